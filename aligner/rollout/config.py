"""Settings of generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import entry_points
from typing import Any

from aligner.errors import ABOVE_0, NOT_NEGATIVE, SHARE, ConfigError, check_range
from aligner.models.config import Architecture, Family, LoraConfig, LoraTarget, ModelConfig, SeeingArchitecture
from aligner.parallel.topology import ParallelConfig
from aligner.types import SamplingConfig


def graph_rows(rows: int) -> int:
    """Rows of the CUDA graph that replays a decode step of so many: at most a quarter more."""
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


@dataclass(kw_only=True, slots=True)
class VLLMConfig:
    """The vLLM engine (`rollout.engine=vllm`)."""

    enforce_eager: bool = False  # no torch.compile and no CUDA graphs: starts faster, samples slower
    prefix_caching: bool = True  # a prompt is computed once for all responses to it

    def check(self, sampling: SamplingConfig) -> None:
        """Raise ConfigError naming a setting that this engine does not support."""
        for name in ("stop_strings", "raw_logprobs"):
            if getattr(sampling, name):
                raise ConfigError(f"rollout.sampling.{name}: not available with rollout.engine=vllm; allowed: the default")


# Settings of sampling without an exact counterpart in TensorRT-LLM: the value that is off, and why no other is possible.
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "stop_strings": ([], "it looks for a string's own tokens, not for its text across tokens; use stop_token_ids"),
    "min_response_length": (0, "it holds off its end-of-sequence token only, not stop_token_ids"),
    "repetition_penalty": (1.0, "its log-probs would be those after the penalty"),
    "presence_penalty": (0.0, "its log-probs would be those after the penalty"),
    "frequency_penalty": (0.0, "its log-probs would be those after the penalty"),
}


class Sampler(str, Enum):
    """The package's sampler; the two differ in the distribution of their log-probs."""

    trtllm = "trtllm"  # the compiled one: a seed for each request, log-probs at the sampling temperature
    torch = "torch"  # the one in PyTorch: log-probs at temperature 1; no seeds before TensorRT-LLM 1.3


class CudaGraphs(str, Enum):
    """Whether decoding is replayed from CUDA graphs."""

    auto = "auto"  # yes, unless the engine sleeps and this version does not support both
    always = "always"
    never = "never"


