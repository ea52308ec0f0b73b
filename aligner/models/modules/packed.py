"""Linear layers with frozen weights in 4 or 8 bits under adapters (QLoRA; Dettmers et al. 2023, 2305.14314).

A packed weight is the same Parameter, whose `data` are codes (`linear.PackedWeight`). Products unpack it, again in the backward pass: one
layer at a time is dense, and nothing dense waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import PACKED_BLOCK
from aligner.models.config import HFArchitecture, Quantization
from aligner.models.families import weight_names
from aligner.models.families.mapping import shard, to_hf, to_megatron
from aligner.models.families.own_modules import PREFIX, packed_linears
from aligner.models.modules.chunk import global_name
from aligner.models.modules.layers import KINDS, SPLIT_INPUTS, LayerModules
from aligner.models.modules.linear import LinearWeight, Nesting, PackedWeight, Packing, linear_weight, numbered
from aligner.parallel import mcore
from aligner.parallel.collectives import raise_everywhere

LINEARS = tuple(dict.fromkeys(name for kind in KINDS for name in kind.linears))  # the layers with a packed form


class _Product(torch.autograd.Function):
    """x W^T of a frozen weight that is unpacked in both passes. Inputs of other types are computed with in theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.read(x.dtype)) if x.numel() else x.new_empty(*x.shape[:-1], weight.shape[0])  # an expert without tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.matmul(ctx.weight.read(grad.dtype)) if grad.numel() else grad.new_empty(*grad.shape[:-1], ctx.weight.shape[1]), None


class _Packed(torch.nn.Module):
    """What Megatron-Core's parallel linear layers have more with packed weights."""

    kind: Quantization
    splits_inputs: bool
    weight: torch.nn.Parameter
    tp_group: dist.ProcessGroup

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        packing = Packing(self.kind, self.weight.dtype, self.tp_group if self.splits_inputs else None)
        codes, *scales = packing.room(self.weight.shape, self.weight.device)
        self.weight.requires_grad_(False)
        self.weight.data = codes  # the Parameter stays, and with it Megatron-Core's marks
        self.weight.packed = (packing, tuple(scales))

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
        **_: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = mcore.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = mcore.copy_to_tensor_model_parallel_region(input, group=tp_group)
        out = _Product.apply(input, linear_weight(weight))
        return out if bias is None else out + bias


@cache
def packed_modules(kind: Quantization) -> LayerModules:
    """The local specification's layers, their linear ones with packed weights: each is packed as soon as it is made."""
    column, row = (
        type(f"Packed{base.__name__}", (_Packed, base), {"kind": kind, "splits_inputs": base is mcore.RowParallelLinear})
        for base in (mcore.ColumnParallelLinear, mcore.RowParallelLinear)
    )
    return LayerModules(column_linear=column, row_linear=row)


class PackedLinear(torch.nn.Linear):
    """torch's linear layer with a packed weight. `packed_parameter` makes it."""

    def forward(self, input: Tensor) -> Tensor:
        out = _Product.apply(input, linear_weight(self.weight))
        return out if self.bias is None else out + self.bias


def nest(chunk: Any) -> None:
    """Give the packed weights of a chunk scales in 8 bits, of any contents."""
    for name, parameter in _layers(chunk, Quantization.nf4):
        weight = linear_weight(parameter)
        packing = replace(parameter.packed[0], nesting=_nesting(chunk, name, weight))
        _, *scales = packing.room(weight.shape, weight.device)
        parameter.packed = (packing, tuple(scales))


