"""Weights between files and the shards of a Megatron model, one tensor at a time, for every parallel layout: which part of which parameter
is where, and how it moves between ranks, layouts and Hugging Face files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.errors import CheckpointError
from aligner.files import with_umask_mode
from aligner.models.checkpoint.files import explain
from aligner.models.checkpoint.hf_files import CONFIG_FILE, INDEX_FILE, MAX_FILE_BYTES, SINGLE_FILE, read_json
from aligner.models.checkpoint.hf_weights import HFWeights
from aligner.models.checkpoint.wrapper import directory_of
from aligner.models.config import Architecture, SeeingArchitecture
from aligner.models.families import architecture_to_hf, weight_names
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, Rule, shard, to_hf
from aligner.models.families.wrappers import wrapped_config
from aligner.models.modules.chunk import Chunk, WholeChunk, global_name
from aligner.models.modules.linear import is_split, linear_weight
from aligner.models.modules.lora import MergedWeights
from aligner.models.modules.scalar_head import HEAD, POLICY_HEAD_FILE, POLICY_HEAD_NAMES
from aligner.parallel import platform
from aligner.parallel.collectives import broadcast_object, from_rank_0

SLICE_BYTES = 16 * 2**20  # of a tensor whose columns are split, gathered at a time
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
    rule: Rule | None  # the Hugging Face tensors that the whole holds; None for a head and adapters, which Hugging Face models do not have


def named_shards(chunks: Sequence[Chunk], *, adapters: bool = False) -> list[ParameterShard]:
    """Every parameter of this rank's chunks but those of adapters; with `adapters`, these alone. No communication."""
    found = []
    for chunk in chunks:
        chunk.settle()
        table = weight_names(chunk.architecture)
        for local_name, parameter in chunk.named_parameters():
            if (ADAPTER in local_name) != adapters:
                continue
            name, weight = global_name(chunk, local_name), linear_weight(parameter)
            is_copy = name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights
            place = Place(
                name=name,
                stage=chunk.pg_collection.pp.rank(),
                expert_rank=chunk.pg_collection.ep.rank() if _EXPERT.fullmatch(name) else None,
                shape=tuple(weight.shape),
                dtype=weight.dtype,
                split_dim=parameter.partition_dim if is_split(parameter) and parameter.partition_dim >= 0 else None,
                is_copy=is_copy,
            )
            rule = None if adapters or name.startswith(HEAD) else table.find(EMBEDDING if is_copy else name)
            found.append(ParameterShard(place=place, parameter=parameter, rule=rule))
    return found


def all_places(chunks: Sequence[Chunk]) -> list[Place]:
    """Every parameter of the whole model once, in Hugging Face's order, heads last, without a policy's head of values. Collective over each
    pipeline-parallel group."""
    here = [shard.place for shard in named_shards(chunks) if not shard.place.is_copy]
    return places_everywhere(chunks, [place for place in here if chunks[0].head is not None or not place.name.startswith(HEAD)])


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


