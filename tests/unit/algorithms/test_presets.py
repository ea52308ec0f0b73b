"""Every preset of a recipe's algorithm: what it sets, and that it sets nothing that is the default already."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import yaml

from aligner.algorithms.dpo import DPOConfig
from aligner.algorithms.grpo import GRPOConfig
from aligner.algorithms.kto import KTOConfig
from aligner.algorithms.online_distill import OnlineDistillationConfig
from aligner.algorithms.online_dpo import OnlineDPOConfig
from aligner.algorithms.ppo import PPOConfig
from aligner.algorithms.rejection_sampling import RejectionSamplingConfig
from aligner.algorithms.self_rewarding import SelfRewardingConfig
from aligner.algorithms.spin import SPINConfig
from aligner.settings.compose import from_yaml

CONF = Path(__file__).parents[3] / "conf"
OTHERS = {
    "ppo/algorithm/ppo": PPOConfig,
    "kto/algorithm/kto": KTOConfig,
    "kto/algorithm/apo_zero": KTOConfig,
    "online_distill/algorithm/online_distill": OnlineDistillationConfig,
    "online_dpo/algorithm/online_dpo": OnlineDPOConfig,
    "rejection_sampling/algorithm/rejection_sampling": RejectionSamplingConfig,
    "spin/algorithm/spin": SPINConfig,
    "self_rewarding/algorithm/self_rewarding": SelfRewardingConfig,
}
# Losses on pairs, in the settings of aligner/algorithms/dpo.py.
PAIRS = {
    "dpo": {},
    "conservative": {"label_smoothing": 0.1},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    "ipo": {"loss": "ipo"},
    "hinge": {"loss": "hinge"},
    "length_normalized": {"average_logprobs": True, "beta": 5.0},
    "exo": {"loss": "exo", "label_smoothing": 1e-3},
    "dpop": {"loss": "dpop", "beta": 0.3, "dpop_coef": 50.0},
    "sppo": {"loss": "sppo", "beta": 1e-3},
    "bco": {"loss": "bco"},
    "nca": {"loss": "nca", "beta": 0.01},
    "apo_zero": {"loss": "apo_zero"},
    "apo_down": {"loss": "apo_down"},
    "rpo": {"loss": "rpo_bwd_kl"},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
    "cpo": {"loss": "cpo"},
    "orpo": {"loss": "orpo"},
}
SEQUENCES = {"objective": "reinforce", "aggregation": "sequence_sum_constant", "kl_in": "reward", "kl_estimator": "k1"}
# What the papers' names stand for, in the settings of aligner/algorithms/grpo.py.
SAID = {
    "grpo": {},
    "dr_grpo": {"normalize_std": False, "aggregation": "sequence_sum_constant", "kl_coef": 0.0},
    "dapo": {
        "prompts_per_step": 512,
        "group_size": 16,
        "clip_eps_high": 0.28,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "dynamic_sampling": True,
        "shaping.overlong_buffer": 51,
    },
    "gspo": {"objective": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4, "kl_coef": 0.0},
    "cispo": {"objective": "cispo", "clip_eps_high": 4.0, "aggregation": "token_mean", "kl_coef": 0.0},
    "gmpo": {"objective": "gmpo", "clip_eps_low": 0.4, "clip_eps_high": 0.4, "kl_coef": 0.0},
    "sapo": {"objective": "sapo", "kl_coef": 0.0},
    "rloo": SEQUENCES | {"advantage_estimator": "rloo", "group_size": 4, "mini_batch_size": 256, "kl_coef": 0.05},
    "remax": SEQUENCES | {"advantage_estimator": "remax", "prompts_per_step": 512, "group_size": 1},
    "reinforce": SEQUENCES | {"advantage_estimator": "reinforce", "prompts_per_step": 512, "group_size": 1},
    "reinforce_pp": {
        "advantage_estimator": "reinforce_pp",
        "aggregation": "token_mean",
        "prompts_per_step": 1024,
        "group_size": 1,
        "mini_batch_size": 128,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.01,
    },
    "reinforce_pp_baseline": {"advantage_estimator": "reinforce_pp_baseline", "aggregation": "token_mean", "kl_estimator": "k2"},
}


def flat(settings: dict, prefix: str = "") -> dict[str, object]:
    """One level, names joined by dots."""
    return {
        key: value
        for name, inner in settings.items()
        for key, value in (flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {f"{prefix}{name}": inner}).items()
    }


def deviations(config: object) -> dict[str, object]:
    """The settings that are not the schema's defaults."""
    assert is_dataclass(config)
    default = flat(asdict(type(config)()))
    return {name: value for name, value in flat(asdict(config)).items() if value != default[name]}


ALL = {f"grpo/algorithm/{name}": GRPOConfig for name in SAID} | {f"dpo/algorithm/{name}": DPOConfig for name in PAIRS} | OTHERS


def test_no_preset_is_unknown_here() -> None:
    assert {str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/algorithm/*.yaml")} == set(ALL)


@pytest.mark.parametrize("name", SAID)
def test_a_preset_is_what_its_name_says(name: str) -> None:
    assert deviations(from_yaml(GRPOConfig, (CONF / "grpo" / "algorithm" / f"{name}.yaml").read_text())) == SAID[name]


@pytest.mark.parametrize("name", PAIRS)
def test_a_preset_of_pairs_is_what_its_name_says(name: str) -> None:
    """DPO on pairs of the policy's own samples takes it too."""
    text = (CONF / "dpo" / "algorithm" / f"{name}.yaml").read_text()
    assert deviations(from_yaml(DPOConfig, text)) == deviations(from_yaml(OnlineDPOConfig, text)) == PAIRS[name]


@pytest.mark.parametrize("name", ALL)
def test_a_preset_repeats_no_default_and_says_where_it_is_from(name: str) -> None:
    text = (CONF / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    default = flat(asdict(ALL[name]()))
    repeated = {key for key, value in flat(yaml.safe_load(text)).items() if default[key] == value}
    assert repeated == set(), f"conf/{name}.yaml repeats defaults"
