"""`--multirun`: every combination is a run of its own, and the same command again goes on with the same runs."""

from __future__ import annotations

from pathlib import Path

from training_jobs import run_aligner, supervised_settings, write_rows

from aligner.algorithms.registry import recipes
from aligner.reporting.jsonl import read_metrics


def test_two_learning_rates(task: Path) -> None:
    data = write_rows(task / "sft.jsonl", [{"prompt": "3+4=", "response": "7"}] * 8)
    settings = [one for one in supervised_settings(task, data, "algorithm.batch_size=4") if not one.startswith("optimizer.lr=")]
    settings += ["loop.max_steps=2", "loop.validate_every=0", "run.export_hf=false", f"run.directory={task / 'run'}"]
    code, shown = run_aligner("train", "sft", "--multirun", "optimizer.lr=1e-3,2e-3", *settings)
    assert code == 0, shown
    names = [f"optimizer.lr={lr}" for lr in (0.001, 0.002)]
    losses = {name: read_metrics(task / "run" / "sweep" / name / "metrics.jsonl")[-1].values["sft/loss"] for name in names}
    assert len(set(losses.values())) == 2
    table = shown[shown.rindex(" settings") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == names and all(line.split()[-1] == "done" for line in table[1:3])
    assert table[3] == f"in {task / 'run' / 'sweep'}"
    column = next(column for column in recipes()["sft"].columns if column.metric == "sft/loss")
    assert [float(line.split()[1]) for line in table[1:3]] == [float(format(losses[name], column.format)) for name in names]


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, text in (
        (
            ["optimizer.lr=1,2", "loop.max_stepz=1,2"],
            "unknown setting loop.max_stepz in 'loop.max_stepz=1,2': did you mean loop.max_steps?",
        ),
        (["optimizer.lr=1,2", "hydra/sweeper=nothing"], "Could not find 'hydra/sweeper/nothing'"),
    ):
        code, shown = run_aligner("train", "sft", "-m", "data.train=x", f"run.directory={tmp_path}", *arguments)
        assert code == 2 and text in shown, shown
    assert list(tmp_path.iterdir()) == []
