"""GRPO over two data-parallel ranks with rollouts that are sampled ahead: it trains, validates, ends, and goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import SAYS_77, grpo_settings, launcher, run_job, series, steps_of, write_task

pytestmark = pytest.mark.timeout(300)


def test_ends_and_goes_on(tmp_path: Path) -> None:
    write_task(tmp_path)
    settings = [
        *grpo_settings(tmp_path),
        *SAYS_77,
        *("num_processes=2", "rollout.asynchronous.max_staleness=1", "rollout.asynchronous.recompute=true"),
        *(f"data.validation={tmp_path / 'prompts.jsonl'}", "loop.validate_every=2"),
    ]
    run = tmp_path / "run"
    said = run_job(launcher("grpo"), run, [*settings, "loop.max_steps=3", "run.export_hf=false"])
    assert "warning: algorithm.correction.kind=none with rollout.asynchronous.max_staleness=1" in said
    said = run_job(launcher("grpo"), run, [*settings, "loop.max_steps=5", "algorithm.correction.kind=tis", "run.allow_changes=true"])
    assert "resumed after step 3" in said and "correction.kind=none" not in said
    assert steps_of(run) == [1, 2, 3, 4, 5]
    # The first step after a start has nothing that was sampled ahead; two updates make a step.
    assert series(run, "rollout/staleness_max") == [0, 1, 1, 0, 1]
    assert max(series(run, "rollout/versions")) <= 2 and len(series(run, "time/generate")) == 5


def test_experts_of_older_weights_are_replayed(tmp_path: Path) -> None:
    """Two ranks that split the experts and sample together, from weights that change on the way: what they chose is what trains, though the
    trainer would choose otherwise by then."""
    write_task(tmp_path)
    experts = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64}
    settings = [
        *grpo_settings(tmp_path),
        *SAYS_77,
        *(f"model.architecture.{name}={value}" for name, value in experts.items()),
        *("num_processes=2", "parallel.ep=2", "rollout.tp=2", "rollout.asynchronous.max_staleness=1", "rollout.routing_replay=replay"),
        *("algorithm.correction.kind=tis", "run.export_hf=false", "loop.max_steps=2"),
    ]
    run = tmp_path / "run"
    run_job(launcher("grpo"), run, settings)
    assert series(run, "rollout/staleness_max") == [0, 1]
    assert series(run, "rollout/route_mismatch") == [0, 0]
    assert min(series(run, "rollout/route_replaced")) > 0  # two updates make a step
