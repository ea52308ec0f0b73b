"""How weights are stored: adapters, exports, refits, checkpoints and offloading read the base weight of a linear layer through here.

A weight is dense, or packed in 4 or 8 bits beside float32 scales, which are those of the whole weight in every layout. NF4 has a scale for
each 64 numbers of a row: cutting rows cuts no block, and cutting inputs cuts none if every rank's are a multiple of 64 (others are refused,
`aligner.models.architecture.divisible`; bitsandbytes 0.50 also unpacks such shapes to wrong numbers on a CPU). INT8 has one for each row,
from the largest number on any of the ranks that have parts of it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import PACKED_BLOCK
from aligner.models.config import Quantization

_LARGEST = 127  # code of INT8
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

    @torch.no_grad()
    def negate(self) -> None:
        """Change the sign of its numbers."""
        self.parameter.neg_()


@cache
def operators(setting: str = "model.quantization=nf4", others: str = "int8, none") -> Any:
    """Those of bitsandbytes, which is imported where they are needed: it takes seconds. Not while tensors are fake."""
    kernels = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # else it fetches one from the Hub that is not used here
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # and warns without
    try:
        import bitsandbytes  # noqa: F401  (registers them)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: needs bitsandbytes 0.50.1 or newer, which does not import ({error}); "
            f'allowed: pip install "aligner[qlora]", or {others}'
        ) from error
    finally:
        del sys.modules["kernels"]
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return torch.ops.bitsandbytes


@dataclass(frozen=True, slots=True)
class Packing:
    """How numbers are packed: `group` has the ranks that hold parts of the same rows; None if rows are whole."""

    kind: Quantization
    dtype: torch.dtype  # of the numbers
    group: dist.ProcessGroup | None

    def pack(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, scales [rows, scales of a row]) of this rank's share of a weight. Collective over the group in INT8."""
        numbers = numbers.to(self.dtype).contiguous()
        if self.kind is Quantization.nf4:
            codes, scales = operators().quantize_4bit(numbers, PACKED_BLOCK, self.kind.value, torch.uint8)
            return codes.view(len(numbers), -1), scales.view(len(numbers), -1)
        largest = numbers.abs().amax(dim=1, keepdim=True).float()
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        factors = _LARGEST / torch.where(largest > 0, largest, 1.0)
        return (numbers.float() * factors).round_().to(torch.int8), largest / _LARGEST

    def unpack(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of these rows."""
        if self.kind is Quantization.nf4:
            shape = [len(codes), codes.shape[1] * 2]
            return operators().dequantize_4bit(codes.reshape(-1, 1), scales.reshape(-1), PACKED_BLOCK, self.kind.value, shape, dtype)
        return (codes * scales).to(dtype)

    def room(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Codes and scales of any contents for numbers of this shape."""
        rows, inputs = shape
        if self.kind is Quantization.nf4:
            codes, blocks = torch.empty(rows, inputs // 2, dtype=torch.uint8, device=device), inputs // PACKED_BLOCK
        else:
            codes, blocks = torch.empty(rows, inputs, dtype=torch.int8, device=device), 1
        return codes, torch.empty(rows, blocks, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class PackedWeight(LinearWeight):
    """This rank's share of a packed weight."""

    packing: Packing
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        rows, width = self.parameter.shape
        return torch.Size((rows, width * 2 if self.packing.kind is Quantization.nf4 else width))

    @property
    def dtype(self) -> torch.dtype:
        return self.packing.dtype

    @property
    def storage(self) -> tuple[Tensor, ...]:
        return (self.parameter.data, self.scales)

    def read(self, dtype: torch.dtype | None = None, rows: slice = ALL_ROWS) -> Tensor:
        return self.packing.unpack(self.parameter.detach()[rows], self.scales[rows], dtype or self.dtype)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        for target, source in zip(self.storage, self.packing.pack(numbers.to(self.parameter.device)), strict=True):
            target.copy_(source)

    @torch.no_grad()
    def negate(self) -> None:
        self.scales.neg_()


def linear_weight(parameter: Tensor) -> LinearWeight:
    """How a parameter's numbers are read."""
    packed = parameter.__dict__.get("packed")
    return LinearWeight(parameter) if packed is None else PackedWeight(parameter, *packed)


def weight_storage(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that hold the parameters of a model's chunks."""
    return (tensor for chunk in chunks for parameter in chunk.parameters() for tensor in linear_weight(parameter).storage)


def is_split(parameter: Tensor) -> bool:
    """Whether this is a shard of a tensor-parallel parameter, also where there is one rank."""
    # Megatron marks split parameters with an attribute that others do not have at all.
    return "tensor_model_parallel" in parameter.__dict__ and parameter.tensor_model_parallel
