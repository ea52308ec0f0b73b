"""How weights are stored: adapters, exports, refits, checkpoints and offloading read the base weight of a linear layer through here.

A weight is dense, or packed in 4 or 8 bits beside float32 scales, which are those of the whole weight in every layout. NF4 has a scale for
each 64 numbers of a row: cutting rows cuts no block, and cutting inputs cuts none if every rank's are a multiple of 64 (others are refused,
`aligner.models.architecture.divisible`; bitsandbytes 0.50 also unpacks such shapes to wrong numbers on a CPU). INT8 has one for each row,
from the largest number on any of the ranks that have parts of it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import PACKED_BLOCK
from aligner.models.config import Quantization

_LARGEST = 127  # code of INT8
_NESTED_BLOCK = 256  # scales that share a second one
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
class Nesting:
    """Scales in 8 bits (double quantization): codes of a matrix's scales without their mean, with a float32 scale for each 256 of them.
    The matrices are Hugging Face's whole ones, each by itself; every rank has the second scales of all, and codes of its own."""

    parts: Callable[[Tensor], list[Tensor]]  # this rank's scales [rows, scales of a row] -> the matrices' whole ones; collective
    starts: Tensor  # [rows, 1]: the number of a row's first scale among all matrices', each of which has a multiple of 256 numbers
    table: Tensor  # the numbers of the codes
    count: int  # second scales

    @staticmethod
    def of(parts: Callable[[Tensor], list[Tensor]], numbering: tuple[Tensor, int]) -> Nesting:
        """`numbering`: each scale's number, of this rank's [rows, scales of a row], and how many second scales there are."""
        from bitsandbytes.functional import create_dynamic_map

        positions, count = numbering
        return Nesting(parts, positions[:, :1].int(), create_dynamic_map().to(positions.device), count)

    def pack(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """(codes of this rank's scales, [second scales, 2]: each with its matrix's mean)."""
        codes, second = [], []
        for part in self.parts(scales):
            flat, mean = part.reshape(-1), part.mean()
            own, largest = operators().quantize_blockwise(flat - mean, self.table, _NESTED_BLOCK)
            codes.append(F.pad(own.flatten(), (0, -len(flat) % _NESTED_BLOCK)))
            second.append(torch.stack([largest, mean.expand_as(largest)], dim=1))
        return torch.cat(codes)[self._numbers(self.starts, scales.shape[1])], torch.cat(second)

    def unpack(self, codes: Tensor, second: Tensor, rows: slice) -> Tensor:
        """Scales of these rows, in float32."""
        scales, means = second[self._numbers(self.starts[rows], codes.shape[1]) // _NESTED_BLOCK].unbind(-1)
        return self.table[codes[rows].int()] * scales + means

    @staticmethod
    def _numbers(starts: Tensor, count: int) -> Tensor:
        return starts + torch.arange(count, device=starts.device, dtype=starts.dtype)


def numbered(shapes: Sequence[Sequence[int]], device: torch.device) -> tuple[list[Tensor], int]:
    """(numbers of the scales of matrices that have scales of these shapes, how many second scales they have)."""
    found, first = [], 0
    for rows, width in shapes:
        found.append(torch.arange(first, first + rows * width, device=device).view(rows, width))
        first += -(-rows * width // _NESTED_BLOCK) * _NESTED_BLOCK
    return found, first // _NESTED_BLOCK


@dataclass(frozen=True, slots=True)
class Packing:
    """How numbers are packed: `group` has the ranks that hold parts of the same rows; None if rows are whole."""

    kind: Quantization
    dtype: torch.dtype  # of the numbers
    group: dist.ProcessGroup | None
    nesting: Nesting | None = None  # None: scales are float32

    def pack(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """(codes, scales [rows, scales of a row]) of this rank's share of a weight; with a nesting codes of scales and second scales in
        their place. Collective over the group in INT8, and with a nesting."""
        numbers = numbers.to(self.dtype).contiguous()
        if self.kind is Quantization.nf4:
            codes, scales = operators().quantize_4bit(numbers, PACKED_BLOCK, self.kind.value, torch.uint8)
            codes, scales = codes.view(len(numbers), -1), scales.view(len(numbers), -1)
            return codes, *((scales,) if self.nesting is None else self.nesting.pack(scales))
        largest = numbers.abs().amax(dim=1, keepdim=True).float()
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        factors = _LARGEST / torch.where(largest > 0, largest, 1.0)
        return (numbers.float() * factors).round_().to(torch.int8), largest / _LARGEST

    def unpack(self, codes: Tensor, *stored: Tensor, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        """The numbers of these rows, from what `pack` made."""
        codes = codes[rows]
        scales = stored[0][rows] if self.nesting is None else self.nesting.unpack(*stored, rows)
        if self.kind is Quantization.nf4:
            shape = [len(codes), codes.shape[1] * 2]
            return operators().dequantize_4bit(codes.reshape(-1, 1), scales.reshape(-1), PACKED_BLOCK, self.kind.value, shape, dtype)
        return (codes * scales).to(dtype)

    def room(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """What `pack` makes for numbers of this shape, of any codes, with scales that are NaN until it is filled."""
        rows, inputs = shape
        if self.kind is Quantization.nf4:
            codes, blocks = torch.empty(rows, inputs // 2, dtype=torch.uint8, device=device), inputs // PACKED_BLOCK
        else:
            codes, blocks = torch.empty(rows, inputs, dtype=torch.int8, device=device), 1
        if self.nesting is None:
            return codes, torch.full((rows, blocks), torch.nan, dtype=torch.float32, device=device)
        second = torch.full((self.nesting.count, 2), torch.nan, dtype=torch.float32, device=device)
        return codes, torch.empty(rows, blocks, dtype=torch.uint8, device=device), second


@dataclass(frozen=True, slots=True)
class PackedWeight(LinearWeight):
    """This rank's share of a packed weight."""

    packing: Packing
    scales: tuple[Tensor, ...]  # what `Packing.pack` makes behind the codes

    @property
    def shape(self) -> torch.Size:
        rows, width = self.parameter.shape
        return torch.Size((rows, width * 2 if self.packing.kind is Quantization.nf4 else width))

    @property
    def dtype(self) -> torch.dtype:
        return self.packing.dtype

    @property
    def storage(self) -> tuple[Tensor, ...]:
        return (self.parameter.data, *self.scales)

    def read(self, dtype: torch.dtype | None = None, rows: slice = ALL_ROWS) -> Tensor:
        return self.packing.unpack(self.parameter.detach(), *self.scales, dtype=dtype or self.dtype, rows=rows)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        for target, source in zip(self.storage, self.packing.pack(numbers.to(self.parameter.device)), strict=True):
            target.copy_(source)

    @torch.no_grad()
    def negate(self) -> None:
        self.scales[-1].neg_()  # and means with second scales


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
