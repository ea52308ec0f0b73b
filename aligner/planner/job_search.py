"""The best layouts of each component of a job, and the best jobs that they make up.

`RoleSearch` finds for a number of ranks the layouts of one component that no other beats: times first, memory only of what is still worth
it, since a time is arithmetic and an activation has to be measured. `JobSearch` combines these fronts of (ranks, seconds), never the
product of the layouts, so the largest job takes as long as its largest component. Times are estimates; the caller plans the first
candidates in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np

from aligner.models.config import ModelConfig, Recompute
from aligner.planner.memory import Sizes, device_optimizer, host_memory, resting_bytes
from aligner.planner.search import Estimator, Space, micro_batch_setting
from aligner.planner.times import phase_seconds, policy_away_seconds, relief_seconds
from aligner.planner.workload import GIB, Component, Engine, Phase

DIGITS = 9  # digits of seconds that count: sums in another order differ in the last bits
COMMUNICATORS = 5  # communicators of a rank of another component on the same GPU, about
T = TypeVar("T")


class Aim(str, Enum):
    """What makes a layout better than another one, by how the phases of the job meet."""

    phases = "phases"  # sampling, training and the phases between them, each on its own: others compute at the same time
    ahead = "ahead"  # sampling beside all other phases
    total = "total"  # one phase after the other


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A component as it may be in a job, with the estimated seconds of its phases."""

    component: Component
    guest: Component | None  # another model in the component's processes
    times: Mapping[Phase, float]  # the guest's included
    host: int  # bytes of host memory of its fullest node

    @property
    def between(self) -> float:
        """Seconds of the phases other than sampling and training."""
        return sum(seconds for phase, seconds in self.times.items() if phase not in (Phase.generate, Phase.train))


@dataclass(kw_only=True, slots=True)
class _Place:
    """A layout of the component (without its engine) and of its guests (at most one), with what they hold."""

    component: Component
    sizes: Sizes
    guests: list[tuple[Component, Sizes]]
    turn: float  # seconds of the turn before sampling

    @property
    def guest_bytes(self) -> int:
        return sum(resting_bytes(*guest) for guest in self.guests)


@dataclass(kw_only=True, slots=True)
class _Pass:
    """A place with a micro-batch and a recomputation."""

    place: int
    component: Component
    guests: list[tuple[Component, Sizes]]
    times: dict[Phase, float]


