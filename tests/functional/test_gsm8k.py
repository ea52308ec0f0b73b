"""The GSM8K recipe, wired up: real questions through the converter, the real checking of answers, and a model too small for any of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from builders import load_module
from training_jobs import ROOT, run_job, train, write_rows

from aligner.algorithms.grpo import TrainGRPO
from aligner.errors import DataError
from aligner.reporting.jsonl import read_metrics
from aligner.settings.compose import compose

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def gsm8k() -> ModuleType:
    return load_module(ROOT / "examples" / "nlp" / "data" / "gsm8k.py", "gsm8k_converter")


def test_records_become_prompts(gsm8k: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    source.write_text(
        json.dumps({"question": " How many?\u2028 ", "answer": "3*400 = <<3*400=1200>>1200\n#### 1,200"}, ensure_ascii=False) + "\n"
    )
    (chat,) = gsm8k.convert(source, plain=False)
    assert chat == {"messages": [{"role": "user", "content": f"How many? {gsm8k.INSTRUCTION}"}], "answer": "1200"}
    (plain,) = gsm8k.convert(source, plain=True)
    assert plain == {"prompt": f"Question: How many?\n{gsm8k.INSTRUCTION}\nAnswer:", "answer": "1200"}
    source.write_text(source.read_text() + '{"question": "Why?", "answer": "because"}\n')
    with pytest.raises(DataError, match=r"gsm8k.jsonl:2: not a record of GSM8K"):
        list(gsm8k.convert(source, plain=False))


def test_the_recipe_for_gpus_composes() -> None:
    config = compose(TrainGRPO, "grpo_gsm8k_qwen2_5_1_5b", ["data.train=x"])
    assert config.algorithm.rollouts_per_step == 1024 * 5 and config.algorithm.updates_per_step == 4
    assert config.data.max_prompt_length + config.rollout.sampling.max_response_length <= config.model.seq_length


@pytest.mark.shared
def test_the_tiny_model_runs_through_it(gsm8k: ModuleType, tmp_path: Path, shared_data: Path) -> None:
    pytest.importorskip("math_verify")
    for split in ("train", "test"):
        lines = (shared_data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")[:16]
        (tmp_path / f"{split}.raw").write_text("\n".join(lines) + "\n", encoding="utf-8")
        write_rows(tmp_path / f"{split}.jsonl", gsm8k.convert(tmp_path / f"{split}.raw", plain=True))
    settings = [f"model.path={shared_data / 'stories260k'}", "logging.tensorboard=false", "logging.progress=plain"]
    settings += [f"data.train={tmp_path / 'train.jsonl'}", f"data.validation={tmp_path / 'test.jsonl'}", "loop.max_steps=2"]
    settings += ["guard.learnt_nothing=warn"]  # a model of children's stories solves none of these
    run_job(train("grpo_gsm8k_tiny"), tmp_path / "run", settings)
    first, one, two = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 0 <= first.values["validation/accuracy"] <= 1 and 0 <= two.values["validation/accuracy"] <= 1
    assert [0 <= step.values["rollout/reward"] <= 1 for step in (one, two)] == [True, True]
    assert [step.values["rollout/rewards_invalid"] for step in (one, two)] == [0, 0]
