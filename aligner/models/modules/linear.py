"""How weights are stored: adapters, exports, refits, checkpoints and offloading read the base weight of a linear layer through here.

Every weight is dense today. A form with fewer bits is a subclass of `LinearWeight` that `linear_weight` returns for its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """This rank's share of a weight. `shape`, `dtype` and `device` are those of its numbers, whatever form `parameter` has."""

    parameter: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """The tensors that hold it, which move together between devices."""
        return (self.parameter.data,)

    def read(self, dtype: torch.dtype | None = None, rows: slice = ALL_ROWS) -> Tensor:
        """Its numbers, without gradient. Not to be written to: this may be the parameter itself."""
        own = self.parameter.detach()
        return (own if rows == ALL_ROWS else own[rows]).to(dtype or own.dtype)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        """Replace its numbers."""
        self.parameter.copy_(numbers)


def linear_weight(parameter: Tensor) -> LinearWeight:
    """How a parameter's numbers are read."""
    return LinearWeight(parameter)


def weight_storage(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that hold the parameters of a model's chunks."""
    return (tensor for chunk in chunks for parameter in chunk.parameters() for tensor in linear_weight(parameter).storage)


def is_split(parameter: Tensor) -> bool:
    """Whether this is a shard of a tensor-parallel parameter, also where there is one rank."""
    # Megatron marks split parameters with an attribute that others do not have at all.
    return "tensor_model_parallel" in parameter.__dict__ and parameter.tensor_model_parallel