class RoleSearch:
    """One component of a job in one arrangement. `beside`: the number of other processes on its GPUs."""

    def __init__(self, component: Component, guest: Component | None, space: Space, estimator: Estimator, *, aim: Aim, beside: int) -> None:
        self.component, self.space, self.estimator, self.aim = component, space, estimator, aim
        self.guests = [guest] if guest is not None else []
        self.cluster = cluster = space.cluster
        self.beside = int(beside * (cluster.reserved_gib + COMMUNICATORS * cluster.communicator_gib) * GIB)
        self.limit = int(cluster.gpu_memory_gib * GIB)
        self._reliefs = space.reliefs(component)
        self._lightest = self._reliefs[-1]
        self._fronts: dict[int, list[Option]] = {}
        self._engine_weights: dict[tuple[int, int], tuple[int, int]] = {}

    def front(self, ranks: int) -> list[Option]:
        """The options that fit on `ranks` ranks and that no other beats in everything the aim compares, fastest first."""
        if ranks not in self._fronts:
            self._fronts[ranks] = self._search(ranks)
        return self._fronts[ranks]

    def _search(self, ranks: int) -> list[Option]:
        places = self._places(ranks)
        passes = [one for number, place in enumerate(places) for one in self._passes(number, place)]
        engines = [] if self.component.engine is None else self.space.engines(self.component, self.component.engine, ranks)
        if not passes or (self.component.engine is not None and not engines):
            return []

        # Whether something fits with all that may move to host memory, before there is an engine; measured when it is asked for.
        @cache
        def place_fits(number: int) -> bool:
            smallest = self._smallest(next(one for one in passes if one.place == number).component)
            return self._peak(self._lightest(smallest), places[number].sizes, places[number]) <= self.limit

        @cache
        def pass_fits(number: int) -> bool:
            place = places[passes[number].place]
            return self._peak(self._lightest(passes[number].component), place.sizes, place) <= self.limit

        @cache
        def engine_fits(number: int, index: int) -> bool:
            place, engine = places[number], engines[index]
            component = _in_phase(self._lightest(self._with_engine(place.component, engine)), Phase.generate)
            return self._peak(component, self._engine_sizes(component, place.sizes), place) <= self.limit

        sampling = self._sampling(places, passes, engines)
        costs = self._costs(passes, sampling)
        pass_of, engine_of = np.divmod(np.arange(len(costs)), sampling.shape[1])
        place_of = np.array([one.place for one in passes])[pass_of]
        alive, found = np.ones(len(costs), dtype=bool), list[Option]()
        for number in np.argsort(costs.sum(axis=1), kind="stable"):
            if not alive[number]:
                continue
            of_pass, index = int(pass_of[number]), int(engine_of[number])
            one = passes[of_pass]
            if not place_fits(one.place):
                alive &= place_of != one.place
            elif not pass_fits(of_pass):
                alive &= pass_of != of_pass
            elif engines and not engine_fits(one.place, index):
                alive &= (place_of != one.place) | (engine_of != index)
            else:  # what moves away makes it slower than `costs`, so that a later one may still be faster
                engine = engines[index] if engines else None
                for option in self._options(places[one.place], one, engine, float(sampling[of_pass, index])):
                    found.append(option)
                    alive &= (costs < self._cost(option)).any(axis=1)
        return undominated(found, self._cost)

    def _places(self, ranks: int) -> list[_Place]:
        """Layouts whose weights and training state fit, except what can move to host memory."""
        found = []
        for component in self.space.layouts(self.component, ranks):
            sizes = self.estimator.sizes(component)
            guests = [replace(guest, num_ranks=ranks, parallel=component.parallel) for guest in self.guests]
            held = [(guest, self.estimator.sizes(guest)) for guest in guests]
            trained = self._lightest(component)
            place = _Place(component=component, sizes=sizes, guests=held, turn=self._turn(trained, sizes))
            resident = max(state.weights + state.gradients + device_optimizer(trained, state) for state in sizes.stages)
            if resident + place.guest_bytes <= self.limit:
                found.append(place)
        return found

    def _turn(self, component: Component, sizes: Sizes) -> float:
        """Seconds that `phase_times` adds to sampling if others use the GPUs after it: the difference, without an engine."""
        if Phase.generate not in component.turns:
            return 0.0
        one = _in_phase(component, Phase.generate)
        turning, staying = (phase_seconds(replace(one, turns=turns), sizes, self.cluster) for turns in (one.turns, frozenset[Phase]()))
        return turning[Phase.generate] - staying[Phase.generate]

    def _passes(self, number: int, place: _Place) -> Iterator[_Pass]:
        others = _in_phase(place.component, *(phase for phase in place.component.work.phases if phase != Phase.generate))
        # `_options` adds what these cost.
        optimizer = place.component.optimizer and replace(place.component.optimizer, offload=False, cpu_offload=False)
        for model in self.space.models(place.component):
            component = replace(others, model=model)
            guests = [(self._following(guest, model), sizes) for guest, sizes in place.guests]
            times = phase_seconds(replace(component, optimizer=optimizer), place.sizes, self.cluster)
            for guest, sizes in guests:
                for phase, seconds in phase_seconds(guest, sizes, self.cluster).items():
                    times[phase] = times.get(phase, 0.0) + seconds
            yield _Pass(place=number, component=component, guests=guests, times=times)

    def _following(self, guest: Component, host: ModelConfig) -> Component:
        """The guest with its host's micro-batch, if both count it in the same unit."""
        name = micro_batch_setting(host)
        if name != micro_batch_setting(guest.model) or not self.space.is_free(self.space.key(guest, f"model.{name}")):
            return guest
        return replace(guest, model=replace(guest.model, **{name: getattr(host, name)}))

    def _smallest(self, component: Component) -> Component:
        """The component with the smallest micro-batch that may be chosen, and all recomputation that may."""
        name, model = micro_batch_setting(component.model), component.model
        row = component.work.length * component.work.unit if name == "micro_batch_tokens" else 1
        recomputes = component.optimizer is not None and self.space.is_free(self.space.key(self.component, "model.recompute"))
        smallest = {name: min(row, getattr(model, name))}
        return replace(component, model=replace(model, recompute=Recompute.full if recomputes else model.recompute, **smallest))

    def _sampling(self, places: list[_Place], passes: list[_Pass], engines: list[Engine]) -> np.ndarray:
        """Seconds of sampling, [passes, engines]: the policy's own layout matters only by whether weights are moved."""
        if not engines:
            return np.zeros((len(passes), 1))
        known: dict[tuple[int, bool], float] = {}
        by_place = np.zeros((len(places), len(engines)))
        for (number, place), (index, engine) in product(enumerate(places), enumerate(engines)):
            component = replace(self._with_engine(place.component, replace(engine, offload=False)), turns=frozenset())
            key = (index, component.engine_reshards)
            if key not in known:
                sizes = self._engine_sizes(component, place.sizes)
                known[key] = phase_seconds(_in_phase(component, Phase.generate), sizes, self.cluster)[Phase.generate]
            by_place[number, index] = known[key] + place.turn
        return by_place[[one.place for one in passes]]

    def _with_engine(self, component: Component, engine: Engine) -> Component:
        return replace(component, engine=engine, work=self.component.work)

    def _engine_sizes(self, component: Component, sizes: Sizes) -> Sizes:
        assert component.engine is not None
        p = component.parallel
        key = (component.engine.tp, p.tp * p.ep)  # heads that several ranks share make a difference
        if key not in self._engine_weights:
            own = self.estimator.sizes(component)
            self._engine_weights[key] = own.engine_weights, own.adapters
        weights, adapters = self._engine_weights[key]
        return replace(sizes, engine_weights=weights, adapters=adapters)

    def _costs(self, passes: list[_Pass], sampling: np.ndarray) -> np.ndarray:
        train = np.array([one.times.get(Phase.train, 0.0) for one in passes])[:, None]
        between = np.array([sum(one.times.values()) for one in passes])[:, None] - train
        columns = [np.broadcast_to(column, sampling.shape).ravel() for column in self._columns(sampling, between, train)]
        return np.round(np.stack(columns, axis=1), DIGITS)

    def _cost(self, option: Option) -> tuple[float, ...]:
        sampling, train = (option.times.get(phase, 0.0) for phase in (Phase.generate, Phase.train))
        return tuple(round(seconds, DIGITS) for seconds in self._columns(sampling, option.between, train))

    def _columns(self, sampling: Any, between: Any, train: Any) -> list[Any]:
        if self.aim is Aim.phases:
            return [sampling, between, train]
        return [sampling, between + train] if self.aim is Aim.ahead else [sampling + between + train]

    def _options(self, place: _Place, one: _Pass, engine: Engine | None, sampling: float) -> Iterator[Option]:
        """The pass with each choice of what moves to host memory that fits; the moves take time."""
        component, sizes, cluster = one.component, place.sizes, self.cluster
        if engine is not None:
            component = self._with_engine(component, engine)
            sizes = self._engine_sizes(component, sizes)
        for relieved in self._reliefs:
            chosen = relieved(component)
            if self._peak(chosen, sizes, place) > self.limit or self._guest_peak(chosen, sizes, one) > self.limit:
                continue
            host = sum(sum(host_memory(*model, cluster).values()) for model in [(chosen, sizes), *one.guests])
            times = dict(one.times)
            if Phase.train in times:
                times[Phase.train] += relief_seconds(chosen, sizes, cluster)
            if chosen.engine is not None:
                times[Phase.generate] = sampling + policy_away_seconds(chosen, chosen.engine, sizes, cluster)
            if host <= cluster.host_memory_gib * GIB:
                yield Option(component=chosen, guest=next((guest for guest, _ in one.guests), None), times=times, host=host)

    def _peak(self, component: Component, sizes: Sizes, place: _Place) -> int:
        component = replace(component, beside_bytes=self.beside + place.guest_bytes)
        return self.estimator.peak_of(component, self.estimator.measured(component, sizes))

    def _guest_peak(self, component: Component, sizes: Sizes, one: _Pass) -> int:
        beside = self.beside + resting_bytes(component, sizes)
        guests = [(replace(guest, beside_bytes=beside), own) for guest, own in one.guests]
        return max((self.estimator.peak_of(guest, self.estimator.measured(guest, own)) for guest, own in guests), default=0)


