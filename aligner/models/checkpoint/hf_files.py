"""Checks a Hugging Face model's files and lists their tensors before anything is loaded. No torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from aligner.errors import ModelFilesError, describe_os_error
from aligner.files import is_plain_name

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30  # of an export's weight files
MXFP4 = "MXFP4"
MXFP4_ENDINGS = "_blocks", "_scales"  # of the names of a tensor's two, both U8
FP8 = "FP8"
FP8_SCALES = "_scale_inv"  # ends the name of the scales of a tensor in F8_E4M3
BITS4 = "NF4"
BITS4_STATE = ".quant_state.bitsandbytes__"  # behind the name of a tensor in U8: JSON, as bytes, of what the codes stand for
BITS4_PARTS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"  # scales and their tables
BITS8 = "INT8"
BITS8_SCALES = "SCB"  # in place of `weight` in the name of a matrix in I8
BITS8_FORMAT = "weight_format"  # and of what orders its bytes, which files have in rows
_LFS_POINTER = b"version https://git-lfs"
_POINTER = "is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`"
_MOST_HEADER_BYTES = 100 << 20  # what the format itself allows
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor in a file of the directory."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, I8, ...; or MXFP4, FP8, NF4 or INT8
    span: tuple[int, int] = (0, 0)  # its bytes: from one offset in the file up to another


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFilesError, in one line that names the file, if it has none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFilesError(describe_os_error(error, path)) from error
    if data.startswith(_LFS_POINTER):
        raise ModelFilesError(f"{path} {_POINTER}")
    return json_object(data, path)


def json_object(data: bytes, where: Path | str) -> dict[str, Any]:
    """The object in a JSON file's content. Raises ModelFilesError, which calls the file `where`, if it has none."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{where} is damaged: a JSON {type(content).__name__}, expected an object")
    return content


def has_weights(directory: Path) -> bool:
    """Whether all weight files that a model's directory names are there; damaged or not."""
    if (directory / INDEX_FILE).exists():
        return all((directory / file).is_file() for file in set(index_files(directory / INDEX_FILE).values()))
    return (directory / SINGLE_FILE).is_file()


def index_files(path: Path) -> dict[str, str]:
    """The file of every tensor, from an index. Raises ModelFilesError if it is damaged, or names files that are not beside it."""
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise ModelFilesError(f"{path} is damaged: no weight_map of names and files")
    if strange := [name for name, file in found.items() if not is_plain_name(file)]:
        raise ModelFilesError(f"{path}: weight_map has {found[strange[0]]!r} for {strange[0]!r}; allowed: the name of a file beside it")
    return found


def stored_tensors(directory: Path) -> tuple[dict[str, Stored], int]:
    """Every tensor of a directory's safetensors files by name, and the bytes of the files. Only headers and sizes are read, and tensors
    that are there twice: what transformers reads of them depends on its version.

    Raises ModelFilesError for a file that is missing, cut short or other than in the index, and for two different tensors of one name.
    """
    index = index_files(directory / INDEX_FILE) if (directory / INDEX_FILE).exists() else {}
    if not index and not (directory / SINGLE_FILE).exists():
        raise ModelFilesError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read")
    named = set(index.values()) or {SINGLE_FILE}
    tensors: dict[str, Stored] = {}
    total = 0
    for file in [*sorted(named), *({SINGLE_FILE} - named if (directory / SINGLE_FILE).exists() else ())]:
        header, size = _read_header(directory / file)
        total += size if file in named else 0
        if missing := [name for name, where in index.items() if where == file and name not in header]:
            raise ModelFilesError(f"{directory / file}: has no {missing[0]}, which {INDEX_FILE} expects there ({len(missing)} such)")
        for name, one in header.items():
            other = tensors.get(name, one)
            if other is not one and not is_same(directory, one, other):
                raise ModelFilesError(f"{directory}: {name} is in {other.file} and, another one, in {file}; allowed: one of them")
            if other is one or index.get(name) == file:
                tensors[name] = one
    return tensors, total


def is_same(directory: Path, one: Stored, other: Stored) -> bool:
    """Whether two tensors are equal byte by byte. Reads them up to the first difference, once in a process."""
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    return same and _is_same(*((directory / t.file, t.span, (directory / t.file).stat().st_mtime_ns) for t in (one, other)))


@lru_cache(maxsize=1024)
def _is_same(*spans: tuple[Path, tuple[int, int], int]) -> bool:
    return all(one == other for one, other in zip_longest(*(_chunks(path, *span) for path, span, _ in spans)))


def _chunks(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        for offset in range(start, end, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, end - offset))


