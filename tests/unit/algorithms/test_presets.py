"""Every preset under conf/algorithm: what it sets, and that it sets nothing that is the default already."""

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
from aligner.config import from_yaml

FOLDER = Path(__file__).parents[3] / "conf" / "algorithm"
OTHERS = {
    "ppo": PPOConfig,
    "kto": KTOConfig,
    "apo_zero_kto": KTOConfig,
    "online_distill": OnlineDistillationConfig,
    "online_dpo": OnlineDPOConfig,
    "rejection_sampling": RejectionSamplingConfig,
    "spin": SPINConfig,
    "self_rewarding": SelfRewardingConfig,
}
# Losses on pairs, in the settings of aligner/algorithms/dpo.py.
PAIRS = {
    "dpo": {},
    "conservative_dpo": {"label_smoothing": 0.1},
    "robust_dpo": {"loss": "robust", "label_smoothing": 0.1},
    "ipo_dpo": {"loss": "ipo"},
    "hinge_dpo": {"loss": "hinge"},
    "length_normalized_dpo": {"average_logprobs": True, "beta": 5.0},
    "exo_dpo": {"loss": "exo", "label_smoothing": 1e-3},
    "dpop_dpo": {"loss": "dpop", "beta": 0.3, "dpop_coef": 50.0},
    "sppo_dpo": {"loss": "sppo", "beta": 1e-3},
    "bco_dpo": {"loss": "bco"},
    "nca_dpo": {"loss": "nca", "beta": 0.01},
    "apo_zero_dpo": {"loss": "apo_zero"},
    "apo_down_dpo": {"loss": "apo_down"},
    "rpo_dpo": {"loss": "rpo_bwd_kl"},
    "simpo_dpo": {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
    "cpo_dpo": {"loss": "cpo"},
    "orpo_dpo": {"loss": "orpo"},
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


def test_no_preset_is_unknown_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == SAID.keys() | PAIRS.keys() | OTHERS.keys()


@pytest.mark.parametrize("name", SAID)
def test_a_preset_is_what_its_name_says(name: str) -> None:
    assert deviations(from_yaml(GRPOConfig, (FOLDER / f"{name}.yaml").read_text())) == SAID[name]


@pytest.mark.parametrize("name", PAIRS)
def test_a_preset_of_pairs_is_what_its_name_says(name: str) -> None:
    """DPO on pairs of the policy's own samples takes it too."""
    text = (FOLDER / f"{name}.yaml").read_text()
    assert deviations(from_yaml(DPOConfig, text)) == deviations(from_yaml(OnlineDPOConfig, text)) == PAIRS[name]


@pytest.mark.parametrize("name", SAID | PAIRS | OTHERS)
def test_a_preset_repeats_no_default_and_says_where_it_is_from(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    default = flat(asdict((OTHERS | dict.fromkeys(PAIRS, DPOConfig)).get(name, GRPOConfig)()))
    repeated = {key for key, value in flat(yaml.safe_load(text)).items() if default[key] == value}
    assert repeated == set(), f"conf/algorithm/{name}.yaml repeats defaults"
