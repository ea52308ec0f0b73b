"""Settings of recipes that cannot work: each is refused with the setting as typed, its value and what is allowed."""

from __future__ import annotations

import pytest

from aligner.algorithms.dpo import DPOConfig
from aligner.algorithms.grpo import GRPOConfig
from aligner.algorithms.kto import KTOConfig
from aligner.algorithms.online_dpo import OnlineDPOConfig
from aligner.algorithms.ppo import PPOConfig
from aligner.algorithms.rejection_sampling import RejectionSamplingConfig
from aligner.algorithms.steerlm2 import SteerLM2Config
from aligner.errors import ConfigError
from aligner.losses.aggregation import Aggregation
from aligner.losses.policy import Objective
from aligner.losses.preference import DPOVariant


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
def test_a_policy_loss(config, fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


BAD = {
    GRPOConfig: [
        (
            {"group_size": 1},
            "algorithm.group_size=1: a group needs at least 2 responses to compare, with advantage_estimator=grpo; "
            "1 is allowed with remax, reinforce, reinforce_pp",
        ),
        ({"mini_batch_size": 100}, "algorithm.mini_batch_size=100: must divide prompts_per_step * group_size = 512"),
        ({"kl_coef": -1.0}, "algorithm.kl_coef=-1.0: must not be negative"),
        (
            {"advantage_estimator": "reinforce", "dynamic_sampling": True},
            "algorithm.dynamic_sampling=true: advantage_estimator=reinforce learns from equal rewards; "
            "allowed with grpo, rloo, reinforce_pp_baseline, per_turn, gigpo",
        ),
        ({"std_epsilon": -1.0}, "algorithm.std_epsilon=-1.0: must be finite and not negative"),
        (
            {"advantage_estimator": "rloo", "normalize_std": False},
            "algorithm.normalize_std=false: advantage_estimator=rloo does not divide by a group's deviation; allowed: true",
        ),
        ({"gamma": 0.9}, "algorithm.gamma=0.9: advantage_estimator=grpo has one advantage per response; allowed: 1"),
        ({"advantage_estimator": "remax", "gamma": 1.5}, "algorithm.gamma=1.5: must be between 0 and 1"),
        ({"kl_target": 0.1, "kl_coef": 0.0}, "algorithm.kl_target=0.1: moves kl_coef=0, which stays 0; allowed: 0, or kl_coef above 0"),
        ({"max_rounds_per_step": 0}, "algorithm.max_rounds_per_step=0: must be at least 1"),
    ],
    PPOConfig: [
        ({"rollouts_per_step": 0}, "algorithm.rollouts_per_step=0: must be at least 1"),
        ({"mini_batch_size": 100}, "algorithm.mini_batch_size=100: must divide rollouts_per_step=512"),
        ({"kl_target": 0.1, "kl_coef": 0.0}, "algorithm.kl_target=0.1: moves kl_coef=0, which stays 0; allowed: 0, or kl_coef above 0"),
        ({"kl_coef": -0.1}, "algorithm.kl_coef=-0.1: must not be negative"),
        ({"gamma": 1.5}, "algorithm.gamma=1.5: must be between 0 and 1"),
    ],
    DPOConfig: [
        ({"batch_size": 0}, "algorithm.batch_size=0: must be at least 1"),
        ({"beta": 0.0}, "algorithm.beta=0.0: must be above 0"),
        ({"label_smoothing": 0.5}, "algorithm.label_smoothing=0.5: must be at least 0 and below 0.5"),
        (
            {"label_smoothing": 0.1, "loss": DPOVariant.ipo},
            "algorithm.label_smoothing=0.1: needs loss=sigmoid, robust, exo, simpo, cpo, not ipo",
        ),
        ({"loss": DPOVariant.exo}, "algorithm.label_smoothing=0.0: loss=exo needs one above 0, such as 0.001"),
        ({"sft_coef": -1.0}, "algorithm.sft_coef=-1.0: must not be negative"),
        ({"gamma": 0.5}, "algorithm.gamma=0.5: needs loss=simpo, not sigmoid"),
        ({"gamma": -0.5, "loss": DPOVariant.simpo}, "algorithm.gamma=-0.5: must not be negative"),
        ({"eta": 2.0}, "algorithm.eta=2.0: needs loss=rpo_bwd_kl, rpo_fwd_kl or rpo_sq, not sigmoid"),
        ({"loss": DPOVariant.dpop}, "algorithm.dpop_coef=0.0: loss=dpop needs one above 0, such as 50"),
        ({"dpop_coef": 1.0}, "algorithm.dpop_coef=1.0: needs loss=dpop, not sigmoid"),
        (
            {"loss": DPOVariant.orpo, "average_logprobs": False},
            "algorithm.average_logprobs=False: loss=orpo is of the odds of a mean log-prob",
        ),
    ],
    OnlineDPOConfig: [
        ({"group_size": 1}, "algorithm.group_size=1: a pair needs at least 2 responses"),
        ({"beta": 0.0}, "algorithm.beta=0.0: must be above 0"),
        ({"loss": DPOVariant.simpo, "reference_every": 2}, "algorithm.reference_every=2: loss=simpo has no reference; allowed: 0"),
        ({"min_gap": -1.0}, "algorithm.min_gap=-1.0: must not be negative"),
        ({"num_epochs": 0}, "algorithm.num_epochs=0: must be at least 1"),
    ],
    KTOConfig: [
        ({"beta": 0.0}, "algorithm.beta=0.0: must be above 0"),
        ({"desirable_weight": -1.0}, "algorithm.desirable_weight=-1.0: must not be negative"),
        ({"sft_coef": -1.0}, "algorithm.sft_coef=-1.0: must not be negative"),
        ({"batch_size": 1}, "algorithm.batch_size=1: must be at least 2: each prompt is paired with another's response"),
        ({"validation_batch_size": 0}, "algorithm.validation_batch_size=0: must be at least 1"),
    ],
    SteerLM2Config: [({"batch_size": 0}, "algorithm.batch_size=0: must be at least 1")],
    RejectionSamplingConfig: [
        ({"keep": 9}, "algorithm.keep=9: must be at most group_size=8"),
        ({"keep": 0}, "algorithm.keep=0: must be at least 1"),
        ({"mini_batch_size": 0}, "algorithm.mini_batch_size=0: must be at least 1"),
    ],
}


@pytest.mark.parametrize(("config", "settings", "text"), [(config, *case) for config, cases in BAD.items() for case in cases])
def test_bad_settings(config, settings, text):
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert str(caught.value) == text
