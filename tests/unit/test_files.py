"""A file has its name once it is complete, and not before."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.cluster.run_directory import RunDirectory
from aligner.files import own_directory, publish, with_umask_mode


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Beside what a process that was killed has left."""
    path, seen = tmp_path / "folder" / "record.json", []
    publish(path, lambda new: new.write_text("one"))
    (path.parent / ".record.json.new").write_text("half of something longer than what follows")

    def write(new: Path) -> None:
        new.write_text("two")
        seen.append(path.read_text())

    publish(path, write)
    assert seen == ["one"] and path.read_text() == "two" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_an_error_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "record.json"
    publish(path, lambda new: new.write_text("one"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(new: Path) -> None:
        new.write_text("tw")
        if where == "write":
            full()

    if where == "fsync":
        monkeypatch.setattr("aligner.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        publish(path, write)
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077], ids=oct)
def test_weights_have_the_mode_of_any_new_file(mask: int, tmp_path: Path) -> None:
    """The writer of safetensors gives its files mode 0600."""
    previous = os.umask(mask)
    try:
        path = tmp_path / "model.safetensors"
        with_umask_mode(path, lambda new: save_file({"w": torch.arange(3)}, new))
        (tmp_path / "config.json").write_text("{}")
        run = RunDirectory(tmp_path / "run").create()
    finally:
        os.umask(previous)
    assert path.stat().st_mode == (tmp_path / "config.json").stat().st_mode
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    assert load_file(path)["w"].tolist() == [0, 1, 2]
    assert run.export.stat().st_mode & 0o777 == 0o777 & ~mask and run.path.stat().st_mode & 0o777 == 0o700


def test_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from aligner.files import own_directory as own; kept = own('mine-'); print(kept.name, flush=True); input()"
    command, environment = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "key").write_text("secret")
        (tmp_path / "other-folder").mkdir()
        own = own_directory("mine-")
        assert theirs.is_dir() and Path(own.name).is_dir()
        process.kill()
        process.wait()
        third = own_directory("mine-")
        assert sorted(tmp_path.iterdir()) == sorted([Path(own.name), Path(third.name), tmp_path / "other-folder"])
        own.cleanup()
        third.cleanup()


def test_nothing_is_removed_that_may_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of another host, whose locks are not seen here, and all folders of a file system without locks."""
    monkeypatch.setattr("aligner.files.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = tmp_path / "mine-otherhost-1"
    elsewhere.mkdir()
    left = tmp_path / f"mine-{socket.gethostname()}-left"
    left.mkdir()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as without_locks:
        without_locks.setattr("aligner.files.fcntl.flock", refuse)
        own = own_directory("mine-")
    assert elsewhere.is_dir() and left.is_dir() and Path(own.name).is_dir()
    own.cleanup()
    own = own_directory("mine-")
    assert elsewhere.is_dir() and not left.exists()
    own.cleanup()
