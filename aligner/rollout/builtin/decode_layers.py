"""The parts of the built-in engine's layers other than plain attention: norms, positions, latent attention, gated delta nets, experts.

Mixtures of experts add up the chosen experts' outputs for each token in three ways. `mix` runs each expert on the tokens that chose it, and
needs their number on the host: the arithmetic of Megatron-Core's `SequentialMLP`, for the CPU and for prompts. On a GPU a decode step must
not wait for that and is recorded in a graph, so its shapes cannot depend on the routing. `mix_grouped` sorts the tokens by expert, leaving
the counts on the device (`torch._grouped_mm`); it needs the experts' matrices in one tensor. `mix_all` runs every expert on every token:
with few tokens a step takes the time of reading the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.architecture.rope import neighbours_apart
from aligner.models.config import Architecture, Normalization, SeeingArchitecture
from aligner.models.modules.gated_delta_net import chunked, convolved, gated_norm, split_heads, step, tokens_of
from aligner.models.modules.router import limited
from aligner.rollout.builtin.attention import DecodePlan, PrefillPlan, SeatStates
from aligner.rollout.builtin.weights import Affine, DeltaWeights, FeedForward, LatentWeights, dense, linear

Norm = Callable[[Tensor, Affine], Tensor]
Tables = tuple[Tensor, Tensor]  # cosines and sines


def norm_of(architecture: Architecture) -> Norm:
    """The architecture's norm over the last dimension."""
    eps, kind = architecture.norm_eps, architecture.normalization
    if kind is Normalization.rms_norm:
        return lambda x, weights: F.rms_norm(x, weights.weight.shape, weights.weight, eps)
    if kind is Normalization.rms_norm_1p:
        return lambda x, weights: F.rms_norm(x.float(), weights.weight.shape, weights.weight.float() + 1, eps).to(x.dtype)
    if kind is Normalization.layer_norm_1p:
        return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight + 1, weights.bias, eps)
    return lambda x, weights: F.layer_norm(x, weights.weight.shape, weights.weight, weights.bias, eps)


def norm_of_heads(architecture: Architecture, *, ranks: int, add_up: Callable[[Tensor], Tensor]) -> Norm:
    """The norm of this rank's queries, or keys, [N, groups, heads of each, D]; `add_up` sums over the `ranks` that share the heads."""
    eps = architecture.norm_eps

    def whole(x: Tensor, weights: Affine) -> Tensor:
        flat = x.flatten(1).float()
        squares = add_up(flat.square().sum(dim=-1, keepdim=True)) / (flat.shape[-1] * ranks)
        return ((flat * torch.rsqrt(squares + eps)).to(x.dtype) * weights.weight).view(x.shape)

    def by_head(x: Tensor, weights: Affine) -> Tensor:
        return (F.layer_norm(x.float(), x.shape[-1:], eps=eps) * weights.weight.float().view(x.shape[1:])).to(x.dtype)

    if architecture.qk_norm_whole:
        return whole
    return by_head if architecture.qk_norm_by_head else norm_of(architecture)


