"""A whole job's best arrangements: every component's fronts (`role_search`) put together, the ranks shared out between them.

Roles are combined by fronts of (ranks, seconds), never by a product of their layouts, so the largest job takes as long as its largest
component. Times are estimates here; who asks plans the first candidates in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from aligner.planner.role_search import Aim, Option, RoleSearch, undominated
from aligner.planner.search import Estimator
from aligner.planner.space import Space
from aligner.planner.workload import GIB, Component, Phase


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
