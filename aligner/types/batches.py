"""Rows of tokens with what a loss reads of them, what a forward pass gives a loss, and what the loss returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from aligner.telemetry.metrics import Metrics
from aligner.types.extras import RowTensor


def check_tensors(owner: object, tensors: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ValueError if a tensor does not have the dtype and shape stated."""
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{type(owner).__name__}.{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")


_PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "old_values", "returns", "step_labels")
# Of every tensor of a batch. B: rows, S: columns, P: pairs, K: any size, the same in all fields of one batch.
FIELDS: dict[str, tuple[torch.dtype, str]] = {
    **{"tokens": (torch.int64, "BS"), "lengths": (torch.int64, "B"), "loss_mask": (torch.bool, "BS")},
    **{"prompt_ids": (torch.int64, "B"), "truncated": (torch.bool, "B"), "margins": (torch.float32, "P"), "labels": (torch.float32, "BK")},
    **{"teacher_tokens": (torch.int64, "BSK"), "teacher_logprobs": (torch.float32, "BSK")},
    **{"episodes": (torch.int64, "B"), "episode_tokens": (torch.int64, "B"), "leads": (torch.bool, "B")},
    **dict.fromkeys(_PER_TOKEN, (torch.float32, "BS")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of tokens: tokens int64 [B, S] (right-padded), lengths int64 [B], and what else travels with them (`aligner.types.extras`).

    Raises ValueError naming a field with another dtype or shape than its entry in FIELDS; fields that may be None are optional.
    """

    tokens: Tensor
    lengths: Tensor
    extras: Mapping[str, RowTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        b, s = self.tokens.shape
        sizes, expected = {"B": b, "S": s, "P": b // 2}, {}
        if isinstance(self, PreferenceBatch) and b % 2:
            raise ValueError(f"PreferenceBatch.tokens has {b} rows; chosen and rejected rows come in pairs")
        for name, tensor in tensors_of(self).items():
            dtype, axes = FIELDS[name]
            if axes[-1] == "K":
                sizes.setdefault("K", tensor.shape[-1])
            expected[name] = (tensor, dtype, tuple(sizes[axis] for axis in axes))
        check_tensors(self, expected)
        for extra in self.extras.values():
            extra.check(b, s)


BatchT = TypeVar("BatchT", bound=Batch)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by field, without those that it does not have and without its extras."""
    found = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name != "extras"}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def of_kind(kind: type[BatchT], batch: Batch, **others: Any) -> BatchT:
    """The rows as a batch of another class: the fields that both have, and `others`, which replace them."""
    shared = {one.name for one in fields(kind)} & {one.name for one in fields(batch)}
    return kind(**{name: getattr(batch, name) for name in shared} | others)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch(Batch):
    """What every forward pass needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedBatch(Batch):
    """Rows with a loss_mask, bool [B, S]: the tokens that a loss counts."""

    loss_mask: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledBatch(MaskedBatch):
    """Rows that a policy may have sampled: rollout_logprobs float32 [B, S] then, of the sampler."""

    rollout_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch(SampledBatch):
    """Rollouts as tensors: rollout_logprobs (always given), prompt_ids int64 [B], truncated bool [B]."""

    rollout_logprobs: Tensor
    prompt_ids: Tensor
    truncated: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch(SampledBatch):
    """What a policy loss reads: float32 [B, S] old_logprobs, advantages; optional ref_logprobs.

    Without `old_logprobs` the batch is trained on once, by the policy that sampled it: the ratio is then 1, with gradient.

    Where several rows may be one episode, it counts as one sequence: `episode_tokens` int64 [B] are the tokens in the loss_mask of all rows
    of the row's episode, and `leads` (bool [B]) is True on one of them if it has any.

    `old_values` and `returns`, as of a ValueBatch, for a head of values on the policy.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    episode_tokens: Tensor | None = None
    leads: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBatch(MaskedBatch):
    """What the value loss reads: float32 [B, S] old_values, returns. `episodes` int64 [B]: which rows, next to each other, are one
    episode (`EpisodeRows.owner`); None: each is one."""

    old_values: Tensor
    returns: Tensor
    episodes: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch(SampledBatch):
    """P pairs as 2P rows, chosen and rejected interleaved (row 2i chosen, 2i+1 rejected); margins float32 [P]; optional ref_logprobs."""

    margins: Tensor
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LabeledBatch(SampledBatch):
    """Supervised rows; optional labels float32 [B, K] and ref_logprobs."""

    labels: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch(MaskedBatch):
    """Responses in steps: at each judged step's last token loss_mask is True, and step_labels float32 [B, S] from 0 (bad) to 1 (good)."""

    step_labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationBatch(SampledBatch):
    """Rows with a teacher's K likeliest tokens at every trained position, int64 [B, S, K], and their log-probs over its whole vocabulary,
    float32 [B, S, K]; both are 0 where loss_mask is False."""

    teacher_tokens: Tensor
    teacher_logprobs: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutputs:
    """What a forward pass gives a loss: the fields that were asked for, float32; logprobs, entropy, values, step_scores [B, S],
    scores [B, K], topk_logprobs [B, S, K] of the tokens topk_tokens (int64), which a batch may name."""

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
                f"LossOutput needs a scalar total and an int64 scalar count, got {tuple(self.total.shape)} "
                f"and {self.count.dtype} {tuple(self.count.shape)}"
            )
