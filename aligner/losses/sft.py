"""Supervised fine-tuning: token cross-entropy."""

from __future__ import annotations

from aligner.losses.aggregation import masked, require
from aligner.telemetry.metrics import Mean
from aligner.types import LabeledBatch, LossOutput, TokenOutputs


def sft_loss(outputs: TokenOutputs, batch: LabeledBatch) -> LossOutput:
    """Negative log-likelihood summed over masked tokens; count: those tokens. Reads outputs.logprobs [B, S].

    Metrics: sft/loss (nats per token; perplexity is its exponential). Raises ValueError if logprobs are missing.
    """
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), batch.loss_mask)
    total, count = -logprobs.sum(), batch.loss_mask.sum()
    return LossOutput(total=total, count=count, metrics={"sft/loss": Mean(total=total.detach(), count=count)})
