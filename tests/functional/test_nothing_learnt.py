"""Runs that learn nothing end with exit code 78 and say why: without an export, without done.json, also when they are started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import SAYS_77, Job, run_job, steps_of, tiny_settings, train

pytestmark = pytest.mark.timeout(300)
ALL_CUT = "rollout.sampling.min_response_length=8"  # as long as a response may be: none ends by itself
REJECTION = ("algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.mini_batch_size=4")
SELF_REWARDING = ("algorithm.judge=reward", "algorithm.batch_size=4", "algorithm.prompts_per_iteration=4", "algorithm.group_size=2")


@pytest.fixture(scope="module")
def task(task: Path) -> Path:
    (task / "sft.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "response": str(a + 1)}) + "\n" for a in range(8)))
    return task


def ends_for_good(command: tuple[str, ...], run: Path, settings: list[str]) -> str:
    with Job(command, run, settings) as job:
        output = job.finish(78)
    assert not (run / "done.json").exists() and list((run / "export").iterdir()) == []
    return output


def test_rejection_sampling_where_every_response_is_cut(task: Path) -> None:
    """Ended after so many empty steps; or, at will, warned of, and then it says at its end what it learnt from."""
    settings = [*tiny_settings(task), *REJECTION, *SAYS_77, ALL_CUT, "loop.max_steps=4", "guard.learnt_nothing_steps=2"]
    output = ends_for_good(train("rejection_sampling"), task / "stop", settings)
    said = "nothing was learnt in the last 2 steps, to step 2: of 16 samples 100.0% cut at the length limit"
    assert f"error: {said} (guard.learnt_nothing=stop, guard.learnt_nothing_steps=2)" in output
    assert steps_of(task / "stop") == [1, 2]

    output = run_job(train("rejection_sampling"), task / "warn", [*settings, "guard.learnt_nothing=warn"])
    assert output.count(f"warning: {said}") == 1 and "warning: nothing was learnt in the whole run, to step 4: of 32 samples" in output
    assert (task / "warn" / "done.json").exists()


def test_self_rewarding_where_every_response_is_cut(task: Path) -> None:
    """A run shorter than `guard.learnt_nothing_steps`; started again it has no step left to take."""
    settings = [*tiny_settings(task), *SELF_REWARDING, *SAYS_77, ALL_CUT, "loop.max_steps=2"]
    said = "error: nothing was learnt in the whole run, to step 2: of 16 samples 100.0% cut at the length limit"
    for _ in range(2):
        output = ends_for_good(train("self_rewarding"), task / "self_rewarding", settings)
        assert said in output and "nothing is exported" in output
    assert "resumed after step 2" in output


def test_a_learning_rate_too_small_to_change_a_weight_and_one_that_is_not(task: Path) -> None:
    model = [one for one in tiny_settings(task) if not one.startswith(("rollout.", "data."))]
    settings = [*model, f"data.train={task / 'sft.jsonl'}", "data.max_length=16", "algorithm.batch_size=4", "loop.max_steps=2"]
    output = ends_for_good(train("sft"), task / "small", [*settings, "optimizer.lr=1e-30"])
    assert "error: no weight changed in 2 updates to step 2: optimizer.lr is too small" in output

    output = run_job(train("sft"), task / "learns", settings)
    assert "learnt from 8 samples, 16 tokens, 2 updates\n" in output
