"""A simulated CUDA device: torch's own CUDA tensors, allocator and streams, whose operators the CPU computes in the same memory.

`install` runs when torch is imported in the environment of environment.py. What a real GPU would refuse is refused (tensors of two devices
in one operator, CPU tensors in an NCCL group, waiting for the device while a graph is captured); what makes the host wait for the device is
counted with the line it comes from. Kernels, their precision and speed, NCCL's order and deadlocks are not simulated.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from simulated_cuda.kernels import kernel
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

REPORT = "SIMULATED_CUDA_REPORT"  # the folder that receives one JSON file per process
# Computed by torch's CUDA build itself: they allocate or relabel memory and start no kernel.
_NATIVE = {
    f"aten::{name}"
    for name in (
        "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_", "set_", "record_stream", "is_pinned",
        "_pin_memory", "detach", "alias", "lift_fresh", "lift", "_unsafe_view", "_reshape_alias", "view", "sym_size", "sym_stride",
    )
} | {"prim::device"}  # fmt: skip
_MIXES_DEVICES = {
    f"aten::{name}" for name in ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index")
}
# Their result's shape or value is read by the host.
_WAIT = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
        "bincount",
        "is_nonzero",
    )
}
_BOOLEAN_INDEX = {f"aten::{name}" for name in ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index")}
_mode: Simulation
_nccl_groups: set[str] = set()


class SimulationError(RuntimeError):
    """What a real GPU would refuse, or what this simulation cannot do."""


class Counts:
    """What this process did, over all threads."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()  # (what, line)
        self.captures: Counter[str] = Counter()  # by line
        self.replays = 0

    def wait(self, what: str) -> None:
        """The host waits for the device. Raises SimulationError where that cannot be."""
        self.waits[what, site()] += 1
        if _captured.graph is not None:
            raise SimulationError(f"{what} while a CUDA graph is captured, at {site()}")

    def write(self) -> None:
        folder = os.environ.get(REPORT)
        if not folder or not self.operators:
            return
        report = {
            "rank": os.environ.get("RANK", "0"),
            "program": sys.argv,
            "operators": sum(self.operators.values()),
            "names": dict(self.operators.most_common()),
            "waits": [[what, line, count] for (what, line), count in self.waits.most_common()],
            "captures": dict(self.captures),
            "replays": self.replays,
            "peak_allocated": [torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())],
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


counts = Counts()


class _Captured(threading.local):
    graph: list[tuple[Any, ...]] | None = None


_captured = _Captured()


def site() -> str:
    """The innermost lines of Megatron-Core and of this project on the stack, as `file:line`."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/aligner/" in name:
            line = f"aligner/{name.split('/aligner/')[-1]}:{frame.f_lineno}"
            return f"{found} < {line}" if found else line
        if "/megatron/" in name and not found:
            found = f"megatron/{name.split('/megatron/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return found or "?"


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor in the memory of a CUDA tensor, which it keeps alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_byte * size).from_address(storage.data_ptr())
    buffer.owner = storage
    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A new CUDA tensor with a CPU tensor's values and strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host_view(made).copy_(tensor)
    return made


class Simulation(TorchDispatchMode):
    """Computes every operator that has CUDA tensors or makes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if name.startswith("c10d") and not _in_nccl(name, args, tensors) and on_gpu:
            return _in_gloo(func, args)
        if not on_gpu and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        counts.operators[name] += 1
        if name in _NATIVE or torch.Tag.inplace_view in func.tags or (func.is_view and name != "aten::_to_copy"):
            return func(*args, **kwargs)
        if on_gpu and name not in _MIXES_DEVICES and any(not tensor.is_cuda and tensor.dim() for tensor in tensors):
            raise SimulationError(f"Expected all tensors to be on the same device: {name} got cuda and cpu tensors at {site()}")
        if (what := _makes_host_wait(name, args, kwargs, target)) is not None:
            counts.wait(what)
        result = compute(func, args, kwargs)
        if _captured.graph is not None:
            _captured.graph.append((func, args, kwargs, result))
        return result