def _in_phase(component: Component, *phases: Phase) -> Component:
    return replace(component, work=replace(component.work, phases=phases))


def undominated(found: Sequence[T], cost: Callable[[T], tuple[float, ...]]) -> list[T]:
    """The items that no other is as good as in every cost."""
    best: list[tuple[tuple[float, ...], T]] = []
    for own, one in sorted(((cost(one), one) for one in found), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in best):
            best.append((own, one))
    return [one for _, one in best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Who shares GPUs with whom, as settings and as components: the one that trains, its servers, and by server the model it also holds."""

    words: str
    settings: Mapping[str, str]
    components: tuple[Component, ...]
    guests: Mapping[str, Component] = field(default_factory=dict)
    colocated: bool = False
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One job: its arrangement, an option for each component, its GPUs and the estimated seconds of a step."""

    arrangement: Arrangement
    options: tuple[Option, ...]
    gpus: int
    seconds: float

    def settings(self, space: Space) -> dict[str, str]:
        found = dict(self.arrangement.settings)
        for option in self.options:
            found |= space.settings(option.component)
            found |= space.guest_settings(option.guest) if option.guest is not None else {}
        return found


class JobSearch:
    """Candidates of one arrangement for any number of GPUs."""

    def __init__(self, arrangement: Arrangement, space: Space, estimator: Estimator) -> None:
        self.arrangement, self.space, self.colocated = arrangement, space, arrangement.colocated
        servers = len(arrangement.components) - 1
        aim = Aim.phases if servers else Aim.ahead if arrangement.asynchronous else Aim.total
        aim, beside = (Aim.total, servers) if self.colocated else (aim, 0)
        self._servers: dict[int, list[tuple[Option, ...]]] = {}
        self.roles = [
            RoleSearch(one, arrangement.guests.get(one.name), space, estimator, aim=aim, beside=beside) for one in arrangement.components
        ]

    def candidates(self, gpus: int) -> list[Candidate]:
        """Jobs on at most `gpus` GPUs, by estimate the fastest first, then the smallest."""
        return sorted(self._all(gpus), key=lambda one: (one.seconds, one.gpus))

    def _all(self, gpus: int) -> Iterator[Candidate]:
        main, *servers = self.roles
        host, asynchronous = self.space.cluster.host_memory_gib * GIB, self.arrangement.asynchronous
        for ranks in self.space.ranks(main.component, gpus):
            own = main.front(ranks)
            room = ranks if self.colocated else gpus - ranks
            if own and room not in self._servers:
                self._servers[room] = self._server_options(servers, room)
            for others, option in product(self._servers.get(room, []), own):
                together = (option, *others)
                sizes = [one.component.num_ranks for one in together]
                if sum(one.host for one in together) <= host if self.colocated else self._are_placeable(sizes):
                    seconds = step_seconds(together, colocated=self.colocated, asynchronous=asynchronous)
                    total = max(sizes) if self.colocated else sum(sizes)
                    yield Candidate(arrangement=self.arrangement, options=together, gpus=total, seconds=seconds)

    def _server_options(self, servers: Sequence[RoleSearch], room: int) -> list[tuple[Option, ...]]:
        """Joint options of the servers on `room` GPUs, each on its own GPUs (colocated: on the same ones), without the beaten ones."""

        def ranks(options: tuple[Option, ...]) -> int:
            return sum(option.component.num_ranks for option in options)

        def cost(options: tuple[Option, ...]) -> tuple[float, ...]:
            if self.colocated:  # in turn
                return sum(sum(one.times.values()) for one in options), sum(one.host for one in options)
            return ranks(options), max(one.between for one in options), max(one.times.get(Phase.train, 0.0) for one in options)

        found: list[tuple[Option, ...]] = [()]
        for server in servers:
            own = [option for size in self.space.ranks(server.component, room) for option in server.front(size)]
            longer = [(*before, option) for before, option in product(found, own)]
            found = undominated([one for one in longer if self.colocated or ranks(one) <= room], cost)
        return found

    def _are_placeable(self, sizes: Sequence[int]) -> bool:
        """Whether Slurm can give each component whole nodes, or all of them parts of one node."""
        node = self.space.cluster.gpus_per_node
        return sum(sizes) <= node or all(size % node == 0 for size in sizes)


def step_seconds(options: Sequence[Option], *, colocated: bool, asynchronous: bool) -> float:
    """An estimate of a step: servers score while the actor samples, and train while it trains; colocated ones take turns."""
    main, *servers = options
    if colocated:
        return sum(sum(option.times.values()) for option in options)
    sampling = max([main.times.get(Phase.generate, 0.0), *(server.between for server in servers)])
    training = max(option.times.get(Phase.train, 0.0) for option in options)
    return max(sampling, main.between + training) if asynchronous else sampling + main.between + training
