"""From hidden states to a loss's inputs. Only `placement.next_token_of` applies the shift: a hidden state predicts the next token.

Outputs are [B, S] of the whole micro-batch on every rank. A context-parallel rank fills in its own part and the sum over ranks combines
the parts, so losses never see a layout. Masks and lengths that select what is projected stay on the host: nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aligner.models.modules.chunk import Chunk
from aligner.models.modules.scalar_head import VALUES, HeadGradient, Pooling, ScalarHead
from aligner.models.training.placement import Placement
from aligner.parallel.context import sum_over_ranks
from aligner.parallel.logprobs import Projection, linear_logprobs, linear_logprobs_of, linear_topk
from aligner.parallel.mcore import copy_to_tensor_model_parallel_region
from aligner.types import TokenOutputs
from aligner.types.rows import upload


def token_outputs(module: Chunk, hidden: Tensor, placement: Placement, *, tokens: Tensor, mask: Tensor, temperature: float) -> TokenOutputs:
    """Log-prob and entropy, float32 [B, S], of the `tokens` [B, S] that `mask` selects, 0 elsewhere.

    `hidden` is what the last stage returned, [L, rows, H] (or this rank's part of L under sequence parallelism). `mask` is bool [B, S] on
    the CPU, False at position 0; only where it selects is projected onto the vocabulary.
    """
    selected, places, weight, projection = _for_vocabulary(module, hidden, placement, mask, temperature)
    logprobs, entropy = linear_logprobs(selected, weight, tokens.reshape(-1)[places], projection)
    return TokenOutputs(logprobs=_scatter(module, logprobs, places, mask.shape), entropy=_scatter(module, entropy, places, mask.shape))


def named_outputs(
    module: Chunk, hidden: Tensor, placement: Placement, *, tokens: Tensor, named: Tensor, mask: Tensor, temperature: float
) -> TokenOutputs:
    """As `token_outputs` without entropy, and besides topk_logprobs float32 [B, S, K] of the tokens that `named` (int64 [B, S, K]) has for
    each position. One projection serves both."""
    selected, places, weight, projection = _for_vocabulary(module, hidden, placement, mask, temperature)
    wanted = torch.cat([tokens.reshape(-1)[places][:, None], named.flatten(0, 1)[places]], dim=1)
    logprobs = linear_logprobs_of(selected, weight, wanted, projection)
    return TokenOutputs(
        logprobs=_scatter(module, logprobs[:, 0], places, mask.shape), topk_logprobs=_scatter(module, logprobs[:, 1:], places, mask.shape)
    )


def topk_outputs(
    module: Chunk, hidden: Tensor, placement: Placement, *, mask: Tensor, k: int, below: int, temperature: float
) -> TokenOutputs:
    """The `k` likeliest tokens (ids less than `below`) in place of each that `mask` selects, and their log-probs: [B, S, k], likeliest
    first. No gradient."""
    selected, places, weight, projection = _for_vocabulary(module, hidden, placement, mask, temperature)
    found, logprobs = linear_topk(selected, weight, k, projection, below=below)
    return TokenOutputs(
        topk_tokens=_scatter(module, found, places, mask.shape), topk_logprobs=_scatter(module, logprobs, places, mask.shape)
    )


def value_outputs(module: Chunk, hidden: Tensor, placement: Placement, *, mask: Tensor) -> TokenOutputs:
    """Value of the state in which each token that `mask` selects was chosen: float32 [B, S], 0 elsewhere. Position 0 must be False."""
    return TokenOutputs(values=_scored(module, hidden, placement.next_token_of, mask))


def score_outputs(module: Chunk, hidden: Tensor, placement: Placement, *, lengths: Tensor, width: int) -> TokenOutputs:
    """Scores of each sequence, as the head pools: float32 [B, K]. `width` is the S of the batch; int64 `lengths` [B] are on the CPU.

    The mean over tokens averages their scores, which equals the score of their mean: context-parallel ranks' parts add up.
    """
    hidden = module.whole_sequences(hidden, grads_are_partial=False)
    positions = torch.arange(width)
    is_mean = module.head.pooling is Pooling.mean
    pooled = positions < lengths[:, None] if is_mean else positions == lengths[:, None] - 1
    selected, places = _select(hidden, placement.token_of, pooled)
    scores, rows = module.score_head(selected.float()), places // width
    if is_mean:
        scores = scores / upload(lengths, scores.device)[rows, None]
    whole = torch.zeros(len(lengths), scores.shape[1], dtype=scores.dtype, device=scores.device)
    return TokenOutputs(scores=sum_over_ranks(whole.index_put((rows,), scores, accumulate=is_mean), module.pg_collection.cp))


def step_outputs(module: Chunk, hidden: Tensor, placement: Placement, *, mask: Tensor) -> TokenOutputs:
    """Score of the step that ends at each token in `mask`, from that token's own hidden state: float32 [B, S], 0 elsewhere."""
    return TokenOutputs(step_scores=_scored(module, hidden, placement.token_of, mask))


def _scored(module: Chunk, hidden: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """The head's first output, [B, S], where `_select` selects."""
    selected, places = _select(module.whole_sequences(hidden, grads_are_partial=False), index, mask)
    return _scatter(module, module.score_head(selected.float())[:, 0], places, mask.shape)


def linear_head(head: ScalarHead, size: int, device: torch.device, *, residual: int = 0) -> torch.nn.Linear:
    """A head's linear layer: small random weights, the same on every rank, and no bias. `residual`: width of the stream, if not `size`."""
    made = torch.nn.Linear(size, head.num_outputs, bias=head.has_bias, dtype=torch.float32, device=device)
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        drawn = torch.randn(made.weight.shape, generator=generator, device="cpu") / math.sqrt((residual or size) + 1)
        made.weight.copy_(upload(drawn, device), non_blocking=True)
        if head.has_bias:
            made.bias.zero_()
    return made


def add_value_head(module: Chunk, gradient: HeadGradient) -> None:
    """Give a policy a head of values beside its output layer."""
    module.value_gradient = gradient
    if module.post_process:
        weight = module.output_parameter
        module.score_head = linear_head(VALUES, weight.shape[1], weight.device, residual=module.architecture.hidden_size)


def combine_outputs(module: Chunk, weights: Sequence[float], head: ScalarHead) -> None:
    """Replace a module's head by `head`, whose one output is the weighted sum of all outputs."""
    several, module.head = module.head, head
    if not module.post_process:
        return
    old = module.score_head
    module.score_head = made = linear_head(head, old.weight.shape[1], old.weight.device)
    factors = torch.tensor([list(weights)], dtype=torch.float32, device=old.weight.device)
    with torch.no_grad():
        made.weight.copy_(factors @ old.weight)
        if head.has_bias and several.has_bias:
            made.bias.copy_(factors[0] @ old.bias)


def _for_vocabulary(
    module: Chunk, hidden: Tensor, placement: Placement, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Projection]:
    """As `_select`; and this rank's rows of the output layer, and how they are applied."""
    hidden = module.whole_sequences(hidden, grads_are_partial=True)
    selected, places = _select(hidden, placement.next_token_of, mask)
    if not module.config.sequence_parallel:
        # Sums the ranks' parts of the gradient. On `selected`, whose gradient is contiguous: Megatron reduces a *copy* of one that is not.
        selected = copy_to_tensor_model_parallel_region(selected)
    return selected, places, *_projection(module, temperature)


def _projection(module: Chunk, temperature: float) -> tuple[Tensor, Projection]:
    weight, start = module.vocabulary_weight()
    return weight, Projection(
        vocab_start=start,
        group=module.pg_collection.tp,
        temperature=temperature,
        chunk_size=module.logits_chunk_size,
        scale=module.architecture.logits_scale,
        softcap=module.architecture.logits_softcap,
        arithmetic=module.arithmetic,
        parameter=module.output_parameter,
    )


def _select(hidden: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden states [N, H] of the slots whose `index` [rows, L] is a position that `mask` [B, S] selects, those flat positions [N])."""
    chosen = (index >= 0) & mask.reshape(-1)[index.clamp(min=0)]
    slots, device = chosen.nonzero(as_tuple=True), hidden.device
    return hidden.transpose(0, 1)[tuple(upload(part, device) for part in slots)], upload(index[chosen], device)


def _scatter(module: Chunk, selected: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """[B, S, ...] with the rows of `selected` [N, ...] in these places of `shape` [B, S], 0 elsewhere."""
    rest = selected.shape[1:]
    flat = torch.zeros(shape.numel(), *rest, dtype=selected.dtype, device=selected.device).index_put((places,), selected)
    return sum_over_ranks(flat.view(*shape, *rest), module.pg_collection.cp)
