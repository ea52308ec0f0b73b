"""`--multirun`: every combination is a run of its own, and the same command again goes on with the same runs."""

from __future__ import annotations

from pathlib import Path

from training_jobs import run_aligner, tiny_settings, write_task

from aligner.algorithms.registry import recipes
from aligner.reporting.jsonl import read_metrics


def test_two_learning_rates(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "3+4=", "response": "7"}\n' * 8)
    settings = [one for one in tiny_settings(tmp_path) if one.startswith(("model.", "logging."))]
    settings += [f"data.train={tmp_path / 'sft.jsonl'}", "data.max_length=16", "algorithm.batch_size=4", "loop.max_steps=2"]
    swept = ["optimizer.lr=1e-3,2e-3", "run.export_hf=false", f"run.directory={tmp_path / 'run'}"]
    code, shown = run_aligner("train", "sft", "--multirun", *swept, *settings)
    assert code == 0, shown
    names = [f"optimizer.lr={lr}" for lr in (0.001, 0.002)]
    losses = {name: read_metrics(tmp_path / "run" / "sweep" / name / "metrics.jsonl")[-1].values["sft/loss"] for name in names}
    assert len(set(losses.values())) == 2
    table = shown[shown.rindex(" settings") :].splitlines()
    assert [line.split()[0] for line in table[1:3]] == names and all(line.split()[-1] == "done" for line in table[1:3])
    assert table[3] == f"in {tmp_path / 'run' / 'sweep'}"
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
