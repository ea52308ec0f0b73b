"""DPO, killed with SIGKILL and resumed, equals a run that was not killed, to the last bit; with a stored reference too."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from resumed_runs import kill_after, kill_when, same_runs
from training_jobs import Job, run_job, steps_of, tiny_settings, train, without_times, write_task

pytestmark = pytest.mark.timeout(600)
TRAIN = train("dpo")
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


@pytest.mark.slow
def test_killed_on_the_way(tmp_path: Path) -> None:
    """After step 23 (or soon after: a step takes little). Also the log-ratios: the reference of the resumed run is the model that the run
    began with, not the checkpoint."""
    write_task(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_job(TRAIN, whole, settings(tmp_path))
    with Job(TRAIN, killed, settings(tmp_path)) as job:
        kill_after(job, 23)
    assert steps_of(killed)[-1] < NUM_STEPS
    output = run_job(TRAIN, killed, settings(tmp_path))
    (resumed,) = (int(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "resumed after step" in line)
    assert 10 <= resumed < NUM_STEPS and steps_of(killed) == list(range(1, NUM_STEPS + 1))
    same_runs(killed, whole, NUM_STEPS)
    assert without_times(whole)[-1]["preference/margin"] > 0.01


def test_killed_while_the_reference_is_stored_and_after_it(tmp_path: Path) -> None:
    """In the middle of the pass, whose files are then gone on with, and in the middle of the training, which goes on with all of them."""
    write_task(tmp_path)
    common = [one for one in settings(tmp_path) if not one.startswith("loop.")]
    common += ["loop.max_steps=14", "loop.save_every=4", "algorithm.reference=precomputed", "algorithm.reference_part_size=5"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_job(TRAIN, whole, common)
    assert len(stored(whole)) == 40  # 100 pairs to train on, and the same to validate, in files of five
    with Job(TRAIN, killed, common) as job:
        kill_when(job, lambda: len(stored(killed)) >= 2)
    before = len(stored(killed))
    assert 2 <= before < 40
    with Job(TRAIN, killed, common) as job:
        kill_after(job, 6)
        assert f"resumed after step {before}\n" in job.output()  # of the pass
    output = run_job(TRAIN, killed, common)
    assert "resumed after step" in output and "the reference's log-probs of" not in output  # of the training; nothing is left to compute
    assert stored(killed) == stored(whole)
    same_runs(killed, whole, 14)


def stored(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "reference").glob("*.safetensors"))}
