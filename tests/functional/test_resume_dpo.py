"""DPO, killed with SIGKILL and resumed, equals a run that was not killed, to the last bit."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from resumed_runs import kill_after, optimizer_and_weights, same_tensors, weights
from training_jobs import Job, run_job, script, steps_of, tiny_settings, without_times, write_task

pytestmark = pytest.mark.timeout(600)
TRAIN = script("train_dpo.py")
NUM_STEPS = 60


def settings(folder: Path) -> list[str]:
    """Cosine decay, pairs of several lengths, 16 of 100 pairs a step (so that steps straddle epochs), a save every ten."""
    draw = random.Random(1)
    records = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + draw.choice((-10, -1, 1, 100)))}
        for a in range(10)
        for b in range(10)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    replaced = ("data.", "rollout.", "optimizer.decay=", "model.micro_batch_size=")
    return [
        *(setting for setting in tiny_settings(folder) if not setting.startswith(replaced)),
        *(f"data.train={folder / 'pairs.jsonl'}", f"data.validation={folder / 'pairs.jsonl'}", "data.max_length=16"),
        *("algorithm.batch_size=16", "algorithm.sft_coef=0.1", "model.micro_batch_size=4", "optimizer.decay=cosine"),
        *(f"loop.max_steps={NUM_STEPS}", "loop.save_every=10", "loop.validate_every=5"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The directories of a run that was left alone and of one that was killed after step 23 (or soon after: a step takes little)."""
    folder = tmp_path_factory.mktemp("resume_dpo")
    write_task(folder)
    whole, killed = folder / "whole", folder / "killed"
    run_job(TRAIN, whole, settings(folder))
    with Job(TRAIN, killed, settings(folder)) as job:
        kill_after(job, 23)
    assert steps_of(killed)[-1] < NUM_STEPS
    output = run_job(TRAIN, killed, settings(folder))
    (resumed,) = (int(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "resumed after step" in line)
    assert 10 <= resumed < NUM_STEPS
    return whole, killed


def test_the_policies_are_equal_to_the_last_bit(runs: tuple[Path, Path]) -> None:
    whole, killed = runs
    assert weights(killed) == weights(whole)
    last = f"checkpoints/policy/step_{NUM_STEPS:06d}"
    same_tensors(optimizer_and_weights(killed / last), optimizer_and_weights(whole / last))


def test_the_metrics_are_equal(runs: tuple[Path, Path]) -> None:
    """Also the log-ratios: the reference of the resumed run is the model that the run began with, not the checkpoint."""
    whole, killed = runs
    assert steps_of(killed) == list(range(1, NUM_STEPS + 1))
    assert without_times(killed) == without_times(whole)
    assert without_times(whole)[-1]["preference/margin"] > 0.01
