"""`--multirun`: every combination is a run of its own, and the same command again goes on with the same runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from training_jobs import ROOT, script, tiny_settings, write_task

from aligner.algorithms.registry import recipes
from aligner.reporting.jsonl import read_metrics

TIMEOUT = 400


def test_two_seeds_and_two_learning_rates(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "3+4=", "response": "7"}\n' * 8)
    common = [one for one in tiny_settings(tmp_path) if one.startswith(("model.", "logging."))]
    common += [
        f"data.train={tmp_path / 'sft.jsonl'}",
        "data.max_length=16",
        "algorithm.batch_size=4",
        "loop.max_steps=2",
        "run.export_hf=false",
    ]
    command = [
        *script("train_sft.py"),
        "--multirun",
        "optimizer.lr=1e-3,2e-3",
        "run.seed=1,2",
        *common,
        f"run.directory={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [f"optimizer.lr={lr},run.seed={seed}" for lr in (0.001, 0.002) for seed in (1, 2)]
    losses = {name: read_metrics(tmp_path / "run" / "sweep" / name / "metrics.jsonl")[-1].values["sft/loss"] for name in names}
    assert len(set(losses.values())) == 4
    table = done.stdout[done.stdout.rindex(" settings") :].splitlines()
    assert [line.split()[0] for line in table[1:5]] == names and all(line.split()[-1] == "done" for line in table[1:5])
    assert table[5] == f"in {tmp_path / 'run' / 'sweep'}"
    column = next(column for column in recipes()["sft"].columns if column.metric == "sft/loss")
    assert [float(line.split()[1]) for line in table[1:5]] == [float(format(losses[name], column.format)) for name in names]


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, text in (
        (
            ["optimizer.lr=1,2", "loop.max_stepz=1,2"],
            "unknown setting loop.max_stepz in 'loop.max_stepz=1,2': did you mean loop.max_steps?",
        ),
        (["optimizer.lr=1,2", "hydra/sweeper=nothing"], "Could not find 'hydra/sweeper/nothing'"),
    ):
        command = [*script("train_sft.py"), "-m", "data.train=x", f"run.directory={tmp_path}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
        assert (done.returncode, done.stdout) == (2, "") and text in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