@dataclass(kw_only=True, slots=True)
class TensorRTLLMConfig:
    """`rollout.tensorrt_llm`: settings of this engine alone."""

    sampler: Sampler = Sampler.trtllm  # torch: the sampler written in PyTorch, with log-probs at temperature 1
    cuda_graphs: CudaGraphs = CudaGraphs.auto  # auto: unless the engine sleeps and this version does not support both
    kv_memory_fraction: float = 0.9  # the most of the free memory beside the weights for rollout.kv_cache_tokens
    timeout_seconds: float = 1800.0  # longest time in which no running response ends, before the engine counts as hung
    pause_seconds: float = 300.0  # for the executor to pause and to load one bucket of weights, before the engine counts as hung
    start_seconds: float = 1800.0  # for the engine's process to import the package and build the model
    allow_drafts: bool = False  # also allow versions whose recorded contract is a draft, mostly from other versions' sources

    def __post_init__(self) -> None:
        check_range(self, "rollout.tensorrt_llm", ABOVE_0, "timeout_seconds", "pause_seconds", "start_seconds")
        check_range(self, "rollout.tensorrt_llm", SHARE, "kv_memory_fraction")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ConfigError naming a setting that this engine does not support, and the remedy."""
        for name, (off, why) in _REFUSED.items():
            value = getattr(sampling, name)
            if value != off:
                raise ConfigError(f"rollout.sampling.{name}={value}: not with rollout.engine=tensorrt_llm: {why}; allowed: {off}")
        if sampling.min_p and self.sampler == Sampler.torch:
            setting = f"rollout.sampling.min_p={sampling.min_p}"
            raise ConfigError(f"{setting}: not with rollout.tensorrt_llm.sampler=torch; allowed: 0, or sampler=trtllm")
        if sampling.raw_logprobs and sampling.temperature != 1:
            raise ConfigError(
                f"rollout.sampling.raw_logprobs=true: rollout.engine=tensorrt_llm gives log-probs of one kind, at "
                f"temperature={sampling.temperature}; allowed: temperature=1, where both are equal, or false"
            )


PAGE_SIZE = 16  # tokens in a page of the key-value cache, unless a kernel needs another size
KEPT_FEATURES = 1 << 29  # bytes of features of images that the built-in engine keeps

LORA_LAYOUT = (
    "adapters stay in full precision beside the policy's own weights, rounded; allowed: model, or rollout.tp=parallel.tp, parallel.pp=1, "
    "parallel.ep=1 and rollout.asynchronous.max_staleness=0"
)

ENGINES = "aligner.engines"  # group of entry points: engines of other packages


class EngineKind(str, Enum):
    """The engines of this package."""

    megatron = "megatron"  # the built-in one, on the policy's own weights
    tensorrt_llm = "tensorrt_llm"  # NVIDIA's, in a separate process for each replica
    vllm = "vllm"  # in the training processes
    auto = "auto"  # vllm on a GPU if it is installed and supports the run's settings, else megatron


class VerifyRefit(str, Enum):
    """Checks of a refit, besides that every weight arrived complete and finite."""

    none = "none"
    checksum = "checksum"  # every weight must equal training's bit for bit, in its place


class Refit(str, Enum):
    """What a package's engine gets of a policy that trains adapters (`model.lora`)."""

    auto = "auto"  # adapters if engine and model can take them alone, else merged
    adapters = "adapters"  # the weights under them once, then the adapters alone
    merged = "merged"  # all weights, with the adapters in them


class Kernels(str, Enum):
    """The kernels of the built-in engine."""

    auto = "auto"  # on CPU in float32: C kernels, compiled at first use; on GPU: installed attention kernels
    torch = "torch"  # plain torch


class Precision(str, Enum):
    """What the built-in engine keeps of a number."""

    model = "model"  # model.dtype
    fp8 = "fp8"  # e4m3, with a scale for each row
    int8 = "int8"  # 8 bits, with a scale for each row

    @property
    def is_on(self) -> bool:
        return self is not Precision.model


class RoutingReplay(str, Enum):
    """Whether a token trains the experts that sampled it: see docs/agreement.md."""

    none = "none"  # the trainer chooses
    measure = "measure"  # the trainer chooses; rollout/route_mismatch counts how often its choice differs
    replay = "replay"  # the sampler's choice


class ShareWork(str, Enum):
    """Whether replicas take prompts from one queue as they have room, so that all end at about the same time.

    Timing then decides which replica samples a prompt. Tokens depend on prompt and seed alone, but the last bits of log-probs depend on the
    batch: only a run with fixed shares repeats bit for bit, if the device does.
    """

    auto = "auto"  # on GPU, and with model.batch_invariant, where the batch does not matter; fixed shares on CPU
    always = "always"
    never = "never"


