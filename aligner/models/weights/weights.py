"""Weights between Hugging Face files and the shards of a Megatron model, one tensor at a time, for every parallel layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from aligner.errors import CheckpointError, ModelFilesError
from aligner.files import with_umask_mode
from aligner.models.architecture.architecture import MOST_LAYERS
from aligner.models.checkpoint.files import explain
from aligner.models.checkpoint.hf_files import (
    CONFIG_FILE,
    FP8,
    FP8_SCALES,
    INDEX_FILE,
    MAX_FILE_BYTES,
    MXFP4,
    MXFP4_ENDINGS,
    SINGLE_FILE,
    Stored,
    as_read,
    has_weights,
    is_same,
    read_json,
    stored_tensors,
)
from aligner.models.config import Architecture
from aligner.models.families import architecture_from_hf, architecture_to_hf, text_part, weight_names
from aligner.models.families.hf_config import LAYERS
from aligner.models.families.mapping import (
    EMBEDDING,
    OUTPUT_LAYER,
    NameTable,
    Rule,
    expected_sizes,
    hf_shapes,
    shard,
    size_settings,
    to_hf,
    to_megatron,
)
from aligner.models.modules.chunk import Chunk, WholeChunk
from aligner.models.modules.lora import MergedWeights
from aligner.models.modules.scalar_head import HEAD, HF_HEADS, read_head
from aligner.models.weights.shards import ParameterShard, Place, all_places, named_shards, shard_anywhere, tensor_group

SLICE_BYTES = 16 * 2**20  # of a tensor whose columns are split, gathered at a time
_LM_HEAD = "lm_head.weight"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_FURTHER = re.compile(r".*\.eh_proj\.weight|mtp\.fc\.weight")  # what only layers have that predict further tokens
_DTYPES = ("F64", "F32", "F16", "BF16", MXFP4, FP8)  # those of other quantized weights mean something else than their numbers


class WeightSource(Protocol):
    """The weights of one model, in files, by Megatron's names. Every method raises AlignerError naming a tensor that does not fit."""

    def check(self, architecture: Architecture, *, is_scalar: bool) -> None:
        """Raise where the tensors are not those of the whole model."""

    def full(self, name: str, rule: Rule, shape: tuple[int, ...], architecture: Architecture) -> Tensor:
        """A whole parameter in Megatron's layout, of this shape; rows of the vocabulary's padding are 0."""

    def head(self, name: str, shape: torch.Size) -> Tensor | None:
        """A parameter of a head; None if the files have no such tensor."""


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three bits below the sign


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Microscaling FP4 (2310.10537): uint8 `blocks` [..., rows, groups, 16] of two numbers each, the low four bits first, and `scales`
    [..., rows, groups], exponents of 2 plus 127, -> bfloat16 [..., groups * 32, rows], in which all of them are exact."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.stack([table[(blocks & 0x0F).int()], table[(blocks >> 4).int()]], dim=-1).flatten(-2)
    scaled = torch.ldexp(numbers, scales.int()[..., None] - 127)
    return scaled.flatten(-2).transpose(-1, -2)


