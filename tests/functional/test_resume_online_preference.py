"""Online DPO with a moving reference, and rejection sampling: a run in two parts equals one in one, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from resumed_runs import same_runs
from training_jobs import checkpoint_steps, run_job, series, slow_reward, steps_of, tiny_settings, train

pytestmark = pytest.mark.timeout(600)


def in_two_parts(task: Path, recipe: str, settings: list[str], *, first: int, last: int) -> Path:
    """The directory of a run that was resumed after step `first`, once it is found equal to one that was not."""
    whole, parts, program = task / f"{recipe}_whole", task / f"{recipe}_parts", train(recipe)
    common = [*tiny_settings(task), *settings, slow_reward(task, 0.0), "algorithm.prompts_per_step=24"]  # of 64: step 3 straddles epochs
    run_job(program, whole, [*common, f"loop.max_steps={last}"])
    run_job(program, parts, [*common, f"loop.max_steps={first}"])
    output = run_job(program, parts, [*common, f"loop.max_steps={last}"])
    assert f"resumed after step {first}" in output and steps_of(parts) == list(range(1, last + 1))
    assert max(series(parts, "rollout/logprob_gap")) < 1e-4
    same_runs(parts, whole, last)
    return parts


def test_online_dpo(task: Path) -> None:
    """The reference is the policy after step 2 from step 3 on: the resumed run reads it from its own checkpoint."""
    settings = ["algorithm.group_size=4", "algorithm.mini_batch_size=8", "algorithm.num_epochs=2", "algorithm.reference_every=2"]
    run = in_two_parts(task, "online_dpo", settings, first=3, last=4)
    assert checkpoint_steps(run / "checkpoints" / "reference") == [2]
    assert not (run / "checkpoints" / "reference" / "step_000002" / "optimizer").exists()
    assert min(series(run, "pairs/count")) > 0 and min(series(run, "pairs/ref_kl")) > 0


def test_rejection_sampling(task: Path) -> None:
    run = in_two_parts(task, "rejection_sampling", ["algorithm.mini_batch_size=8", "algorithm.require_spread=true"], first=2, last=3)
    kept, sampled = series(run, "kept/reward"), series(run, "rollout/reward")
    assert all(one > other for one, other in zip(kept, sampled, strict=True))
    assert all(0 < fraction <= 1 / 8 for fraction in series(run, "kept/fraction"))
