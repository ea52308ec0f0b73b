"""A run that the gap's alarm ends, what it reported until then, and `aligner gap` on what it left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import SAYS_77, Job, grpo_settings, run_aligner, series, train

pytestmark = pytest.mark.timeout(300)


def test_alarm_validation_and_attribution(task: Path) -> None:
    run = task / "run"
    settings = [
        *(*grpo_settings(task), *SAYS_77, "loop.max_steps=9", "run.export_hf=false"),
        *(f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=4", "loop.validate_every=1"),
        *("validation.scorer.path=aligner.rewards.builtin:fixed_string", '+validation.scorer.arguments.target="7-"'),
        *("validation.num_samples=2", "checkpoint.best_metric=validation/pass@2"),
        *("guard.logprob_gap.stop=1e-12", "guard.logprob_gap.statistic=p99", "guard.logprob_gap.patience=2"),
    ]
    with Job(train("grpo"), run, settings) as job:
        output = job.finish(78)
    assert "guard.logprob_gap.stop=1e-12 (2 steps in a row)" in output and f"aligner gap {run}" in output
    assert len(series(run, "rollout/logprob_gap_p99")) == 2 and (run / "checkpoints" / "policy" / "step_000002").is_dir()
    assert all(0 < ess <= 1 for ess in series(run, "rollout/effective_sample_size"))
    assert len(series(run, "validation/pass@2")) == 2 and (run / "checkpoints" / "policy" / "best").exists()

    code, output = run_aligner("gap", run, "--tokens", 6, "--json", task / "gap.json")
    assert code == 0, output
    assert "engine and trainer agree within rounding" in output
    report = json.loads((task / "gap.json").read_text())
    assert report["agrees"] and report["num_rollouts"] == 16 and set(report["paths"]) == {"prefill", "decode"}
    code, output = run_aligner("gap", run, "rollout.kernels=torch", "--random-prompts", "--prompts", 2, "--ulps", 1e-6)
    assert code == 1, output
    assert "first difference beyond rounding: layer 0, " in output
