"""A cluster's hardware figures that a plan needs. A module without heavy imports: the config root reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from aligner.errors import ConfigError


class Device(str, Enum):
    """What the ranks compute on."""

    gpu = "gpu"
    cpu = "cpu"


_ZERO_ALLOWED = (
    "cpus_per_node",
    "fp8_tflops",
    "reserved_gib",
    "communicator_gib",
    "fragmentation",
    "leaf_nodes",
    "collective_microseconds",
    "network_microseconds",
    "launch_microseconds",
    "host_layer_microseconds",
    "host_pass_milliseconds",
    "engine_step_milliseconds",
    "engine_sequence_microseconds",
    "engine_request_microseconds",
    "layer_token_microseconds",
    "step_seconds",
    "sequence_milliseconds",
    "phase_seconds",
    "straggling",
)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes of one kind. Only `aligner plan` reads it; the defaults are a CPU's, conf/cluster/ holds machines.

    Rates are of one GPU. Link rates count one direction; FLOP/s are dense (without sparsity).
    """

    device: Device = Device.cpu  # what the ranks compute on
    gpus_per_node: int = 1  # ranks that share a node (and its host memory)
    cpus_per_node: int = 0  # processors of a node, which job scripts share out to its ranks; 0: as Slurm does by itself
    gpu_memory_gib: float = 16.0  # what the driver leaves to programs
    host_memory_gib: float = 16.0  # of a node
    bf16_tflops: float = 0.2  # peak of dense bfloat16 matrix products, in TFLOP/s
    fp8_tflops: float = 0.0  # peak of dense 8-bit matrix products, in TFLOP/s; 0: none
    compute_capability: float = 9.0  # of the GPUs: what model.fp8_recipe=auto is
    hbm_gb_per_second: float = 40.0  # bandwidth of the device memory, in GB/s
    nvlink_gb_per_second: float = 10.0  # to other GPUs of the node
    network_gb_per_second: float = 1.0  # to other nodes
    host_gb_per_second: float = 10.0  # to host memory
    host_memory_gb_per_second: float = 20.0  # that a node's cores read and write of its memory (`optimizer.cpu_offload`)
    reserved_gib: float = 0.44  # context, libraries and their workspaces, in every process; on CPU Python and torch too
    communicator_gib: float = 0.0  # buffers of each communicator that a rank belongs to
    fragmentation: float = 0.0  # part of what is allocated that the allocator loses between blocks
    storage_gb_per_second: float = 1.0  # of all ranks together, to the run directory
    leaf_nodes: int = 0  # nodes below one switch, beyond which the network is oversubscribed; 0: it nowhere is
    oversubscription: float = 1.0  # by so much the network is slower between leaves
    achievable_flops: float = 0.5  # part of the peak that large matrix products reach
    achievable_attention: float = 0.4  # part of the peak that attention kernels reach
    achievable_experts: float = 0.6  # speed of the products of experts, relative to equal ones of dense layers
    achievable_bandwidth: float = 0.7  # part of the device memory's rate
    achievable_link: float = 0.7  # part of the links' rates
    collective_microseconds: float = 50.0  # latency of a collective inside a node
    network_microseconds: float = 20.0  # more of it for each doubling of the nodes
    launch_microseconds: float = 50.0  # of the kernels of one layer of a decode step, below which no layer gets
    host_layer_microseconds: float = 400.0  # host time that starts the kernels of one layer's forward pass in training
    layer_token_microseconds: float = 0.0  # of a layer's small kernels for one token besides its bytes: what short rows cost a CPU
    host_pass_milliseconds: float = 2.0  # host time of a micro-batch's forward pass besides its layers
    engine_step_milliseconds: float = 1.0  # host time of a decode step: scheduling, the draw, stop strings
    engine_sequence_microseconds: float = 10.0  # of it for each sequence of the batch
    engine_request_microseconds: float = 0.0  # host time of a response: its request, the first pages, the text
    step_seconds: float = 0.1  # host time of a training step besides its phases: data, rewards, advantages, metrics
    sequence_milliseconds: float = 0.5  # of it for each sequence, on the rank that handles most
    phase_seconds: float = 0.0  # to change from one phase to the next: waits for all ranks, memory given back, caches filled
    straggling: float = 0.0  # part by which the slowest of many ranks computes longer than the mean
    expert_imbalance: float = 1.2  # tokens of the most loaded rank of an expert-parallel group, relative to the mean
    concurrency: float = 0.5  # speed of sampling and of training, relative to alone, while both use the same ranks

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "device" or (field.name in _ZERO_ALLOWED and value >= 0):
                continue
            if not value > 0:
                raise ConfigError(f"cluster.{field.name}={value}: must be above 0")
        for name in (
            "achievable_flops",
            "achievable_attention",
            "achievable_experts",
            "achievable_bandwidth",
            "achievable_link",
            "concurrency",
        ):
            if getattr(self, name) > 1:
                raise ConfigError(f"cluster.{name}={getattr(self, name)}: a part of the peak, at most 1")
        for name in ("oversubscription", "expert_imbalance"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name}={getattr(self, name)}: must be at least 1")
        if self.fragmentation >= 1:
            raise ConfigError(f"cluster.fragmentation={self.fragmentation}: must be below 1")

    def ranks_on_node(self, component: str, num_ranks: int) -> int:
        """How many of a component's ranks share a node. Raises ConfigError where they would not fill the nodes."""
        found = min(self.gpus_per_node, num_ranks)
        if num_ranks % found:
            raise ConfigError(f"{component} has {num_ranks} ranks: they must fill nodes of cluster.gpus_per_node={self.gpus_per_node}")
        return found


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """What a plan assumes of a run that its settings do not say. Only `aligner plan` reads it; times depend on it, memory does not."""

    response_length: float = 0.0  # mean tokens of a response; 0: all are as long as they may be
    response_spread: float = 0.7  # standard deviation of the logarithm of the responses' lengths
    prompt_length: float = 0.0  # mean tokens of a prompt; 0: all are as long as they may be
    example_length: float = 0.0  # of recipes that sample nothing: mean tokens of an example (a pair's are of both); 0: the longest
    lengths_of: str = ""  # a run's directory or metrics.jsonl, whose last steps say the mean; or a text file with a length on each line
    rollout_ranks: int = 0  # GPUs of their own for the engine, beside the actor's: a plan of what no run has yet; 0: the actor's
    static_batches: bool = False  # the engine begins a batch when the last response of the one before has ended, as others' do
    reward_seconds: float = 0.0  # of a reward function, for one response on one rank
    turns: float = 1.0  # mean turns of an episode; each computes the prompt and what was written before anew
    environment_seconds: float = 0.0  # that an episode waits for its environment after each turn
    validation_responses: int = 0  # that a validation samples, where loop.validate_every asks for it
    node_mtbf_hours: float = 0.0  # mean time between failures of a node; 0: none fails
    restart_minutes: float = 10.0  # from a failure until the run trains again
    steps: int = 8  # that are simulated, after those that fill the pipeline of asynchronous rollouts
    seed: int = 0  # of lengths' order and of failures

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (str, bool)) and value < 0:
                raise ConfigError(f"plan.{field.name}={value}: must not be negative")
        if self.turns < 1 or self.steps < 1:
            name = "turns" if self.turns < 1 else "steps"
            raise ConfigError(f"plan.{name}={getattr(self, name)}: must be at least 1")
        if self.lengths_of and self.response_length:
            raise ConfigError(f"plan.lengths_of={self.lengths_of}: says the lengths; allowed beside it: plan.response_length=0")
