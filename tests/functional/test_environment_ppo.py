"""PPO on episodes of several turns, rewarded by environment, function and served reward model together, with a critic server."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from training_jobs import launcher, metrics_of, ppo_settings, run_job, series, tiny_settings, train, write_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FUNCTIONS = """
def digits(prompts, responses, answers):
    return [sum(character.isdigit() for character in response) / 8 for response in responses]
"""


def train_reward_model(folder: Path) -> Path:
    """Three steps on pairs whose chosen responses are of even digits: the directory of its checkpoints."""
    pairs = [{"prompt": f"{i % 10}+{i % 7}=", "chosen": "2468"[: 1 + i % 4], "rejected": "13579"[: 1 + i % 5]} for i in range(64)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    kept = [setting for setting in tiny_settings(folder) if not setting.startswith(("data.", "rollout."))]
    settings = [*kept, f"data.train={folder / 'pairs.jsonl'}", "data.max_length=32", "algorithm.batch_size=32", "loop.max_steps=3"]
    run_job(train("reward_model"), folder / "rm", settings)
    return folder / "rm" / "checkpoints" / "reward_model"


def test_ppo_with_a_calculator_and_three_rewards(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    settings = [
        *ppo_settings(tmp_path),
        "environment.path=aligner.environments.calculator:Calculator",
        '+environment.arguments={open: "", close: "="}',
        *("environment.max_turns=3", "environment.form=plain", 'environment.suffix=" "'),
        *('rollout.sampling.stop_strings=["="]', "rollout.sampling.max_response_length=20"),
        *("reward.serve=true", f"reward.model.path={train_reward_model(tmp_path)}"),
        f"reward.functions.digits={{path:'{tmp_path}/mine.py:digits',weight:0.5}}",
        "reward.functions.model={served:true,weight:0.25}",
        *("loop.max_steps=3", "run.export_hf=false"),
    ]
    run_job(launcher("ppo"), tmp_path / "run", settings)
    run = tmp_path / "run"
    assert [line.step for line in metrics_of(run)] == [1, 2, 3]
    parts = zip(*(series(run, f"reward/{name}") for name in ("environment", "digits", "model")), strict=True)
    assert series(run, "rollout/reward") == pytest.approx(
        [played + 0.5 * digits + 0.25 * model for played, digits, model in parts], abs=1e-5
    )
    assert max(series(run, "reward/environment")) > 0
    for name in ("reward/digits", "rollout/observation_tokens"):
        assert min(series(run, name)) > 0, name
    assert all(math.isfinite(value) and value for value in series(run, "reward/model"))
    turns = series(run, "rollout/turns")  # of a model that knows nothing: seldom a call that the calculator can read
    assert all(1.02 < mean < 3 for mean in turns), turns
    assert max(series(run, "rollout/logprob_gap")) < 1e-4  # of what the policy wrote, not of what it was told
    later = metrics_of(run)[1:]  # the critic's numbers come a step later
    assert all(math.isfinite(line.values["critic/loss"]) for line in later)
