"""Runs that end without a result: user code that ends the processes, however they were started, and runs that learn nothing, which end with
exit code 78 and say why, also when they are started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_jobs import (
    SAYS_77,
    Job,
    grpo_settings,
    launcher,
    run_job,
    steps_of,
    supervised_settings,
    tiny_settings,
    train,
    write_rows,
)

pytestmark = pytest.mark.timeout(300)
ALL_CUT = "rollout.sampling.min_response_length=8"  # as long as a response may be: none ends by itself
REJECTION = ("algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.mini_batch_size=4")
SELF_REWARDING = ("algorithm.judge=reward", "algorithm.batch_size=4", "algorithm.prompts_per_iteration=4", "algorithm.group_size=2")


def ends_by_exit(command: tuple[str, ...], task: Path, name: str, reward: str, code: int) -> str:
    """The output of a GRPO run with this file of a reward; there is no done.json."""
    (task / f"{name}.py").write_text(reward)
    run = task / f"{name}{len(command)}"
    with Job(command, run, [*grpo_settings(task), "loop.max_steps=2", f"reward.function.path={task / name}.py:reward"]) as job:
        output = job.finish(code)
    assert not (run / "done.json").exists()
    return output


@pytest.mark.parametrize("command", [train("grpo"), launcher("grpo")], ids=["directly", "launcher"])
def test_a_reward_function_that_calls_exit(command: tuple[str, ...], task: Path) -> None:
    output = ends_by_exit(command, task, "exits", "import os\n\ndef reward(prompts, responses, answers):\n    os._exit(0)\n", 1)
    assert "error: rank 0 was ended with exit code 0 before its work was done, by os._exit in " in output
    assert "exits.py:4 (reward)" in output and "finished" not in output


def test_a_reward_file_that_ends_the_program_when_it_is_imported(task: Path) -> None:
    output = ends_by_exit(train("grpo"), task, "import", "import sys\n\nsys.exit(0)\n", 2)
    assert "import.py: SystemExit: it ended the program (sys.exit(0) at " in output


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
    data = write_rows(task / "sft.jsonl", ({"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)))
    settings = supervised_settings(task, data, "data.validation=''", "loop.validate_every=0", "algorithm.batch_size=4", "loop.max_steps=2")
    output = ends_for_good(train("sft"), task / "small", [*settings, "optimizer.lr=1e-30"])
    assert "error: no weight changed in 2 updates to step 2: optimizer.lr is too small" in output

    output = run_job(train("sft"), task / "learns", settings)
    assert "learnt from 8 samples, 16 tokens, 2 updates\n" in output
