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
from itertools import product
from typing import Any, TypeVar

import numpy as np

from aligner.models.config import ModelConfig, Recompute
from aligner.planner.memory import Sizes, device_optimizer, host_memory, resting_bytes
from aligner.planner.search import Estimator, Space, micro_batch_setting
from aligner.planner.times import phase_times, policy_away_seconds, relief_seconds
from aligner.planner.workload import GIB, Component, Engine, Phase

DIGITS = 9  # of seconds that count: sums in another order differ in the last bits
T = TypeVar("T")
COMMUNICATORS = 5  # of a rank of another component on the same GPU, about


class Aim(str, Enum):
    """What makes a layout better than another one, by how the phases of the job meet."""

    phases = "phases"  # sampling, training, and what is between them, each for itself: others compute at the same time
    ahead = "ahead"  # sampling beside all the rest
    total = "total"  # one phase after the other


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A component as it may be in a job, with the estimated seconds of its phases."""

    component: Component
    guest: Component | None  # the model that its processes hold too
    times: Mapping[Phase, float]  # with the guest's
    host: int  # bytes of host memory of its fullest node

    @property
    def between(self) -> float:
        """Seconds of the phases that are neither sampling nor training."""
        return sum(seconds for phase, seconds in self.times.items() if phase not in (Phase.generate, Phase.train))


@dataclass(kw_only=True, slots=True)
class _Place:
    """A layout of the component (without its engine) and of its guest, with what they hold."""

    component: Component
    sizes: Sizes
    guest: Component | None
    guest_sizes: Sizes | None
    turn: float  # seconds of the turn before sampling
    fits: bool | None = None  # with the smallest micro-batch; None: not measured yet
    engines: dict[int, bool] | None = None


@dataclass(kw_only=True, slots=True)
class _Pass:
    """A place with a micro-batch and a recomputation."""

    place: int
    component: Component
    guest: Component | None
    times: dict[Phase, float]
    fits: bool | None = None


class RoleSearch:
    """One component of a job in one arrangement. `beside`: how many other processes are on its GPUs."""

    def __init__(self, component: Component, guest: Component | None, space: Space, estimator: Estimator, *, aim: Aim, beside: int) -> None:
        self.component, self.guest, self.space, self.estimator, self.aim = component, guest, space, estimator, aim
        cluster = space.cluster
        self.beside = int(beside * (cluster.reserved_gib + COMMUNICATORS * cluster.communicator_gib) * GIB)
        self.limit = int(cluster.gpu_memory_gib * GIB)
        self._reliefs = space.reliefs(component)
        self._fronts: dict[int, list[Option]] = {}
        self._engine_weights: dict[tuple[int, int], int] = {}

    def front(self, ranks: int) -> list[Option]:
        """Those that fit on `ranks` ranks and that no other one beats in everything the aim looks at, fastest first."""
        if ranks not in self._fronts:
            self._fronts[ranks] = self._search(ranks)
        return self._fronts[ranks]

    def _search(self, ranks: int) -> list[Option]:
        places = self._places(ranks)
        passes = [one for number, place in enumerate(places) for one in self._passes(number, place)]
        engines = [] if self.component.engine is None else self.space.engines(self.component, self.component.engine, ranks)
        if not passes or (self.component.engine is not None and not engines):
            return []
        sampling = self._sampling(places, passes, engines, ranks)
        costs = self._costs(passes, sampling)
        width = sampling.shape[1]
        pass_of, engine_of = np.divmod(np.arange(len(costs)), width)
        place_of = np.array([one.place for one in passes])[pass_of]
        alive, found = np.ones(len(costs), dtype=bool), list[Option]()
        for number in np.argsort(costs.sum(axis=1), kind="stable"):
            if not alive[number]:
                continue
            one, index = passes[pass_of[number]], int(engine_of[number])
            place, engine = places[one.place], engines[index] if engines else None
            if not self._pass_fits(place, one):
                alive &= (pass_of != pass_of[number]) if place.fits else (place_of != one.place)
            elif engine is not None and not self._engine_fits(place, engine, index):
                alive &= (place_of != one.place) | (engine_of != index)
            else:  # what moves away makes it slower than `costs`, so that a later one may still be faster
                for option in self._options(place, one, engine, float(sampling[pass_of[number], index])):
                    found.append(option)
                    alive &= (costs < self._cost(option)).any(axis=1)
        return undominated(found, self._cost)

    def _places(self, ranks: int) -> list[_Place]:
        """Layouts whose weights and training state fit, as far as they cannot move away."""
        found, lightest = [], self._reliefs[-1]
        for component in self.space.layouts(self.component, ranks):
            sizes = self.estimator.sizes(component)
            guest, guest_sizes = None, None
            if self.guest is not None:
                guest = replace(self.guest, num_ranks=ranks, parallel=component.parallel)
                guest_sizes = self.estimator.sizes(guest)
            trained = lightest(component)
            resident = max(state.weights + state.gradients + device_optimizer(trained, state) for state in sizes.stages)
            resident += resting_bytes(guest, guest_sizes) if guest is not None and guest_sizes is not None else 0
            if resident <= self.limit:
                turn = self._turn(trained, sizes)
                found.append(_Place(component=component, sizes=sizes, guest=guest, guest_sizes=guest_sizes, turn=turn, engines={}))
        return found

    def _turn(self, component: Component, sizes: Sizes) -> float:
        """What phase_times adds to a phase at whose end others have the GPUs: its difference, without an engine to sample."""
        if Phase.generate not in component.turns:
            return 0.0
        one = replace(component, work=replace(component.work, phases=(Phase.generate,)))
        turning, staying = (self._seconds(replace(one, turns=turns), sizes) for turns in (one.turns, frozenset[Phase]()))
        return turning[Phase.generate] - staying[Phase.generate]

    def _seconds(self, component: Component, sizes: Sizes) -> dict[Phase, float]:
        return {time.phase: time.total for time in phase_times(component, sizes, self.space.cluster)}

    def _passes(self, number: int, place: _Place) -> list[_Pass]:
        work = place.component.work
        others = replace(work, phases=tuple(phase for phase in work.phases if phase != Phase.generate))
        # `_options` adds what these cost.
        optimizer = place.component.optimizer and replace(place.component.optimizer, offload=False, cpu_offload=False)
        found = []
        for model in self.space.models(place.component):
            component = replace(place.component, model=model, work=others)
            times, guest = self._seconds(replace(component, optimizer=optimizer), place.sizes), None
            if place.guest is not None and place.guest_sizes is not None:
                guest = self._following(place.guest, model)
                times |= self._seconds(guest, place.guest_sizes)
            found.append(_Pass(place=number, component=component, guest=guest, times=times))
        return found

    def _following(self, guest: Component, host: ModelConfig) -> Component:
        """The guest with its host's micro-batch, where both count it alike."""
        name = micro_batch_setting(host)
        if name != micro_batch_setting(guest.model) or not self.space.is_free(self.space.key(guest, f"model.{name}")):
            return guest
        return replace(guest, model=replace(guest.model, **{name: getattr(host, name)}))

    def _sampling(self, places: list[_Place], passes: list[_Pass], engines: list[Engine], ranks: int) -> np.ndarray:
        """Seconds of sampling, [passes, engines]: of the policy's own layout they depend only by whether weights are moved."""
        if not engines:
            return np.zeros((len(passes), 1))
        known: dict[tuple[int, bool], float] = {}
        by_place = []
        for place in places:
            row = []
            for index, engine in enumerate(engines):
                component = self._with_engine(place.component, replace(engine, offload=False), turns=False)
                key = (index, component.engine_reshards)
                if key not in known:
                    one = replace(component, work=replace(component.work, phases=(Phase.generate,)))
                    known[key] = self._seconds(one, self._engine_sizes(component, place.sizes))[Phase.generate]
                row.append(known[key] + place.turn)
            by_place.append(row)
        return np.array([by_place[one.place] for one in passes])

    def _with_engine(self, component: Component, engine: Engine, *, turns: bool = True) -> Component:
        return replace(component, engine=engine, work=self.component.work, turns=component.turns if turns else frozenset())

    def _engine_sizes(self, component: Component, sizes: Sizes) -> Sizes:
        assert component.engine is not None
        p = component.parallel
        key = (component.engine.tp, p.tp * p.ep)  # heads that several ranks share make a difference
        if key not in self._engine_weights:
            self._engine_weights[key] = self.estimator.sizes(component).engine_weights
        return replace(sizes, engine_weights=self._engine_weights[key])

    def _costs(self, passes: list[_Pass], sampling: np.ndarray) -> np.ndarray:
        train = np.array([one.times.get(Phase.train, 0.0) for one in passes])[:, None]
        between = np.array([sum(one.times.values()) for one in passes])[:, None] - train
        columns = [np.broadcast_to(column, sampling.shape).ravel() for column in self._columns(sampling, between, train)]
        return np.round(np.stack(columns, axis=1), DIGITS)

    def _cost(self, option: Option) -> tuple[float, ...]:
        sampling, train = (option.times.get(phase, 0.0) for phase in (Phase.generate, Phase.train))
        return tuple(round(seconds, DIGITS) for seconds in self._columns(sampling, option.between, train))

    def _columns(self, sampling: Any, between: Any, train: Any) -> list[Any]:
        """What the aim compares, of numbers or of arrays."""
        columns = {
            Aim.phases: [sampling, between, train],
            Aim.ahead: [sampling, between + train],
            Aim.total: [sampling + between + train],
        }
        return columns[self.aim]

    def _pass_fits(self, place: _Place, one: _Pass) -> bool:
        """Whether it fits with all that may move away, before there is an engine; of a place nothing does where the smallest does not."""
        lightest = self._reliefs[-1]
        if place.fits is None:
            name = micro_batch_setting(one.component.model)
            row = one.component.work.length * one.component.work.unit if name == "micro_batch_tokens" else 1
            smallest = {name: min(row, getattr(one.component.model, name))}
            recompute = Recompute.full if one.component.optimizer is not None and self._recomputes() else one.component.model.recompute
            component = replace(one.component, model=replace(one.component.model, recompute=recompute, **smallest))
            place.fits = self._peak(lightest(component), place.sizes, place) <= self.limit
        if place.fits and one.fits is None:
            one.fits = self._peak(lightest(one.component), place.sizes, place) <= self.limit
        return bool(place.fits and one.fits)

    def _recomputes(self) -> bool:
        return self.space.is_free(self.space.key(self.component, "model.recompute"))

    def _engine_fits(self, place: _Place, engine: Engine, index: int) -> bool:
        """Whether sampling fits beside the place's weights, with all that may move away."""
        assert place.engines is not None
        if index not in place.engines:
            component = self._reliefs[-1](self._with_engine(place.component, engine))
            component = replace(component, work=replace(component.work, phases=(Phase.generate,)))
            place.engines[index] = self._peak(component, self._engine_sizes(component, place.sizes), place) <= self.limit
        return place.engines[index]

    def _options(self, place: _Place, one: _Pass, engine: Engine | None, sampling: float) -> Iterator[Option]:
        """With what fits of all that may move to host memory, whose moves take time."""
        component = one.component if engine is None else self._with_engine(one.component, engine)
        sizes = place.sizes if engine is None else self._engine_sizes(component, place.sizes)
        times = one.times | ({Phase.generate: sampling} if engine is not None else {})
        for relieved in self._reliefs:
            chosen = relieved(component)
            if self._peak(chosen, sizes, place) > self.limit or self._guest_peak(chosen, sizes, place, one.guest) > self.limit:
                continue
            host = sum(host_memory(chosen, sizes, self.space.cluster).values())
            host += sum(host_memory(one.guest, place.guest_sizes, self.space.cluster).values()) if one.guest and place.guest_sizes else 0
            if host <= self.space.cluster.host_memory_gib * GIB:
                yield Option(component=chosen, guest=one.guest, times=self._with_moves(times, chosen, sizes), host=host)

    def _with_moves(self, times: Mapping[Phase, float], component: Component, sizes: Sizes) -> dict[Phase, float]:
        found, cluster = dict(times), self.space.cluster
        if Phase.train in found:
            found[Phase.train] += relief_seconds(component, sizes, cluster)
        if component.engine is not None:
            found[Phase.generate] += policy_away_seconds(component, component.engine, sizes, cluster)
        return found

    def _peak(self, component: Component, sizes: Sizes, place: _Place) -> int:
        held = resting_bytes(place.guest, place.guest_sizes) if place.guest is not None and place.guest_sizes is not None else 0
        component = replace(component, beside_bytes=self.beside + held)
        return self.estimator.peak_of(component, self.estimator.measured(component, sizes))

    def _guest_peak(self, component: Component, sizes: Sizes, place: _Place, guest: Component | None) -> int:
        if guest is None or place.guest_sizes is None:
            return 0
        guest = replace(guest, beside_bytes=self.beside + resting_bytes(component, sizes))
        return self.estimator.peak_of(guest, self.estimator.measured(guest, place.guest_sizes))


