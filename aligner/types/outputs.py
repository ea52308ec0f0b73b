"""What a forward pass gives a loss, and what the loss gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.metrics import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """What a forward pass gives a loss: the fields that were asked for, float32; logprobs, entropy, values, step_scores [B, S],
    scores [B, K], topk_logprobs [B, S, K] of the tokens topk_tokens (int64), which a batch may have named."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    step_scores: Tensor | None = None
    topk_tokens: Tensor | None = None
    topk_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """A loss as a sum and an integer count (tokens, sequences or pairs): the trainer divides once, after reducing both.

    `total` is a scalar with gradient; `count` an int64 scalar; both are sums over the micro-batch, so the gradient is the same for every
    micro-batch size and parallel layout.
    """

    total: Tensor
    count: Tensor
    metrics: Metrics

    def __post_init__(self) -> None:
        if self.total.dim() or self.count.dim() or self.count.dtype != torch.int64:
            raise ValueError(
                f"LossOutput wants a scalar total and an int64 scalar count, got {tuple(self.total.shape)} "
                f"and {self.count.dtype} {tuple(self.count.shape)}"
            )
