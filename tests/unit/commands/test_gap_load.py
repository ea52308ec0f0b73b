"""What `aligner gap` is given: a file of conf/, or the directory of a run, whose kind is found from what it wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.sft import TrainSFT
from aligner.commands.gap import load
from aligner.data.config import PromptDataConfig
from aligner.errors import ConfigError
from aligner.models.config import ModelConfig
from aligner.settings.compose import to_yaml


def test_what_is_refused_and_what_was_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.train is required"):
        load("grpo", [], random_prompts=False)
    with pytest.raises(ConfigError, match="config sft: this kind of run does not sample; allowed: grpo, "):
        load("sft", [], random_prompts=False)
    (tmp_path / "config.yaml").write_text(to_yaml(TrainSFT()))  # SPIN has all of its settings, and more
    with pytest.raises(ConfigError, match=f"config {tmp_path}: this kind of run does not sample"):
        load(str(tmp_path), [], random_prompts=False)
    config = TrainGRPO(model=ModelConfig(path="start"), data=PromptDataConfig(train="prompts.jsonl"))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(ConfigError, match=r"rollout\.tq"):
        load(str(tmp_path), ["rollout.tq=2"], random_prompts=False)
    assert load(str(tmp_path), [], random_prompts=True).model.path == "start"
    newest = tmp_path / "checkpoints" / "policy"
    newest.mkdir(parents=True)
    assert load(str(tmp_path), [], random_prompts=True).model.path == str(newest)
    assert load(str(tmp_path), ["model.path=other"], random_prompts=True).model.path == "other"
