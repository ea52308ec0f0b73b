"""GRPO over two processes: it samples and trains what one process does, continues what a killed rank left, and samples ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from resumed_runs import same_runs
from safetensors.torch import load_file
from training_jobs import (
    SAYS_77,
    Job,
    checkpoint_steps,
    eventually,
    grpo_settings,
    kill,
    launcher,
    run_job,
    series,
    slow_reward,
    steps_of,
    without_times,
)

from aligner.reporting.rollout_table import read_rows

pytestmark = pytest.mark.timeout(600)
LAUNCH = launcher("grpo")
LAYOUTS = {
    "dp2": (),
    "pp2_rollout_tp2": ("parallel.pp=2", "rollout.tp=2"),
}


def run(task: Path, name: str, num_processes: int, *settings: str) -> Path:
    # A small learning rate: Adam turns a gradient's last bits near 0 into whole steps. The vocabulary of 18 is padded to 20 whatever tp is:
    # random weights depend on the padded size.
    common = ("optimizer.lr=1e-3", "loop.max_steps=2", "loop.table_every=1", "model.make_vocab_divisible_by=5")
    run_job(LAUNCH, task / name, [*grpo_settings(task), *SAYS_77, *common, *settings, f"num_processes={num_processes}"])
    return task / name


@pytest.fixture(scope="module")
def single(task: Path) -> Path:
    return run(task, "single", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_equal_one(layout: str, single: Path) -> None:
    two = run(single.parent, layout, 2, *LAYOUTS[layout])
    for step in (1, 2):
        rows, expected = (read_rows(folder / f"rollouts/step_{step:06d}.jsonl") for folder in (two, single))
        assert [replace(row, tokens=None) for row in rows] == [replace(row, tokens=None) for row in expected]
        for row, other in zip(rows, expected, strict=True):
            assert row.tokens.texts == other.tokens.texts and {"sampler", "advantage"} <= other.tokens.numbers.keys()
            for key, numbers in other.tokens.numbers.items():
                assert row.tokens.numbers[key] == pytest.approx(numbers, rel=1e-3, abs=1e-5), key
    for got, expected in zip(without_times(two), without_times(single), strict=True):
        gaps = {key for key in expected if key.startswith(("rollout/logprob_", "policy/approx_kl", "policy/loss"))}  # rounding, about 0
        assert {key: got[key] for key in expected.keys() - gaps} == pytest.approx(
            {k: expected[k] for k in expected.keys() - gaps}, rel=1e-3
        )
        assert {key: got[key] for key in gaps} == pytest.approx({key: expected[key] for key in gaps}, abs=1e-5)
        assert expected["optim/grad_norm"] > 1e-3  # there was something to learn from
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (two, single))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (ours[name] - weight).abs().max() < 1e-4, name


def test_the_second_rank_killed_after_step_3(task: Path) -> None:
    """Cosine decay, two updates a step, 24 of 64 prompts a step, a save every two, with the distributed optimizer."""
    sizes = ("algorithm.prompts_per_step=24", "algorithm.mini_batch_size=96", "optimizer.decay=cosine", "num_processes=2")
    settings = [*grpo_settings(task), *sizes, "loop.max_steps=5", "loop.save_every=2"]
    whole, killed = task / "whole", task / "killed"
    run_job(LAUNCH, whole, [*settings, slow_reward(task, 0.0)])
    with Job(LAUNCH, killed, [*settings, slow_reward(task, 0.3)]) as job:
        job.reached(3)
        ranks = sorted(pid for pid, command in job.processes().items() if "aligner.cli train grpo" in command)
        kill(ranks[1])
        assert job.wait() != 0
        assert eventually(lambda: not job.processes(), 60.0)  # the launcher ended the other rank
    assert checkpoint_steps(killed / "checkpoints" / "policy") == [2]
    assert "resumed after step 2" in run_job(LAUNCH, killed, [*settings, slow_reward(task, 0.0)])
    assert steps_of(killed) == [1, 2, 3, 4, 5]
    same_runs(killed, whole, 5)


def test_rollouts_that_are_sampled_ahead(task: Path) -> None:
    """It trains, validates, ends, and continues where it was."""
    settings = [
        *(*grpo_settings(task), *SAYS_77),
        *("num_processes=2", "rollout.asynchronous.max_staleness=1", "rollout.asynchronous.recompute=true"),
        *(f"data.validation={task / 'prompts.jsonl'}", "loop.validate_every=2"),
    ]
    run = task / "ahead"
    said = run_job(LAUNCH, run, [*settings, "loop.max_steps=3", "run.export_hf=false"])
    assert "warning: algorithm.correction.kind=none with rollout.asynchronous.max_staleness=1" in said
    said = run_job(LAUNCH, run, [*settings, "loop.max_steps=5", "algorithm.correction.kind=tis", "run.allow_changes=true"])
    assert "resumed after step 3" in said and "correction.kind=none" not in said
    assert steps_of(run) == [1, 2, 3, 4, 5]
    # The first step after a start has nothing that was sampled ahead; two updates make a step.
    assert series(run, "rollout/staleness_max") == [0, 1, 1, 0, 1]
    assert max(series(run, "rollout/versions")) <= 2 and len(series(run, "time/generate")) == 5


def test_experts_of_older_weights_are_replayed(task: Path) -> None:
    """Two ranks that split the experts and sample together, from weights that change on the way: what they chose is what trains, though the
    trainer would choose otherwise by then."""
    experts = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64}
    settings = [
        *(*grpo_settings(task), *SAYS_77),
        *(f"model.architecture.{name}={value}" for name, value in experts.items()),
        *("num_processes=2", "parallel.ep=2", "rollout.tp=2", "rollout.asynchronous.max_staleness=1", "rollout.routing_replay=replay"),
        *("algorithm.correction.kind=tis", "run.export_hf=false", "loop.max_steps=2"),
    ]
    run = task / "experts"
    run_job(LAUNCH, run, settings)
    assert series(run, "rollout/staleness_max") == [0, 1]
    assert series(run, "rollout/route_mismatch") == [0, 0]
    assert min(series(run, "rollout/route_replaced")) > 0  # two updates make a step
