"""The stored form of weights: all reads of a linear layer's base weight by adapters, exports, refits and checkpoints come through here.

Every weight is dense today. A form with fewer bits is another `LinearWeight`, which `linear_weight` returns for its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ALL_ROWS = slice(None)


class LinearWeight(Protocol):
    """This rank's share of a parameter, in whatever form it is stored."""

    @property
    def shape(self) -> torch.Size:
        """Of what `read` gives."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read` gives by default."""

    @property
    def device(self) -> torch.device: ...

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """The tensors that hold it."""

    def read(self, dtype: torch.dtype | None = None, rows: slice = ALL_ROWS) -> Tensor:
        """Its numbers, without gradient. Not to be written to: they may be the parameter itself."""

    def write(self, numbers: Tensor) -> None:
        """Replace its numbers."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A parameter that holds its numbers as they are."""

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
        return (self.parameter.data,)

    def read(self, dtype: torch.dtype | None = None, rows: slice = ALL_ROWS) -> Tensor:
        own = self.parameter.detach()
        return (own if rows == ALL_ROWS else own[rows]).to(dtype or own.dtype)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        self.parameter.copy_(numbers)


def linear_weight(parameter: Tensor) -> LinearWeight:
    """How a parameter's numbers are read."""
    return DenseWeight(parameter)


def weight_storage(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that hold a model's parameters: what moves with them between devices."""
    return (tensor for chunk in chunks for parameter in chunk.parameters() for tensor in linear_weight(parameter).storage)
