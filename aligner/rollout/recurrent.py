"""Gated delta nets in the built-in engine: what they remember of a sequence lies at its seat, not in pages.

That is the end of the convolution's window and the state of every head, of whatever length the sequence is. It can neither be cut back nor
be read in the middle, so beginnings of prompts are not shared: a group's prompt is computed at the seat of its first response, and what
is there then is copied to those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture
from aligner.models.delta_rule import chunked, convolved, step
from aligner.models.gated_delta_net import gated_norm, split_heads, tokens_of
from aligner.rollout.attention import DecodePlan, PrefillPlan, RecurrentStates, upload
from aligner.rollout.weights import DeltaWeights


class SeatStates:
    """`RecurrentStates` of an architecture's delta nets on one of `ranks` that share its heads."""

    def __init__(self, architecture: Architecture, ranks: int, weight: Tensor) -> None:
        a, heads = architecture, architecture.linear_value_heads // ranks
        channels = 2 * a.linear_key_heads * a.linear_key_head_dim // ranks + heads * a.linear_value_head_dim
        shapes = (a.linear_conv_size - 1, channels), (heads, a.linear_key_head_dim, a.linear_value_head_dim)
        layers = len(a.linear_attention_layers)
        self._tensors = [
            torch.zeros((layers, 0, *shape), dtype=dtype, device=weight.device)
            for shape, dtype in zip(shapes, (weight.dtype, torch.float32), strict=True)
        ]

    def reserve(self, seats: int) -> None:
        """There are at least so many seats from now on; those that were there keep what they have."""
        if (missing := seats - self._tensors[0].shape[1]) > 0:
            self._tensors = [torch.cat([x, x.new_zeros(len(x), missing, *x.shape[2:])], dim=1) for x in self._tensors]

    def clear(self) -> None:
        """As if nothing had been there."""
        for tensor in self._tensors:
            tensor.zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """From seat to seat, of all layers."""
        source, target = (upload(np.array(seats, np.int64), self._tensors[0].device) for seats in (sources, targets))
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]

    def at(self, layer: int, seats: Tensor) -> tuple[Tensor, Tensor]:
        """Of the delta net of this number: the windows' ends [N, W - 1, channels], and the states float32 [N, heads, K, V]."""
        tails, states = (tensor[layer][seats] for tensor in self._tensors)
        return tails, states

    def put(self, layer: int, seats: Tensor, tails: Tensor, states: Tensor) -> None:
        """The inverse of `at`."""
        for tensor, new in zip(self._tensors, (tails, states), strict=True):
            tensor[layer].index_copy_(0, seats, new)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeads:
    """This rank's heads of an architecture."""

    architecture: Architecture
    number: dict[int, int]  # which delta net a layer is

    def mixed(self, x: Tensor, layer: int, weights: DeltaWeights, plan: PrefillPlan | DecodePlan, states: RecurrentStates) -> Tensor:
        """[N, heads * V] of what a layer reads [N, H]; what it remembers of the sequences goes on to behind these tokens."""
        number, seats, conv = self.number[layer], plan.seats, weights.conv[:, 0]
        channels, gates, rate, decay = split_heads(F.linear(x, weights.qkvz), F.linear(x, weights.ba), self.architecture)
        tails, state = states.at(number, seats)
        if isinstance(plan, DecodePlan):
            rows = torch.cat([tails, channels[:, None]], dim=1)
            tails, channels = rows[:, 1:], torch.einsum("nwc,cw->nc", rows, conv)
            out, state = step(tokens_of(channels, rate, decay, (weights.a_log, weights.dt_bias), self.architecture), state)
        else:
            # What another sequence left at a seat may be anything, NaN too: it is no factor.
            tails, state = (torch.where(plan.continues.view(-1, *[1] * (x.dim() - 1)), x, 0.0) for x in (tails, state))
            channels, tails = convolved(channels, conv, plan.lengths, tails)
            out, state = chunked(tokens_of(channels, rate, decay, (weights.a_log, weights.dt_bias), self.architecture), plan.lengths, state)
        states.put(number, seats, tails, state)
        return gated_norm(out, gates, weights.norm, self.architecture.norm_eps).flatten(1)