def _makes_host_wait(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device | None) -> str | None:
    """Why the host waits for the device in this operator, or None where it does not."""
    if name in _WAIT or (name == "aten::repeat_interleave" and len(args) == 1 and kwargs.get("output_size") is None):
        return name.removeprefix("aten::")
    if name in _BOOLEAN_INDEX:
        masks = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
        # A mask and one number of the host are a masked_fill.
        fills = name != "aten::index" and len(args) > 2 and args[2].numel() == 1 and not args[2].is_cuda
        return "boolean index" if masks and not fills else None
    if name == "aten::copy_":
        to, source = args[0], args[1]
        if not source.numel():
            return None
        wait_free = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if to.is_cuda and source.is_cuda:
            return None
        if source.is_cuda:
            return None if wait_free and to.is_pinned() else "copy to the host"
        return _upload(source, wait_free)
    if name == "aten::_to_copy" and target is not None:
        source, wait_free = args[0], bool(kwargs.get("non_blocking"))
        if not source.numel():
            return None
        if source.is_cuda and target.type == "cpu":
            return None if wait_free else "copy to the host"  # torch pins what a non-blocking one returns
        if not source.is_cuda and target.type == "cuda":
            return _upload(source, wait_free)
    return None


def _upload(source: Tensor, wait_free: bool) -> str | None:
    if not source.is_pinned():
        return "pageable copy"
    return None if wait_free else "blocking copy"


