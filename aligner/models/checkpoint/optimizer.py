"""The optimizer's part of a checkpoint, in a layout-independent form.

Megatron-Core's distributed optimizer keeps float32 weights and moments in flat buffers that are cut over the data-parallel ranks: a rank
holds a range of each parameter's flattened elements. A range of a tensor of n dimensions is at most 2n - 1 boxes, and each box is a shard
of the whole model's tensor: nothing is gathered, and no offset in a buffer is used. (Upstream's `fully_reshardable`, with the same files,
gathers everything on every rank and, up to 0.19, cuts at the wrong places behind a bucket that ends in padding: pull request 5077.)

An optimizer that is not distributed holds whole parameters on every rank, and saves them in the same form. (Megatron-Core's own fails with
a float32 head on a bfloat16 model, and does not spread experts over other ranks.)

The only parameter-group state that the run's config does not give is the number of steps taken: the model's version.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aligner.errors import CheckpointError
from aligner.models.training.adam import EMA, HostAdam, make_room
from aligner.models.training.adam8bit import Adam8bit
from aligner.models.training.muon import Muon
from aligner.parallel.mcore import ChainedOptimizer, DistributedOptimizer, Range, ShardedTensor, sharded_leaves

_STATES = ("param", "exp_avg", "exp_avg_sq")  # Adam's, for each parameter; the first are the float32 weights
_CONFIGURED = ("max_lr", "min_lr", "betas", "eps")


def sharded_state(optimizer: ChainedOptimizer, sharded_weights: dict[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
    """The optimizer's state with its place in the whole model's; with `is_loading` tensors on the CPU to read it into."""
    shards = {}
    for held in _held(optimizer, sharded_weights):
        for state, values in held.blank() if is_loading else held.values():
            for number, piece in enumerate(_pieces(held.weight, f"optimizer.state.{state}.{held.weight.key}", values, held)):
                shards[f"{held.name}.{state}.{number}"] = piece
    return shards


def restore(optimizer: ChainedOptimizer, sharded_weights: dict[str, Any], loaded: dict[Any, Any], *, step: int) -> list[str]:
    """Put a loaded state, of `step` steps, into the optimizer. Learning rates, betas and epsilon stay those of this run's config.

    Returns the names of this rank's parameters whose float32 weights differ from the model's: the state belongs to other weights, and
    none of it is loaded. Empties `loaded` on the way, so that host memory holds the state once.
    """
    # Megatron-Core's distributed optimizer may give its groups each other's settings.
    configured = [{name: group[name] for name in _CONFIGURED} for group in optimizer.param_groups]
    if strangers := _fill(optimizer, sharded_weights, loaded, step):
        return strangers
    for group, settings in zip(optimizer.param_groups, configured, strict=True):
        group.update(settings)
    return []


def rounds(optimizer: ChainedOptimizer) -> tuple[str, ...]:
    """How the names of states begin that this optimizer may round as it takes them, if they were other blocks or in float32."""
    holds_codes = any(isinstance(part.optimizer, Adam8bit) for part in optimizer.chained_optimizers if not part.is_stub_optimizer)
    return tuple(f"optimizer.state.{state}." for state in _STATES[1:]) if holds_codes else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """One optimizer's part of one parameter on this rank: elements start.. of the flattened parameter."""

    name: str  # unique on this rank
    part: Any
    parameter: Tensor
    weight: Any  # the parameter's shard of the whole model, or what makes its shards
    start: int
    size: int
    whole: Tensor | None  # the float32 weights of an optimizer that is not distributed

    @property
    def states(self) -> tuple[str, ...]:
        own = self.part.optimizer
        if isinstance(own, Muon) and self.whole is not None:
            return ("param", *own.moments(self.whole))
        return (*_STATES, EMA) if self.part.keeps_average else _STATES

    def _own(self) -> dict[str, Any]:
        """What the optimizer has of the parameter."""
        if self.whole is not None:
            return {"param": self.whole, **self.part.optimizer.state[self.whole]}
        return self.part._get_main_param_and_optimizer_states(self.parameter)

    def values(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._own()
        if isinstance(self.part.optimizer, Adam8bit):
            tensors |= self.part.optimizer.moments(tensors["param"])
        for state in self.states:
            tensor = tensors[state].detach().flatten()
            # Moments and weights in fewer bits were converted for this already, and would fill the device.
            yield state, tensor if tensor.dtype == torch.float32 else tensor.to("cpu", torch.float32)

    def blank(self) -> Iterator[tuple[str, Tensor]]:
        for state in self.states:
            yield state, torch.empty(self.size, dtype=torch.float32)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        if self.whole is None and not isinstance(self.part.optimizer, HostAdam | Adam8bit):
            self.part._set_main_param_and_optimizer_states(self.parameter, tensors)
            return
        own = self._own()  # Megatron-Core would put others in the place of these
        if isinstance(self.part.optimizer, Adam8bit):
            self.part.optimizer.fill(own["param"], tensors)
            own["param"].copy_(tensors["param"])
            return
        for state in self.states:
            own[state].copy_(tensors[state].view_as(own[state]))

    def is_of_the_weights(self, main: Tensor) -> bool:
        """Whether float32 weights equal the model's weights up to one rounding."""
        weights = self.parameter.detach().flatten()[self.start : self.start + self.size]
        main = main.to(weights.device).flatten()
        if weights.dtype == torch.float32:
            return torch.equal(main, weights)
        kind = torch.finfo(weights.dtype)
        return bool(((main - weights.float()).abs() <= kind.eps * weights.float().abs() + kind.tiny).all())


def _held(optimizer: ChainedOptimizer, sharded_weights: dict[str, Any]) -> Iterator[_Held]:
    """Every parameter part that this rank holds; a rank may hold padding only."""
    weights = {shard.data: shard for shard in sharded_leaves(sharded_weights)}
    for place, part in enumerate(optimizer.chained_optimizers):
        for number, (parameter, span, whole) in enumerate(_ranges(part, weights)):
            name, weight = f"{place}.{number}", weights[parameter]
            yield _Held(name=name, part=part, parameter=parameter, weight=weight, start=span.start, size=span.size, whole=whole)


def _ranges(part: Any, weights: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any, Tensor | None]]:
    if part.is_stub_optimizer:
        return
    if not isinstance(part, DistributedOptimizer):
        updated = {main for group in part.optimizer.param_groups for main in group["params"]}
        mains = ((parameter, getattr(parameter, "main_param", parameter)) for parameter in weights)
        yield from ((parameter, Range(0, parameter.numel()), main) for parameter, main in mains if main in updated)
        return
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"], None


