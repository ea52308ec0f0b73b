"""Writing checkpoints: full disks, kills before every operation, replaced steps, and saving while the training goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from threading import Event

import pytest
from model_steps import adam, same, save, train, weights_of

from aligner.errors import CheckpointError
from aligner.models.checkpoint import async_save, checkpoint
from aligner.models.checkpoint import files as checkpoint_files

pytestmark = pytest.mark.usefixtures("topology")


@pytest.mark.parametrize("failing", ["weights", "optimizer"])
def test_a_failed_save_leaves_no_checkpoint(failing, make_model, tmp_path, monkeypatch):
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
        with pytest.raises(CheckpointError, match=r"writing a checkpoint failed: rank 0: .*step_000002.*No space left on device"):
            save(policy, tmp_path, step=2)
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


def test_a_step_that_is_saved_again_replaces_the_first(make_model, tmp_path):
    """Steps after the one that a run resumed from are of another past: they must not be taken for this run's own."""
    policy = make_model("policy", optimizer=adam())
    path = save(policy, tmp_path, step=1, note="first")
    train(policy, range(1))
    assert save(policy, tmp_path, step=1, note="second") == path
    assert json.loads((path / "state.json").read_text())["loop"] == {"note": "second"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]


# Saving in the background.


def test_what_is_saved_in_the_background_is_the_state_of_that_moment(make_model, tmp_path):
    """Training goes on while the files are written: the checkpoint is the one that a synchronous save writes, and so is its resumption."""
    first = make_model("policy", optimizer=adam(), seed=1)
    train(first, range(2))
    pending = checkpoint.start_save(tmp_path / "async", first.model, checkpoint.SaveRequest(step=2, state={}), in_background=True)
    at_save, steps = weights_of(first), train(first, range(2, 4))
    assert not (tmp_path / "async" / "latest").exists()  # nothing is visible yet
    path = pending.publish()
    assert checkpoint.resolve(tmp_path / "async") == path
    resumed = make_model("policy", optimizer=adam(), seed=2)
    checkpoint.load(resumed.model, path)
    assert same(weights_of(resumed), at_save) and not same(at_save, weights_of(first))
    assert train(resumed, range(2, 4)) == steps
    assert same(weights_of(resumed), weights_of(first))


def test_an_error_in_the_background_is_raised_at_publication(make_model, tmp_path, monkeypatch):
    policy = make_model("policy", optimizer=adam())
    good = save(policy, tmp_path, step=1)

    def broken(part, number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(async_save, "_write_bucket", broken)
    pending = checkpoint.start_save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}), in_background=True)
    with pytest.raises(CheckpointError, match="step_000002.*No space left"):
        pending.publish()
    assert checkpoint.resolve(tmp_path) == good and sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]


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
