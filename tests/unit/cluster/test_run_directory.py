from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ConfigError, LaunchError


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


def test_what_is_known_of_the_newest_start_is_beside_the_id(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    identity, day = run.run_id(), run.first_day()
    run.record(float32_matmul={"model": "high"})
    run.record(float32_matmul={"model": "highest"})
    assert json.loads(run.identity.read_text())["float32_matmul"] == {"model": "highest"}
    assert (run.run_id(), run.first_day()) == (identity, day) and [p.name for p in run.path.iterdir() if p.is_file()] == ["run.json"]
    run.identity.write_text("{}")
    with pytest.raises(LaunchError, match="cannot read the run's run_id"):
        run.record(float32_matmul={})


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(Path("run")).path == tmp_path / "run"


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by others \(mode 777\).*chmod 700"):
        RunDirectory(path).create()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_directory_that_others_can_read_is_closed_to_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    RunDirectory(path).create()
    assert path.stat().st_mode & 0o777 == 0o700
    said = f"run.directory={path}: others could read it (mode {mode:o}), and it holds secrets: it is 700 now\n"
    assert capsys.readouterr().out == said
    RunDirectory(path).create()
    assert capsys.readouterr().out == ""


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for path in (tmp_path / "run", tmp_path / "run" / "a" / "b"):
        with pytest.raises(ConfigError, match=f"run.directory={path}: {tmp_path}/run exists and is not a directory"):
            RunDirectory(path).create()


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the file system is full"), (errno.EROFS, "mounted read-only")])
def test_a_file_system_that_takes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=f"run.directory={tmp_path}/run: {said if number == errno.ENOSPC else '.*' + said}"):
        RunDirectory(tmp_path / "run").create()


def test_a_disk_that_is_nearly_full_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=1 << 20))
    with pytest.raises(ConfigError, match=r"run.directory=.*run: 3.0 MiB are free there, allowed: at least 16 MiB"):
        RunDirectory(tmp_path / "run").create()
