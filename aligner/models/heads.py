"""From hidden states to what a loss reads. Here, and in `forward`, is the one shift: position t-1's hidden state speaks of token t."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.models.build import LanguageModel, ScalarModel
from aligner.parallel.logprobs import linear_logprobs
from aligner.parallel.mcore import copy_to_tensor_model_parallel_region
from aligner.types import TokenOutputs


def token_outputs(module: LanguageModel, hidden: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float) -> TokenOutputs:
    """Log-prob and entropy of the tokens that `mask` selects, from `forward`'s hidden states.

    Args:
        hidden: what the module returned, [S, B, H] (or this rank's part under sequence parallelism).
        tokens: int64 [B, S].
        mask: bool [B, S]; only these positions are projected onto the vocabulary. Position 0 must be False.

    Returns:
        logprobs and entropy, float32 [B, S], 0 where the mask is False.
    """
    hidden = module.whole_sequences(hidden, grads_are_partial=True)
    selected = hidden.transpose(0, 1)[:, :-1][mask[:, 1:]]  # [N, H]: the state before each selected token
    if not module.config.sequence_parallel:
        # Sums the ranks' parts of the gradient. On `selected`, whose gradient is contiguous: Megatron reduces a *copy* of one that is not.
        selected = copy_to_tensor_model_parallel_region(selected)
    weight, start = module.vocabulary_weight()
    logprobs, entropy = linear_logprobs(
        selected,
        weight,
        tokens[mask],
        vocab_start=start,
        group=module.pg_collection.tp,
        temperature=temperature,
        chunk_size=module.logits_chunk_size,
    )
    return TokenOutputs(logprobs=_scatter(logprobs, mask), entropy=_scatter(entropy, mask))


def value_outputs(module: ScalarModel, hidden: Tensor, mask: Tensor) -> TokenOutputs:
    """Value of the state in which each token that `mask` selects was chosen: float32 [B, S], 0 elsewhere. Position 0 must be False."""
    hidden = module.whole_sequences(hidden, grads_are_partial=False)
    selected = hidden.transpose(0, 1)[:, :-1][mask[:, 1:]]
    return TokenOutputs(values=_scatter(module.score_head(selected.float())[:, 0], mask))


def score_outputs(module: ScalarModel, hidden: Tensor, lengths: Tensor) -> TokenOutputs:
    """Score of each sequence, from its last token's hidden state: float32 [B, K]."""
    hidden = module.whole_sequences(hidden, grads_are_partial=False)
    last = hidden[lengths - 1, torch.arange(lengths.shape[0], device=lengths.device)]
    return TokenOutputs(scores=module.score_head(last.float()))


def _scatter(selected: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=selected.dtype, device=selected.device).masked_scatter(mask, selected)
