"""Transformer Engine's own Python code without its compiled part, for machines without a GPU.

`install` imports the modules of a wheel of the package `transformer-engine`, unpacked in a folder (`make transformer-engine`). The library
that they call is replaced by names that cannot be called. So modules can be made, of fake tensors, by the code that makes them on a GPU:
which arguments they take, and which parameters of which shapes and marks they have, is Transformer Engine's word. No kernel has run, and
nothing that one returns has been seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Python modules of the package that need what is not installed here: triton, onnx, einops.
REPLACED = (
    *("onnx_extensions", "triton", "triton.pad", "triton.permutation", "triton.cross_entropy"),
    *("triton.grouped_dbias_dscales", "triton.mhc"),  # of later versions
)


class Symbol:
    """A name in the compiled library, or a type or number there: it can be compared and put into tables, and not be called."""

    _numbers = itertools.count()

    def __init__(self, name: str) -> None:
        self._name, self._number = name, next(self._numbers)

    def __getattr__(self, name: str) -> Any:
        if name == "__members__":  # of an enumeration: those that Python's copy of it has asked for
            return {member: symbol for member, symbol in vars(self).items() if isinstance(symbol, Symbol)}
        if name.startswith("__"):
            raise AttributeError(name)
        symbol = Symbol(f"{self._name}.{name}")
        setattr(self, name, symbol)
        return symbol

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is compiled code, which is not here")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __index__(self) -> int:
        return self._number

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __or__(self, other: object) -> type:
        return object

    __ror__ = __or__


class Symbols(types.ModuleType):
    """A module with every name that it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("__"):
            raise AttributeError(name)
        symbol = Symbol(f"{self.__name__}.{name}")
        setattr(self, name, symbol)
        return symbol


def install(folder: Path) -> Any:
    """`transformer_engine`, from the wheel unpacked in `folder`. Once in a process, before Megatron-Core is imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then looks for none of CUDA's libraries
    sys.path.insert(0, str(folder))
    sys.modules["transformer_engine_torch"] = Symbols("transformer_engine_torch")
    for name in ("einops", *(f"transformer_engine.pytorch.{name}" for name in REPLACED)):
        if importlib.util.find_spec(name) is None if "." not in name else True:
            sys.modules[name] = Symbols(name)
            above, _, last = name.rpartition(".")
            if above in sys.modules:
                setattr(sys.modules[above], last, sys.modules[name])
    place = folder / "transformer_engine" / "common" / "__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine.common", place, submodule_search_locations=[str(place.parent)])
    assert spec is not None and spec.loader is not None
    common = sys.modules["transformer_engine.common"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None
    package = importlib.import_module("transformer_engine")
    package.common = common
    importlib.import_module("transformer_engine.pytorch")
    # It takes the library's functions by `import *`, which finds none. This one is asked for a version while modules are made.
    importlib.import_module("transformer_engine.pytorch.cpp_extensions").get_cudnn_version = lambda: 91300
    return package


@contextmanager
def claimed_gpu(capability: tuple[int, int] = (9, 0), cuda: str = "12.9") -> Iterator[None]:
    """In the block torch says that there is a GPU of this compute capability, and that it was compiled for a version of CUDA; what is made
    for the GPU is on the CPU."""
    from aligner.parallel.cpu_platform import _Event, _Stream

    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: torch.device("cpu"),
        "get_device_capability": lambda *_: capability,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: _Stream(),
    }
    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.version, "cuda", cuda))
        if quantization := sys.modules.get("transformer_engine.pytorch.quantization"):
            stack.enter_context(mock.patch.object(quantization, "get_device_compute_capability", lambda: capability))
            stack.enter_context(mock.patch.object(quantization.tex, "get_cublasLt_version", lambda: 120900))
            for name, value in list(vars(quantization).items()):  # what it has found out of another GPU
                if name.startswith("check_") and hasattr(value, "cache_clear"):
                    value.cache_clear()
                elif name.startswith("_") and name.endswith("_SUPPORT"):
                    setattr(quantization, name, None)
        yield


def described(chunk: Any) -> dict[str, dict[str, Any]]:
    """Every parameter by its global name: what moving weights between layouts, files and engines goes by."""
    from aligner.models.modules.chunk import global_name

    marks = ("tensor_model_parallel", "partition_dim", "allreduce", "sequence_parallel", "shared_embedding")
    neutral = {"partition_dim": -1, "allreduce": True}
    found = {}
    for name, parameter in chunk.named_parameters():
        has = parameter.__dict__
        found[global_name(chunk, name)] = {"shape": list(parameter.shape), "dtype": str(parameter.dtype)} | {
            mark: has.get(mark, neutral.get(mark, False)) for mark in marks
        }
    return found