def gathered(chunk: Chunk, place: Place, tensor: Tensor, blocks: int = 1) -> Tensor:
    """The full tensor, of each of whose `blocks` every tensor-parallel rank holds an equal share; assembled in place. Collective."""
    group = tensor_group(chunk, place)
    if place.split_dim is None or group.size() == 1:
        return tensor
    own, ranks = tensor.contiguous(), group.size()
    if place.split_dim == 0:
        full = own.new_empty(ranks * own.shape[0], *own.shape[1:])
        for target, part in zip(full.chunk(blocks), own.chunk(blocks), strict=True):
            dist.all_gather_into_tensor(target, part, group=group)
        return full
    full = own.new_empty(own.shape[0], ranks * own.shape[1])
    rows = max(1, SLICE_BYTES // (full.shape[1] * full.element_size()))
    for target, part in zip(full.split(rows), own.split(rows), strict=True):
        parts = part.new_empty(ranks * part.shape[0], part.shape[1])
        dist.all_gather_into_tensor(parts, part, group=group)
        target.view(len(target), ranks, -1).copy_(parts.view(ranks, len(target), -1).transpose(0, 1))
    return full


def _broadcast(place: Place, own: Tensor | None, group: dist.ProcessGroup, source: int) -> Tensor:
    tensor = own.contiguous() if own is not None else torch.empty(place.shape, dtype=place.dtype, device=platform.device())
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


class WeightSource(Protocol):
    """The weights of one model, in files, by Megatron's names. Every method raises AlignerError naming a tensor that does not fit."""

    def check(self, architecture: Architecture, *, is_scalar: bool) -> None:
        """Raise where the tensors are not those of the whole model."""

    def full(self, name: str, rule: Rule, shape: tuple[int, ...], architecture: Architecture) -> Tensor:
        """A whole parameter in Megatron's layout, of this shape; rows of the vocabulary's padding are 0."""

    def head(self, name: str, shape: torch.Size) -> Tensor | None:
        """A parameter of a head; None if the files have no such tensor."""


def load_hf(chunks: Sequence[Chunk], directory: Path, *, with_head: bool = True) -> None:
    """Fill this rank's shards from a Hugging Face directory; heads that it lacks (a new value head) keep their initialisation, and all do
    without `with_head`. A head of values may be the one beside a policy's export.

    No communication. Raises ModelFilesError for a tensor that is missing (anywhere in the model; every rank raises), has the wrong shape,
    or is in the files but belongs to no parameter.
    """
    if isinstance(chunks[0], WholeChunk):
        chunks[0].read_files(directory, with_head=with_head)
    else:
        fill(chunks, HFWeights(directory, weight_names(chunks[0].architecture)), with_head=with_head)
    if with_head and chunks[-1].gives_values and chunks[-1].post_process and (directory / POLICY_HEAD_FILE).exists():
        with safe_open(directory / POLICY_HEAD_FILE, framework="pt") as handle, torch.no_grad():
            for name, parameter in chunks[-1].score_head.named_parameters():
                parameter.copy_(handle.get_tensor(POLICY_HEAD_NAMES + name))


def fill(chunks: Sequence[Chunk], source: WeightSource, *, with_head: bool = True, only: Collection[Tensor] | None = None) -> None:
    """Fill this rank's shards, or those in `only`, from `source`, as `load_hf`."""
    source.check(chunks[0].architecture, is_scalar=chunks[0].head is not None)
    wanted = None if only is None else set(map(id, only))
    with torch.no_grad():
        for part in named_shards(chunks):
            if wanted is not None and id(part.parameter) not in wanted:
                continue
            if part.rule is not None:
                group, dim, shape = tensor_group(chunks[0], part.place), part.place.split_dim, list(part.place.shape)
                if dim is not None:
                    shape[dim] *= group.size()
                name = EMBEDDING if part.place.is_copy else part.place.name
                full = source.full(name, part.rule, tuple(shape), chunks[0].architecture)
                own = full if dim is None else shard(part.rule.layout, full, dim=dim, num_shards=group.size(), index=group.rank())
                linear_weight(part.parameter).write(own)
            elif with_head and (tensor := source.head(part.place.name, part.parameter.shape)) is not None:
                part.parameter.copy_(tensor)


def policy_head(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """A policy's head of values, which no reader of its weights knows, as in POLICY_HEAD_FILE; empty for other models. Collective over each
    pipeline-parallel group."""
    last, pp = chunks[-1], chunks[-1].pg_collection.pp
    if last.value_gradient is None:
        return {}
    own = {POLICY_HEAD_NAMES + name: one.cpu() for name, one in last.score_head.state_dict().items()} if last.post_process else {}
    return broadcast_object(own, src=dist.get_global_rank(pp, pp.size() - 1), group=pp)


def export_hf(chunks: Sequence[Chunk], *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor in the parameter's dtype) in the order of Hugging Face's model; heads last, tied copies never.

    Collective over the whole component: every rank consumes the stream to its end, and every rank gets every tensor, one at a time.
    A tensor is to be used, or copied, before the next one is asked for; it may be the parameter itself. `merged`: adapters
    are in the weights.
    """
    chunk = chunks[0]
    if isinstance(chunk, WholeChunk):
        yield from chunk.file_tensors(merged=merged)
        return
    table = weight_names(chunk.architecture)
    stacks: dict[str, Tensor] = {}  # of experts, that are not complete
    parameters = {part.place.name: part.parameter for part in named_shards(chunks) if not part.place.is_copy}
    own = MergedWeights(parameters, chunks if merged else [])
    for place in all_places(chunks):
        tensor = shard_anywhere(chunk, place, own.get(place.name))
        if place.name.startswith(HEAD):
            yield place.name, tensor
            continue
        rule = table.find(place.name)
        parts = to_hf(rule, gathered(chunk, place, tensor, rule.layout.blocks), chunk.architecture)
        del tensor
        if rule.expert is None:
            yield from zip(rule.hf_names, parts, strict=True)
        else:
            for name, part in zip(rule.hf_names, parts, strict=True):
                yield from _stacked(stacks, name, part, rule.expert, chunk.architecture.num_experts)
        del parts  # before the next one is gathered


def _stacked(stacks: dict[str, Tensor], name: str, part: Tensor, expert: int, count: int) -> Iterator[tuple[str, Tensor]]:
    if name not in stacks:
        stacks[name] = part.new_empty(count, *part.shape)
    stacks[name][expert] = part
    if expert == count - 1:
        yield name, stacks.pop(name)


def save_hf(chunks: Sequence[Chunk], directory: Path, *, writer: bool) -> None:
    """Write `config.json` and sharded safetensors. Every rank calls it; the one `writer` writes, holding one file's tensors at a time.

    A text part of a model of images and text is written as that model, whose other tensors are those of its files. A reward model, of the
    text part alone, becomes an `AutoModelForSequenceClassification`; where it averages over tokens or scores each of them, and so for a
    value model, an `AutoModelForTokenClassification`. A policy's head of values is in a file of its own. Raises CheckpointError naming rank
    and file where it cannot be written.
    """
    architecture, config, head = chunks[0].architecture, chunks[0].config, chunks[0].head
    whole = from_rank_0(lambda: directory_of(chunks[0].wrapper)) if chunks[0].wrapper else None
    if writer:
        directory.mkdir(parents=True, exist_ok=True)
        parts = directory.glob("model-*-of-*.safetensors")
        for old in (*(directory / name for name in (INDEX_FILE, SINGLE_FILE, POLICY_HEAD_FILE)), *parts):
            old.unlink(missing_ok=True)  # an index that stayed would have the tensors of the export before read
        dtype = str(config.params_dtype).removeprefix("torch.")
        hf_config = architecture_to_hf(architecture) | {"dtype": dtype}
        if whole is not None or isinstance(architecture, SeeingArchitecture):
            hf = architecture.hf if whole is None else read_json(whole / CONFIG_FILE)
            hf_config = wrapped_config(hf, architecture, dtype)
        if head is not None:
            hf_config |= head.to_hf(hf_config["architectures"][0])
        (directory / CONFIG_FILE).write_text(json.dumps(hf_config, indent=2) + "\n")
    sizes, written = [0], 0
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, int] = {}
    values = policy_head(chunks)
    tensors = export_hf(chunks)
    if writer and whole is not None:
        tensors = HFWeights(whole, weight_names(architecture)).as_stored(tensors)
    for name, tensor in tensors:
        if not writer:
            continue
        name = head.hf_name(name, architecture.family) if head is not None and name.startswith(HEAD) else name
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and sizes[-1] + num_bytes > MAX_FILE_BYTES:
            _write(pending, directory / f"part-{written}.safetensors")
            pending, written = {}, written + 1
            sizes.append(0)
        pending[name] = tensor.cpu().contiguous().clone()
        weight_map[name] = written
        sizes[-1] += num_bytes
    if writer:
        _write(pending, directory / f"part-{written}.safetensors")
        if values:
            _write(values, directory / POLICY_HEAD_FILE)
        _name_files(directory, weight_map, written + 1, sum(sizes))


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        with_umask_mode(path, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"writing the model failed: rank {dist.get_rank()}: {path}: {explain(error, path.parent)}") from error


def _name_files(directory: Path, weight_map: dict[str, int], num_files: int, num_bytes: int) -> None:
    """Give the parts the names that Hugging Face tools expect, and an index if there are several."""
    if num_files == 1:
        (directory / "part-0.safetensors").replace(directory / SINGLE_FILE)
        return
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    for i, name in enumerate(names):
        (directory / f"part-{i}.safetensors").replace(directory / name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": {name: names[part] for name, part in weight_map.items()}}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
