"""What a user says about generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.errors import ConfigError
from aligner.models.config import Architecture
from aligner.types import SamplingConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engine of the actor."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_batch_size: int = 128  # sequences decoded at a time by one replica of the engine; their keys and values share the device
    tp: int = 0  # ranks that share the model in generation; all ranks of the actor take part, in (ranks / tp) replicas; 0: parallel.tp
    refit_bucket_mib: int = 256  # device memory for weights on their way to the engine, where its layout is not the training layout
    offload: bool = False  # of the engine's own weights and the policy's, only those that the phase needs are on the device

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("tp", 0), ("refit_bucket_mib", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: must be at least {least}")
        if self.sampling.temperature == 0:
            raise ConfigError("rollout.sampling.temperature=0: training rollouts need a positive temperature")


def check_splits(architecture: Architecture, *, tp: int, world_size: int) -> None:
    """Raise ConfigError where `rollout.tp` ranks cannot share the model, or do not divide the component's ranks."""
    if world_size % tp:
        allowed = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(f"rollout.tp={tp}: does not divide the {world_size} ranks of this component; allowed: {allowed}")
    feed_forward = "expert_ffn_hidden_size" if architecture.num_experts else "ffn_hidden_size"
    for name in ("num_attention_heads", feed_forward):
        if getattr(architecture, name) % tp:
            raise ConfigError(f"rollout.tp={tp}: does not divide the model's {name}={getattr(architecture, name)}")
    groups = architecture.num_key_value_heads
    if groups % tp and tp % groups:
        raise ConfigError(f"rollout.tp={tp}: must divide, or be a multiple of, the model's num_key_value_heads={groups}")