def as_read(directory: Path, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors that those of the files stand for: blocks [..., rows, groups, 16] of two numbers each and their scales in MXFP4 for
    [..., groups * 32, rows], as gpt-oss has them; matrices in FP8 with a scale for each block, as DeepSeek-V3 has them; and in four or
    eight bits, as bitsandbytes saves them."""
    blocks, scales = MXFP4_ENDINGS
    found = dict(tensors)
    for name, one in tensors.items():
        packed, _, kind = name.partition(BITS4_STATE)
        if kind and (codes := tensors.get(packed)) is not None and codes.dtype == one.dtype == "U8":
            with (directory / one.file).open("rb") as file:
                file.seek(one.span[0])
                state = quant_state(file.read(one.span[1] - one.span[0]), directory / one.file, packed)
            found[packed] = replace(codes, shape=tuple(state["shape"]), dtype=BITS4)
            for own in (name, *(packed + ending for ending in BITS4_PARTS)):
                found.pop(own, None)
        if one.dtype == "F8_E4M3" and len(one.shape) == 2 and found.pop(name + FP8_SCALES, None):
            found[name] = replace(one, dtype=FP8)
        layer, _, kind = name.rpartition(".")
        scales8 = tensors.get(f"{layer}.{BITS8_SCALES}")
        if kind == "weight" and one.dtype == "I8" and scales8 is not None and (scales8.dtype, scales8.shape) == ("F32", one.shape[:1]):
            found[name] = replace(one, dtype=BITS8)
            for own in (BITS8_SCALES, BITS8_FORMAT):
                found.pop(f"{layer}.{own}", None)
        base = name.removesuffix(blocks)
        pair = one, tensors.get(base + scales)
        if base == name or pair[1] is None or {part.dtype for part in pair} != {"U8"} or one.shape[:-1] != pair[1].shape:
            continue
        *stack, rows, groups, size = one.shape
        if base in found:
            raise ModelFilesError(f"{name} and {base} are two of one tensor; allowed: one of them")
        del found[name], found[base + scales]
        found[base] = Stored(file=one.file, shape=(*stack, groups * size * 2, rows), dtype=MXFP4)
    return found


def unread_packing(found: Any) -> tuple[str, Any, str] | None:
    """(key, value, what is allowed) of a `quantization_config` whose files are not read; None if they are."""
    if found is None:
        return None
    found = found if isinstance(found, dict) else {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method not in ("mxfp4", "fp8", "bitsandbytes"):
        return "quantization_config.quant_method", method, '"mxfp4", "fp8" or "bitsandbytes"'
    if method == "fp8" and (not isinstance(block, list) or [type(size) for size in block] != [int, int] or min(block) < 1):
        return "quantization_config.weight_block_size", block, "rows and columns of a block, such as [128, 128]"
    unchanged = {"fp8": {"fmt": "e4m3", "activation_scheme": "dynamic"}, "bitsandbytes": {"bnb_4bit_quant_storage": "uint8"}}
    differing = [(key, found[key], json.dumps(own)) for key, own in unchanged.get(method, {}).items() if found.get(key, own) != own]
    return differing[0] if differing else None


def quant_state(data: bytes, path: Path, name: str) -> dict[str, Any]:
    """What bitsandbytes has written about a tensor in four bits: `shape` and `blocksize`, and with double quantization `nested_blocksize`
    and `nested_offset`. Raises ModelFilesError for other values."""
    state = json_object(data, f"{path}: the state of {name}")
    sizes = [state.get("blocksize"), *(state["shape"] if isinstance(state.get("shape"), list) else [None])]
    sizes += [state["nested_blocksize"]] if "nested_blocksize" in state else []
    offset = state.get("nested_offset", None if "nested_blocksize" in state else 0.0)
    if not all(type(size) is int and size > 0 for size in sizes) or type(offset) not in (int, float) or not math.isfinite(offset):
        raise ModelFilesError(f"{path}: the state of {name} is damaged: shape, blocksize or nested ones")
    return state


def _read_header(path: Path) -> tuple[dict[str, Stored], int]:
    """(tensors by name, bytes of the file). The file must be exactly as long as its header requires."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(len(_LFS_POINTER))
            length = struct.unpack("<Q", prefix[:8])[0] if len(prefix) >= 8 else 0
            whole = 2 <= length <= min(size - 8, _MOST_HEADER_BYTES)
            file.seek(8)
            text = file.read(length) if whole else b""
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path} is missing") from error
    except OSError as error:
        raise ModelFilesError(describe_os_error(error, path)) from error
    if prefix == _LFS_POINTER:
        raise ModelFilesError(f"{path} {_POINTER}")
    if not whole:
        raise ModelFilesError(f"{path} ({size} bytes) does not begin like a safetensors file: cut short, or of another format")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            name: Stored(
                file=path.name, shape=tuple(map(int, entry["shape"])), dtype=entry["dtype"], span=(8 + length + first, 8 + length + last)
            )
            for name, entry in header.items()
            for first, last in [entry["data_offsets"]]
        }
        end = max((one.span[1] for one in tensors.values()), default=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(f"{path}: its header cannot be read: {error}") from error
    if end != size:
        raise ModelFilesError(f"{path} has {size} bytes, its header says {end}: cut short, or still being copied")
    return tensors, size
