from __future__ import annotations

from pathlib import Path

import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError


def test_create_makes_private_directories_and_keeps_what_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "one").create()
    assert (tmp_path / "runs" / "one").stat().st_mode & 0o777 == 0o700
    folders = ["checkpoints", "export", "health", "journal", "logs", "rollouts", "services", "tensorboard"]
    assert sorted(p.name for p in run.path.iterdir() if p.is_dir()) == folders
    assert [p.name for p in run.path.iterdir() if p.is_file()] == ["run.json"]
    identity = run.run_id()
    (run.checkpoints / "kept").write_text("x")
    run.create()
    assert (run.checkpoints / "kept").read_text() == "x"
    assert run.run_id() == identity


def test_names() -> None:
    run = RunDirectory(Path("/r"))
    assert str(run.config) == "/r/config.yaml"
    assert str(run.metrics) == "/r/metrics.jsonl"
    assert str(run.log("critic", 1)) == "/r/logs/critic.1.log"
    assert str(run.service("critic")) == "/r/services/critic.json"


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(Path("run")).path == tmp_path / "run"


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(LaunchError, match=r"can be written by others \(mode 777\).*chmod 700"):
        RunDirectory(path).create()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(LaunchError, match="is not a directory"):
        RunDirectory(tmp_path / "run").create()
