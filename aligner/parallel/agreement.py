"""Check once at the start, through the rendezvous store, that all ranks run the same thing.

Every rank writes a record. Rank 0 reads them all (N reads, not N x N) and publishes one verdict, which every rank awaits. So the whole
component stops with the same message, which names the ranks that differ or are missing.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta

import torch
from torch.distributed import Store

from aligner.errors import LaunchError
from aligner.version import __version__

_SHOWN = 8  # ranks, or runs of neighbours, that a message lists
_MARGIN_SECONDS = 5.0  # the other ranks wait this much longer than rank 0, whose message names the missing ones
_LINGER_SECONDS = 3.0  # for the other ranks to read a bad verdict: the store ends with rank 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """A rank's record; all fields but the first three must be equal everywhere. `gpu`: its name on the host; "": none to claim."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    gpu: str = ""
    world_size: int
    fingerprint: str
    aligner: str = __version__
    torch: str = torch.__version__


def differences(reference: RankRecord, record: RankRecord) -> str:
    """The differences between `record` and rank 0's, or the empty string."""
    names = [one.name for one in fields(RankRecord) if one.name not in ("rank", "host", "gpu")]
    theirs, ours = asdict(record), asdict(reference)
    parts = [f"{name} is {theirs[name]!r} and not {ours[name]!r}" for name in names if theirs[name] != ours[name]]
    return f"rank {record.rank} on {record.host}: " + ", ".join(parts) if parts else ""


def check(store: Store, record: RankRecord, *, timeout_seconds: float) -> None:
    """Raise LaunchError on every rank unless all ranks are there and agree. Collective."""
    if store.add(f"claims/{record.rank}", 1) > 1:
        raise LaunchError(f"two processes call themselves rank {record.rank} (one is on {record.host}): the launcher's variables are wrong")
    store.set(f"record/{record.rank}", json.dumps(asdict(record)))
    if record.rank == 0:
        store.set("verdict", _judge(store, record, timeout_seconds))
    verdict = _await_verdict(store, record, timeout_seconds + _MARGIN_SECONDS)
    if record.rank != 0 and not verdict:
        # A rank that rank 0 does not know (its world is smaller) compares the two itself.
        verdict = differences(_read(store, 0), record)
    if verdict:
        store.set(f"read/{record.rank}", "")
        if record.rank == 0:
            came = [rank for rank in range(record.world_size) if store.check([f"record/{rank}"])]
            with contextlib.suppress(RuntimeError):  # a rank died meanwhile; the verdict is raised anyway
                store.wait([f"read/{rank}" for rank in came], timedelta(seconds=_LINGER_SECONDS))
        raise LaunchError(f"the ranks of this component do not fit together: {verdict}")


def _judge(store: Store, reference: RankRecord, timeout_seconds: float) -> str:
    keys = [f"record/{rank}" for rank in range(reference.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return f"{rank_list(missing)} of {reference.world_size} did not come within {timeout_seconds:.0f} s"
    records = [_read(store, rank) for rank in range(reference.world_size)]
    found = [text for record in records if (text := differences(reference, record))] or crowded(records)
    more = f"; and {len(found) - _SHOWN} more ranks" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def crowded(records: Sequence[RankRecord]) -> list[str]:
    """One message for each GPU with more than one rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for record in records:
        ranks.setdefault((record.host, record.gpu), []).append(record.rank)
    return [
        f"{rank_list(both)} are on the same GPU of {host} ({gpu}): start no more ranks on a node than it has GPUs, or let them share "
        f"with run.ranks_per_gpu={len(both)}"
        for (host, gpu), both in ranks.items()
        if gpu and len(both) > 1
    ]


def _await_verdict(store: Store, record: RankRecord, timeout_seconds: float) -> str:
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_seconds))
        return store.get("verdict").decode()
    except RuntimeError as error:
        who = f"rank {record.rank} of {record.world_size}"
        raise LaunchError(f"{who} waited {timeout_seconds:.0f} s for rank 0's verdict on the ranks: {error}") from error


def _read(store: Store, rank: int) -> RankRecord:
    return RankRecord(**json.loads(store.get(f"record/{rank}")))


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`; of many that are not neighbours the first, and how many more: a message is read by a person."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:_SHOWN])
    more = sum(map(len, parts[_SHOWN:]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" + (f" and {more} more" if more else "")
