"""The tensors of a Hugging Face directory, read on demand: which of them are the model's, and their numbers from files in few bits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aligner.errors import ModelFilesError
from aligner.models.architecture.architecture import MOST_LAYERS
from aligner.models.checkpoint import hf_files
from aligner.models.checkpoint.hf_files import (
    BITS4,
    BITS4_PARTS,
    BITS4_STATE,
    BITS8,
    BITS8_FORMAT,
    BITS8_SCALES,
    CONFIG_FILE,
    FP8,
    FP8_SCALES,
    MXFP4,
    MXFP4_ENDINGS,
    Stored,
    read_json,
    stored_tensors,
)
from aligner.models.config import Architecture
from aligner.models.families import architecture_from_hf, mapping, weight_names
from aligner.models.families.hf_config import LAYERS
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, NameTable, Rule
from aligner.models.families.wrappers import SeeingNames, is_of_images, text_name, text_part, wrapper_of
from aligner.models.modules.scalar_head import HEAD, HF_HEADS, read_head

_LM_HEAD = "lm_head.weight"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_FURTHER = re.compile(r".*\.eh_proj\.weight|mtp\.fc\.weight")  # what only layers have that predict further tokens
_DTYPES = ("F64", "F32", "F16", "BF16", MXFP4, FP8, BITS4, BITS8)  # those of other quantized weights mean something else than their numbers

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


def four_bits(codes: Tensor, scales: Tensor, table: Tensor, block: int) -> Tensor:
    """What bitsandbytes packs (QLoRA, 2305.14314): uint8 `codes` of two numbers each, the high four bits first, which stand for those of
    `table` [16] times the scale of each `block` of numbers -> float32 [numbers]. Raises ValueError for another number of scales."""
    numbers = table[torch.stack([codes.flatten() >> 4, codes.flatten() & 0x0F], dim=-1).flatten().int()]
    if scales.numel() != -(-numbers.numel() // block):
        raise ValueError(f"has {scales.numel()} scales for {numbers.numel()} numbers in blocks of {block}")
    return numbers * scales.repeat_interleave(block)[: numbers.numel()]


def eight_bits(codes: Tensor, scales: Tensor) -> Tensor:
    """What bitsandbytes packs in INT8 (2208.07339): `codes` [rows, columns], of which 127 stands for a row's scale -> float32."""
    return codes * scales[:, None] * torch.tensor(1 / 127, dtype=torch.float32)