class Rotary:
    """The effect of positions in each layer: tables for positions below `length`, in the dtype and on the device of `like`.

    `frequencies`: one for each pair of rotated dimensions; None if positions are learned. `everywhere` are the tables of the layers that
    have no base of their own: [length, R] each for R rotated dimensions.
    """

    def __init__(self, architecture: Architecture, frequencies: Tensor | None, like: Tensor, length: int) -> None:
        self._architecture = architecture
        self._frequencies, self._dtype = frequencies, like.dtype

        def tables(frequencies: Tensor, factor: float) -> Tables:
            """x * cos + roll(x, R/2) * sin rotates the halves, as Megatron does: of the sines those of the first half are negative."""
            angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies.to(like.device)
            cos, sin = angles.cos() * factor, angles.sin() * factor
            return torch.cat([cos, cos], -1).to(like.dtype), torch.cat([-sin, sin], -1).to(like.dtype)

        local = architecture.rope_local_theta
        self.everywhere = None if frequencies is None else tables(frequencies, architecture.rope_attention_factor)
        self._local = tables(rope.frequencies(rope.local(architecture)), 1.0) if local else None

    def at(self, positions: Tensor, axes: Tensor | None = None) -> list[Tables | None]:
        """For each layer the rows [N, 1, 1, R] of N tokens' positions, or of those [3, N] on several axes; None where nothing rotates."""
        every, local = (None if both is None else _rows(both, positions) for both in (self.everywhere, self._local))
        if axes is not None:
            every = self._of_axes(axes)
        a = self._architecture
        windowed = [local is not None and a.window_of(layer) > 0 for layer in range(a.num_layers)]
        return [(local if windowed[layer] else every) if a.rotates(layer) else None for layer in range(a.num_layers)]

    def _of_axes(self, axes: Tensor) -> Tables:
        assert isinstance(self._architecture, SeeingArchitecture) and self._frequencies is not None
        angles = rope.angles_of_axes(axes, self._frequencies.to(axes.device), self._architecture)[:, None, None]
        cos, sin = (part * self._architecture.rope_attention_factor for part in (angles.cos(), angles.sin()))
        half = sin.shape[-1] // 2
        return cos.to(self._dtype), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).to(self._dtype)

    def tempered(self, queries: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Queries [N, groups, queries per group, D] with the temperature of layers without rotary positions."""
        if not self._architecture.attention_temperature or self._architecture.rotates(layer):
            return queries
        return (queries * rope.temperature(self._architecture, positions)[:, None, None, None]).to(queries.dtype)


def _rows(tables: Tables, positions: Tensor) -> Tables:
    cos, sin = tables
    return cos[positions][:, None, None], sin[positions][:, None, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentHeads:
    """Multi-head latent attention, of this rank's `heads`: the cache holds a token's latent and rotated key, not every head's own.

    A head's score of a token is q . (U l) = (U^T q) . l for its matrix U and the token's latent l: queries are multiplied by U once, and
    then all heads read the same cache, as if they were one group with keys [rotated | latent] and values [latent] (2405.04434, 2.1.2).
    """

    architecture: Architecture
    heads: int
    norm: Norm

    def mixed(self, x: Tensor, weights: LatentWeights, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, 1, heads, W] of what attention reads [N, H], keys and values [N, 1, W]; values are the latent and zeros.

        `rotary`: cosines and sines [N, 1, 1, R] of the tokens' positions.
        """
        a = self.architecture
        cos, sin = (table[:, 0] for table in rotary)
        compressed = F.linear(x, weights.kv_down)
        latent, shared = self.norm(compressed[:, : a.latent_size], weights.kv_norm), compressed[:, a.latent_size :]
        read = x if weights.q_down is None else self.norm(F.linear(x, weights.q_down), weights.q_norm)
        query = linear(read, weights.q_up).unflatten(-1, (self.heads, a.head_dim))
        plain, rotated = query.split([a.head_dim - a.rotated, a.rotated], dim=-1)
        absorbed = torch.einsum("nhd,hdl->nhl", plain, self._matrices(weights)[:, : a.head_dim - a.rotated])
        turned = [neighbours_apart(part, a.rotated) if a.rotary_interleaved else part for part in (rotated, shared[:, None])]
        query_rotated, key_rotated = (rope.rotate(part, cos, sin) for part in turned)
        queries = torch.cat([query_rotated, absorbed], dim=-1)
        keys = torch.cat([key_rotated[:, 0], latent], dim=-1)
        return queries[:, None], keys[:, None], F.pad(latent, (0, a.rotated))[:, None]

    def values(self, attended: Tensor, weights: LatentWeights) -> Tensor:
        """[N, heads * value D] from the latents that the heads gathered, [N, 1, heads, W]."""
        a = self.architecture
        latent = attended[:, 0, :, : a.latent_size]
        return torch.einsum("nhl,hvl->nhv", latent, self._matrices(weights)[:, a.head_dim - a.rotated :]).flatten(1)

    def _matrices(self, weights: LatentWeights) -> Tensor:
        """[heads, plain D + value D, latent]"""
        return dense(weights.kv_up).unflatten(0, (self.heads, -1))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """This rank's heads of an architecture's gated delta nets."""

    architecture: Architecture
    number: dict[int, int]  # which delta net a layer is

    def mixed(self, x: Tensor, layer: int, weights: DeltaWeights, plan: PrefillPlan | DecodePlan, states: SeatStates) -> Tensor:
        """[N, heads * V] of what a layer reads [N, H]; moves what it remembers of the sequences on past these tokens."""
        number, seats, conv = self.number[layer], plan.seats, weights.conv[:, 0]
        channels, gates, rate, decay = split_heads(linear(x, weights.qkvz), linear(x, weights.ba), self.architecture)
        tails, state = states.at(number, seats)
        if isinstance(plan, DecodePlan):
            rows = torch.cat([tails, channels[:, None]], dim=1)
            tails, channels = rows[:, 1:], torch.einsum("nwc,cw->nc", rows, conv)
            out, state = step(tokens_of(channels, rate, decay, (weights.a_log, weights.dt_bias), self.architecture), state)
        else:
            # `where`, not a product: another sequence may have left anything at a seat, NaN too.
            tails, state = (torch.where(plan.continues.view(-1, *[1] * (x.dim() - 1)), x, 0.0) for x in (tails, state))
            channels, tails = convolved(channels, conv, plan.lengths, tails)
            out, state = chunked(tokens_of(channels, rate, decay, (weights.a_log, weights.dt_bias), self.architecture), plan.lengths, state)
        states.put(number, seats, tails, state)
        return gated_norm(out, gates, weights.norm, self.architecture.norm_eps).flatten(1)


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
    """The sum of weight times output over the experts in `routing`, each run once on its tokens. `biased`: this rank adds outer biases."""
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
        part = linear((hidden * scale).to(x.dtype), expert.down.weight)
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
        down = expert.down.weight
        out = torch.addmm(out, hidden, down.t()) if isinstance(down, Tensor) else out + linear(hidden, down)
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
    """Views of the experts' weights; None if they are packed, not aligned, or not at equal distances in one storage."""
    if not isinstance(experts[0].down.weight, Tensor):
        return None
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
