"""Collectives on rows, objects and metrics. Every rank of the group calls them in the same order.

`together` gives one answer for all ranks: an action that fails on any of them fails on all, with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import AlignerError, ConfigError
from aligner.parallel import platform
from aligner.parallel.logprobs import beside
from aligner.telemetry.metrics import Metric, Metrics, on_host
from aligner.types.rows import upload

T = TypeVar("T")


def gather_assigned_rows(local: Tensor, rows: Sequence[Sequence[int]], *, group: dist.ProcessGroup) -> Tensor:
    """Every rank's rows in the order of their numbers, on every rank: rank i holds the rows `rows[i]`, in that order."""
    order = upload(torch.tensor([row for share in rows for row in share], dtype=torch.int64), local.device)
    largest = max(map(len, rows))
    gathered = local
    if group.size() > 1:
        padded = local.new_zeros((largest, *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        gathered = torch.cat([part[: len(share)] for part, share in zip(parts, rows, strict=True)])
    return torch.empty_like(gathered).index_copy_(0, order, gathered)


def gather_columns(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[N, sum of F] of every rank's [N, F], side by side, on every rank; F may differ. `group` None: there is one rank."""
    if group is None or group.size() == 1:
        return local
    widths = [0] * group.size()
    dist.all_gather_object(widths, local.shape[1], group=group)
    whole = beside(torch.nn.functional.pad(local, (0, max(widths) - local.shape[1])), group)
    return torch.cat([part[:, :width] for part, width in zip(whole.split(max(widths), dim=1), widths, strict=True)], dim=1)


def gather_objects(local: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's Python object, in rank order, on every rank (pickled: for small things, or once a step)."""
    size = dist.get_world_size(group)
    if size == 1:
        return [local]
    parts: list[T | None] = [None] * size
    dist.all_gather_object(parts, local, group=group)
    return parts  # type: ignore[return-value]


def broadcast_object(value: T | None, *, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """The object of global rank `src`, on every rank of `group`."""
    box = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, src=src, group=group)
    return box[0]  # type: ignore[return-value]


def leaders_integers(values: Sequence[int], *, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The numbers of the first rank of `group` (None: one rank), on every rank of it; one small tensor, cheaper than an object."""
    box = upload(torch.tensor(values, dtype=torch.int64), device)
    if group is not None:
        dist.broadcast(box, src=dist.get_global_rank(group, 0), group=group)
    return box.tolist()


def all_ranks(condition: bool | Tensor, device: torch.device) -> bool:
    """Whether `condition`, on the host or the device, holds on every rank of the world, by one number on the device."""
    if dist.get_world_size() == 1:
        return bool(condition)
    agreed = condition.int() if isinstance(condition, Tensor) else upload(torch.tensor(int(condition)), device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


def raise_everywhere(error: Exception | None) -> None:
    """Agree on failure: if any rank passes an error, every rank raises the first by rank, so that none keeps waiting."""
    for found in gather_objects(error):
        if found is not None:
            raise found


def from_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank returns its result, or raises what it raised."""
    result: T | None = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as failed:  # re-raised on every rank below
            error = failed
    result, error = broadcast_object((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def reduce_metrics(metrics: Metrics, group: dist.ProcessGroup, device: torch.device) -> dict[str, Metric]:
    """Merge metrics over the ranks of `group`: sums are added, maxima maximised. All ranks hold the same names."""
    metrics = on_host(metrics)
    if group.size() == 1:
        return {name: metric.rebuilt(metric.sums, metric.tops) for name, metric in metrics.items()}
    sums = [metric.sums for metric in metrics.values()]
    tops = [metric.tops for metric in metrics.values()]
    summed = upload(torch.tensor([number for part in sums for number in part], dtype=torch.float64), device)
    maximised = upload(torch.tensor([number for part in tops for number in part], dtype=torch.float64), device)
    dist.all_reduce(summed, group=group)
    if maximised.numel():
        dist.all_reduce(maximised, op=dist.ReduceOp.MAX, group=group)
    totals, largest = iter(summed.tolist()), iter(maximised.tolist())
    return {
        name: metric.rebuilt([next(totals) for _ in own], [next(largest) for _ in top])
        for (name, metric), own, top in zip(metrics.items(), sums, tops, strict=True)
    }


def together(action: Callable[[], T], what: str, *, error: type[AlignerError]) -> T:
    """Run `action` on every rank. If any rank fails, every rank raises `error` with the first failing rank's message.

    A ConfigError that all ranks raise stays a ConfigError. Collective. The action must not communicate after a point where one rank alone
    may fail: the others would wait for it there.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as failed:  # raised below, once all ranks know
        failure = failed
    if all_ranks(failure is None, platform.device()):
        return result
    messages = gather_objects("" if failure is None else _describe(failure))
    if all(gather_objects(isinstance(failure, ConfigError))):
        raise failure
    rank, message = next((rank, one) for rank, one in enumerate(messages) if one)
    where = f" on rank {rank}" if dist.get_world_size() > 1 and not all(messages) else ""
    raise error(f"{what} failed{where}: {message}") from failure


def _describe(error: Exception) -> str:
    """The error's message; with the error's name unless the message is written for users."""
    message = str(error)
    return message if message and isinstance(error, AlignerError) else f"{type(error).__name__}: {message}"
