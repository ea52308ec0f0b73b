"""Settings of vLLM. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.errors import ConfigError
from aligner.types import SamplingConfig


@dataclass(kw_only=True, slots=True)
class VLLMConfig:
    """The vLLM engine (`rollout.engine=vllm`)."""

    enforce_eager: bool = False  # neither torch.compile nor CUDA graphs: starts at once, samples slower
    prefix_caching: bool = True  # a prompt is computed once for all responses to it

    def check(self, sampling: SamplingConfig) -> None:
        """Raise ConfigError naming a setting that this engine cannot follow."""
        for name in ("stop_strings", "raw_logprobs"):
            if getattr(sampling, name):
                raise ConfigError(f"rollout.sampling.{name}: not available with rollout.engine=vllm; allowed: the default")
