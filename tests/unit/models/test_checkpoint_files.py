"""Names, publication, pointers and removal of checkpoints: what a kill between any two of them leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.ppo import TrainPPO
from aligner.data.config import PromptDataConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint import files
from aligner.run.settings import CheckpointConfig, LoopConfig


def make(folder: Path, step: int, text: str = "") -> Path:
    """A published checkpoint with one file."""
    final = files.step_directory(folder, step)
    writing = files.new_writing_directory(final)
    (writing / "weights").mkdir()
    (writing / "weights" / "data").write_text(text)
    (writing / files.MANIFEST).write_text("{}\n")
    files.write_marker(writing, {"kind": "language", "step": step})
    files.publish(writing, final)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publication(tmp_path):
    folder = tmp_path / "policy"
    assert files.complete_steps(folder) == {}
    writing = files.new_writing_directory(files.step_directory(folder, 3))
    assert writing.name.startswith(".writing_step_000003.") and files.complete_steps(folder) == {}
    path = make(folder, 20)
    make(folder, 3)
    assert list(files.complete_steps(folder).items()) == [(3, folder / "step_000003"), (20, path)]
    assert files.pointed_step(folder, files.LATEST) == 3
    assert files.read_marker(path)["step"] == 20


def test_a_step_is_replaced_by_a_complete_one(tmp_path):
    make(tmp_path, 3, "old")
    path = make(tmp_path, 3, "new")
    assert (path / "weights" / "data").read_text() == "new"
    assert names(tmp_path) == ["latest", "step_000003"]


def test_what_a_path_means(tmp_path):
    first, second = make(tmp_path, 1), make(tmp_path, 2)
    files.point(tmp_path, files.BEST, first)
    assert files.resolve(first) == first
    assert files.resolve(tmp_path) == files.resolve(tmp_path / "latest") == second
    assert files.resolve(tmp_path / "best") == first
    (tmp_path / "best").write_text("step_000009\n")
    with pytest.raises(CheckpointError, match="best names step_000009, which is not a complete checkpoint"):
        files.resolve(tmp_path / "best")
    assert files.pointed_step(tmp_path, "best") == 9 and files.pointed_step(tmp_path / "nowhere", "best") is None
    (tmp_path / "best").write_text("elsewhere\n")
    assert files.pointed_step(tmp_path, "best") is None
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", r"no checkpoint here \(neither aligner.json nor latest\)"), ("absent", ".*no such directory")):
        with pytest.raises(CheckpointError, match=message):
            files.resolve(tmp_path / name)


def test_only_directories_of_steps_count(tmp_path):
    make(tmp_path, 1)
    (tmp_path / "step_000002").mkdir()  # no marker
    make(tmp_path, 1_234_567)
    make(tmp_path, 4).rename(tmp_path / "step_000004_backup")
    assert list(files.complete_steps(tmp_path)) == [1, 1_234_567]


def test_a_pair_is_removed_together(tmp_path):
    folders = [tmp_path / "policy", tmp_path / "critic"]
    for folder in folders:
        make(folder, 1)
        make(folder, 2)
    files.remove_step(folders, 1)
    assert [names(folder) for folder in folders] == [["latest", "step_000002"]] * 2
    make(folders[1], 1)
    files.remove_step(folders, 1)  # one that has no partner
    assert [names(folder) for folder in folders] == [["latest", "step_000002"]] * 2


@pytest.mark.parametrize("kill_at", range(5))
def test_a_removal_that_is_killed_is_ended_at_the_next_start(kill_at, tmp_path, monkeypatch):
    """Killed before any of its renames and removals: no step is ever there without its partner after the next start."""
    folders = [tmp_path / "policy", tmp_path / "critic"]
    for folder in folders:
        make(folder, 1)
        make(folder, 2)
    calls = [0]

    class Killed(BaseException):
        pass

    def counted(real):
        def call(*args, **kwargs):
            if calls[0] == kill_at:
                raise Killed
            calls[0] += 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(files.shutil, "rmtree", counted(files.shutil.rmtree))
        with pytest.raises(Killed):
            files.remove_step(folders, 1)
    assert all((folder / "step_000002" / files.MARKER).exists() for folder in folders)
    files.clean(folders)
    left = [names(folder) for folder in folders]
    # Before the first rename nothing has happened.
    expected = ["latest", "step_000001", "step_000002"] if kill_at <= 1 else ["latest", "step_000002"]
    assert left == [expected, expected]


def test_a_start_removes_what_a_killed_run_left_in_its_own_folder(tmp_path):
    own, other = tmp_path / "policy", tmp_path / "critic"
    for folder in (own, other):
        make(folder, 1)
        files.new_writing_directory(files.step_directory(folder, 2))
    shutil.copytree(own / "step_000001", own / ".replaced_step_000001.abcd")
    files.clean([own, other])
    assert names(own) == ["latest", "step_000001"]
    assert len(names(other)) == 3  # the critic may be writing


def test_a_replacement_that_is_killed_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """Between the two renames neither the old nor the new one has the step's name: the next start gives it back to the old one."""
    make(tmp_path, 1, "old")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(files.WRITING):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, 1, "new")
    assert not files.step_directory(tmp_path, 1).exists()
    files.clean([tmp_path])
    assert names(tmp_path) == ["latest", "step_000001"]
    assert files.resolve(tmp_path) == files.step_directory(tmp_path, 1)
    assert (files.step_directory(tmp_path, 1) / "weights" / "data").read_text() == "old"


