"""An unmodified environment of Gymnasium trains a model: in threads and in processes, one of which is killed, with the same numbers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from training_jobs import Job, grpo_settings, read_rows, run_aligner, run_job, series, train, without_times

pytestmark = pytest.mark.timeout(600)
LAKE = ("environment.kind=gymnasium", "environment.name=FrozenLake-v1", "+environment.arguments={desc: [SFG, FHF], is_slippery: false}")
STEPS = 5


def settings(folder: Path) -> list[str]:
    return [
        *grpo_settings(folder),
        *(*LAKE, "environment.max_turns=4", "environment.form=plain", 'environment.prefix="\n"', 'environment.suffix="\n"'),
        *(f"data.train={folder / 'lake.jsonl'}", "data.max_prompt_length=64", "rollout.sampling.max_response_length=64"),
        *("rollout.sampling.stop_strings=['0','1','2','3']", "model.architecture.max_position_embeddings=160", f"loop.max_steps={STEPS}"),
        *("run.export_hf=false", "algorithm.kl_coef=0"),
    ]


@pytest.fixture(scope="module")
def lake(task: Path) -> Path:
    code, output = run_aligner("data", "tasks", task / "lake.jsonl", *LAKE, "--count", 64, "--seed", 7)
    assert code == 0, output
    return task


def test_the_prompts_are_first_observations(lake: Path) -> None:
    rows = read_rows(lake / "lake.jsonl")
    assert rows == [{"prompt": "0\nAction: one of 0, 1, 2, 3.", "seed": seed} for seed in range(7, 71)]


def test_it_learns_and_processes_change_no_number(lake: Path) -> None:
    """Two steps to the right are worth a reward; nothing is lost or doubled where a process of the environment is killed."""
    threads = lake / "threads"
    run_job(train("grpo"), threads, settings(lake))
    rewards = series(threads, "reward/environment")
    assert rewards[-1] > rewards[0] + 0.2, rewards
    assert max(series(threads, "rollout/logprob_gap")) < 1e-4
    processes = lake / "processes"
    with Job(train("grpo"), processes, [*settings(lake), "environment.num_processes=2"]) as job:
        job.reached(1)
        workers = [pid for pid, command in job.processes().items() if "aligner.environments.isolated" in command]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        output = job.finish()
        assert "was killed by signal 9; another takes its place" in output
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert without_times(threads) == without_times(processes)
