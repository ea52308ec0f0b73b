"""What a check is and what it says: every item of the preflight is an `Item`, and ends as a `Finding`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aligner.errors import ConfigError
from aligner.jobs.preflight.allocation import Allocation
from aligner.loop.config import JobRun


class Level(str, Enum):
    """How an item ended. Only `fatal` changes the exit code."""

    ok = "ok"
    warning = "warning"
    fatal = "fatal"
    not_run = "not run"


class Where(str, Enum):
    """Which ranks look."""

    every_rank = "every rank"
    every_node = "every node"  # the first rank of each
    first_rank = "first rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What came of one item: `found` in a line or a few, `advice` says what to do, `figures` are for programs."""

    level: Level
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class Context:
    """What a check may use. `job`, the composed config, is there once the item `config` has run."""

    allocation: Allocation
    name: str  # of the file in conf/
    overrides: tuple[str, ...]
    with_engine: bool = False
    job: JobRun | None = None
    findings: dict[str, Finding] = field(default_factory=dict)  # of the items before this one

    @property
    def config(self) -> JobRun:
        """The composed config. Raises ConfigError where it could not be composed."""
        if self.job is None:
            raise ConfigError(f"the config {self.name} could not be composed")
        return self.job


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One check: some ranks `observe`, each by itself or with the others, and rank 0 judges what they saw.

    `observe` returns an instance of `kind` (a dataclass of JSON values) or raises; whatever it raises is fatal and named with its ranks.
    `judge` gets the observations by rank. An item is not run where one that it `needs` was fatal or was not run itself for that reason.
    """

    name: str  # for --only
    where: Where
    kind: type
    observe: Callable[[Context], Any]
    judge: Callable[[Context, Mapping[int, Any]], Finding]
    timeout_seconds: float
    needs: tuple[str, ...] = ()
    advice: str = "mend this and start again"  # where a rank failed to observe


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` of 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def who(allocation: Allocation, ranks: Sequence[int]) -> str:
    """Ranks with their nodes, for a person: `rank 3 on n2`, `ranks 0-7 on n1, n2`, `all ranks`."""
    if len(ranks) == allocation.world.world_size > 1:
        return "all ranks"
    nodes = list(dict.fromkeys(allocation.node_of(rank) for rank in sorted(ranks)))
    shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)} on {shown}"
