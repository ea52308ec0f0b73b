"""Feed-forward layers on plain tensors, dense and mixtures of experts: the arithmetic of Megatron-Core's `MLP` and `SequentialMLP`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Activation
from aligner.rollout.weights import FeedForward


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.squared_relu: _squared_relu,
}


def expand(x: Tensor, weights: FeedForward, activation: Callable[[Tensor], Tensor], *, gated: bool) -> Tensor:
    """This rank's share of the inner activations, [..., F / tp]: activation(gate x) * (up x), or activation(up x)."""
    inner = F.linear(x, weights.up.weight, weights.up.bias)
    if not gated:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up


def route(x: Tensor, router: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights [N, k], experts int64 [N, k]) of tokens [N, H], in float32: softmax probabilities of the k likeliest experts, which sum to 1
    if `normalize`."""
    logits = F.linear(x.float(), router.float())
    if normalize:
        scores, experts = logits.topk(top_k, dim=-1)
        return scores.softmax(dim=-1), experts
    return logits.softmax(dim=-1).topk(top_k, dim=-1)


def mix(
    x: Tensor,
    experts: tuple[FeedForward, ...],
    routing: tuple[Tensor, Tensor],
    inner: Callable[[Tensor, FeedForward], Tensor],
    *,
    biased: bool,
) -> Tensor:
    """Sum over the experts that `routing` (from `route`) chose for each token [N, H] of weight times output.

    `inner` gives an expert's inner activations; `biased` where this rank adds the outer biases. Tokens are sorted by expert, so that each
    expert runs once, on the tokens that chose it.
    """
    weights, chosen = routing
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    scales = weights.flatten()[order, None]
    out = torch.zeros_like(x)
    for expert, rows, scale in zip(experts, (order // top_k).split(counts), scales.split(counts), strict=True):
        if not rows.shape[0]:
            continue
        hidden = inner(x[rows], expert)
        part = F.linear((hidden * scale).to(x.dtype), expert.down.weight)
        if biased and expert.down.bias is not None:
            part = part + (scale * expert.down.bias).to(x.dtype)
        out.index_add_(0, rows, part)
    return out
