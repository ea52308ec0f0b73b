"""Settings of the TensorRT-LLM engine. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aligner.errors import ConfigError
from aligner.types import SamplingConfig

# Settings of sampling that have no exact counterpart, how they are switched off, and why they cannot be had.
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "stop_strings": ([], "it looks for a string's own tokens, not for its text across tokens; use stop_token_ids"),
    "min_response_length": (0, "it holds off its end-of-sequence token only, not stop_token_ids"),
    "repetition_penalty": (1.0, "its log-probs would be those after the penalty"),
    "presence_penalty": (0.0, "its log-probs would be those after the penalty"),
    "frequency_penalty": (0.0, "its log-probs would be those after the penalty"),
}


class Sampler(str, Enum):
    """Which of the package's samplers draws the tokens; they differ in the distribution of their log-probs."""

    trtllm = "trtllm"  # the compiled one: a seed for each request, log-probs at the sampling temperature
    torch = "torch"  # the one in PyTorch: log-probs at temperature 1; no seeds before TensorRT-LLM 1.3


class CudaGraphs(str, Enum):
    """Whether decoding is replayed from CUDA graphs."""

    auto = "auto"  # yes, but where the engine sleeps and this version cannot do both
    always = "always"
    never = "never"


@dataclass(kw_only=True, slots=True)
class TensorRTLLMConfig:
    """`rollout.tensorrt_llm`: settings of the engine that no other one has."""

    sampler: Sampler = Sampler.trtllm  # torch: the one written in PyTorch, with log-probs at temperature 1
    cuda_graphs: CudaGraphs = CudaGraphs.auto  # auto: unless the engine sleeps and this version cannot do both
    kv_memory_fraction: float = 0.9  # at most this much of the memory that is free beside the weights holds rollout.kv_cache_tokens
    timeout_seconds: float = 1800.0  # without one response that ends, of many that run; then the engine is taken for hung
    pause_seconds: float = 300.0  # for the executor to pause, and to take one bucket of weights; then the engine is taken for hung
    start_seconds: float = 1800.0  # for the engine's process to import the package and to build the model
    allow_drafts: bool = False  # also versions whose recorded contract is a draft: mostly of other versions' sources

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "pause_seconds", "start_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rollout.tensorrt_llm.{name}={getattr(self, name)}: must be above 0")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError(f"rollout.tensorrt_llm.kv_memory_fraction={self.kv_memory_fraction}: must be above 0 and at most 1")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ConfigError naming a setting that this engine cannot follow, and what to do."""
        for name, (off, why) in _REFUSED.items():
            value = getattr(sampling, name)
            if value != off:
                raise ConfigError(f"rollout.sampling.{name}={value}: not with rollout.engine=tensorrt_llm: {why}; allowed: {off}")
        if sampling.min_p and self.sampler == Sampler.torch:
            raise ConfigError(
                f"rollout.sampling.min_p={sampling.min_p}: not with rollout.tensorrt_llm.sampler=torch; allowed: 0, or sampler=trtllm"
            )
        if sampling.raw_logprobs and sampling.temperature != 1:
            raise ConfigError(
                f"rollout.sampling.raw_logprobs=true: not with rollout.engine=tensorrt_llm at temperature={sampling.temperature}: it gives "
                "log-probs of one kind; allowed: temperature=1, where both are the same, or false"
            )
