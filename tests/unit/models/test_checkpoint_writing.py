"""Writing checkpoints: full disks, kills before every operation, replaced steps, and saving while the training goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from model_steps import adam, same, save, train, weights_of

from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint import async_save, checkpoint, files as checkpoint_files
from aligner.models.config import Dtype

pytestmark = pytest.mark.usefixtures("topology")


@pytest.mark.parametrize(("failing", "in_background"), [("weights", False), ("optimizer", False), ("weights", True)])
def test_a_failed_save_leaves_no_checkpoint(failing, in_background, make_model, tmp_path, monkeypatch):
    """The disk is full half way: `latest` still names the one before, and the next attempt succeeds."""
    policy = make_model("policy", optimizer=adam())
    good = save(policy, tmp_path, step=1)
    train(policy, range(1))
    real = async_save._write_bucket

    def broken(part, number: int):
        if part.path.name == failing:
            raise OSError(28, "No space left on device")
        return real(part, number)

    with monkeypatch.context() as patch:
        patch.setattr(async_save, "_write_bucket", broken)
        pending = checkpoint.start_save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}), in_background=in_background)
        with pytest.raises(CheckpointError, match=r"writing a checkpoint failed: rank 0: .*step_000002.*No space left on device"):
            pending.publish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]  # what was written makes room again
    assert checkpoint.resolve(tmp_path) == good
    again = save(policy, tmp_path, step=2)
    assert checkpoint.resolve(tmp_path) == again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001", "step_000002"]
    fresh = make_model("policy", optimizer=adam(), seed=9)
    checkpoint.load(fresh.model, again)
    assert same(weights_of(fresh), weights_of(policy))


def operations(patch, before) -> None:
    """Have `before()` called ahead of everything that saving does to the disk."""

    def announced(real):
        def call(*args, **kwargs):
            before()
            return real(*args, **kwargs)

        return call

    for owner, name in (
        *((Path, name) for name in ("mkdir", "rename", "replace", "unlink")),
        *((os, name) for name in ("fsync", "posix_fallocate")),
        *((async_save, name) for name in ("_write_bucket", "write_metadata")),
        *((shutil, "rmtree"), (checkpoint_files, "write_text")),
    ):
        patch.setattr(owner, name, announced(getattr(owner, name)))


def test_a_save_that_is_killed_before_any_of_its_operations(make_model, tmp_path, monkeypatch):
    """Whatever was done last, the newest checkpoint is whole: the one before up to the rename, the new one from then on."""

    class Killed(BaseException):
        pass

    first, second, fresh = (make_model("policy", seed=seed, architecture={"num_layers": 1}) for seed in (1, 2, 3))
    before, after = weights_of(first), weights_of(second)
    old = save(first, tmp_path, step=1)
    newest = []
    for kill_at in range(1000):
        count = 0

        def count_down(kill_at: int = kill_at) -> None:
            nonlocal count
            count += 1
            if count > kill_at:
                raise Killed

        with monkeypatch.context() as patch:
            operations(patch, count_down)
            try:
                new = save(second, tmp_path, step=2)
                break
            except Killed:
                pass
        step, path = list(checkpoint_files.complete_steps(tmp_path).items())[-1]
        newest.append(step)
        assert checkpoint.resolve(tmp_path) in (old, path)
        checkpoint.load(fresh.model, path)
        assert same(weights_of(fresh), before if step == 1 else after)
        if step == 2:
            shutil.rmtree(path)
            checkpoint_files.point(tmp_path, checkpoint_files.LATEST, old)
        checkpoint_files.clean([tmp_path])
        assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".latest") == ["latest", "step_000001"]
    assert new.name == "step_000002" and newest == sorted(newest) and newest.count(2) >= 3 and newest.count(1) > 20


def test_state_that_cannot_be_written_is_an_error_of_the_checkpoint(make_model, tmp_path):

    with pytest.raises(CheckpointError, match="writing a checkpoint failed.*not JSON serializable"):
        save(make_model("policy"), tmp_path, step=1, thing=object())
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to(make_model, tmp_path):
    """A file where the folder should be: root, who may write into any directory, cannot make one there either."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"writing a checkpoint failed: .*Not a directory.*checkpoints"):
        save(make_model("policy"), tmp_path / "checkpoints", step=1)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(95, "Operation not supported")])
