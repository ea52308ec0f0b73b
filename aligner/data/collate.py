"""Rows of tokens, and from them right-padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.types import FinishReason, LabeledBatch, PreferenceBatch, Rollout, RolloutBatch, TokenBatch
from aligner.types.batches import of_kind
from aligner.types.extras import padded


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedExample:
    """One row: `loss_mask` is True on response tokens and their end token; `source` is `file:line`.

    `ref_logprobs`: a frozen reference's log-probs of the tokens in `loss_mask`, float32, where they are stored
    (`aligner.jobs.stored_reference`).
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str
    ref_logprobs: Tensor | None = field(default=None, compare=False, repr=False)
    extras: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)  # `aligner.types.extras`


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two rows that begin with the same prompt; `margin` is the given reward difference, or 0."""

    chosen: SupervisedExample
    rejected: SupervisedExample
    margin: float

    @property
    def source(self) -> str:
        return self.chosen.source

    @property
    def rows(self) -> tuple[SupervisedExample, ...]:
        """The rows that a model reads."""
        return self.chosen, self.rejected

    def with_reference(self, logprobs: Sequence[Tensor]) -> PreferencePair:
        """The same pair with a frozen reference's log-probs of the trained tokens of each of its `rows`."""
        chosen, rejected = (replace(row, ref_logprobs=found) for row, found in zip(self.rows, logprobs, strict=True))
        return replace(self, chosen=chosen, rejected=rejected)


def token_batch(sequences: Sequence[Sequence[int]], pad_id: int, *, extras: Sequence[Mapping[str, Tensor]] = ()) -> TokenBatch:
    """Tokens and lengths, with the `extras` of each row."""
    if not sequences:
        raise ValueError("a batch needs at least one row, got none")
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    width = int(lengths.max())
    return TokenBatch(tokens=_pad(sequences, pad_id, width, torch.int64), lengths=lengths, extras=padded(extras, width))


def rollout_batch(rollouts: Sequence[Rollout], pad_id: int) -> RolloutBatch:
    """Rollouts as they are, in their order: loss_mask on the policy's own tokens (end token included), sampler's log-probs, 0 elsewhere."""
    for rollout in rollouts:
        if not rollout.prompt.tokens:
            raise ValueError(f"the prompt of {rollout.prompt.source} has no token: position 0 would be a response token")
    batch = token_batch([rollout.tokens for rollout in rollouts], pad_id, extras=[rollout.all_extras for rollout in rollouts])
    width = batch.tokens.shape[1]
    masks = [[False] * len(r.prompt.tokens) + list(r.written or [True] * len(r.response)) for r in rollouts]
    logprobs = [[0.0] * len(r.prompt.tokens) + list(r.logprobs) for r in rollouts]
    return of_kind(
        RolloutBatch,
        batch,
        loss_mask=_pad(masks, False, width, torch.bool),
        rollout_logprobs=_pad(logprobs, 0.0, width, torch.float32),
        prompt_ids=torch.tensor([r.prompt.id for r in rollouts], dtype=torch.int64),
        truncated=torch.tensor([r.finish_reason is FinishReason.length for r in rollouts], dtype=torch.bool),
    )


def supervised_batch(examples: Sequence[SupervisedExample], pad_id: int) -> LabeledBatch:
    """Supervised rows, padded; no labels. With the reference's log-probs if the rows have them: all, or none."""
    batch = token_batch([example.tokens for example in examples], pad_id, extras=[example.extras for example in examples])
    mask = _pad([example.loss_mask for example in examples], False, batch.tokens.shape[1], torch.bool)
    return of_kind(LabeledBatch, batch, loss_mask=mask, ref_logprobs=_stored_logprobs(examples, mask))


def preference_batch(pairs: Sequence[PreferencePair], pad_id: int) -> PreferenceBatch:
    """P pairs as 2P rows: row 2i is chosen i, row 2i+1 rejected i."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    labeled = supervised_batch(rows, pad_id)
    return of_kind(PreferenceBatch, labeled, margins=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32))


def _stored_logprobs(examples: Sequence[SupervisedExample], mask: Tensor) -> Tensor | None:
    stored = [example.ref_logprobs for example in examples if example.ref_logprobs is not None]
    if not stored:
        return None
    if len(stored) < len(examples):
        raise ValueError(f"{len(stored)} of {len(examples)} rows have the reference's log-probs, expected all or none")
    return torch.zeros(mask.shape).masked_scatter_(mask, torch.cat(stored))


def _pad(rows: Sequence[Sequence[float]], fill: float, width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