def _nesting(chunk: Any, name: str, weight: LinearWeight) -> Nesting:
    """Of the weight of the layer `name`, of which this rank has this share."""
    rule = replace(weight_names(chunk.architecture).find(f"{name}.weight"), transposed=False)  # blocks lie along the inputs here
    group = chunk.pg_collection.expt_tp if ".local_experts." in name else chunk.pg_collection.tp
    dim, ranks = (1 if name.rsplit(".", 1)[-1] in SPLIT_INPUTS else 0), group.size()

    def parts(scales: Tensor) -> list[Tensor]:
        shares = [torch.empty_like(scales, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(shares, scales.contiguous(), group=group)
        blocks = [share.chunk(rule.layout.blocks if dim == 0 else 1) for share in shares]
        return to_hf(rule, torch.cat([torch.cat(block, dim=dim) for block in zip(*blocks, strict=True)]), chunk.architecture)

    whole = [weight.shape[0], weight.shape[1] // PACKED_BLOCK]
    whole[dim] *= ranks
    outline = to_hf(rule, torch.empty(whole, device="meta"), chunk.architecture)
    numbers, count = numbered([one.shape for one in outline], weight.device)
    full = to_megatron(rule, numbers, chunk.architecture, 0)
    return Nesting.of(parts, (shard(rule.layout, full, dim=dim, num_shards=ranks, index=group.rank()), count))


def packed_parameter(numbers: Tensor, kind: Quantization, dtype: torch.dtype, *, nested: bool) -> torch.nn.Parameter:
    """The weight of a `PackedLinear`."""
    packing = whole_packing(numbers, kind, dtype, nested=nested)
    codes, *scales = packing.pack(numbers)
    parameter = torch.nn.Parameter(codes, requires_grad=False)
    parameter.packed = (packing, tuple(scales))
    return parameter


def whole_packing(weight: Tensor, kind: Quantization, dtype: torch.dtype, *, nested: bool) -> Packing:
    """How a matrix that one rank has is packed."""
    if not nested:
        return Packing(kind, dtype, None)
    (numbers,), count = numbered([(weight.shape[0], weight.shape[1] // PACKED_BLOCK)], weight.device)
    return Packing(kind, dtype, None, Nesting.of(lambda scales: [scales], (numbers, count)))


def check_filled(chunks: Sequence[Any]) -> None:
    """Raise ConfigError on every rank if a packed weight on any has scales that are not finite. Collective if the model is packed."""
    kind = chunks[0].quantization
    if not kind.is_on:
        return
    scales = [linear_weight(p).storage[1:] for chunk in chunks for p in chunk.parameters()]
    bad = sum(not all(bool(one.isfinite().all()) for one in of_weight) for of_weight in scales)
    error = f"model.quantization={kind.value}: {bad} weights are not finite, or nothing has filled them; allowed: other weights, or none"
    raise_everywhere(ConfigError(error) if bad else None)


@contextmanager
def dense(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """In the block the packed ones among these are dense, of any contents; at its end they are packed. For checkpoints, which are dense."""
    opened = [(p, p.packed) for p in parameters if "packed" in p.__dict__]
    for parameter, (packing, _) in opened:
        numbers = torch.empty(linear_weight(parameter).shape, dtype=packing.dtype, device=parameter.device)
        del parameter.packed
        parameter.data = numbers
    yield
    for parameter, (packing, scales) in opened:
        numbers = parameter.data
        parameter.data = packing.room(numbers.shape, numbers.device)[0]
        parameter.packed = (packing, scales)
        linear_weight(parameter).write(numbers)


@torch.no_grad()
def round_as(chunks: Sequence[Any], kind: Quantization, dtype: torch.dtype, *, nested: bool, only: Iterable[torch.nn.Parameter]) -> None:
    """Round those of a model's dense linear layers whose weights are in `only` as if packed. Raises ConfigError for NF4 if ranks have parts
    of its blocks."""
    wanted = set(map(id, only))
    for chunk in chunks:
        for name, weight in _layers(chunk, kind):
            if id(weight) not in wanted:
                continue
            of_expert, last = ".local_experts." in name, name.rsplit(".", 1)[-1]
            group = chunk.pg_collection.expt_tp if of_expert else chunk.pg_collection.tp
            if kind is Quantization.nf4 and weight.shape[1] % PACKED_BLOCK:
                raise ConfigError(
                    f"parallel.{'etp' if of_expert else 'tp'}={group.size()}: {name} has {weight.shape[1]} inputs on each rank, and the "
                    f"adapters are of weights in nf4, of which {PACKED_BLOCK} share a scale; allowed: fewer ranks"
                )
            nesting = _nesting(chunk, name, linear_weight(weight)) if nested else None
            packing = Packing(kind, dtype, group if last in SPLIT_INPUTS else None, nesting)
            weight.copy_(packing.unpack(*packing.pack(weight), dtype=dtype))


def _layers(chunk: Any, kind: Quantization) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name in the whole model, weight) of each layer of a chunk that has a packed form."""
    own = isinstance(chunk.architecture, HFArchitecture)
    names = {f"{PREFIX}{name}" for name in packed_linears(chunk.architecture, kind)} if own else set(LINEARS)
    for name, parameter in chunk.named_parameters():
        layer = global_name(chunk, name).removesuffix(".weight")
        if (layer if own else layer.rsplit(".", 1)[-1]) in names:
            yield layer, parameter
