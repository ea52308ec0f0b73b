"""The clipped value loss of a PPO critic, training with it, and explained variance from metrics that merge exactly."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aligner.losses.aggregation import masked, masked_mean, require
from aligner.protocols import Loss, Trainable
from aligner.telemetry.metrics import Mean, Metric, merge, values
from aligner.types import EpisodeRows, LossOutput, PolicyBatch, TokenOutputs, ValueBatch
from aligner.types.rows import num_rows, take_rows


def value_loss(outputs: TokenOutputs, batch: ValueBatch | PolicyBatch, *, clip: float | None) -> LossOutput:
    """0.5 * max((v_clip - G)^2, (v - G)^2) summed over masked tokens, v_clip = v_old + clip(v - v_old, -clip, clip); count: those tokens.

    G are the (unwhitened) returns, v_old the values that the returns were made from; `clip` None leaves 0.5 * (v - G)^2. Reads
    outputs.values [B, S]. Raises ValueError if values are missing or clip is not positive.
    Metrics: value/{loss, clip_fraction, mean, return_mean}, and value/{return_sq_mean, error_mean, error_sq_mean} for `explained_variance`.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"value clip is {clip}, expected a number > 0 or None")
    mask = batch.loss_mask
    values = masked(require(outputs.values, "TokenOutputs.values"), mask)
    returns = masked(require(batch.returns, "batch.returns"), mask)
    old_values = masked(require(batch.old_values, "batch.old_values"), mask)
    squared = (values - returns).square()
    metrics: dict[str, Metric] = {}
    if clip is not None:
        shift = values - old_values
        squared = squared.maximum((old_values + shift.clamp(-clip, clip) - returns).square())
        metrics["value/clip_fraction"] = masked_mean((shift.abs() > clip).to(values.dtype), mask)
    total, count = 0.5 * squared.sum(), mask.sum()
    # float64: a variance is the small difference of two large sums
    returns64, values64 = returns.double(), values.detach().double()
    error = returns64 - values64
    metrics |= {
        "value/loss": Mean(total=total.detach(), count=count),
        "value/mean": masked_mean(values64, mask),
        "value/return_mean": masked_mean(returns64, mask),
        "value/return_sq_mean": masked_mean(returns64.square(), mask),
        "value/error_mean": masked_mean(error, mask),
        "value/error_sq_mean": masked_mean(error.square(), mask),
    }
    return LossOutput(total=total, count=count, metrics=metrics)


def train_on_returns(
    model: Trainable, batch: ValueBatch, loss: Loss[ValueBatch], *, mini_batch_size: int, num_epochs: int
) -> dict[str, float]:
    """Train a value model on one step's rollouts: in order, in mini-batches of `mini_batch_size` episodes (the last may be smaller), each
    one optimizer step, and this `num_epochs` times. The metrics are merged over all optimizer steps."""
    rows = EpisodeRows.single(num_rows(batch)) if batch.episodes is None else EpisodeRows(batch.episodes)
    parts: list[dict[str, Metric]] = []
    for _ in range(num_epochs):
        for part in torch.arange(len(rows)).split(mini_batch_size):
            own = rows.rows_of(part)
            parts.append(model.train_step(take_rows(batch, slice(int(own[0]), int(own[-1]) + 1)), loss))
    return values(merge(parts))


def explained_variance(metrics: Mapping[str, float]) -> float:
    """1 - Var(G - v) / Var(G) of all merged `value_loss` metrics: 1 is perfect, 0 a constant's, NaN if all returns are equal."""
    return_variance = metrics["value/return_sq_mean"] - metrics["value/return_mean"] ** 2
    error_variance = metrics["value/error_sq_mean"] - metrics["value/error_mean"] ** 2
    scale = max(metrics["value/return_sq_mean"], 1e-30)
    return 1.0 - error_variance / return_variance if return_variance > 1e-12 * scale else float("nan")
