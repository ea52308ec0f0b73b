"""The policy loss as it is configured: what is refused, and that settings reach the loss."""

from __future__ import annotations

import pytest

from aligner.algorithms.grpo import GRPOConfig
from aligner.algorithms.ppo import PPOConfig
from aligner.errors import ConfigError
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import Objective


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_eps_low": 1.0}, r"algorithm.clip_eps_low=1.0, clip_eps_high=0.2: need 0 < low < 1 and high > 0"),
        ({"dual_clip": 0.5}, r"algorithm.dual_clip=0.5: must be above 1, or 0 for off"),
        ({"dual_clip": 3.0, "objective": Objective.cispo}, r"algorithm.dual_clip=3.0: objective=cispo has none; allowed: 0"),
        ({"tau_neg": 0.0}, r"algorithm.tau_neg=0.0: must be above 0"),
        ({"entropy_coef": -1.0}, r"algorithm.entropy_coef=-1.0: must not be negative"),
        (
            {"objective": Objective.gmpo, "aggregation": Aggregation.token_mean},
            r"algorithm.aggregation=token_mean: objective=gmpo has one loss per response; allowed: sequence_mean",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)
