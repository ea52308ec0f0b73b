"""Which part of which parameter is where: what moving weights between ranks, layouts and files needs to know of a rank's shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models.families import weight_names
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, Rule
from aligner.models.modules.chunk import Chunk, global_name
from aligner.models.modules.linear import is_split, linear_weight
from aligner.models.modules.scalar_head import HEAD
from aligner.parallel import platform

_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a parameter of the whole model is. The same on every rank, with the sizes of one rank's shard of it."""

    name: str  # Megatron's, with global layer and expert numbers
    stage: int  # pipeline rank that holds it
    expert_rank: int | None  # expert-parallel rank that holds it; None: not an expert, and so on all of them
    shape: tuple[int, ...]  # of a shard
    dtype: torch.dtype
    split_dim: int | None  # dimension that is split over the tensor-parallel (for experts: expert tensor-parallel) ranks; None: whole
    is_copy: bool  # the last stage's copy of a tied embedding

    @property
    def is_expert(self) -> bool:
        return self.expert_rank is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """This rank's part of one parameter."""

    place: Place
    parameter: Tensor
    rule: Rule | None  # the Hugging Face tensors that the whole holds; None for a head, which Hugging Face models do not have


def named_shards(chunks: Sequence[Chunk]) -> list[ParameterShard]:
    """Every parameter of this rank's chunks but those of adapters. No communication."""
    found = []
    for chunk in chunks:
        chunk.settle()
        table = weight_names(chunk.architecture)
        for local_name, parameter in chunk.named_parameters():
            if ADAPTER in local_name:
                continue
            name = global_name(chunk, local_name)
            is_copy = name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights
            place = _place(chunk, name, parameter, is_copy=is_copy)
            rule = None if name.startswith(HEAD) else table.find(EMBEDDING if is_copy else name)
            found.append(ParameterShard(place=place, parameter=parameter, rule=rule))
    return found


def adapter_shards(chunks: Sequence[Chunk]) -> dict[str, tuple[Place, Tensor]]:
    """Every parameter of this rank's adapters by its global name. No communication."""
    found = {}
    for chunk in chunks:
        chunk.settle()
        for local_name, parameter in chunk.named_parameters():
            if ADAPTER in local_name:
                place = _place(chunk, global_name(chunk, local_name), parameter)
                found[place.name] = (place, parameter)
    return found


def _place(chunk: Chunk, name: str, parameter: Tensor, *, is_copy: bool = False) -> Place:
    weight = linear_weight(parameter)
    return Place(
        name=name,
        stage=chunk.pg_collection.pp.rank(),
        expert_rank=chunk.pg_collection.ep.rank() if _EXPERT.fullmatch(name) else None,
        shape=tuple(weight.shape),
        dtype=weight.dtype,
        split_dim=parameter.partition_dim if is_split(parameter) and parameter.partition_dim >= 0 else None,
        is_copy=is_copy,
    )


def all_places(chunks: Sequence[Chunk]) -> list[Place]:
    """Every parameter of the whole model once, in Hugging Face's order, heads last. Collective over each pipeline-parallel group."""
    return places_everywhere(chunks, [shard.place for shard in named_shards(chunks) if not shard.place.is_copy])


def places_everywhere(chunks: Sequence[Chunk], here: Sequence[Place]) -> list[Place]:
    """The places of this rank and those of all other stages and expert-parallel ranks, in an order that is the same everywhere."""
    first = chunks[0]
    mine = [place for own in here for place in _on_all_expert_ranks(own, first)]
    pp = first.pg_collection.pp
    stages: list[list[Place]] = [mine]
    if pp.size() > 1:
        stages = [[] for _ in range(pp.size())]
        dist.all_gather_object(stages, mine, group=pp)
    order = {name: i for i, name in enumerate(weight_names(first.architecture).names(first.architecture))}
    return sorted((place for stage in stages for place in stage), key=lambda place: (order.get(place.name, len(order)), place.name))


def _on_all_expert_ranks(place: Place, chunk: Chunk) -> list[Place]:
    """An expert's place and those of its like on the other expert-parallel ranks, which hold as many experts each."""
    expert = _EXPERT.fullmatch(place.name)
    if expert is None:
        return [place]
    ep = chunk.pg_collection.ep
    per_rank = chunk.architecture.num_experts // ep.size()
    slot = int(expert[2]) % per_rank
    return [replace(place, name=f"{expert[1]}{rank * per_rank + slot}{expert[3]}", expert_rank=rank) for rank in range(ep.size())]


def tensor_group(chunk: Chunk, place: Place) -> dist.ProcessGroup:
    """The ranks that hold the shards of a split parameter."""
    return chunk.pg_collection.expt_tp if place.is_expert else chunk.pg_collection.tp


def shard_anywhere(chunk: Chunk, place: Place, own: Tensor | None) -> Tensor:
    """The shard with this rank's tensor-parallel index, on every pipeline stage and expert-parallel rank; `own` where it is held here.

    Collective: every rank calls it for the same places in the same order. Not to be written to: it may be the parameter itself.
    """
    pp, ep = chunk.pg_collection.pp, chunk.pg_collection.ep
    if pp.size() > 1 and place.expert_rank in (None, ep.rank()):
        own = _broadcast(place, own, pp, place.stage)
    if place.expert_rank is not None and ep.size() > 1:
        own = _broadcast(place, own, ep, place.expert_rank)
    assert own is not None
    return own


def gather_plain(chunk: Chunk, place: Place, shard: Tensor) -> Tensor:
    """The full tensor of which every tensor-parallel rank holds an equal share along the place's dimension. Collective."""
    group = tensor_group(chunk, place)
    if place.split_dim is None or group.size() == 1:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=place.split_dim)


def _broadcast(place: Place, own: Tensor | None, group: dist.ProcessGroup, source: int) -> Tensor:
    tensor = own.contiguous() if own is not None else torch.empty(place.shape, dtype=place.dtype, device=platform.device())
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor
