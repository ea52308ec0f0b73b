"""Which ranks hold up a stalled component: a pure function of its ranks' records.

A rank inside a collective waits for the members of the group that have not entered it yet; a rank in a point-to-point operation waits for
its peers. A slow rank is one that others wait for and that waits for nobody, or one whose process does not run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aligner.parallel.progress import Collective, Snapshot

NUM_KINDS = 3  # of collectives that are named beside a slow rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """One rank's last record. `absence` says why its process does not run (empty where it does, or has ended in order)."""

    rank: int
    host: str
    snapshot: Snapshot
    absence: str = ""
    ended: bool = False  # it has left its session; nothing waits for it in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`culprits` are the ranks that hold up the others; empty where no rank can be named. `text` is for people, several lines."""

    culprits: tuple[int, ...]
    text: str


def diagnose(component: str, states: Sequence[RankState], *, world_size: int, stall_seconds: float) -> Verdict:
    """Name the slow ranks of a component that has made no progress for `stall_seconds`."""
    by_rank = {state.rank: state for state in states}
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    waits = {rank: _waits_for(state, by_rank) for rank, state in by_rank.items()}
    culprits = _culprits(by_rank, waits)
    lines = [f"{component}: no progress for {stall_seconds:.0f} s"]
    lines += [_accusation(by_rank[rank], [by_rank[w] for w, awaited in waits.items() if rank in awaited]) for rank in culprits]
    if missing:
        lines.append(f"{rank_list(missing)}: left no record in the health directory")
    if not culprits:
        lines.append("no single rank can be named: none waits for another one in a collective; the stacks say what they are in")
    lines.append("what every rank did:")
    lines += [f"  {text}: {rank_list(ranks)}" for text, ranks in _groups(by_rank, waits).items()]
    return Verdict(culprits=tuple(culprits), text="\n".join(lines))


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _waits_for(state: RankState, by_rank: Mapping[int, RankState]) -> set[int]:
    """The ranks without which this one cannot go on."""
    inside = state.snapshot.inside
    if inside is None or state.absence or state.ended:
        return set()
    if inside.peers:
        return {peer for peer in inside.peers if peer in by_rank and peer != state.rank}
    others = [by_rank[member] for member in inside.group.members if member in by_rank and member != state.rank]
    return {other.rank for other in others if other.snapshot.counts.get(inside.group.key, 0) < inside.sequence}


def _culprits(by_rank: Mapping[int, RankState], waits: Mapping[int, set[int]]) -> list[int]:
    awaited = set().union(*waits.values()) if waits else set()
    absent = [rank for rank, state in by_rank.items() if state.absence]
    # A process that does not run explains everything, whatever it was doing when it stopped.
    if absent:
        return sorted(absent)
    if sinks := sorted(rank for rank in awaited if not waits[rank]):
        return sinks
    outside = [rank for rank, state in by_rank.items() if state.snapshot.inside is None and not state.ended]
    if len(outside) < len(by_rank) or len(by_rank) == 1:
        return sorted(outside)
    return _behind(by_rank)


def _behind(by_rank: Mapping[int, RankState]) -> list[int]:
    """The ranks that have entered fewer collectives than another member. NCCL's calls return early, so no rank is seen inside one.

    Counts are compared within a group: pipeline stages enter different collectives. A rank may be behind only because it waits for another
    that is behind. Only their lags tell the two apart, so the rank furthest behind is named.
    """
    tops: dict[str, int] = {}
    for state in by_rank.values():
        for key, count in state.snapshot.counts.items():
            tops[key] = max(count, tops.get(key, 0))
    lag = {
        rank: max((tops[key] - count for key, count in state.snapshot.counts.items()), default=0)
        for rank, state in by_rank.items()
        if not state.ended
    }
    furthest = max(lag.values(), default=0)
    return sorted(rank for rank, behind in lag.items() if behind == furthest) if furthest else []


def _accusation(state: RankState, waiting: Sequence[RankState]) -> str:
    where = f"rank {state.rank} ({state.host})"
    doing = _doing(state.snapshot)
    if state.absence:
        head = f"{where} does not run ({state.absence}); it was last seen {doing}"
    elif state.ended:
        head = f"{where} has ended, {doing}"
    else:
        head = f"{where} stalled: {doing}"
    kinds: dict[str, list[int]] = {}
    for other in waiting:
        if other.snapshot.inside is not None:
            kinds.setdefault(_collective_text(other.snapshot.inside), []).append(other.rank)
    texts = [f"{rank_list(ranks)} in {text}" for text, ranks in kinds.items()]
    more = f", and {len(texts) - NUM_KINDS} other groups" if len(texts) > NUM_KINDS else ""
    return f"{head}; it is waited for by {', '.join(texts[:NUM_KINDS])}{more}" if texts else head


def _groups(by_rank: Mapping[int, RankState], waits: Mapping[int, set[int]]) -> dict[str, list[int]]:
    """Ranks by their activity."""
    found: dict[str, list[int]] = {}
    for rank, state in sorted(by_rank.items()):
        text = _doing(state.snapshot, with_time=False)
        if state.absence:
            text = f"not running ({state.absence}), last seen {text}"
        elif state.ended:
            text = f"ended, {text}"
        elif waits[rank]:
            text += f", waiting for {rank_list(sorted(waits[rank]))}"
        found.setdefault(text, []).append(rank)
    return found


def _doing(snapshot: Snapshot, *, with_time: bool = True) -> str:
    place = f"in phase {snapshot.phase} of step {snapshot.step}"
    at = f" since {_clock(snapshot.last_progress)}" if with_time else ""
    if snapshot.inside is not None:
        return f"{place} in {_collective_text(snapshot.inside)}{at}"
    last = snapshot.last_left
    after = "" if last is None else f" (after {_collective_text(last)})"
    return f"{place} outside any collective{at}{after}"


def _collective_text(collective: Collective) -> str:
    """`all_reduce #48123 (tensor model parallel group of 2)`; the number counts the group's collectives, the same on all its members."""
    if collective.peers:
        return f"{collective.name} with {rank_list(collective.peers)}"
    label = f"{collective.group.label} " if collective.group.label else ""
    return f"{collective.name} #{collective.sequence} ({label}group of {len(collective.group.members)})"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