@dataclass(kw_only=True, slots=True)
class AsynchronousConfig:
    """Sampling the next rounds of rollouts while the policy trains: see docs/asynchronous.md."""

    max_staleness: int = 0  # training steps by which a rollout's oldest token may lag behind the learning policy; 0: on-policy
    partial: bool = True  # running responses continue with new weights; false: new weights wait for the end of the running round
    recompute: bool = False  # with partial=true: compute keys and values of running responses again with the new weights
    timeout_seconds: float = 3600.0  # time limit for a round of rollouts, and for a step of the sampler

    def __post_init__(self) -> None:
        check_range(self, "rollout.asynchronous", NOT_NEGATIVE, "max_staleness", note=" (0 is on-policy)")
        if self.recompute and not self.partial:
            raise ConfigError("rollout.asynchronous.recompute=true: without partial no response continues; allowed: with partial=true")
        check_range(self, "rollout.asynchronous", ABOVE_0, "timeout_seconds")


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engine of the actor."""

    # megatron (built in, on the policy's own weights), tensorrt_llm, vllm, auto (vllm if it is installed and supports the run's settings,
    # else megatron), or the name of an entry point of another package
    engine: str = EngineKind.megatron.value  # the sampling engine (docs/rollouts.md, docs/extending.md)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_batch_size: int = 128  # sequences that one replica decodes at once; their keys and values share the device
    kv_cache_tokens: int = 0  # tokens in the cache of one replica; 0: enough for max_batch_size of the longest sequences
    prefill_chunk_tokens: int = 2048  # prompt tokens computed in one pass
    tp: int = 0  # ranks that share the model in generation: the actor's ranks form (ranks / tp) replicas; 0: parallel.tp
    share_work: ShareWork = ShareWork.auto  # whether replicas share one queue of prompts
    refit_bucket_mib: int = 256  # device memory for weights in transfer to the engine, if its layout differs from training's
    verify_refit: VerifyRefit = VerifyRefit.none  # checksum: another pass over the weights on both sides
    refit: Refit = Refit.auto  # of vLLM under model.lora: adapters alone (megabytes a step), or merged; auto: adapters where it can
    kernels: Kernels = Kernels.auto  # of the built-in engine; auto falls back on torch if its kernels are missing
    # fp8: also the layers' inputs, a scale for each token. A copy of one byte per weight, rounded anew in each refit: in a layout in which
    # the engine reads the policy's weights in place, it comes in addition to them
    precision: Precision = Precision.model  # built-in engine: its linear layers' weights, in one byte with fp8 (inputs too) or int8
    cache_precision: Precision = Precision.model  # built-in engine: its keys and values, in one byte and a scale per head and token
    cuda_graphs: bool = True  # built-in engine on GPU: replay a decode step instead of launching its kernels one by one
    routing_replay: RoutingReplay = RoutingReplay.none  # measure: compare trainer's and engine's experts; replay: train with the engine's
    offload: bool = False  # keep only the weights of the current phase, the engine's or the policy's, on the device
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    tensorrt_llm: TensorRTLLMConfig = field(default_factory=TensorRTLLMConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)

    def __post_init__(self) -> None:
        self.engine = self.engine.value if isinstance(self.engine, EngineKind) else self.engine
        known = [*(kind.value for kind in EngineKind), *sorted(entry.name for entry in entry_points(group=ENGINES))]
        if self.engine not in known:
            raise ConfigError(f"rollout.engine={self.engine}: allowed: {', '.join(known)} (entry points of the group {ENGINES} add others)")
        for name, least in (("max_batch_size", 1), ("kv_cache_tokens", 0), ("prefill_chunk_tokens", 1), ("tp", 0), ("refit_bucket_mib", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: must be at least {least}")
        if self.refit is Refit.adapters and self.engine not in (EngineKind.vllm, EngineKind.auto):
            raise ConfigError(
                f"rollout.refit=adapters: rollout.engine={self.engine} does not take adapters alone; allowed: auto, merged, or "
                "rollout.engine=vllm"
            )
        if self.asynchronous.max_staleness:
            self._check_asynchronous()

    def reason_to_merge(self, architecture: Architecture, lora: LoraConfig) -> str:
        """Why a refit sends whole weights; empty: the adapters alone will do, as far as is known before the engine has started."""
        if self.refit is Refit.merged:
            return "rollout.refit=merged"
        if not lora.is_on:
            return "the policy has no adapters (model.lora.rank=0)"
        if self.engine != EngineKind.vllm:
            return f"rollout.engine={self.engine} gets whole weights here"
        if lora.dora:
            return "model.lora.dora=true: vLLM has no DoRA"
        if LoraTarget.experts in lora.targets:
            return "model.lora.targets: adapters of experts have not run in vLLM"
        if isinstance(architecture, SeeingArchitecture):
            return "adapters of a model of images have not run in vLLM"
        if architecture.latent_size:
            return "vLLM loads no weights under adapters of latent attention"
        return "GPT-2's matrices are transposed in its files" if architecture.family is Family.gpt2 else ""

    @property
    def records_routes(self) -> bool:
        """Whether rollouts have the engine's choice of experts."""
        return self.routing_replay is not RoutingReplay.none

    @property
    def quantized(self) -> list[str]:
        """The settings, as typed, by which the engine keeps fewer bits than the model."""
        given = {"rollout.precision": self.precision, "rollout.cache_precision": self.cache_precision}
        return [f"{name}={kind.value}" for name, kind in given.items() if kind.is_on]

    @property
    def replays_routes(self) -> bool:
        """Whether the trainer uses that choice."""
        return self.routing_replay is RoutingReplay.replay

    def _check_asynchronous(self) -> None:
        setting = f"rollout.asynchronous.max_staleness={self.asynchronous.max_staleness}"
        if self.engine not in (EngineKind.megatron, EngineKind.auto):
            # A wrapped package accepts no weights between two steps, and its collectives use training's threads and groups.
            raise ConfigError(f"{setting}: rollout.engine={self.engine} samples between training phases; allowed: megatron, or 0")
        if self.offload:
            raise ConfigError(f"{setting}: sampling and training need their weights at once; allowed: with rollout.offload=false, or 0")


