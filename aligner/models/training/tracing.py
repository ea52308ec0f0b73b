"""The operations of a decoder-only transformer by name, and their outputs for chosen tokens: how two computations are compared.

The trainer's modules (`models.training.probe`) and the rollout engine's decoder (`rollout.builtin.probe`) are traced under the same names,
token by token, whatever batches, pieces and splits they compute in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class Operation(str, Enum):
    """In the order in which they are computed; what is between `input_norm` and `residual` once in every layer."""

    embedding = "embedding"  # positions included, where they are learned
    input_norm = "input_norm"
    qkv = "qkv"  # with its bias
    q_norm = "q_norm"
    k_norm = "k_norm"
    queries = "queries"  # after the rotary embedding
    keys = "keys"
    attention = "attention"  # weighted values of all heads
    projection = "projection"  # attention's output matrix, with its bias
    attention_residual = "attention_residual"
    mlp_norm = "mlp_norm"
    router = "router"  # a mixture's weights of all experts, 0 where not chosen
    activation = "activation"  # the MLP's inner activations
    mlp = "mlp"  # with its bias
    residual = "residual"
    final_norm = "final_norm"
    logits = "logits"


ORDER = {operation: number for number, operation in enumerate(Operation)}
# What tensor-parallel ranks hold by heads or features; all else each of them has whole.
SPLIT = frozenset(
    {Operation.qkv, Operation.q_norm, Operation.k_norm, Operation.queries, Operation.keys, Operation.attention, Operation.activation}
)
Tap = Callable[[Operation, int, Tensor], None]  # operation, layer (embedding: -1, what follows the last one: their number), its output


class Place(NamedTuple):
    """Where in the model: the layer (embedding: -1, what follows the last one: their number), and the operation."""

    layer: int
    operation: Operation

    @property
    def rank(self) -> tuple[int, int]:
        return self.layer, ORDER[self.operation]

    def describe(self, num_layers: int) -> str:
        name = self.operation.value.replace("_", " ")
        return f"layer {self.layer}, {name}" if 0 <= self.layer < num_layers else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of one operation's outputs in two traces: `absolute` the largest of an element, `relative` the largest over tokens of |a - b| /
    max(|b|, median of all tokens' |b|) (Euclidean norms), NaN made infinite, and `token` the flat position where that is."""

    place: Place
    absolute: float
    relative: float
    token: int
    num_tokens: int


class Trace:
    """Outputs of operations for the tokens of a batch that are `wanted` (bool [B, S]). Tokens are named by flat position, row * S + t."""

    def __init__(self, wanted: Tensor) -> None:
        self.wanted = wanted
        self._flat = wanted.reshape(-1)
        self._parts: dict[Place, list[tuple[Tensor, Tensor]]] = {}

    @property
    def places(self) -> set[Place]:
        return set(self._parts)

    def chosen(self, tokens: Tensor) -> Tensor:
        """Which of these flat positions (int64 [N], negative: none) are wanted, bool [N], on their device."""
        return (tokens >= 0) & self._flat.to(tokens.device)[tokens.clamp(min=0)]

    def add(self, place: Place, tokens: Tensor, output: Tensor) -> None:
        """Keep, in host memory, the rows of `output` [N, ...] whose `tokens` (int64 [N], as for `chosen`) are wanted."""
        rows = self.chosen(tokens)
        if rows.any():
            kept = output.detach()[rows].flatten(1).to("cpu", copy=True)
            self._parts.setdefault(place, []).append((tokens[rows].cpu(), kept))

    def outputs(self, place: Place) -> tuple[Tensor, Tensor]:
        """(flat positions int64 [N], outputs [N, F]) of an operation that has been seen."""
        tokens, outputs = zip(*self._parts[place], strict=True)
        return torch.cat(tokens), torch.cat(outputs)


def difference(place: Place, ours: Trace, theirs: Trace) -> Difference | None:
    """How far `ours` is from `theirs` on the tokens that both have; None where these are none, or the outputs have other sizes."""
    our_tokens, our_outputs = ours.outputs(place)
    their_tokens, their_outputs = theirs.outputs(place)
    where = torch.full((ours.wanted.numel(),), -1, dtype=torch.int64)
    where[their_tokens] = torch.arange(len(their_tokens))
    both = where[our_tokens] >= 0
    if not both.any() or our_outputs.shape[1] != their_outputs.shape[1]:
        return None
    tokens = our_tokens[both]
    a, b = our_outputs[both].double(), their_outputs[where[tokens]].double()
    delta = a - b
    sizes = b.norm(dim=1)
    # Not by a token's own size where that is small: what cancels leaves rounding errors of what it cancelled from.
    relative = delta.norm(dim=1) / sizes.clamp(min=max(float(sizes.median()), torch.finfo(torch.float32).tiny))
    relative = torch.where(relative.isnan(), math.inf, relative)
    worst = int(relative.argmax())
    absolute = float(delta.abs().nan_to_num(nan=math.inf).max())
    return Difference(place=place, absolute=absolute, relative=float(relative[worst]), token=int(tokens[worst]), num_tokens=len(tokens))


def differences(ours: Trace, theirs: Trace) -> list[Difference]:
    """The differences of all comparable operations, in the order of computation."""
    found = [difference(place, ours, theirs) for place in sorted(ours.places & theirs.places, key=lambda place: place.rank)]
    return [one for one in found if one is not None]