def test_room_for_the_small_files(error, make_model, tmp_path, monkeypatch):
    """A full disk is found before anything large is written, on one rank and outside of collectives; some file systems cannot reserve."""

    def refuse(*_):
        raise error

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if error.errno == 28:
        with pytest.raises(CheckpointError, match="writing a checkpoint failed: .*No space left on device"):
            save(make_model("policy"), tmp_path, step=1)
        assert not list(tmp_path.iterdir())
    else:
        assert not (save(make_model("policy"), tmp_path, step=1) / ".reserved").exists()


def test_a_writer_that_never_ends_is_given_up(make_model, tmp_path, monkeypatch):
    policy, released, real = make_model("policy"), Event(), async_save._write_bucket

    def slow(part, number: int):
        released.wait(20)
        return real(part, number)

    monkeypatch.setattr(async_save, "_write_bucket", slow)
    pending = checkpoint.start_save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}), in_background=True)
    assert not pending.is_written
    with pytest.raises(CheckpointError, match="were not written 0 s after"):
        pending.publish(timeout_seconds=0.05)
    released.set()


# Whether checkpoints fit: the estimate at the start, and the check before each of them.


@pytest.fixture
def trained(make_model):
    """A policy that has taken a step, so that its optimizer has a state."""

    def make(dtype: Dtype = Dtype.float32):
        policy = make_model("policy", optimizer=adam(), config={"dtype": dtype})
        train(policy, range(1))
        return policy

    return make


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checkpoint_files.os, "statvfs", lambda path: SimpleNamespace(f_bavail=size // 512, f_frsize=512))


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_the_estimate_is_about_the_size(trained, tmp_path, monkeypatch, dtype):
    policy, asked = trained(dtype), []
    monkeypatch.setattr(checkpoint_files, "check_room", lambda directory, needed: asked.append(needed))
    path = save(policy, tmp_path, step=1)
    (planned,) = asked
    written = sum(file.stat().st_size for folder in ("weights", "optimizer") for file in (path / folder).glob("*.distcp"))
    assert 0.93 * planned < checkpoint.estimated_bytes(policy.model) < 1.02 * planned  # besides tensors there are 10 kB of settings
    assert planned / 1.02 <= written < planned + 2000 * 4 * len(list(policy.model.module.parameters()))  # each tensor has a header


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_written(trained, tmp_path, monkeypatch):
    policy = trained()
    good = save(policy, tmp_path, step=1)
    needed = checkpoint.estimated_bytes(policy.model)
    with monkeypatch.context() as patch:
        free(patch, needed // 2)
        with pytest.raises(CheckpointError, match=r"step_000002.*: a checkpoint of \d+\.\d MiB does not fit, \d+\.\d MiB are free there"):
            save(policy, tmp_path, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert checkpoint.resolve(tmp_path) == good and save(policy, tmp_path, step=2).name == "step_000002"


def test_the_start_warns_where_too_few_fit(trained, tmp_path, monkeypatch):
    policy, folder = trained(), tmp_path / "run" / "checkpoints" / "policy"  # yet to be made
    assert checkpoint.shortage(policy.model, folder, keep=3) == ""
    free(monkeypatch, int(checkpoint.estimated_bytes(policy.model) * 2.5))
    warning = checkpoint.shortage(policy.model, folder, keep=2)
    assert warning.startswith(f"warning: {folder}: a checkpoint takes about ")
    assert warning.endswith("room for 2, the run needs 3 at a time (checkpoint.keep=2)")
    assert checkpoint.shortage(policy.model, folder, keep=0) == ""  # keeps all: there is room for two


def test_a_disk_without_room_for_one_checkpoint_is_refused_at_the_start(trained, tmp_path, monkeypatch):
    policy = trained()
    free(monkeypatch, checkpoint.estimated_bytes(policy.model) // 2)
    with pytest.raises(ConfigError, match=rf"run.directory: {tmp_path}: a checkpoint takes about .* free: not even one fits"):
        checkpoint.shortage(policy.model, tmp_path, keep=1)


def test_what_is_said_of_an_error_that_hides_the_systems(tmp_path):
    try:
        try:
            raise OSError(28, "No space left on device", "shard")
        except OSError as inner:
            raise RuntimeError("unexpected pos 64 vs 0") from inner
    except RuntimeError as error:
        assert checkpoint_files.explain(error, tmp_path).startswith("the file system is full: shard (ENOSPC: No space left on device); ")
    assert checkpoint_files.explain(RuntimeError("unexpected pos"), tmp_path).startswith(f"{tmp_path}: unexpected pos; ")