class Numbers:
    """The numbers of a directory's tensors, read on demand, also of those in files in few bits. `stored`: those of the files."""

    def __init__(self, directory: Path, stored: Mapping[str, Stored]) -> None:
        self.directory = directory
        self.tensors = hf_files.as_read(directory, stored)
        self._files = {name: one.file for name, one in stored.items()}
        self._handles: dict[Path, Any] = {}

    def read(self, name: str, part: int | None = None) -> Tensor:
        """The full tensor, or one of those that are stacked in it. Raises ModelFilesError."""
        if self.tensors[name].dtype == MXFP4:
            return mxfp4(*(self._read(name + ending, part) for ending in MXFP4_ENDINGS))
        if self.tensors[name].dtype == BITS4:
            return self._four_bits(name)
        if self.tensors[name].dtype == BITS8:
            layer = name.removesuffix("weight")
            if (order := layer + BITS8_FORMAT) in self._files and int(self._read(order, None)) != 0:
                raise ModelFilesError(f"{self.directory}: {order} is {int(self._read(order, None))}; allowed: 0, numbers in rows")
            return eight_bits(self._read(name, None), self._read(layer + BITS8_SCALES, None))
        if self.tensors[name].dtype == FP8:
            try:
                return fp8(self._read(name, None), self._read(name + FP8_SCALES, None), self._fp8_block)
            except ValueError as error:
                raise ModelFilesError(f"{self.directory}: {name} {error}") from error
        return self._read(name, part)

    @cached_property
    def _fp8_block(self) -> tuple[int, int]:
        rows, columns = (read_json(self.directory / CONFIG_FILE).get("quantization_config") or {}).get("weight_block_size") or (1, 1)
        return rows, columns

    def _four_bits(self, stored: str) -> Tensor:
        """The numbers of a tensor in four bits, float32. With double quantization its scales are codes, too. Raises ModelFilesError."""
        named = next(name for name in self._files if name.startswith(stored + BITS4_STATE))
        state = hf_files.quant_state(bytes(self._read(named, None).tolist()), self.directory / self._files[named], stored)
        absent = [stored + part for part in BITS4_PARTS[: 4 if "nested_blocksize" in state else 2] if stored + part not in self._files]
        if absent:
            raise ModelFilesError(f"{self.directory}: no tensor named {absent[0]}, which the state of {stored} expects")
        try:
            scales, table = (self._read(stored + part, None) for part in BITS4_PARTS[:2])
            if "nested_blocksize" in state:
                second, codes = (self._read(stored + part, None) for part in BITS4_PARTS[2:])
                each = second.repeat_interleave(state["nested_blocksize"])[: scales.numel()]
                scales = codes[scales.int()] * each + state["nested_offset"]
            return four_bits(self._read(stored, None), scales, table, state["blocksize"]).view(state["shape"])
        except (ValueError, RuntimeError, IndexError) as error:
            raise ModelFilesError(f"{self.directory}: {stored} {error}") from error

    def _read(self, stored: str, part: int | None) -> Tensor:
        """A tensor of a file unchanged, or its slice at `part` of the first dimension."""
        handle = self._open(stored)
        return handle.get_tensor(stored) if part is None else handle.get_slice(stored)[part]

    def _open(self, stored: str) -> Any:
        path = self.directory / self._files[stored]
        try:
            handle = self._handles[path] = self._handles.get(path) or safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ModelFilesError(f"{path}: cannot be read: {error}") from error
        return handle


class _Cut(NamedTuple):
    """A tensor as a part of one in the files."""

    stored: str
    index: tuple[int | slice, ...]
    transposed: bool


