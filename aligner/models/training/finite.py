"""Checks that a model's numbers are finite: after every update, and before they are written to a checkpoint.

One pass reads every parameter once and allocates nothing of their size. It takes the smallest and largest element; any NaN makes both NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import CheckpointError
from aligner.models.training.offload import by_device, optimizer_tensors
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects, raise_everywhere

_SHOWN = 3  # tensors that a message names


def non_finite_parameters(runners: Sequence[Any], limit: float) -> str:
    """Which trained parameters are not finite, or above `limit` in magnitude (0: any finite one may be); empty where all are sound.

    `runners`: this rank's DDP-wrapped chunks. Before an asynchronous gather each rank has its own share of the update, and of the others'
    shares what it had before: a fault there is found an update later. The same on every rank. Collective: one number is added up.
    """
    buffers = [buffer for runner in runners for buffer in (*runner.buffers, *runner.expert_parallel_buffers)]
    # The distributed optimizer keeps all parameters of a buffer in one tensor.
    flat = [t for b in buffers for t in ([b.param_data] if b.param_data is not None else [p.data for p in b.params])]
    count = (~_sound(flat, limit)).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(count)
    return _describe(runners, limit) if int(count) else ""


def check_before_save(chunks: Sequence[torch.nn.Module], optimizer: Any, rank: int) -> None:
    """Raise CheckpointError on every rank where a weight, a moment or a main weight of the optimizer on any rank is not finite."""
    weights = [p.data for chunk in chunks for p in chunk.parameters()]
    own, saved = [], {"the weights": weights, "the optimizer": optimizer_tensors(optimizer) if optimizer is not None else []}
    for what, tensors in saved.items():
        bad = sum(int((~_sound(own_device, 0.0)).sum()) for own_device in by_device(tensors))
        if bad:
            own.append(f"{bad} of {len(tensors)} tensors of {what}")
    error = f"rank {rank}: {', '.join(own)} are not finite; nothing is saved, the checkpoints before stay" if own else ""
    raise_everywhere(CheckpointError(error) if error else None)


@torch.no_grad()
def _sound(tensors: Iterable[Tensor], limit: float) -> Tensor:
    """Bool [tensors]: whether every element is finite and at most `limit` in magnitude, on the tensors' device."""
    ends = [torch.stack(torch.aminmax(t)).float() for t in tensors if t.is_floating_point() and t.numel()]
    if not ends:
        return torch.ones(1, dtype=torch.bool, device=platform.device())
    largest = torch.stack(ends).abs().amax(dim=1)  # NaN where any element is
    return largest <= (limit or torch.finfo(torch.float32).max)


def _describe(runners: Sequence[Any], limit: float) -> str:
    named = [(name, p.data) for runner in runners for name, p in runner.module.named_parameters() if p.requires_grad and p.numel()]
    sound = _sound([data for _, data in named], limit).tolist() if named else []
    own = [f"{name}: {float(data.abs().max()):.3g}" for (name, data), good in zip(named, sound, strict=True) if not good]
    found = [(rank, entry) for rank, part in enumerate(gather_objects(own)) for entry in part]
    total = sum(gather_objects(len(named)))
    shown = ", ".join(f"{entry} on rank {rank}" for rank, entry in found[:_SHOWN])
    above = f", or above guard.max_weight={limit:g}" if limit else ""
    return f"{len(found)} of {total} parameters that are not finite{above} (largest magnitudes: {shown})"
