"""From hidden states to what a loss reads. The one shift, that a hidden state speaks of the next token, is in `placement.next_token_of`.

Outputs are [B, S] of the whole micro-batch on every rank: a context-parallel rank fills in what it holds, and the sum over ranks puts the
parts together, so that losses never see a layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.models.build import LanguageModel, ScalarModel
from aligner.models.placement import Placement
from aligner.parallel.context import sum_over_ranks
from aligner.parallel.exact import EXACT
from aligner.parallel.logprobs import FAST, linear_logprobs
from aligner.parallel.mcore import copy_to_tensor_model_parallel_region
from aligner.types import TokenOutputs


def token_outputs(
    module: LanguageModel, hidden: Tensor, placement: Placement, *, tokens: Tensor, mask: Tensor, temperature: float
) -> TokenOutputs:
    """Log-prob and entropy of the tokens that `mask` selects, from `forward`'s hidden states.

    Args:
        hidden: what the last stage returned, [L, rows, H] (or this rank's part of L under sequence parallelism).
        tokens: int64 [B, S].
        mask: bool [B, S]; only these positions are projected onto the vocabulary. Position 0 must be False.

    Returns:
        logprobs and entropy, float32 [B, S], 0 where the mask is False.
    """
    hidden = module.whole_sequences(hidden, grads_are_partial=True)
    selected, places = _select(hidden, placement.next_token_of, mask)
    if not module.config.sequence_parallel:
        # Sums the ranks' parts of the gradient. On `selected`, whose gradient is contiguous: Megatron reduces a *copy* of one that is not.
        selected = copy_to_tensor_model_parallel_region(selected)
    weight, start = module.vocabulary_weight()
    logprobs, entropy = linear_logprobs(
        selected,
        weight,
        tokens.reshape(-1)[places],
        vocab_start=start,
        group=module.pg_collection.tp,
        temperature=temperature,
        chunk_size=module.logits_chunk_size,
        arithmetic=EXACT if module.batch_invariant else FAST,
    )
    return TokenOutputs(logprobs=_scatter(module, logprobs, places, mask.shape), entropy=_scatter(module, entropy, places, mask.shape))


def value_outputs(module: ScalarModel, hidden: Tensor, placement: Placement, *, mask: Tensor) -> TokenOutputs:
    """Value of the state in which each token that `mask` selects was chosen: float32 [B, S], 0 elsewhere. Position 0 must be False."""
    hidden = module.whole_sequences(hidden, grads_are_partial=False)
    selected, places = _select(hidden, placement.next_token_of, mask)
    return TokenOutputs(values=_scatter(module, module.score_head(selected.float())[:, 0], places, mask.shape))


def score_outputs(module: ScalarModel, hidden: Tensor, placement: Placement, *, lengths: Tensor, width: int) -> TokenOutputs:
    """Score of each sequence, from its last token's hidden state: float32 [B, K]. `width` is the S of the batch."""
    hidden = module.whole_sequences(hidden, grads_are_partial=False)
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    last = torch.zeros(lengths.shape[0], width, dtype=torch.bool, device=lengths.device)
    last[rows, lengths - 1] = True
    selected, places = _select(hidden, placement.token_of, last)
    scores = module.score_head(selected.float())
    whole = torch.zeros(lengths.shape[0], scores.shape[1], dtype=scores.dtype, device=scores.device)
    return TokenOutputs(scores=sum_over_ranks(whole.index_put((places // width,), scores), module.pg_collection.cp))


def _select(hidden: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden states [N, H] of the slots whose `index` [rows, L] is a position that `mask` [B, S] selects, those flat positions [N])."""
    chosen = (index >= 0) & mask.reshape(-1)[index.clamp(min=0)]
    return hidden.transpose(0, 1)[chosen], index[chosen]


def _scatter(module: LanguageModel | ScalarModel, selected: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    flat = torch.zeros(shape.numel(), dtype=selected.dtype, device=selected.device).index_put((places,), selected)
    return sum_over_ranks(flat.view(shape), module.pg_collection.cp)
