"""Megatron-Core on a machine without CUDA: the same modules, schedules and optimizer, on CPU tensors over gloo.

Megatron-Core uses `torch.cuda` and `device="cuda"` in many places. `install()` gives every `megatron.*` module its *own* namespace copy of
`torch` in which `torch.cuda` is a CPU stand-in and the tensor factories map `"cuda"` to the CPU. torch itself and all other packages
keep the real one. `install()` also replaces some Megatron functions that assume CUDA kernels (gradient clipping, parameter types).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "zeros ones empty full tensor arange rand randn randint as_tensor zeros_like ones_like empty_like full_like linspace eye".split()
)


def install() -> None:
    """Prepare this process for Megatron-Core on CPU, before it is imported. Raises RuntimeError after that, or with CUDA."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU platform must not be installed where CUDA is available")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before aligner.parallel.mcore: import aligner.parallel.mcore first")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # without CUDA these would only raise
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    # `jit_fuser` is torch.compile: it would import Inductor (3 s) and compile C++ during the first step.
    unchanged = dict.fromkeys(("jit_fuser", "noop_decorator"), lambda function: function)
    _add_module("megatron.core.jit", unchanged | dict.fromkeys(("enable_jit_fuser", "disable_jit_fuser"), _nothing))
    if importlib.util.find_spec("triton") is None:  # 0.19 always imports a triton kernel
        _add_module("megatron.core.transformer.moe.ops.paged_stash", {"__getattr__": lambda name: None})
    sys.meta_path.insert(0, _GiveNamespace(_torch_namespace()))
    _replace_functions()


def _add_module(name: str, contents: dict[str, Any]) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Event:
    """torch.cuda.Event on a device that finishes everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, *args: Any) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    wait = synchronize = _nothing


class _Stream:
    """torch.cuda.Stream: the CPU is one in-order stream."""

    device = CPU

    __init__ = wait_stream = wait_event = synchronize = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


def _cuda_namespace() -> types.ModuleType:
    cuda = types.ModuleType("torch.cuda")
    cuda.__dict__.update(torch.cuda.__dict__)
    stand_ins: dict[str, Any] = {
        "__getattr__": lambda name: getattr(torch.cuda, name),
        "is_available": lambda: False,
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "stream": lambda *args: contextlib.nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "memory_stats": lambda *args: defaultdict(int),
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, mark=_nothing),
    }
    stand_ins |= dict.fromkeys(("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect"), _nothing)
    stand_ins |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *args: 0)
    cuda.__dict__.update(stand_ins)
    return cuda


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapper


def _torch_namespace() -> types.ModuleType:
    namespace = types.ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    namespace.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in FACTORIES})
    namespace.__dict__["__getattr__"] = lambda name: getattr(torch, name)
    namespace.__dict__["cuda"] = _cuda_namespace()
    namespace.__dict__["autocast"] = lambda device_type, *args, **kwargs: torch.autocast(
        "cpu" if device_type == "cuda" else device_type, *args, **kwargs
    )
    return namespace


class _GiveNamespace(importlib.abc.MetaPathFinder):
    """Replaces the name `torch` in every `megatron.*` module after it has been executed (0.19 imports lazily, so a hook is needed)."""

    def __init__(self, namespace: types.ModuleType) -> None:
        self.namespace = namespace

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if module.__dict__.get("torch") is torch:
                    module.torch = self.namespace

            spec.loader.exec_module = exec_module
        return spec


def _replace_functions() -> None:
    def load(name: str) -> types.ModuleType:
        return importlib.import_module("megatron.core." + name)

    rng = load("tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)  # "CPU RNG state changed within GPU RNG context": they are one here
    optimizer, clip = load("optimizer.optimizer"), load("optimizer.clip_grads")
    clip.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = _clip_grad_by_total_norm
    _present_cuda_types(optimizer.Float16OptimizerWithFloat16Params)
    _present_cuda_types(load("optimizer.distrib_optimizer").DistributedOptimizer)
    load("transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = _plain_numbers


def _plain_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of the experts' dispatcher: gloo's all-to-all accepts integers only; other tensors stay tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _clip_grad_by_total_norm(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False, **_: Any) -> None:
    """Megatron's clipping without multi-tensor-apply: scale all gradients by max_norm / total_norm if that is below 1."""
    name = "decoupled_grad" if use_decoupled_grad else "grad"
    grads = [grad.detach() for p in parameters if (grad := getattr(p, name, None)) is not None]
    coefficient = max_norm / (total_norm + 1.0e-6)
    if grads and coefficient < 1.0:
        torch._foreach_mul_(grads, coefficient)


def _present_cuda_types(optimizer: type) -> None:
    """Show CUDA type strings to constructors, which sort parameters by `param.type()` and know no others."""
    construct, real = optimizer.__init__, torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        return result if args or kwargs else result.replace("torch.", "torch.cuda.", 1)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.Tensor.type = type_
        try:
            construct(self, *args, **kwargs)
        finally:
            torch.Tensor.type = real

    optimizer.__init__ = __init__
