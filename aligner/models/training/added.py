"""The losses that an optimizer step has besides its own (`aligner.protocols.Added`), and what is noted of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aligner.models.modules.router import loss_count
from aligner.protocols import Added, Loss
from aligner.types import Batch, LossOutput, TokenOutputs


def joined(batch: Batch, loss: Loss, added: Sequence[Added]) -> Loss:
    """The loss of a step, and those that are added to it on the step's own batch: one pass gives the outputs of all."""
    losses = [loss, *(scaled(replace(one, batch=batch), loss_count(batch, loss)) for one in added if one.batch is None)]
    if len(losses) == 1:
        return loss

    def all_of(outputs: TokenOutputs, part: Batch) -> LossOutput:
        results = [one(outputs, part) for one in losses]
        metrics = {name: metric for result in results for name, metric in result.metrics.items()}
        return replace(results[0], total=torch.stack([result.total for result in results]).sum(), metrics=metrics)

    return all_of


def scaled(added: Added, count: int) -> Loss:
    """The loss of an added batch for gradients that are divided by `count`, that of the step's own loss over its whole batch."""
    factor = added.coef * count / max(loss_count(added.batch, added.loss), 1)

    def of_step(outputs: TokenOutputs, batch: Batch) -> LossOutput:
        result = added.loss(outputs, batch)
        return replace(result, total=factor * result.total, count=torch.zeros_like(result.count))

    return of_step


def noting_totals(loss: Loss, totals: list[Tensor]) -> Loss:
    """`loss`, with its results recorded in `totals` without synchronising: they are checked once, after the backward pass."""

    def noting(outputs: TokenOutputs, batch: Batch) -> LossOutput:
        result = loss(outputs, batch)
        totals.append(result.total.detach())
        return result

    return noting
