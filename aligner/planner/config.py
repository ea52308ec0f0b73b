"""A cluster's hardware figures that a plan needs. A module without heavy imports: the config root reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from aligner.errors import ConfigError, check_numbers


class Device(str, Enum):
    """What the ranks compute on."""

    gpu = "gpu"
    cpu = "cpu"


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Nodes of one kind, for `aligner plan` (conf/cluster/). Rates are of one GPU and one direction; FLOP/s are dense."""

    device: Device = Device.cpu  # what the ranks compute on
    gpus_per_node: int = 1  # ranks that share a node (and its host memory)
    cpus_per_node: int = 0  # processors of a node, which job scripts divide among its ranks; 0: Slurm decides
    gpu_memory_gib: float = 16.0  # memory of a GPU that the driver leaves to programs
    host_memory_gib: float = 16.0  # host memory of a node
    bf16_tflops: float = 0.2  # peak of dense bfloat16 matrix products, in TFLOP/s
    fp8_tflops: float = 0.0  # peak of dense 8-bit matrix products, in TFLOP/s; 0: none
    compute_capability: float = 9.0  # compute capability of the GPUs, which decides what model.fp8_recipe=auto is
    hbm_gb_per_second: float = 40.0  # bandwidth of the device memory, in GB/s
    nvlink_gb_per_second: float = 10.0  # bandwidth to other GPUs of the node
    network_gb_per_second: float = 1.0  # bandwidth to other nodes
    host_gb_per_second: float = 10.0  # bandwidth between a GPU and host memory
    host_memory_gb_per_second: float = 20.0  # rate at which a node's cores read and write its memory (`optimizer.cpu_offload`)
    nvme_gb_per_second: float = 2.0  # rate at which a node's local disk reads and writes, both together (`optimizer.nvme_path`)
    reserved_gib: float = 0.44  # context, libraries and their workspaces in every process; on CPU Python and torch too
    communicator_gib: float = 0.0  # buffers of each communicator that a rank belongs to
    fragmentation: float = 0.0  # fraction of allocated memory that the allocator loses between blocks
    storage_gb_per_second: float = 1.0  # rate at which all ranks together write to the run directory
    leaf_nodes: int = 0  # nodes below one switch, beyond which the network is oversubscribed; 0: never oversubscribed
    oversubscription: float = 1.0  # slowdown factor of the network between leaf switches
    achievable_flops: float = 0.5  # fraction of the peak that large matrix products reach
    achievable_attention: float = 0.4  # fraction of the peak that attention kernels reach
    achievable_experts: float = 0.6  # speed of the experts' products, relative to equal products of dense layers
    achievable_bandwidth: float = 0.7  # fraction of the device memory's bandwidth that kernels reach
    achievable_link: float = 0.7  # fraction of the links' bandwidth that transfers reach
    collective_microseconds: float = 50.0  # latency of a collective inside a node
    network_microseconds: float = 20.0  # latency that each doubling of the nodes adds to a collective
    launch_microseconds: float = 50.0  # least time of one layer's kernels in a decode step
    host_layer_microseconds: float = 400.0  # host time that starts the kernels of one layer's forward pass in training
    layer_token_microseconds: float = 0.0  # time of a layer's small kernels per token besides its bytes: what short rows cost a CPU
    host_pass_milliseconds: float = 2.0  # host time of a micro-batch's forward pass besides its layers
    engine_step_milliseconds: float = 1.0  # host time of a decode step: scheduling, the draw, stop strings
    engine_sequence_microseconds: float = 10.0  # host time that each sequence of the batch adds to a decode step
    engine_request_microseconds: float = 0.0  # host time of a response: its request, the first pages, the text
    step_seconds: float = 0.1  # host time of a training step besides its phases: data, rewards, advantages, metrics
    sequence_milliseconds: float = 0.5  # host time that each sequence adds to a training step, on the rank that handles most
    phase_seconds: float = 0.0  # time to change from one phase to the next: waits for all ranks, memory freed, caches filled
    straggling: float = 0.0  # fraction by which the slowest of many ranks takes longer than the mean
    expert_imbalance: float = 1.2  # tokens of the most loaded rank of an expert-parallel group, relative to the mean
    concurrency: float = 0.5  # speed of sampling and of training while both use the same ranks, relative to alone

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            # Durations, and what is 0 by default, may be 0.
            may_be_zero = name.endswith("seconds") or not field.default or name == "reserved_gib"
            if name != "device" and not (value > 0 or (may_be_zero and value == 0)):
                raise ConfigError(f"cluster.{name}={value}: must {'not be negative' if may_be_zero else 'be above 0'}")
            if (name.startswith("achievable_") or name == "concurrency") and value > 1:
                raise ConfigError(f"cluster.{name}={value}: a fraction of the peak, at most 1")
            if name in ("oversubscription", "expert_imbalance") and value < 1:
                raise ConfigError(f"cluster.{name}={value}: must be at least 1")
        if self.fragmentation >= 1:
            raise ConfigError(f"cluster.fragmentation={self.fragmentation}: must be below 1")

    def ranks_on_node(self, component: str, num_ranks: int) -> int:
        """How many of a component's ranks share a node. Raises ConfigError if they do not fill the nodes."""
        found = min(self.gpus_per_node, num_ranks)
        if num_ranks % found:
            raise ConfigError(f"{component} has {num_ranks} ranks: they must fill nodes of cluster.gpus_per_node={self.gpus_per_node}")
        return found


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """What a plan assumes of a run beyond its settings. Only `aligner plan` reads it; memory depends on `image_tokens` alone."""

    response_length: float = 0.0  # mean tokens of a response; 0: every response has the greatest length
    response_spread: float = 0.7  # standard deviation of the logarithm of the responses' lengths
    prompt_length: float = 0.0  # mean tokens of a prompt; 0: every prompt has the greatest length
    example_length: float = 0.0  # mean tokens of an example (both responses of a pair), in recipes that sample nothing; 0: the longest
    image_tokens: int = 0  # tokens that images take in each row, of models that see; 0: the prompt's, or all if there are no prompts
    lengths_of: str = ""  # a run's directory or metrics.jsonl, whose last steps give the mean; or a text file with a length on each line
    rollout_ranks: int = 0  # GPUs of the engine's own, beside the actor's: a plan of what no run has yet; 0: the actor's
    static_batches: bool = False  # whether the engine begins a batch only when all responses of the one before have ended
    reward_seconds: float = 0.0  # time of a reward function, for one response on one rank
    turns: float = 1.0  # mean turns of an episode; each computes the prompt and the earlier turns anew
    environment_seconds: float = 0.0  # time that an episode waits for its environment after each turn
    validation_responses: int = 0  # responses that a validation samples (see loop.validate_every)
    node_mtbf_hours: float = 0.0  # mean time between failures of a node; 0: no failures
    restart_minutes: float = 10.0  # time from a failure until the run trains again
    steps: int = 8  # simulated steps, after those that fill the pipeline of asynchronous rollouts
    seed: int = 0  # seed of failures and of the order of lengths

    def __post_init__(self) -> None:
        numbers = [field.name for field in fields(self) if not isinstance(field.default, (str, bool))]
        check_numbers(self, "plan", at_least_1=("turns", "steps"), not_negative=numbers)
        if self.lengths_of and self.response_length:
            raise ConfigError(f"plan.lengths_of={self.lengths_of}: already determines the lengths; leave plan.response_length at 0")
