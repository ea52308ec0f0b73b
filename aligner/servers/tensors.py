"""Structural checks of a request's tensors, independent of their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aligner.servers.config import RequestLimits

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One named tensor: dtype is "int64", "float32" or "bytes" (UTF-8 text)."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    optional: bool = False


def check_tensors(specs: tuple[TensorSpec, ...], arrays: Arrays, limits: RequestLimits) -> None:
    """Raise ValueError unless `arrays` has the stated tensors with the stated dtypes, agreeing shapes, allowed sizes and finite numbers."""
    described = {name: ("bytes" if array.dtype.kind in "OS" else array.dtype.name, array.shape) for name, array in arrays.items()}
    check_structure(specs, described, limits)
    for name, (dtype, _) in described.items():
        if dtype == "float32" and not np.isfinite(arrays[name]).all():
            bad = int((~np.isfinite(arrays[name])).sum())
            raise ValueError(f"{name}: {bad} of {arrays[name].size} values are NaN or infinite; all must be finite")


def check_structure(specs: tuple[TensorSpec, ...], described: Mapping[str, tuple[str, tuple[int, ...]]], limits: RequestLimits) -> None:
    """Raise ValueError unless the names, dtypes and shapes in `described` are what `specs` and `limits` allow."""
    largest = {"B": limits.max_rows, "S": limits.max_sequence_length}
    sizes: dict[str, tuple[int, str]] = {}
    names = [spec.name for spec in specs]
    for name in described:
        if name not in names:
            raise ValueError(f"{name}: no such tensor; allowed are {', '.join(names)}")
    for spec in specs:
        if spec.name not in described:
            if spec.optional:
                continue
            raise ValueError(f"{spec.name}: missing; expected {spec.dtype} {_shape_text(spec.shape)}")
        dtype, shape = described[spec.name]
        if dtype != spec.dtype or len(shape) != len(spec.shape):
            raise ValueError(f"{spec.name}: got {dtype} {list(shape)}, expected {spec.dtype} {_shape_text(spec.shape)}")
        for expected, size in zip(spec.shape, shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    raise ValueError(f"{spec.name}: got shape {list(shape)}, expected {_shape_text(spec.shape)}")
                continue
            if not 1 <= size <= largest[expected]:
                raise ValueError(f"{spec.name}: got shape {list(shape)}; {expected} may be 1 to {largest[expected]}")
            known, owner = sizes.setdefault(expected, (size, spec.name))
            if known != size:
                raise ValueError(f"{spec.name}: got shape {list(shape)}, but {owner} has {expected} = {known}")


def _shape_text(shape: tuple[str | int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
