"""Whether checkpoints fit: the estimate at the start, and the check before each of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from model_steps import train

from aligner.errors import CheckpointError, ConfigError
from aligner.models.checkpoint import checkpoint, files
from aligner.models.config import Dtype
from aligner.models.training.optimizer import OptimizerConfig

pytestmark = pytest.mark.usefixtures("topology")


@pytest.fixture
def trained(make_model):
    """A policy that has taken a step, so that its optimizer has a state."""

    def make(dtype: Dtype = Dtype.float32):
        policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4), config={"dtype": dtype})
        train(policy, range(1))
        return policy.model

    return make


def save(model, directory: Path, step: int) -> Path:
    return checkpoint.save(directory, model, checkpoint.SaveRequest(step=step, state={}))


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(files.os, "statvfs", lambda path: SimpleNamespace(f_bavail=size // 512, f_frsize=512))


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_the_estimate_is_about_the_size(trained, tmp_path, monkeypatch, dtype):
    model, asked = trained(dtype), []
    monkeypatch.setattr(files, "check_room", lambda directory, needed: asked.append(needed))
    path = save(model, tmp_path, 1)
    (planned,) = asked
    written = sum(file.stat().st_size for folder in ("weights", "optimizer") for file in (path / folder).glob("*.distcp"))
    assert 0.93 * planned < checkpoint.estimated_bytes(model) < 1.02 * planned  # besides tensors there are 10 kB of settings
    assert planned / 1.02 <= written < planned + 2000 * 4 * len(list(model.module.parameters()))  # each tensor has a header


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_written(trained, tmp_path, monkeypatch):
    model = trained()
    good = save(model, tmp_path, 1)
    needed = checkpoint.estimated_bytes(model)
    with monkeypatch.context() as patch:
        free(patch, needed // 2)
        with pytest.raises(CheckpointError, match=r"step_000002.*: a checkpoint of \d+\.\d MiB does not fit, \d+\.\d MiB are free there"):
            save(model, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert checkpoint.resolve(tmp_path) == good and save(model, tmp_path, 2).name == "step_000002"


def test_the_start_warns_where_too_few_fit(trained, tmp_path, monkeypatch):
    model, folder = trained(), tmp_path / "run" / "checkpoints" / "policy"  # yet to be made
    assert checkpoint.shortage(model, folder, keep=3) == ""
    free(monkeypatch, int(checkpoint.estimated_bytes(model) * 2.5))
    warning = checkpoint.shortage(model, folder, keep=2)
    assert warning.startswith(f"warning: {folder}: a checkpoint takes about ")
    assert warning.endswith("room for 2, the run needs 3 at a time (checkpoint.keep=2)")
    assert checkpoint.shortage(model, folder, keep=0) == ""  # keeps all: there is room for two


def test_a_disk_without_room_for_one_checkpoint_is_refused_at_the_start(trained, tmp_path, monkeypatch):
    model = trained()
    free(monkeypatch, checkpoint.estimated_bytes(model) // 2)
    with pytest.raises(ConfigError, match=rf"run.directory: {tmp_path}: a checkpoint takes about .* free: not even one fits"):
        checkpoint.shortage(model, tmp_path, keep=1)


def test_what_is_said_of_an_error_that_hides_the_systems(tmp_path):
    try:
        try:
            raise OSError(28, "No space left on device", "shard")
        except OSError as inner:
            raise RuntimeError("unexpected pos 64 vs 0") from inner
    except RuntimeError as error:
        assert files.explain(error, tmp_path).startswith("the file system is full: shard (ENOSPC: No space left on device); ")
    assert files.explain(RuntimeError("unexpected pos"), tmp_path).startswith(f"{tmp_path}: unexpected pos; ")
