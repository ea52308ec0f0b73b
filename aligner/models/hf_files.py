"""Checks a Hugging Face model's files and lists their tensors before anything is loaded. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aligner.errors import ModelFilesError, describe_os_error

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MXFP4 = "MXFP4"
MXFP4_ENDINGS = "_blocks", "_scales"  # of the names of a tensor's two, both U8
FP8 = "FP8"
FP8_SCALES = "_scale_inv"  # ends the name of the scales of a tensor in F8_E4M3
_LFS_POINTER = b"version https://git-lfs"
_POINTER = "is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`"
_MOST_HEADER_BYTES = 100 << 20  # what the format itself allows


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor in a file of the directory."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it: F32, BF16, I8, ...; or MXFP4 or FP8


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFilesError where there is none, in one line that names the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFilesError(describe_os_error(error, path)) from error
    if data.startswith(_LFS_POINTER):
        raise ModelFilesError(f"{path} {_POINTER}")
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ModelFilesError(f"{path} is damaged: no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} is damaged: a JSON {type(content).__name__}, expected an object")
    return content


def stored_tensors(directory: Path) -> tuple[dict[str, Stored], int]:
    """Every tensor of a directory's safetensors files by name, and the bytes of the files. Only headers and sizes are read.

    Raises ModelFilesError for a file that is missing, cut short or not what the index says.
    """
    index: dict[str, str] = {}
    if (directory / INDEX_FILE).exists():
        found = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
            raise ModelFilesError(f"{directory / INDEX_FILE} is damaged: no weight_map of names and files")
        index = found
    elif not (directory / SINGLE_FILE).exists():
        raise ModelFilesError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors weights are read")
    tensors: dict[str, Stored] = {}
    total = 0
    for file in sorted(set(index.values())) or [SINGLE_FILE]:
        header, size = read_header(directory / file)
        total += size
        if missing := [name for name, where in index.items() if where == file and name not in header]:
            raise ModelFilesError(f"{directory / file}: has no {missing[0]}, which {INDEX_FILE} says it has ({len(missing)} such)")
        for name, entry in header.items():
            if index.get(name, file) == file:
                tensors[name] = Stored(file=file, shape=tuple(entry["shape"]), dtype=str(entry["dtype"]))
    return tensors, total


def as_read(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors that those of the files stand for: blocks [..., rows, groups, 16] of two numbers each and their scales in MXFP4 for
    [..., groups * 32, rows], as gpt-oss has them; and matrices in FP8 with a scale for each block, as DeepSeek-V3 has them."""
    blocks, scales = MXFP4_ENDINGS
    found = dict(tensors)
    for name, one in tensors.items():
        if one.dtype == "F8_E4M3" and len(one.shape) == 2 and found.pop(name + FP8_SCALES, None):
            found[name] = replace(one, dtype=FP8)
        base = name.removesuffix(blocks)
        pair = one, tensors.get(base + scales)
        if base == name or pair[1] is None or {part.dtype for part in pair} != {"U8"} or one.shape[:-1] != pair[1].shape:
            continue
        *stack, rows, groups, size = one.shape
        del found[name], found[base + scales]
        found[base] = Stored(file=one.file, shape=(*stack, groups * size * 2, rows), dtype=MXFP4)
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(entries by tensor, bytes of the file). The file must be exactly as long as its header says."""
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
        entries = [(entry["data_offsets"][1], entry["shape"], entry["dtype"]) for entry in header.values()]
        end = max((offset for offset, _, _ in entries), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelFilesError(f"{path}: its header cannot be read: {error}") from error
    if 8 + length + end != size:
        raise ModelFilesError(f"{path} has {size} bytes, its header says {8 + length + end}: cut short, or still being copied")
    return header, size