def undominated(found: Sequence[T], cost: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Without those that another one is not worse than in any cost."""
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
    """One job: its arrangement, an option for each component, what it takes and, by estimate, how long a step is."""

    arrangement: Arrangement
    options: tuple[Option, ...]
    gpus: int
    seconds: float

    def settings(self, space: Space) -> dict[str, str]:
        """All settings that choose it."""
        found = dict(self.arrangement.settings)
        for option in self.options:
            found |= space.settings(option.component)
            found |= space.guest_settings(option.guest) if option.guest is not None else {}
        return found


class JobSearch:
    """Candidates of one arrangement for any number of GPUs."""

    def __init__(self, arrangement: Arrangement, space: Space, estimator: Estimator) -> None:
        self.arrangement, self.space = arrangement, space
        main, *servers = arrangement.components
        if arrangement.colocated or not (servers or arrangement.asynchronous):
            aim = Aim.total
        elif servers:
            aim = Aim.phases
        else:
            aim = Aim.ahead
        beside = len(servers) if arrangement.colocated else 0
        self._servers: dict[int, list[tuple[Option, ...]]] = {}
        self.roles = [
            RoleSearch(one, arrangement.guests.get(one.name), space, estimator, aim=aim, beside=beside) for one in arrangement.components
        ]

    def candidates(self, gpus: int) -> list[Candidate]:
        """On at most `gpus` GPUs, by estimate the fastest first, and of equally fast ones those on the fewest GPUs."""
        return sorted(self._all(gpus), key=lambda one: (one.seconds, one.gpus))

    def _all(self, gpus: int) -> Iterator[Candidate]:
        main, *servers = self.roles
        for ranks in self.space.ranks(main.component, gpus):
            own = main.front(ranks)
            if not own:
                continue
            room = ranks if self.arrangement.colocated else gpus - ranks
            if room not in self._servers:
                self._servers[room] = self._server_options(servers, room)
            for options in self._servers[room]:
                sizes = [ranks, *(option.component.num_ranks for option in options)]
                if self.arrangement.colocated or self._are_placeable(sizes):
                    yield from self._joined(own, options, sizes)

    def _joined(self, own: Sequence[Option], options: tuple[Option, ...], sizes: list[int]) -> Iterator[Candidate]:
        for option in own:
            together, colocated = (option, *options), self.arrangement.colocated
            if colocated and sum(one.host for one in together) > self.space.cluster.host_memory_gib * GIB:
                continue
            seconds = step_seconds(together, colocated=colocated, asynchronous=self.arrangement.asynchronous)
            yield Candidate(arrangement=self.arrangement, options=together, gpus=max(sizes) if colocated else sum(sizes), seconds=seconds)

    def _server_options(self, servers: Sequence[RoleSearch], room: int) -> list[tuple[Option, ...]]:
        """What the servers may be on `room` GPUs together, each on its own (colocated: the same ones): those that none beats."""
        found: list[tuple[Option, ...]] = [()]
        for server in servers:
            sizes = self.space.ranks(server.component, room)
            options = [option for ranks in sizes for option in server.front(ranks)]
            longer = [(*before, option) for before, option in product(found, options)]
            placed = [one for one in longer if self.arrangement.colocated or _ranks(one) <= room]
            found = undominated(placed, _cost_in_turn if self.arrangement.colocated else _cost_at_once)
        return found

    def _are_placeable(self, sizes: Sequence[int]) -> bool:
        """Whether Slurm can give each of them whole nodes, or all of them parts of one."""
        node = self.space.cluster.gpus_per_node
        return sum(sizes) <= node or all(size % node == 0 for size in sizes)


def step_seconds(options: Sequence[Option], *, colocated: bool, asynchronous: bool) -> float:
    """An estimate of a step: servers score while the actor samples and train while it trains; colocated ones take turns. An asynchronous
    sampler has the whole step for the next round."""
    main, *servers = options
    if colocated:
        return sum(sum(option.times.values()) for option in options)
    sampling = max([main.times.get(Phase.generate, 0.0), *(server.between for server in servers)])
    training = max(option.times.get(Phase.train, 0.0) for option in options)
    return max(sampling, main.between + training) if asynchronous else sampling + main.between + training


def _ranks(options: Sequence[Option]) -> int:
    return sum(option.component.num_ranks for option in options)


def _cost_at_once(options: tuple[Option, ...]) -> tuple[float, ...]:
    return _ranks(options), max(one.between for one in options), max(one.times.get(Phase.train, 0.0) for one in options)


def _cost_in_turn(options: tuple[Option, ...]) -> tuple[float, ...]:
    return sum(sum(one.times.values()) for one in options), sum(one.host for one in options)
