"""Multi-head latent attention in the built-in engine: the cache holds a token's latent and rotated key, not every head's keys and values.

A head's score of a token is q . (U l) = (U^T q) . l for its matrix U and the token's latent l: queries are multiplied by U once, and then
all heads read the same cache, as if they were one group with keys [rotated | latent] and values [latent] (2405.04434, 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models import rope
from aligner.models.config import Architecture
from aligner.models.own_layer import neighbours_apart
from aligner.rollout.weights import Affine, LatentWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentHeads:
    """This rank's `heads` of an architecture."""

    architecture: Architecture
    heads: int
    norm: Callable[[Tensor, Affine], Tensor]

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
        """[N, heads * value D] of what the heads gathered of the latents [N, 1, heads, W]."""
        a = self.architecture
        latent = attended[:, 0, :, : a.latent_size]
        return torch.einsum("nhl,hvl->nhv", latent, self._matrices(weights)[:, a.head_dim - a.rotated :]).flatten(1)

    def _matrices(self, weights: LatentWeights) -> Tensor:
        """[heads, plain D + value D, latent]"""
        return weights.kv_up.unflatten(0, (self.heads, -1))
