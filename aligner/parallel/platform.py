"""The device a component computes on, and the collective backend that goes with it: CUDA with NCCL, else CPU with gloo."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from aligner.errors import ConfigError
from aligner.parallel import host_collectives

_DRIVER = "/dev/nvidiactl"  # a call of CUDA would start the driver, with the environment of that moment


def backend(ranks_per_gpu: int = 1) -> str:
    """The torch.distributed backend: the process group's, else this machine's (on the host for ranks that share a GPU)."""
    if dist.is_initialized() and dist.get_backend() in ("nccl", "gloo"):
        return dist.get_backend()
    return "nccl" if torch.cuda.is_available() and ranks_per_gpu == 1 else "gloo"


def device() -> torch.device:
    """The device of this process, which `select_device` made the current one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def select_device(local_rank: int, *, ranks_per_gpu: int = 1) -> None:
    """Make the GPU with this rank's number on its node the current device. Does nothing on a CPU machine.

    A rank that sees fewer GPUs (CUDA_VISIBLE_DEVICES: its own, or those of its engine's replica) takes its place among them;
    `aligner.parallel.agreement` finds two ranks on one GPU. Raises ConfigError if the process sees all GPUs and they are too few for
    `ranks_per_gpu` on each. If ranks share a GPU, collectives of CUDA tensors use the host from now on.
    """
    if not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if local_rank >= count * ranks_per_gpu and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise ConfigError(
            f"run.ranks_per_gpu={ranks_per_gpu}: local rank {local_rank} finds no free one of this machine's {count} GPUs; allowed: at "
            f"most {count * ranks_per_gpu} ranks of a component here, or ranks that share GPUs: run.ranks_per_gpu={local_rank // count + 1}"
        )
    torch.cuda.set_device(local_rank % count)
    if ranks_per_gpu > 1:
        host_collectives.install()


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads either; the first since 2.9, which warns of the other


def prepare_environment(*, exchanges: bool, asynchronous: bool, hands_memory: bool) -> dict[str, str]:
    """Set the variables that CUDA, NCCL and torch read at their first use, unless the user has set them or NVIDIA's driver is missing.
    Returns the values that they will read.

    NCCL_NVLS_ENABLE=0: a rank belongs to half a dozen communicators, and NVLink SHARP would need memory in each that no plan counts.
    CUDA_DEVICE_MAX_CONNECTIONS=1, if the layers' `exchanges` must start before the work that they overlap with: kernels then start in the
    order of their launch, as Megatron-Core and Transformer Engine require. Not with `asynchronous` rollouts, whose kernels would wait in
    the one queue behind training's. Expandable segments let torch use freed memory for tensors of any size. Not with `hands_memory`: a
    wrapped engine opens tensors from another process by CUDA IPC (TensorRT-LLM), or its allocator refuses such segments (vLLM).
    """
    if not os.path.exists(_DRIVER):
        return {}
    read = {"NCCL_NVLS_ENABLE": "0"}
    if exchanges and not asynchronous:
        read["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    own = [name for name in _ALLOCATOR if name in os.environ]
    if own or not hands_memory:
        read[own[0] if own else _ALLOCATOR[torch.__version__ < "2.9"]] = "expandable_segments:True"
    return {name: os.environ.setdefault(name, value) for name, value in read.items()}


def set_float32_matmul(precision: str) -> None:
    """Compute this process's float32 products in float32 (`highest`) or on a GPU in TF32 (`high`) from now on, whatever the environment
    specifies (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE). Uses the older of torch's interfaces: its compiler reads that one, and raises if the two
    differ."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def claim_device(local_rank: int, *, ranks_per_gpu: int = 1) -> str:
    """`select_device`, but returns the GPU's name, unique on this machine, if one rank alone may have it. Ranks on the same GPU are then
    refused together (`aligner.parallel.agreement`), so nothing is raised here. Empty on a CPU machine."""
    if not torch.cuda.is_available():
        return ""
    if ranks_per_gpu > 1:
        select_device(local_rank, ranks_per_gpu=ranks_per_gpu)
        return ""
    number = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    name = visible_devices()[number]
    if "-" in name:  # its own: GPU-..., MIG-...
        return name
    own = str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
    if own.strip("0-"):
        return own
    return "" if "CUDA_VISIBLE_DEVICES" in os.environ else name  # a driver without UUIDs: among all GPUs the number is a name


def bind_to_node(root: Path = Path("/sys")) -> str:
    """Keep this process on those of its processors that are beside its GPU, so that its copies do not cross between sockets (Linux puts
    memory where it is first touched). Returns the reason if it cannot; empty if it did, or if the machine has one node."""
    if not torch.cuda.is_available() or len(list(root.glob("devices/system/node/node[0-9]*"))) < 2:
        return ""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(gpu, "pci_bus_id"):
        return f"torch {torch.__version__} does not report where the GPU is"
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((root / "bus/pci/devices" / place / "numa_node").read_text())
        beside = (root / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError) as error:
        return f"{root} does not report where GPU {place} is ({error})"
    spans = [span.split("-") for span in beside.strip().split(",") if span]
    wanted, given = {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}, os.sched_getaffinity(0)
    if not wanted:
        return f"{root} does not report which processors are beside GPU {place} (node {node})"
    if not wanted & given:
        return f"it was given processors {min(given)} to {max(given)}, and GPU {place} is beside others (node {node}: {beside.strip()})"
    os.sched_setaffinity(0, wanted & given)
    return ""


def visible_devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; counted by NVML, so the variable can still change."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def see_block(local_rank: int, size: int) -> None:
    """Let this process see only the GPUs of its block of `size` consecutive ranks on the node; before anything has used one.

    For a wrapped engine that uses the GPU with its own rank's number. Does nothing if that already holds, or on a CPU machine.
    """
    everything = visible_devices()
    if len(everything) > size:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(block_of(everything, local_rank, size))


def block_of(devices: Sequence[str], local_rank: int, size: int) -> list[str]:
    """The devices of a rank's block. Raises ConfigError if the node has too few."""
    first = local_rank // size * size
    if first + size > len(devices):
        raise ConfigError(f"local rank {local_rank}, in a block of {size}, has no GPUs among {','.join(devices)} (CUDA_VISIBLE_DEVICES)")
    return list(devices[first : first + size])


def default_dtype() -> torch.dtype:
    """bfloat16 where the hardware multiplies it fast, float32 on CPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


PEAK_MEMORY = "peak_bytes"  # of a rank's training step in the run's trace


def peak_memory() -> int:
    """This process's peak memory in bytes: of the GPU (outside torch its present size), or without one of the host."""
    if not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def synchronize() -> None:
    """Wait for the device, so that a wall-clock reading is right."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_cached() -> None:
    """Release device memory that torch keeps for its next tensors, for other processes and other allocators of this one."""
    torch.cuda.empty_cache()


class SideStream:
    """A stream of the current GPU for one thread beside the main one, so that the two do not wait for each other."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """In the block, the calling thread computes on this stream. At its end the results are ready for all streams. No-op on CPU."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._stream.device)  # a new thread starts on the first GPU
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
