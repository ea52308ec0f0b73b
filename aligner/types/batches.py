"""Rows of tokens with what a loss reads of them, what a forward pass gives a loss, and what the loss gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from aligner.telemetry.metrics import Metrics


def check_tensors(owner: object, tensors: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ValueError if a tensor does not have the dtype and shape stated."""
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{type(owner).__name__}.{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")


def route_dtype(num_experts: int) -> torch.dtype:
    """Of routes: the experts that were chosen for each token in each layer. `no_expert` is a number that none of them has."""
    return torch.uint8 if num_experts < 256 else torch.int16


def no_expert(dtype: torch.dtype) -> int:
    """In place of an expert where a token has no route: nothing was computed after it. (What layers without experts have means nothing.)"""
    return torch.iinfo(dtype).max


_PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "old_values", "returns", "step_labels")
# Of every field of a batch. B: rows, S: columns, P: pairs, K: any size, the same in all fields of one batch.
FIELDS: dict[str, tuple[torch.dtype, str]] = {
    **{"tokens": (torch.int64, "BS"), "lengths": (torch.int64, "B"), "loss_mask": (torch.bool, "BS")},
    **{"prompt_ids": (torch.int64, "B"), "truncated": (torch.bool, "B"), "margins": (torch.float32, "P"), "labels": (torch.float32, "BK")},
    **{"teacher_tokens": (torch.int64, "BSK"), "teacher_logprobs": (torch.float32, "BSK"), "routes": (torch.uint8, "BS")},
    **dict.fromkeys(_PER_TOKEN, (torch.float32, "BS")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """What every batch has: tokens int64 [B, S] (right-padded) and lengths int64 [B]. Raises ValueError naming a field with another dtype
    or shape than FIELDS says; optional ones may be None."""

    tokens: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        b, s = self.tokens.shape
        sizes, expected = {"B": b, "S": s, "P": b // 2}, {}
        if isinstance(self, PreferenceBatch) and b % 2:
            raise ValueError(f"PreferenceBatch.tokens has {b} rows; chosen and rejected rows come in pairs")
        for name, tensor in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if tensor is None:
                continue
            dtype, axes = FIELDS[name]
            if axes[-1] == "K":
                sizes.setdefault("K", tensor.shape[-1])
            shape = tuple(sizes[axis] for axis in axes)
            if name == "routes":
                dtype, shape = torch.int16 if tensor.dtype == torch.int16 else dtype, (*shape, *tensor.shape[2:])
            expected[name] = (tensor, dtype, shape)
        check_tensors(self, expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch(_Rows):
    """What every forward pass needs: tokens int64 [B, S] (right-padded) and lengths int64 [B]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch(_Rows):
    """Rollouts as tensors: loss_mask bool [B, S], rollout_logprobs float32 [B, S], prompt_ids int64 [B], truncated bool [B].

    Here and below, optional: routes uint8 or int16 [B, S, layers, k], the experts that the sampler chose (`route_dtype`, `no_expert`).
    """

    loss_mask: Tensor
    rollout_logprobs: Tensor
    prompt_ids: Tensor
    truncated: Tensor
    routes: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch(_Rows):
    """What a policy loss reads: float32 [B, S] old_logprobs, advantages; optional ref_logprobs, rollout_logprobs.

    `old_logprobs` None says that the batch is trained on once, by the policy that sampled it: the ratio is then 1, with gradient.
    """

    loss_mask: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    routes: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBatch(_Rows):
    """What the value loss reads: float32 [B, S] old_values, returns."""

    loss_mask: Tensor
    old_values: Tensor
    returns: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch(_Rows):
    """P pairs as 2P rows, chosen and rejected interleaved (row 2i chosen, 2i+1 rejected); margins float32 [P].

    Optional, float32 [2P, S]: ref_logprobs; rollout_logprobs of rows that were sampled.
    """

    loss_mask: Tensor
    margins: Tensor
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    routes: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabeledBatch(_Rows):
    """Supervised rows: loss_mask bool [B, S]. Optional: labels float32 [B, K]; float32 [B, S] ref_logprobs, rollout_logprobs of rows that
    were sampled."""

    loss_mask: Tensor
    labels: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    routes: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch(_Rows):
    """Responses in steps: loss_mask (bool [B, S]) is True on the last token of each judged step, step_labels (float32 [B, S]) has from 0
    (bad) to 1 (good) there."""

    loss_mask: Tensor
    step_labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationBatch(_Rows):
    """Rows with what a teacher says of every token that is learnt: its K likeliest tokens in that place, int64 [B, S, K], and their
    log-probs over its whole vocabulary, float32 [B, S, K]; both are 0 where loss_mask (bool [B, S]) is False.

    Optional, float32 [B, S]: rollout_logprobs of rows that were sampled.
    """

    loss_mask: Tensor
    teacher_tokens: Tensor
    teacher_logprobs: Tensor
    rollout_logprobs: Tensor | None = None
    routes: Tensor | None = None


MaskedBatch = RolloutBatch | PolicyBatch | ValueBatch | PreferenceBatch | LabeledBatch | StepBatch | DistillationBatch
Batch = TokenBatch | MaskedBatch
UNROUTED = (TokenBatch, ValueBatch, StepBatch)  # these have no routes: what they train did not sample


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
