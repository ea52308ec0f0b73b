"""Micro-batched passes over a Megatron module through Megatron-Core's schedules.

`outputs` turns hidden states and a micro-batch into `TokenOutputs` (see `aligner.models.heads`, the only place that shifts). Every rank of
a model's tensor-parallel group runs the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aligner.metrics import Metric, merge
from aligner.parallel.mcore import get_forward_backward_func
from aligner.protocols import Loss
from aligner.types import Batch, TokenOutputs, num_rows, select_rows, trim_columns

Outputs = Callable[[Tensor, Batch], TokenOutputs]


def micro_batches(batch: Batch, size: int, *, column_multiple: int) -> list[Batch]:
    """Consecutive slices of `size` rows, each cut to its own longest sequence (rounded up to `column_multiple`)."""
    slices = [select_rows(batch, start, start + size) for start in range(0, num_rows(batch), size)]
    return [trim_columns(part, -(-int(part.lengths.max()) // column_multiple) * column_multiple) for part in slices]


def forward(module: Any, parts: list[Batch], outputs: Outputs) -> list[TokenOutputs]:
    """One `TokenOutputs` per micro-batch, without gradient and with dropout off."""
    if not parts:
        return []
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            return _run(module, parts, lambda part: lambda hidden, non_loss_data=True: outputs(hidden, part), forward_only=True)
    finally:
        module.train(was_training)


def forward_backward(module: Any, parts: list[Batch], outputs: Outputs, loss: Loss) -> dict[str, Metric]:
    """Accumulate gradients of the loss's sum over the micro-batches, finalised (reduced and divided by the global count) by Megatron."""

    def loss_of(part: Batch) -> Callable:
        def compute(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
            result = loss(outputs(hidden, part), part)
            return result.total, result.count, dict(result.metrics)

        return compute

    module.train()
    return merge(_run(module, parts, loss_of, forward_only=False))


def _run(module: Any, parts: list[Batch], loss_of: Callable[[Batch], Callable], *, forward_only: bool) -> list[Any]:
    def step(iterator: Any, model: Any) -> tuple[Tensor, Callable]:
        part = next(iterator)
        positions = torch.arange(part.tokens.shape[1], device=part.tokens.device).expand_as(part.tokens)
        return model(part.tokens, positions, None), loss_of(part)

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(parts),
        model=[module],
        num_microbatches=len(parts),
        seq_length=max(part.tokens.shape[1] for part in parts),
        micro_batch_size=max(num_rows(part) for part in parts),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
