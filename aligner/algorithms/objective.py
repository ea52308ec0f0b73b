"""The policy loss as it is configured: what every online algorithm lets a user choose about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aligner.errors import ConfigError
from aligner.losses.aggregation import Aggregation
from aligner.losses.correction import CorrectionConfig
from aligner.losses.policy import policy_loss
from aligner.losses.surrogates import Objective
from aligner.protocols import Loss


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    """Settings of `aligner.losses.policy.policy_loss` under `algorithm.`; an algorithm's config has them by inheritance."""

    objective: Objective = Objective.ppo
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    dual_clip: float = 0.0  # 0: off; of objective=ppo
    gate_positive: float = 1.0  # of objective=sapo: steepness where the advantage is positive
    gate_negative: float = 1.05
    entropy_coef: float = 0.0
    aggregation: Aggregation = Aggregation.token_mean
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)  # for a sampler whose log-probs are not the trainer's

    def __post_init__(self) -> None:
        if not (0 < self.clip_eps_low < 1 and self.clip_eps_high > 0):
            raise ConfigError(
                f"algorithm.clip_eps_low={self.clip_eps_low}, clip_eps_high={self.clip_eps_high}: need 0 < low < 1 and high > 0"
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip}: must be above 1, or 0 for off")
        if self.dual_clip and self.objective is not Objective.ppo:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip}: objective={self.objective.value} has none; allowed: 0")
        for name in ("gate_positive", "gate_negative"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)}: must be above 0")
        if self.entropy_coef < 0:
            raise ConfigError(f"algorithm.entropy_coef={self.entropy_coef}: must not be negative")
        per_sequence = (Objective.gspo, Objective.gmpo)
        if self.objective in per_sequence and self.aggregation is not Aggregation.sequence_mean:
            raise ConfigError(
                f"algorithm.aggregation={self.aggregation.value}: objective={self.objective.value} has one loss per response; "
                f"allowed: {Aggregation.sequence_mean.value}"
            )

    def loss(self, *, max_response_length: int, **terms: Any) -> Loss:
        """`policy_loss` with these settings; `terms` are the algorithm's own (its KL)."""
        return partial(
            policy_loss,
            objective=self.objective,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            dual_clip=self.dual_clip or None,
            gate_positive=self.gate_positive,
            gate_negative=self.gate_negative,
            entropy_coef=self.entropy_coef,
            aggregation=self.aggregation,
            aggregation_constant=float(max_response_length),
            correction=self.correction,
            **terms,
        )
