"""Mixtures of experts in the built-in engine: routing, and three ways to add up the chosen experts' outputs for each token.

`mix` runs each expert on the tokens that chose it, and needs their number on the host: the arithmetic of Megatron-Core's `SequentialMLP`,
for the CPU and for prompts. On a GPU a decode step must not wait for that and is recorded in a graph, so its shapes cannot depend on the
routing. `mix_grouped` sorts the tokens by expert and leaves the counts on the device (`torch._grouped_mm`); it needs the experts' matrices
in one tensor. `mix_all` runs every expert on every token: with few tokens a step takes the time of reading the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture
from aligner.models.modules.router import limited
from aligner.rollout.builtin.weights import Affine, FeedForward

Inner = Callable[[Tensor, FeedForward], Tensor]  # an expert's inner activations [..., F / tp] of tokens [..., H]


def route(x: Tensor, router: Affine, bias: Tensor | None, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """(weights [N, k], experts int64 [N, k]) of tokens [N, H], in float32: the best experts and their scores, which sum to 1 if the
    architecture normalizes them; `bias` affects only the choice, the router's own bias both."""
    logits = F.linear(x.float(), router.weight.float(), None if router.bias is None else router.bias.float())
    normalize, top_k = architecture.normalize_expert_weights, architecture.experts_per_token
    if normalize and not architecture.router_sigmoid:
        scores, experts = limited(logits, architecture).topk(top_k, dim=-1)
        return scores.softmax(dim=-1) * architecture.router_scale, experts
    scores = logits.sigmoid() if architecture.router_sigmoid else logits.softmax(dim=-1)
    experts = limited(scores if bias is None else scores + bias, architecture).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * architecture.router_scale, experts


def mix(x: Tensor, experts: tuple[FeedForward, ...], routing: tuple[Tensor, Tensor], inner: Inner, *, biased: bool) -> Tensor:
    """Sum of weight times output over the experts that `routing` (from `route`) chose for each token [N, H].

    `biased`: this rank adds the outer biases. Tokens are sorted by expert, so each expert runs once, on the tokens that chose it.
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


def mix_all(x: Tensor, experts: tuple[FeedForward, ...], routing: tuple[Tensor, Tensor], inner: Inner, *, biased: bool) -> Tensor:
    """`mix` in constant shapes: every expert on all tokens, with weight 0 for tokens that chose others."""
    weights, chosen = routing
    scales = weights.new_zeros(x.shape[0], len(experts)).scatter_(1, chosen, weights)
    out = torch.zeros_like(x)
    for expert, scale in zip(experts, scales.split(1, dim=1), strict=True):
        # `where`, not a product: an expert's output for a token of others may overflow.
        hidden = torch.where(scale != 0, inner(x, expert) * scale, 0.0).to(x.dtype)
        out = torch.addmm(out, hidden, expert.down.weight.t())
        if biased and expert.down.bias is not None:
            out = out + (scale * expert.down.bias).to(x.dtype)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The weights of a layer's experts, as views: up [experts, inner (twice if gated), H], down [experts, H, inner], and their biases
    [experts, rows].

    `is_backwards`: the experts are in reverse order, as in Megatron-Core's buffers of trained weights.
    """

    up: Affine
    down: Affine
    is_backwards: bool = False


def mix_grouped(x: Tensor, stack: Stack, routing: tuple[Tensor, Tensor], activate: Callable[[Tensor], Tensor], *, biased: bool) -> Tensor:
    """`mix` by two grouped matrix products, in the same shapes for any routing, without reads on the host."""
    weights, chosen = routing
    count, top_k = stack.up.weight.shape[0], chosen.shape[1]
    last = count - 1
    experts, order = (last - chosen if stack.is_backwards else chosen).flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(count, device=x.device), right=True).int()
    scales = weights.flatten()[order, None]
    inner = torch._grouped_mm(x[order // top_k], stack.up.weight.mT, offs=ends)
    inner = activate(inner if stack.up.bias is None else inner + stack.up.bias[experts])
    parts = torch._grouped_mm((inner * scales).to(x.dtype), stack.down.weight.mT, offs=ends)
    if biased and stack.down.bias is not None:
        parts = parts + (scales * stack.down.bias[experts]).to(x.dtype)
    return torch.empty_like(parts).index_copy_(0, order, parts).view(-1, top_k, x.shape[1]).sum(dim=1)


def multiplies_groups(weight: Tensor) -> bool:
    """Whether the device has a kernel for grouped products of this dtype. Others compute them one by one, with counts on the host."""
    return weight.is_cuda and weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


def stack_of(experts: Sequence[FeedForward]) -> Stack | None:
    """Views of the experts' weights; None if these are not at equal distances in one storage (`OwnWeights` are, training's buffers mostly),
    or not aligned for the kernels."""
    for is_backwards in (False, True):
        ordered = experts[::-1] if is_backwards else experts
        up, down = (_stacked_affine([getattr(expert, name) for expert in ordered]) for name in ("up", "down"))
        if up is not None and down is not None:
            return Stack(up=up, down=down, is_backwards=is_backwards)
    return None


def _stacked_affine(parts: Sequence[Affine]) -> Affine | None:
    weight, biases = _stacked([part.weight for part in parts]), [part.bias for part in parts if part.bias is not None]
    bias = _stacked(biases) if biases else None
    return None if weight is None or (biases and bias is None) else Affine(weight=weight, bias=bias)


_ALIGNMENT = 16  # bytes


def _stacked(parts: Sequence[Tensor]) -> Tensor | None:
    first, size = parts[0], parts[0].element_size()
    offsets = [part.storage_offset() for part in parts]
    step = offsets[1] - offsets[0] if len(parts) > 1 else first.numel()
    strides = (step, *first.stride())
    together = all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.is_contiguous() and part.shape == first.shape
        for part in parts
    )
    spaced = step >= first.numel() and offsets == [offsets[0] + number * step for number in range(len(parts))]
    aligned = all(number * size % _ALIGNMENT == 0 for number in (*strides[:-1], offsets[0])) and first.data_ptr() % _ALIGNMENT == 0
    return first.detach().as_strided((len(parts), *first.shape), strides) if together and spaced and aligned else None