class HFWeights(Numbers):
    """The tensors of a Hugging Face directory, read on demand by their full names, also where the file holds a headless model's, or one of
    images and text, of which the text part is the model."""

    def __init__(self, directory: Path, table: NameTable, tensors: Mapping[str, Stored] | None = None) -> None:
        found = stored_tensors(directory)[0] if tensors is None else tensors
        stored = {name: one for name, one in found.items() if not re.fullmatch(table.ignored, name)}
        config = read_json(directory / CONFIG_FILE) if (directory / CONFIG_FILE).exists() else {}
        wrapper = {} if wrapper_of(config) is None else config  # of a model of images and text
        sees = isinstance(table, SeeingNames)  # then all tensors are the model's
        self._images = {name: one for name, one in stored.items() if is_of_images(name)} if wrapper and not sees else {}
        further = [name for name in stored if re.fullmatch(table.further, name)] if any(map(_FURTHER.fullmatch, stored)) else []
        self._further = ""
        if further:
            self._further = f"{len(further)} tensors, such as {further[0]}, predict further tokens, and are not read and not exported"
        left_out = {*self._images, *further}
        super().__init__(directory, {name: one for name, one in stored.items() if name not in left_out})
        if others := [f"{name} is {one.dtype}" for name, one in self.tensors.items() if one.dtype not in _DTYPES]:
            raise ModelFilesError(f"{directory}: {others[0]} ({len(others)} such): not read; allowed: {', '.join(_DTYPES)}")
        called = table.stored if isinstance(table, SeeingNames) else text_name if wrapper else str
        inner = {name: name if name.startswith(HF_HEADS) else called(name) for name in self.tensors}
        prefix = "" if any(name.startswith(table.base_prefix) for name in inner.values()) else table.base_prefix
        self._stored: dict[str, str] = {}
        for name in self.tensors:
            if (other := self._stored.setdefault(_canonical(inner[name], prefix), name)) != name:
                raise ModelFilesError(f"{directory}: {other} and {name} are two of one tensor; allowed: one of them")
        self._files |= {name: one.file for name, one in self._images.items()}
        self._cuts: dict[str, _Cut] = {}
        if wrapper and any("{expert}" in name for rule in table.layer.values() for name in rule.hf_names):
            self._cut_stacks(text_part(wrapper)["hidden_size"])

    def _cut_stacks(self, width: int) -> None:
        """Find single experts' tensors in a layer's: [experts, gate and up, width] and [experts, width, inner], or transposes."""
        for name, stored in list(self._stored.items()):
            block, _, kind = name.rpartition(".")
            one = self.tensors[stored]
            if kind not in ("gate_up_proj", "down_proj") or not block.endswith(".experts") or len(one.shape) != 3:
                continue
            experts, *shape = one.shape
            transposed = shape[kind == "gate_up_proj"] != width
            rows, columns = reversed(shape) if transposed else shape
            parts = {"down_proj": slice(rows)}
            if kind == "gate_up_proj":
                parts = {"gate_proj": slice(rows // 2), "up_proj": slice(rows // 2, rows)}
            for number, (part, own) in product(range(experts), parts.items()):
                full = f"{block}.{number}.{part}.weight"
                self._stored[full] = full
                self.tensors[full] = replace(one, shape=(own.stop - (own.start or 0), columns))
                self._cuts[full] = _Cut(stored, (number, slice(None), own) if transposed else (number, own), transposed)
            del self._stored[name]

    def as_stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """An export's tensors as these files, of a model of images and text, have them, and then those of images unchanged."""
        missing, stacks = Counter(cut.stored for cut in self._cuts.values()), {}
        for name, tensor in tensors:
            if name not in self._cuts:
                yield self._stored[name], tensor
                continue
            stored, index, transposed = self._cuts[name]
            if stored not in stacks:
                stacks[stored] = tensor.new_empty(self.tensors[stored].shape)
            stacks[stored][index] = tensor.t() if transposed else tensor
            missing[stored] -= 1
            if not missing[stored]:
                yield stored, stacks.pop(stored)
        yield from ((name, self._read(name, None)) for name in self._images)

    def notes(self, architecture: Architecture, *, is_scalar: bool = False) -> list[str]:
        """What a user should know about the files beyond the config."""
        notes = [self._further] if self._further else []
        if self._images:
            what = "neither read nor exported" if is_scalar else "not trained, and unchanged in exports"
            notes.insert(0, f"{len(self._images)} tensors are of images: {what}; the model here is the text part")
        if not architecture.tied_embeddings and architecture_from_hf(read_json(self.directory / CONFIG_FILE)).tied_embeddings:
            notes = [*notes, "the config ties the output layer to the embedding, the files have another one: kept apart, also in exports"]
        return [f"{self.directory}: {note}" for note in notes]

    def get_shaped(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        """The full tensor, or one of those that are stacked in it. Raises ModelFilesError where it is missing or has another shape."""
        if name not in self._stored:
            raise ModelFilesError(f"{self.directory}: no tensor named {name}")
        stored = self._stored[name]
        if (found := self.tensors[stored].shape) != shape:
            raise ModelFilesError(f"{self.directory}: {name} is {found}, the model's config makes it {shape}")
        return self.read(stored, part)

    def _read(self, stored: str, part: int | None) -> Tensor:
        if (cut := self._cuts.get(stored)) is None:
            return super()._read(stored, part)
        found = self._open(cut.stored).get_slice(cut.stored)[cut.index]
        return found.t() if cut.transposed else found

    def check_sizes(self, architecture: Architecture, hf: Mapping[str, Any]) -> None:
        """Raise ModelFilesError, naming settings of the config `hf`, if its sizes are not those of the tensors."""
        for name, dimensions in mapping.expected_sizes(architecture, weight_names(architecture)):
            stored, shape = self._stored.get(name, ""), tuple(size.value for size in dimensions)
            if stored and (found := self.tensors[stored].shape) != shape:
                wrong = [size for size, own in zip_longest(dimensions, found) if size and size.value != own]
                raise ModelFilesError(
                    f"{self.directory / CONFIG_FILE}: {mapping.size_settings(hf, wrong or dimensions)}: {stored} would be {shape}, "
                    f"in {self.tensors[stored].file} it is {found}"
                )

    def is_untied(self, architecture: Architecture) -> bool:
        """Whether the files have another output layer than the embedding, which the architecture makes it."""
        table = weight_names(architecture)
        (head,), (embedding,) = (table.find(name).hf_names for name in (OUTPUT_LAYER, EMBEDDING))
        if not (architecture.tied_embeddings and {head, embedding} <= self._stored.keys()):
            return False
        one, other = (self.tensors[self._stored[name]] for name in (head, embedding))
        return one.dtype in (MXFP4, FP8, BITS4, BITS8) or not hf_files.is_same(self.directory, one, other)

    def check(self, architecture: Architecture, *, is_scalar: bool) -> None:
        """Raise ModelFilesError where the directory's tensors are not those of the whole model, or of the head that its config names."""
        table = weight_names(architecture)
        outputs = table.find(OUTPUT_LAYER).hf_names  # those of a scalar model are not read; a tied file may repeat the embedding
        names = (name for name in table.names(architecture) if not (is_scalar and name == OUTPUT_LAYER))
        needed = list(dict.fromkeys(hf_name for name in names for hf_name in table.find(name).hf_names))
        if missing := [name for name in needed if name not in self._stored]:
            tied = "; if it is the embedding: tie_word_embeddings=true in the config" if missing == [*outputs] else ""
            raise ModelFilesError(f"{self.directory}: no tensor named {missing[0]}, and {len(missing) - 1} more are missing{tied}")
        if coded := [name for name, one in self._images.items() if one.dtype not in _DTYPES and not is_scalar]:
            dtype = self._images[coded[0]].dtype
            raise ModelFilesError(f"{self.directory}: {coded[0]} is {dtype}: exports have weights that are not quantized")
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
        expected = mapping.hf_shapes(rule, shape, architecture)
        tensors = [self.get_shaped(hf_name, one, rule.expert) for hf_name, one in zip(rule.hf_names, expected, strict=True)]
        return mapping.to_megatron(rule, tensors, architecture, shape[0])

    def head(self, name: str, shape: torch.Size) -> Tensor | None:
        """A parameter of the head; None if the files have no such tensor."""
        return self.get_shaped(name, tuple(shape)) if name in self._stored else None


def _canonical(name: str, prefix: str) -> str:
    """A tensor's name in the whole language model, whose files may leave out `prefix`; a classifying head's is Megatron's."""
    if name.startswith(HF_HEADS):
        return HEAD + name.split(".", 1)[1]
    return name if name == _LM_HEAD else prefix + name


def described(directory: Path) -> Architecture:
    """The architecture in a directory's `config.json`, checked against weight files there. Raises ConfigError or ModelFilesError."""
    file = directory / CONFIG_FILE
    hf = read_json(file)
    if not hf_files.has_weights(directory):
        return architecture_from_hf(hf, where=str(file))
    tensors, _ = stored_tensors(directory)
    text = text_part(hf)
    names = tensors if text is hf else [name for name in tensors if not is_of_images(name)]
    layers = 1 + max((int(found[1]) for name in names if (found := _LAYER.search(name))), default=-1)
    for key in LAYERS:
        if type(text.get(key)) is int and text[key] > (layers or MOST_LAYERS):  # before anything is made for each of them
            raise ModelFilesError(f"{file}: {key}={text[key]}: the weight files beside it have {layers} layers")
    architecture = architecture_from_hf(hf, where=str(file))
    source = HFWeights(directory, weight_names(architecture), tensors)
    if source.is_untied(architecture):  # as transformers reads it
        architecture = replace(architecture, tied_embeddings=False)
    source.check_sizes(architecture, text)
    return architecture