def _in_nccl(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Whether a collective is one of an NCCL group, which takes CUDA tensors only."""
    group = next((a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())), None)
    if group is None or torch._C._distributed_c10d.ProcessGroup.unbox(group).group_name not in _nccl_groups:
        return False
    if any(not tensor.is_cuda for tensor in tensors) and name != "c10d::barrier":
        raise SimulationError(f"No backend type associated with device type cpu: {name} in an NCCL group at {site()}")
    return True


def _in_gloo(func: Any, args: tuple[Any, ...]) -> Any:
    """gloo sends and receives CPU tensors only. The project's own kernels for ranks that share a GPU stand below this mode."""
    host_collectives = sys.modules.get("aligner.parallel.host_collectives")
    if host_collectives is None or not host_collectives.is_installed():
        raise SimulationError(f"{func} of CUDA tensors in a gloo group at {site()}")
    if _captured.graph is not None:  # a replay would leave it out
        raise SimulationError(f"{func} over the host while a CUDA graph is captured, at {site()}")
    return host_collectives.over_the_host(func, *args)


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool = False) -> Any:
    """The operator's result, computed on the CPU in the tensors' own memory. With `wait` collectives are over at the return."""
    views: dict[int, tuple[Tensor, Tensor]] = {}

    def to_host(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_cuda):
            return value
        if id(value) not in views:
            views[id(value)] = host_view(value), value
        return views[id(value)][0]

    host_args, host_kwargs = tree_map(to_host, args), {key: tree_map(to_host, value) for key, value in kwargs.items()}
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if target is not None:
        host_kwargs["device"] = torch.device("cpu")
    if target is not None and target.type == "cuda":
        host_kwargs.pop("pin_memory", None)
    device = target or next(iter(views.values()))[1].device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    function = kernel(func._schema.name)
    with _Randomness(func, host_kwargs, device):
        result = function(host_args, host_kwargs) if function is not None else func(*host_args, **host_kwargs)
    if wait:
        for work in tree_flatten(result)[0]:
            if isinstance(work, torch.ScriptObject) and "Work" in str(work._type()):
                torch._C._distributed_c10d.Work.unbox(work).wait()
    originals = {id(view): tensor for view, tensor in views.values()}
    written = _written(func, args, kwargs)
    if written is not None:
        return written

    def back(value: Any) -> Any:
        if not isinstance(value, Tensor) or device.type == "cpu":
            return value
        return originals[id(value)] if id(value) in originals else on_device(value, device)

    return tree_map(back, result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place operator returns, or None where it returns something new."""
    returns = func._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return kwargs[argument.name] if argument.name in kwargs else args[position]
    return None


class _Randomness:
    """In the block a random operator draws from the CPU's generator as the seed and the offset of the CUDA generator say."""

    def __init__(self, func: Any, host_kwargs: dict[str, Any], device: torch.device) -> None:
        given = host_kwargs.get("generator")
        self._generator = None
        if torch.Tag.nondeterministic_seeded in func.tags and device.type == "cuda" and (given is None or given.device.type == "cuda"):
            self._generator = given if given is not None else torch.cuda.default_generators[device.index]
            if "generator" in host_kwargs:
                host_kwargs["generator"] = None

    def __enter__(self) -> None:
        if self._generator is not None:
            self._before = torch.default_generator.get_state()
            offset = self._generator.get_offset()
            torch.default_generator.manual_seed((self._generator.initial_seed() * 1_000_003 + offset) % (1 << 63))
            self._generator.set_offset(offset + 4)

    def __exit__(self, *error: object) -> None:
        if self._generator is not None:
            torch.default_generator.set_state(self._before)


class _Graph:
    """A recorded list of operators; replaying computes them again into the same tensors."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.operators: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        counts.replays += 1
        with _disable_current_modes():
            for func, args, kwargs, before in self.operators:
                after = compute(func, args, kwargs, wait=True)
                for old, new in zip(_tensors(before), _tensors(after), strict=True):
                    if old.is_cuda and old.data_ptr() != new.data_ptr():
                        host_view(old).copy_(host_view(new))

    def reset(self) -> None:
        self.operators = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class _capture:
    """Stands for `torch.cuda.graph`."""

    def __init__(self, graph: _Graph, pool: object = None, stream: object = None, capture_error_mode: str = "global") -> None:
        self._graph = graph

    def __enter__(self) -> None:
        counts.captures[site()] += 1
        _captured.graph = self._graph.operators

    def __exit__(self, *error: object) -> None:
        _captured.graph = None


def _tensors(value: Any) -> list[Tensor]:
    return [part for part in tree_flatten(value)[0] if isinstance(part, Tensor)]


def install() -> None:
    """Let this process's torch compute on the simulated device, in all threads."""
    global _mode
    torch.cuda.graph, torch.cuda.CUDAGraph = _capture, _Graph  # type: ignore[misc, assignment]
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    _count_explicit_waits()
    _simulate_nccl()
    _readable_tensors()
    _causal_bias_outside()
    _enter_in_every_thread()
    _mode = Simulation()
    _mode.__enter__()
    torch.autograd.set_multithreading_enabled(False)  # backward runs in the thread that has the mode
    atexit.register(counts.write)


def _count_explicit_waits() -> None:
    def counted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def wait(*args: Any, **kwargs: Any) -> Any:
            counts.wait(what)
            return original(*args, **kwargs)

        setattr(owner, name, wait)

    def made_of_numbers(original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            for one in tree_flatten(args[:1])[0]:
                if isinstance(one, Tensor) and one is not args[0] and one.is_cuda:
                    counts.wait("_local_scalar_dense")  # of a list of numbers each is read
            made = original(*args, **kwargs)  # copies to the device beside the mode
            if made.is_cuda and not (args and isinstance(args[0], Tensor)):
                counts.wait("pageable copy")
            return made

        return make

    _device_constructors()  # remembers the originals, which a `with torch.device` is asked about
    torch.tensor, torch.as_tensor = made_of_numbers(torch.tensor), made_of_numbers(torch.as_tensor)
    counted(torch.cuda, "synchronize", "synchronize")
    counted(torch.cuda.Stream, "synchronize", "Stream.synchronize")
    counted(torch.cuda.Event, "synchronize", "Event.synchronize")


def _simulate_nccl() -> None:
    """Groups of "nccl" are gloo's over the same memory; they take CUDA tensors only."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    initialise, new_group, get_backend = c10d.init_process_group, c10d.new_group, c10d.get_backend
    default = "gloo"

    def simulated(backend: str | None) -> str | None:
        return "cpu:gloo,cuda:gloo" if backend == "nccl" else backend

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        nonlocal default
        kwargs.pop("device_id", None)
        default = backend or "nccl"
        initialise(simulated(default), *args, **kwargs)
        if default == "nccl":
            _nccl_groups.add(dist.group.WORLD.group_name)

    def simulated_new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        backend = backend or default
        group = new_group(ranks, timeout, simulated(backend), *args[1:], **kwargs)
        if backend == "nccl" and hasattr(group, "group_name"):
            _nccl_groups.add(group.group_name)
        return group

    def is_nccl(group: Any) -> bool:
        return getattr(group or dist.group.WORLD, "group_name", None) in _nccl_groups

    for module in (dist, c10d):
        module.init_process_group, module.new_group = init_process_group, simulated_new_group
        module.get_backend = lambda group=None: "nccl" if is_nccl(group) else get_backend(group)
    c10d._get_object_coll_device = lambda group=None: "cuda" if is_nccl(group) else "cpu"


def _readable_tensors() -> None:
    original = Tensor.__repr__

    def __repr__(self: Tensor, **kwargs: Any) -> str:
        return f"cuda:{original(host_view(self.detach()))}" if self.is_cuda else original(self, **kwargs)

    Tensor.__repr__ = __repr__  # type: ignore[method-assign]


def _causal_bias_outside() -> None:
    """torch's CausalBias is a tensor subclass, which a mode may not make."""
    import torch.nn.attention.bias as bias

    def causal_lower_right(*size: int) -> Any:
        with _disable_current_modes():
            return bias.CausalBias(bias.CausalVariant.LOWER_RIGHT, *size)

    bias.causal_lower_right = causal_lower_right


def _enter_in_every_thread() -> None:
    run = threading.Thread.run

    def in_the_mode(self: threading.Thread) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with Simulation():
            run(self)

    threading.Thread.run = in_the_mode  # type: ignore[method-assign]
