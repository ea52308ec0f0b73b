"""A cluster's hardware figures that a plan needs. A module without heavy imports: the config root reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from aligner.errors import ConfigError


class Device(str, Enum):
    """What the ranks compute on."""

    gpu = "gpu"
    cpu = "cpu"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes of one kind. Only `aligner plan` reads it; the defaults are a laptop, conf/cluster/ holds machines.

    Rates are of one GPU. Link rates count one direction; FLOP/s are dense (without sparsity).
    """

    device: Device = Device.cpu  # what the ranks compute on
    gpus_per_node: int = 1  # ranks that share a node (and its host memory)
    gpu_memory_gib: float = 16.0  # what the driver leaves to programs
    host_memory_gib: float = 16.0  # of a node
    bf16_tflops: float = 0.2  # peak of dense bfloat16 matrix products, in TFLOP/s
    fp8_tflops: float = 0.0  # peak of dense 8-bit matrix products, in TFLOP/s; 0: none
    hbm_gb_per_second: float = 40.0  # bandwidth of the device memory, in GB/s
    nvlink_gb_per_second: float = 10.0  # to other GPUs of the node
    network_gb_per_second: float = 1.0  # to other nodes
    host_gb_per_second: float = 10.0  # to host memory
    reserved_gib: float = 0.44  # context, libraries and their workspaces, in every process; on CPU Python and torch too
    communicator_gib: float = 0.0  # buffers of each communicator that a rank belongs to
    fragmentation: float = 0.0  # part of what is allocated that the allocator loses between blocks
    achievable_flops: float = 0.5  # part of the peak that large matrix products reach
    achievable_bandwidth: float = 0.7  # part of the memory's and the links' rates
    collective_microseconds: float = 50.0  # latency of a collective
    launch_microseconds: float = 50.0  # of the kernels of one layer of a decode step, below which no layer gets

    def __post_init__(self) -> None:
        zero_allowed = ("fp8_tflops", "reserved_gib", "communicator_gib", "fragmentation", "collective_microseconds", "launch_microseconds")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "device" or (field.name in zero_allowed and value >= 0):
                continue
            if not value > 0:
                raise ConfigError(f"cluster.{field.name}={value}: must be above 0")
        for name in ("achievable_flops", "achievable_bandwidth"):
            if getattr(self, name) > 1:
                raise ConfigError(f"cluster.{name}={getattr(self, name)}: a part of the peak, at most 1")
        if self.fragmentation >= 1:
            raise ConfigError(f"cluster.fragmentation={self.fragmentation}: must be below 1")

    def ranks_on_node(self, component: str, num_ranks: int) -> int:
        """How many of a component's ranks share a node. Raises ConfigError where they would not fill the nodes."""
        found = min(self.gpus_per_node, num_ranks)
        if num_ranks % found:
            raise ConfigError(f"{component} has {num_ranks} ranks: they must fill nodes of cluster.gpus_per_node={self.gpus_per_node}")
        return found
