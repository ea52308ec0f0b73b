"""What a user says about vLLM. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class VLLMConfig:
    """The vLLM engine (`rollout.engine=vllm`)."""

    enforce_eager: bool = False  # neither torch.compile nor CUDA graphs: starts at once, samples slower
    prefix_caching: bool = True  # a prompt is computed once for all responses to it
