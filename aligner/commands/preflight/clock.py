"""Do the nodes' clocks agree? Certificates, munge credentials, heartbeats and multi-node logs rely on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where

ROUNDS = 3
NOTABLE_SECONDS, TOO_FAR_SECONDS = 1.0, 60.0
_PAUSE_SECONDS = 0.05  # for the others to be waiting when rank 0 calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """A node's clock minus rank 0's, plus the shortest duration of a call."""

    seconds: float


def _observe(context: Context) -> Offset:
    allocation, offsets = context.allocation, []
    leaders = allocation.leaders()
    for number in range(ROUNDS):
        allocation.put(f"ready/{number}/{allocation.rank}", True)
        if allocation.rank != 0:
            called = allocation.get(f"call/{number}", deadline=allocation.deadline, what="rank 0 to say its time", longest_pause=0.001)
            offsets.append(time.time() - float(called))
            continue
        for rank in leaders:
            allocation.get(f"ready/{number}/{rank}", deadline=allocation.deadline, what=f"rank {rank} to listen")
        time.sleep(_PAUSE_SECONDS)
        allocation.put(f"call/{number}", time.time())
        offsets.append(0.0)
    return Offset(seconds=min(offsets))


def judge(context: Context, seen: Mapping[int, Offset]) -> Finding:
    """Warning from a second, fatal from a minute."""
    rank, offset = max(seen.items(), key=lambda pair: abs(pair[1].seconds))
    figures = {"largest_offset_seconds": offset.seconds}
    if len(seen) == 1:
        return Finding(level=Level.ok, found="one node", figures=figures)
    node, size = context.allocation.node_of(rank), abs(offset.seconds)
    text = f"{node} is {size:.3g} s {'ahead of' if offset.seconds > 0 else 'behind'} {context.allocation.node_of(0)}"
    if size < NOTABLE_SECONDS:
        return Finding(level=Level.ok, found=f"within {max(size, 0.001):.3f} s of each other", figures=figures)
    level = Level.fatal if size >= TOO_FAR_SECONDS else Level.warning
    return Finding(level=level, found=text, advice="set the clocks by NTP (chronyc tracking on that node)", figures=figures)


CLOCK = Item("clock", Where.every_node, _observe, judge, timeout_seconds=60.0, needs=("ranks",))
