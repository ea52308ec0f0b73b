"""Context parallelism: a rank's parts of a sequence, and the two exchanges that a model needs.

A sequence of S tokens is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r (Megatron-Core's order): the work of a causal
query is proportional to its position, so an early and a late chunk together cost the same on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.parallel.mcore import gather_from_sequence_parallel_region, reduce_from_tensor_model_parallel_region


def chunk_numbers(cp_rank: int, cp_size: int) -> tuple[int, ...]:
    """The chunks (of 2 cp, or the one of a rank alone) that a rank holds, in order."""
    return (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)


def local_slots(length: int, cp_rank: int, cp_size: int) -> Tensor:
    """int64 [length / cp]: a rank's positions of a sequence of `length` (a multiple of 2 cp), in the rank's order."""
    size = length // max(1, 2 * cp_size if cp_size > 1 else 1)
    return torch.cat([torch.arange(number * size, (number + 1) * size) for number in chunk_numbers(cp_rank, cp_size)])


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """A whole sequence's 2 cp chunks in order, each [S / (2 cp), ...], of this rank's two. Gradients are summed. Collective."""
    gathered = gather_ranks(x, group)
    early, late = gathered.view(group.size(), 2, x.shape[0] // 2, *x.shape[1:]).unbind(dim=1)
    return [*early.unbind(0), *reversed(late.unbind(0))]


def gather_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * L, ...] of every rank's [L, ...], one after the other; the gradients of all ranks' copies are summed. Collective."""
    return gather_from_sequence_parallel_region(x, group=group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's `x`, in which each fills in its own entries, on every rank; the gradient is passed on unchanged."""
    # Megatron-Core sums in place.
    return x if group.size() == 1 else reduce_from_tensor_model_parallel_region(x.clone(memory_format=torch.contiguous_format), group)
