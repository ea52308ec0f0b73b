"""GRPO on episodes of several turns: a policy of random weights that now and then asks a calculator."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import grpo_settings, metrics_of, run_job, series, train, write_task

from aligner.telemetry.recording import read_spans

pytestmark = pytest.mark.timeout(300)


def test_grpo_with_a_calculator(tmp_path: Path) -> None:
    """`=` ends a turn and calls the calculator with what was written since the last one. No reward function is named."""
    write_task(tmp_path)
    settings = [
        *grpo_settings(tmp_path),
        "environment.path=aligner.environments.calculator:Calculator",
        '+environment.arguments={open: "", close: "="}',
        *("environment.max_turns=3", "environment.form=plain", 'environment.suffix=" "'),
        *('rollout.sampling.stop_strings=["="]', "rollout.sampling.max_response_length=20", "rollout.max_batch_size=48"),
        *(f"data.validation={tmp_path / 'prompts.jsonl'}", "data.num_validation_prompts=4", "loop.validate_every=2"),
        *("loop.max_steps=2", "loop.table_every=1", "run.export_hf=false"),
    ]
    output = run_job(train("grpo"), tmp_path / "run", settings)
    run = tmp_path / "run"
    assert "samples of step 2" in output
    assert all(1.1 < turns < 3 for turns in series(run, "rollout/turns"))
    for name in ("observation_tokens", "tool_calls", "tool_errors"):
        assert min(series(run, f"rollout/{name}")) > 0.2, name
    assert series(run, "reward/environment") == series(run, "rollout/reward")
    assert all(errors < calls for errors, calls in zip(series(run, "rollout/tool_errors"), series(run, "rollout/tool_calls"), strict=True))
    assert max(series(run, "rollout/logprob_gap")) < 1e-4  # of what the policy wrote
    assert "validation/reward" in metrics_of(run)[-1].values
    spans, _ = read_spans(run / "trace")
    turns = [span for span in spans if span.lane == "rank 0 environment" and span.name == "step"]
    assert len(turns) == sum(span.name == "response" for span in spans) > 2 * 128  # every turn of the policy is one of the environment
    assert {span.arguments["turn"] for span in turns} == {1, 2, 3}
    assert sum(span.name == "validate" for span in spans) == 1 and sum(span.name == "report" for span in spans) == 2