def check_cache(config: RolloutConfig, *, longest_prompt: int, context: int) -> None:
    """Raise ConfigError if the built-in engine's key-value cache has a size that is too small for the longest prompt with its response."""
    length = min(longest_prompt + config.sampling.max_response_length, context) - 1  # the last token is never attended to
    needed = -(-length // PAGE_SIZE) * PAGE_SIZE
    if config.engine in (EngineKind.megatron, EngineKind.auto) and 0 < config.kv_cache_tokens < needed:
        raise ConfigError(
            f"rollout.kv_cache_tokens={config.kv_cache_tokens}: the longest prompt has {longest_prompt} tokens and needs {needed} with its "
            f"response (whole pages of {PAGE_SIZE}); allowed: 0 (as many as needed), or at least {needed}"
        )


def check_engine(config: RolloutConfig, architecture: Architecture, *, tp: int, world_size: int) -> None:
    """Raise ConfigError if the engine of `config` cannot sample with replicas of `tp` ranks each. Does not check installed packages."""
    check_splits(architecture, tp=tp, world_size=world_size)
    if config.records_routes and not architecture.num_experts:
        raise ConfigError(f"rollout.routing_replay={config.routing_replay.value}: the model has no experts; allowed: none")
    if architecture.linear_attention_layers and config.engine not in (EngineKind.megatron, EngineKind.auto):
        raise ConfigError(f"rollout.engine={config.engine}: the model's delta nets need the built-in engine; allowed: megatron")
    check_settings(config, tp=tp)


def check_precision(config: RolloutConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the weights of a policy like this cannot be sampled from in the precision of `config`."""
    for setting in config.quantized:
        if model.batch_invariant:
            raise ConfigError(f"{setting}: model.batch_invariant=true is for log-probs of the trainer's own bits; allowed: model")
    if not config.precision.is_on:
        return
    setting, lora = f"rollout.precision={config.precision.value}", model.lora
    if model.quantization.is_on:
        raise ConfigError(f"{setting}: the engine reads the weights of model.quantization={model.quantization.value}; allowed: model")
    if not lora.is_on:
        return
    if lora.dora:
        raise ConfigError(f"{setting}: adapters of model.lora.dora=true are merged before sampling; allowed: model, or lora.dora=false")
    if (config.tp or parallel.tp) != parallel.tp or parallel.pp > 1 or parallel.ep > 1 or config.asynchronous.max_staleness:
        raise ConfigError(f"{setting}: {LORA_LAYOUT}")


def check_untrained(config: RolloutConfig, why: str) -> None:
    """Raise ConfigError for settings that only matter for training on the samples; `why` describes their use instead."""
    if config.asynchronous.max_staleness:
        raise ConfigError(f"rollout.asynchronous.max_staleness={config.asynchronous.max_staleness}: {why}; allowed: 0")
    if config.records_routes:
        raise ConfigError(f"rollout.routing_replay={config.routing_replay.value}: {why}; allowed: none")


def check_settings(config: RolloutConfig, *, tp: int) -> None:
    """Raise ConfigError if the engine of `config` does not support its other settings, with replicas of `tp` ranks."""
    if config.engine in (EngineKind.megatron, EngineKind.auto):  # auto uses megatron for settings that others do not support
        return
    for setting in config.quantized:
        raise ConfigError(f"{setting}: is for the built-in engine, not rollout.engine={config.engine}; allowed: model, or megatron")
    if config.engine == EngineKind.tensorrt_llm:
        config.tensorrt_llm.check_sampling(config.sampling)
    elif config.engine == EngineKind.vllm:
        config.vllm.check(config.sampling)
    if config.records_routes:
        raise ConfigError(
            f"rollout.routing_replay={config.routing_replay.value}: rollout.engine={config.engine} does not report the chosen experts; "
            "allowed: none, or rollout.engine=megatron"
        )
    if config.verify_refit is VerifyRefit.checksum and tp > 1:
        raise ConfigError(
            f"rollout.verify_refit=checksum: rollout.engine={config.engine} reads no weights back from rollout.tp={tp} ranks; "
            "allowed: none, or rollout.tp=1"
        )


def check_ahead(config: RolloutConfig, *, tp: int) -> None:
    """Raise ConfigError if rollouts sampled ahead cannot have replicas of `tp` ranks each on GPUs.

    Sampler and trainer are two threads of every rank. An NCCL kernel waits on the device for the other ranks' kernels, so all ranks must
    issue the kernels of two communicators in the same order (NCCL's manual, "Using multiple NCCL communicators concurrently"), and two
    threads have no common order: the sampler's kernel may fill one rank's device, the trainer's another's. The trainer communicates in
    every layout (at least by `parallel.collectives.all_ranks`), the sampler only within a replica. gloo's collectives wait in their own
    threads on the host, so every layout is possible on CPU.
    """
    if config.asynchronous.max_staleness and tp > 1:
        raise ConfigError(
            f"rollout.asynchronous.max_staleness={config.asynchronous.max_staleness}: with rollout.tp={tp} the sampler's and the trainer's "
            "collectives meet on each GPU in no common order, and may deadlock; allowed on GPUs: rollout.tp=1, or 0"
        )


def check_splits(architecture: Architecture, *, tp: int, world_size: int) -> None:
    """Raise ConfigError if `rollout.tp` ranks cannot share the model, or do not divide the component's ranks."""
    if world_size % tp:
        allowed = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(f"rollout.tp={tp}: does not divide the {world_size} ranks of this component; allowed: {allowed}")
    sizes = ["num_attention_heads", "expert_ffn_hidden_size" if architecture.num_experts else "ffn_hidden_size"]
    sizes += ["ffn_hidden_size"] if architecture.dense_layers else []
    for name in (*sizes, "shared_ffn_hidden_size"):
        if getattr(architecture, name) % tp:
            raise ConfigError(f"rollout.tp={tp}: does not divide the model's {name}={getattr(architecture, name)}")
    if architecture.linear_key_heads % tp:
        raise ConfigError(f"rollout.tp={tp}: does not divide the model's linear_key_heads={architecture.linear_key_heads}")
    groups = architecture.num_key_value_heads
    if groups % tp and tp % groups:
        raise ConfigError(f"rollout.tp={tp}: must divide, or be a multiple of, the model's num_key_value_heads={groups}")