def fp8(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 by blocks (DeepSeek-V3, 2412.19437, 3.3): float8 `numbers` [rows, columns], a scale for each `block` of rows and columns,
    of which the last ones may have fewer, -> float32. Raises ValueError for another number of scales."""
    if scales.shape != tuple(-(-size // part) for size, part in zip(numbers.shape, block, strict=True)):
        raise ValueError(f"has {tuple(scales.shape)} scales for {tuple(numbers.shape)} in blocks of {block}")
    rows, columns = numbers.shape
    each = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return numbers.float() * each


class HFWeights:
    """The tensors of a Hugging Face directory, read on demand by their full names, also where the file holds a headless model's."""

    def __init__(self, directory: Path, table: NameTable, tensors: Mapping[str, Stored] | None = None) -> None:
        self.directory = directory
        found = stored_tensors(directory)[0] if tensors is None else tensors
        stored = {name: one for name, one in found.items() if not re.fullmatch(table.ignored, name)}
        images = [name for name in stored if re.fullmatch(table.images, name)]
        further = [name for name in stored if re.fullmatch(table.further, name)] if any(map(_FURTHER.fullmatch, stored)) else []
        self._unread = [f"{len(images)} tensors are of images, and not read: the model is its text part"] if images else []
        if further:
            self._unread.append(f"{len(further)} tensors, such as {further[0]}, predict further tokens, and are not read and not exported")
        left_out = {*images, *further}
        stored = {name: one for name, one in stored.items() if name not in left_out}
        self._tensors = as_read(stored)
        if others := [f"{name} is {one.dtype}" for name, one in self._tensors.items() if one.dtype not in _DTYPES]:
            raise ModelFilesError(f"{directory}: {others[0]} ({len(others)} such): not read; allowed: {', '.join(_DTYPES)}")
        prefix = "" if any(table.inner(name).startswith(table.base_prefix) for name in self._tensors) else table.base_prefix
        self._stored: dict[str, str] = {}
        for name in self._tensors:
            if (other := self._stored.setdefault(_canonical(table.inner(name), prefix), name)) != name:
                raise ModelFilesError(f"{directory}: {other} and {name} are two of one tensor; allowed: one of them")
        self._files = {name: one.file for name, one in stored.items()}
        self._handles: dict[Path, Any] = {}

    def notes(self, architecture: Architecture) -> list[str]:
        """What a user should know about the files beyond the config."""
        notes = self._unread
        if not architecture.tied_embeddings and architecture_from_hf(read_json(self.directory / CONFIG_FILE)).tied_embeddings:
            notes = [*notes, "the config ties the output layer to the embedding, the files have another one: kept apart, also in exports"]
        return [f"{self.directory}: {note}" for note in notes]

    def get_shaped(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        """The full tensor, or one of those that are stacked in it. Raises ModelFilesError where it is missing or has another shape."""
        if name not in self._stored:
            raise ModelFilesError(f"{self.directory}: no tensor named {name}")
        stored = self._stored[name]
        if (found := self._tensors[stored].shape) != shape:
            raise ModelFilesError(f"{self.directory}: {name} is {found}, the model's config makes it {shape}")
        if self._tensors[stored].dtype == MXFP4:
            return mxfp4(*(self._read(stored + ending, part) for ending in MXFP4_ENDINGS))
        if self._tensors[stored].dtype == FP8:
            return self._from_fp8(stored)
        return self._read(stored, part)

    def _from_fp8(self, stored: str) -> Tensor:
        """Raises ModelFilesError where its scales do not fit the block size in the directory's config."""
        rows, columns = (read_json(self.directory / CONFIG_FILE).get("quantization_config") or {}).get("weight_block_size") or (1, 1)
        try:
            return fp8(self._read(stored, None), self._read(stored + FP8_SCALES, None), (rows, columns))
        except ValueError as error:
            raise ModelFilesError(f"{self.directory}: {stored} {error}") from error

    def _read(self, stored: str, part: int | None) -> Tensor:
        """A tensor of a file unchanged, or its slice at `part` of the first dimension."""
        path = self.directory / self._files[stored]
        try:
            handle = self._handles[path] = self._handles.get(path) or safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ModelFilesError(f"{path}: cannot be read: {error}") from error
        return handle.get_tensor(stored) if part is None else handle.get_slice(stored)[part]

    def check_sizes(self, architecture: Architecture, hf: Mapping[str, Any]) -> None:
        """Raise ModelFilesError, naming settings of the config `hf`, if its sizes are not those of the tensors."""
        for name, dimensions in expected_sizes(architecture, weight_names(architecture)):
            stored, shape = self._stored.get(name, ""), tuple(size.value for size in dimensions)
            if stored and (found := self._tensors[stored].shape) != shape:
                wrong = [size for size, own in zip_longest(dimensions, found) if size and size.value != own]
                raise ModelFilesError(
                    f"{self.directory / CONFIG_FILE}: {size_settings(hf, wrong or dimensions)}: {stored} would be {shape}, "
                    f"in {self._tensors[stored].file} it is {found}"
                )

    def is_untied(self, architecture: Architecture) -> bool:
        """Whether the files have another output layer than the embedding, which the architecture makes it."""
        table = weight_names(architecture)
        (head,), (embedding,) = (table.find(name).hf_names for name in (OUTPUT_LAYER, EMBEDDING))
        if not (architecture.tied_embeddings and {head, embedding} <= self._stored.keys()):
            return False
        one, other = (self._tensors[self._stored[name]] for name in (head, embedding))
        return one.dtype in (MXFP4, FP8) or not is_same(self.directory, one, other)

    def check(self, architecture: Architecture, *, is_scalar: bool) -> None:
        """Raise ModelFilesError where the directory's tensors are not those of the whole model, or of the head that its config names."""
        table = weight_names(architecture)
        outputs = table.find(OUTPUT_LAYER).hf_names  # those of a scalar model are not read; a tied file may repeat the embedding
        names = (name for name in table.names(architecture) if not (is_scalar and name == OUTPUT_LAYER))
        needed = list(dict.fromkeys(hf_name for name in names for hf_name in table.find(name).hf_names))
        if missing := [name for name in needed if name not in self._stored]:
            tied = "; if it is the embedding: tie_word_embeddings=true in the config" if missing == [*outputs] else ""
            raise ModelFilesError(f"{self.directory}: no tensor named {missing[0]}, and {len(missing) - 1} more are missing{tied}")
        if not is_scalar and self.is_untied(architecture):
            raise ModelFilesError(f"{self.directory}: {outputs[0]} is not the embedding, to which the model's config ties it")
        head = read_head(self.directory) if is_scalar else None
        heads = {name for name in self._stored if name.startswith(HEAD)} if is_scalar else set()
        if head is not None and heads != (wanted := {f"{HEAD}weight", *([f"{HEAD}bias"] if head.has_bias else [])}):
            named = [self._stored.get(name, name) for name in sorted(heads ^ wanted)]
            raise ModelFilesError(f"{self.directory}: the class in its config has a head of {sorted(wanted)}, the files differ in {named}")
        unknown = sorted(self._stored[name] for name in self._stored.keys() - set(needed) - set(outputs) - heads)
        if unknown:
            raise ModelFilesError(f"{self.directory}: {len(unknown)} tensors belong to no parameter of the model, e.g. {unknown[:3]}")

    def full(self, name: str, rule: Rule, shape: tuple[int, ...], architecture: Architecture) -> Tensor:
        """The whole parameter, from tensors that must have the very shapes an export would give them."""
        expected = hf_shapes(rule, shape, architecture)
        tensors = [self.get_shaped(hf_name, one, rule.expert) for hf_name, one in zip(rule.hf_names, expected, strict=True)]
        return to_megatron(rule, tensors, architecture, shape[0])

    def head(self, name: str, shape: torch.Size) -> Tensor | None:
        """A parameter of the head; None if the files have no such tensor."""
        return self.get_shaped(name, tuple(shape)) if name in self._stored else None


def _canonical(name: str, prefix: str) -> str:
    """A tensor's name in the whole language model, whose files may leave out `prefix`; a classifying head's is Megatron's."""
    if name.startswith(HF_HEADS):
        return HEAD + name.split(".", 1)[1]
    return name if name == _LM_HEAD else prefix + name


def load_hf(chunks: Sequence[Chunk], directory: Path, *, with_head: bool = True) -> None:
    """Fill this rank's shards from a Hugging Face directory; heads that it lacks (a new value head) keep their initialisation, and all do
    without `with_head`.

    No communication. Raises ModelFilesError for a tensor that is missing (anywhere in the model; every rank raises), has the wrong shape,
    or is in the files but belongs to no parameter.
    """
    if isinstance(chunks[0], WholeChunk):
        chunks[0].read_files(directory, with_head=with_head)
        return
    fill(chunks, HFWeights(directory, weight_names(chunks[0].architecture)), with_head=with_head)


def described(directory: Path) -> Architecture:
    """The architecture that a directory's `config.json` names and, if they are here, its weight files bear out. Nothing is built.

    Raises ConfigError as `architecture_from_hf`, and ModelFilesError if sizes and files differ.
    """
    file = directory / CONFIG_FILE
    hf = read_json(file)
    if not has_weights(directory):
        return architecture_from_hf(hf, where=str(file))
    tensors, _ = stored_tensors(directory)
    text = text_part(hf)
    layers = 1 + max((int(found[1]) for name in tensors if (found := _LAYER.search(name))), default=-1)
    for key in LAYERS:
        if type(text.get(key)) is int and text[key] > (layers or MOST_LAYERS):  # before anything is made for each of them
            raise ModelFilesError(f"{file}: {key}={text[key]}: the weight files beside it have {layers} layers")
    architecture = architecture_from_hf(hf, where=str(file))
    source = HFWeights(directory, weight_names(architecture), tensors)
    if source.is_untied(architecture):  # as transformers reads it
        architecture = replace(architecture, tied_embeddings=False)
    source.check_sizes(architecture, text)
    return architecture


def fill(chunks: Sequence[Chunk], source: WeightSource, *, with_head: bool = True) -> None:
    """Fill this rank's shards from `source`, as `load_hf`."""
    source.check(chunks[0].architecture, is_scalar=chunks[0].head is not None)
    with torch.no_grad():
        for part in named_shards(chunks):
            if part.rule is not None:
                part.parameter.copy_(_import(chunks[0], part, part.rule, source))
            elif with_head and (tensor := source.head(part.place.name, part.parameter.shape)) is not None:
                part.parameter.copy_(tensor)


def _import(chunk: Chunk, part: ParameterShard, rule: Rule, source: WeightSource) -> Tensor:
    """This rank's part of a parameter."""
    group = tensor_group(chunk, part.place)
    dim, shape = part.place.split_dim, list(part.place.shape)
    if dim is not None:
        shape[dim] *= group.size()
    full = source.full(EMBEDDING if part.place.is_copy else part.place.name, rule, tuple(shape), chunk.architecture)
    return full if dim is None else shard(rule.layout, full, dim=dim, num_shards=group.size(), index=group.rank())


def export_hf(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor in the parameter's dtype) in the order of Hugging Face's model; heads last, tied copies never.

    Collective over the whole component: every rank consumes the stream to its end, and every rank gets every tensor, one at a time.
    A tensor is to be used, or copied, before the next one is asked for; it may be the parameter itself. Adapters are in the weights.
    """
    chunk = chunks[0]
    if isinstance(chunk, WholeChunk):
        yield from chunk.file_tensors()
        return
    table = weight_names(chunk.architecture)
    stacks: dict[str, Tensor] = {}  # of experts, that are not complete
    own = MergedWeights({part.place.name: part.parameter for part in named_shards(chunks) if not part.place.is_copy}, chunks)
    for place in all_places(chunks):
        tensor = shard_anywhere(chunk, place, own.get(place.name))
        if place.name.startswith(HEAD):
            yield place.name, tensor
            continue
        rule = table.find(place.name)
        parts = to_hf(rule, _gather(chunk, place, rule, tensor), chunk.architecture)
        del tensor
        if rule.expert is None:
            yield from zip(rule.hf_names, parts, strict=True)
        else:
            for name, part in zip(rule.hf_names, parts, strict=True):
                yield from _stacked(stacks, name, part, rule.expert, chunk.architecture.num_experts)
        del parts  # before the next one is gathered


def _stacked(stacks: dict[str, Tensor], name: str, part: Tensor, expert: int, count: int) -> Iterator[tuple[str, Tensor]]:
    """The tensor of all experts with its last part."""
    if name not in stacks:
        stacks[name] = part.new_empty(count, *part.shape)
    stacks[name][expert] = part
    if expert == count - 1:
        yield name, stacks.pop(name)


def _gather(chunk: Chunk, place: Place, rule: Rule, tensor: Tensor) -> Tensor:
    """The full tensor, assembled in place without a second copy."""
    group = tensor_group(chunk, place)
    if place.split_dim is None or group.size() == 1:
        return tensor
    own, ranks = tensor.contiguous(), group.size()
    if place.split_dim == 0:
        full = own.new_empty(ranks * own.shape[0], *own.shape[1:])
        blocks = rule.layout.blocks
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


def save_hf(chunks: Sequence[Chunk], directory: Path, *, writer: bool) -> None:
    """Write `config.json` and sharded safetensors. Every rank calls it; the one `writer` writes, holding one file's tensors at a time.

    A reward model becomes an `AutoModelForSequenceClassification`; where it averages over tokens or scores each of them, and so for a value
    model, an `AutoModelForTokenClassification`. Raises CheckpointError naming rank and file where it cannot be written.
    """
    architecture, config, head = chunks[0].architecture, chunks[0].config, chunks[0].head
    if writer:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (directory / INDEX_FILE, directory / SINGLE_FILE, *directory.glob("model-*-of-*.safetensors")):
            old.unlink(missing_ok=True)  # an index that stayed would have the tensors of the export before read
        hf_config = architecture_to_hf(architecture) | {"dtype": str(config.params_dtype).removeprefix("torch.")}
        if head is not None:
            hf_config |= head.to_hf(hf_config["architectures"][0])
        (directory / CONFIG_FILE).write_text(json.dumps(hf_config, indent=2) + "\n")
    sizes, written = [0], 0
    pending: dict[str, Tensor] = {}
    weight_map: dict[str, int] = {}
    for name, tensor in export_hf(chunks):
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