def test_which_steps_are_removed():
    def removed(complete: list[int], paired: list[int], keep: int, protected: set[int]) -> list[int]:
        return files.steps_to_remove(complete, paired, keep=keep, protected=protected)

    assert removed([1, 2, 3, 4], [1, 2, 3, 4], 0, set()) == []
    assert removed([1, 2, 3, 4, 5], [1, 3], 0, set()) == []
    assert removed([1, 2, 3, 4], [1, 2, 3, 4], 2, set()) == [1, 2]
    assert removed([1, 2, 3, 4], [1, 2, 3, 4], 2, {1}) == [2]
    assert removed([1, 2, 3, 4, 5], [1, 3], 1, set()) == [1, 2]  # steps without a partner go too, but not those after the newest pair
    assert removed([1, 2], [], 1, set()) == []
    assert removed([1, 2], [1, 2], 5, set()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "aligner.json is damaged: Expecting value"),
        ("[]\n", "format None; this version reads 2"),
        ('{"format": 1}\n', "format 1; this version reads 2"),
        ('{"format": 2, "step": 3}\n', "does not have its own checksum"),
        (b"\xff\xfe", "aligner.json is damaged"),
    ],
)
def test_a_marker_that_is_none(text, message, tmp_path):
    path = make(tmp_path, 1)
    (path / files.MARKER).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=message):
        files.read_marker(path)


def test_a_marker_written_otherwise_is_not_the_same(tmp_path):
    path = make(tmp_path, 1)
    text = (path / files.MARKER).read_text()
    for changed in (text.replace("language", "scalar"), text.replace(": 1,", ":  1,"), text + "\n", text.replace('"step": 1', '"step": 2')):
        assert changed != text
        (path / files.MARKER).write_text(changed)
        with pytest.raises(CheckpointError, match="does not have its own checksum"):
            files.read_marker(path)


@pytest.mark.parametrize(("name", "value"), [("keep", -1), ("keep_best", 0), ("write_timeout_seconds", 0.0)])
def test_bad_settings(name, value):
    with pytest.raises(ConfigError, match=rf"checkpoint.{name}={value}: must"):
        CheckpointConfig(**{name: value})


def test_the_best_checkpoint_needs_validation():
    best = CheckpointConfig(best_metric="validation/reward")
    for config in (TrainGRPO, TrainPPO):
        with pytest.raises(ConfigError, match="checkpoint.best_metric=validation/reward: needs loop.validate_every above 0"):
            config(checkpoint=best)
        with pytest.raises(ConfigError, match="checkpoint.best_metric=validation/reward: needs data.validation"):
            config(checkpoint=best, loop=LoopConfig(validate_every=5))
        held_out = PromptDataConfig(validation="held_out.jsonl")
        assert config(checkpoint=best, loop=LoopConfig(validate_every=5), data=held_out).checkpoint is best