@torch.no_grad()
def _fill(optimizer: ChainedOptimizer, sharded_weights: dict[str, Any], loaded: dict[str, Tensor], step: int) -> list[str]:
    found, strangers = [], []
    for held in _held(optimizer, sharded_weights):
        tensors = {}
        for state in held.states:
            numbered = (f"{held.name}.{state}.{number}" for number in itertools.count())
            tensors[state] = torch.cat([loaded.pop(name).flatten() for name in itertools.takewhile(loaded.__contains__, numbered)])
        found.append((held, tensors))
        if not held.is_of_the_weights(tensors["param"]):
            strangers.append(held.weight.key)
    if strangers:
        return strangers
    for part in {id(held.part): held.part for held, _ in found}.values():  # a rank that holds only padding has no state
        _begin(part, step)
    if any(held.part.keeps_average for held, _ in found):
        make_room(optimizer)
    for held, tensors in found:
        held.fill(tensors)
    return []


def _begin(part: Any, step: int) -> None:
    """Allocate a state of `step` steps, whose moments are to be filled in."""
    own = part.optimizer
    if isinstance(own, HostAdam | Adam8bit | Muon):
        own.begin(step)
    elif isinstance(part, DistributedOptimizer):
        groups = part.state_dict()["optimizer"]["param_groups"]
        part.load_state_dict({"optimizer": {"param_groups": [{**group, "step": step} for group in groups]}})
    else:
        part.init_state_fn(own, part.config)
        if isinstance(own, torch.optim.AdamW):
            for state in own.state.values():
                state["step"] = torch.tensor(float(step))
        else:  # the fused kernels count the steps of a group
            for group in own.param_groups:
                group["step"] = step


def _pieces(weight: Any, key: str, values: Tensor, held: _Held) -> list[ShardedTensor]:
    """The shards that hold `values`, the held elements of the flattened parameter whose shard, or factory of shards, is `weight`."""
    layout = torch.empty(weight.data.shape, device="meta")  # gives the offsets of the parts that a factory makes of a parameter
    start, replica = held.start, weight.replica_id
    if isinstance(held.part, DistributedOptimizer):  # no two ranks of a data-parallel group hold the same elements
        replica = (*replica[:2], 0)
    if hasattr(weight, "build_fn"):
        parts = list(sharded_leaves(replace(weight, key=key, data=layout, replica_id=replica).build()))
    else:
        parts = [replace(weight, key=key, data=layout, dtype=layout.dtype, replica_id=replica)]
    found: list[ShardedTensor] = []
    for part in parts:
        if not part.data.is_contiguous():
            raise CheckpointError(f"{key}: a part of this parameter is not a range of its elements")
        first = part.data.storage_offset()
        low, high = max(start, first), min(start + values.numel(), first + part.data.numel())
        for offset, size in boxes(tuple(part.data.shape), low - first, high - first):
            count = math.prod(size)
            found.append(_box(part, offset, size, values[low - start : low - start + count]))
            low += count
    if sum(piece.data.numel() for piece in found) != values.numel():
        raise CheckpointError(f"{key}: its parts are not all of this parameter")
    return found


def _box(part: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], values: Tensor) -> ShardedTensor:
    axes = part.prepend_axis_num  # shards of several sizes cannot have such axes: they become the data's own
    place = (*part.global_offset[:axes], *(a + b for a, b in zip(part.global_offset[axes:], offset, strict=True)))
    data = values.view(*(1,) * axes, *size)
    # Without `axis_fragmentations` shards of one tensor may differ in size; torch's planner checks that they cover it, each element once.
    return replace(
        part,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=place,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of the boxes that hold elements start..end of a contiguous tensor of this shape, in their order."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    inner = math.prod(shape[1:])
    row, stop = -(-start // inner), end // inner  # the whole rows
    if row > stop:  # within one row
        yield from _in_row(shape, stop, start, end)
        return
    yield from _in_row(shape, row - 1, start, row * inner)
    if row < stop:
        yield (row, *(0 for _ in shape[1:])), (stop - row, *shape[1:])
    yield from _in_row(shape, stop, stop * inner, end)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    base = row * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - base, end - base):
        yield (row, *offset), (1, *size)
