"""What positions do in each layer of the built-in engine: which tables rotate queries and keys, and which queries grow with them."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.models import rope
from aligner.models.config import Architecture

Tables = tuple[Tensor, Tensor]  # cosines and sines


class Rotary:
    """The tables of an architecture for positions below `length`, in the dtype and on the device of `like`.

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
        """Of each layer the rows [N, 1, 1, R] of N tokens' positions; None where nothing is rotated."""
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
