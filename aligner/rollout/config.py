"""What a user says about generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.errors import ConfigError
from aligner.types import SamplingConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engine of the actor."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_batch_size: int = 128  # sequences decoded at a time by one data-parallel replica; their keys and values share the device

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ConfigError(f"rollout.max_batch_size={self.max_batch_size}: must be at least 1")
        if self.sampling.temperature == 0:
            raise ConfigError("rollout.sampling.temperature=0: training rollouts need a positive temperature")
