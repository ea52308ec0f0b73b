"""The parts of the built-in engine's layers other than plain attention: norms, positions, latent attention, gated delta nets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.architecture.rope import neighbours_apart
from aligner.models.config import Architecture, Normalization
from aligner.models.modules.gated_delta_net import chunked, convolved, gated_norm, split_heads, step, tokens_of
from aligner.rollout.builtin.attention import DecodePlan, PrefillPlan, SeatStates
from aligner.rollout.builtin.weights import Affine, DeltaWeights, LatentWeights

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

        def tables(frequencies: Tensor, factor: float) -> Tables:
            """x * cos + roll(x, R/2) * sin rotates the halves, as Megatron does: of the sines those of the first half are negative."""
            angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies.to(like.device)
            cos, sin = angles.cos() * factor, angles.sin() * factor
            return torch.cat([cos, cos], -1).to(like.dtype), torch.cat([-sin, sin], -1).to(like.dtype)

        local = architecture.rope_local_theta
        self.everywhere = None if frequencies is None else tables(frequencies, architecture.rope_attention_factor)
        self._local = tables(rope.frequencies(rope.local(architecture)), 1.0) if local else None

    def at(self, positions: Tensor) -> list[Tables | None]:
        """For each layer the rows [N, 1, 1, R] of N tokens' positions; None for a layer that rotates nothing."""
        every, local = (None if both is None else _rows(both, positions) for both in (self.everywhere, self._local))
        a = self._architecture
        windowed = [local is not None and a.window_of(layer) > 0 for layer in range(a.num_layers)]
        return [(local if windowed[layer] else every) if a.rotates(layer) else None for layer in range(a.num_layers)]

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
        query = F.linear(read, weights.q_up).unflatten(-1, (self.heads, a.head_dim))
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
        return weights.kv_up.unflatten(0, (self.heads, -1))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """This rank's heads of an architecture's gated delta nets."""

    architecture: Architecture
    number: dict[int, int]  # which delta net a layer is

    def mixed(self, x: Tensor, layer: int, weights: DeltaWeights, plan: PrefillPlan | DecodePlan, states: SeatStates) -> Tensor:
        """[N, heads * V] of what a layer reads [N, H]; moves what it remembers of the sequences on past these tokens."""
        number, seats, conv = self.number[layer], plan.seats, weights.conv[:, 0]
        channels, gates, rate, decay = split_heads(F.linear(x, weights.qkvz), F.linear(x, weights.ba), self.architecture)
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
