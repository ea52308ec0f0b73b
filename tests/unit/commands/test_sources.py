"""A resumed run keeps its frozen models, wherever `latest` points by then."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.errors import CheckpointError, ConfigError
from aligner.jobs.sources import model_digest, pinned
from aligner.models.checkpoint import files
from aligner.models.config import ModelConfig


def session(path: Path):
    return SimpleNamespace(directory=SimpleNamespace(path=path))


def checkpoints(folder: Path, *steps: int) -> Path:
    """A folder of complete checkpoints as far as finding them goes; `latest` is the last of `steps`."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        own = files.step_directory(folder, step)
        own.mkdir()
        (own / files.MARKER).write_text("{}")
    files.point(folder, files.LATEST, files.step_directory(folder, steps[-1]))
    return folder


def test_the_first_start_decides(topology, tmp_path):
    run, source = tmp_path / "run", checkpoints(tmp_path / "sft", 3)
    run.mkdir()
    first = pinned(session(run), "model", ModelConfig(path=str(source)))
    assert Path(first.path).name == "step_000003"
    checkpoints(source, 7)
    assert pinned(session(run), "model", ModelConfig(path=str(source))) == first
    assert Path(pinned(session(run), "reward.model", ModelConfig(path=str(source))).path).name == "step_000007"  # another model
    with pytest.raises(ConfigError, match=r"model.path=.*other: this run began with .*sft"):
        pinned(session(run), "model", ModelConfig(path=str(tmp_path / "other")))
    shutil.rmtree(source / "step_000003")
    with pytest.raises(CheckpointError, match=r"began with .*step_000003, which no longer exists"):
        pinned(session(run), "model", ModelConfig(path=str(source)))


def test_a_model_of_the_hub_is_pinned_by_its_commit(topology, tmp_path):
    def cached(cache: str, commit: str) -> ModelConfig:
        directory = tmp_path / cache / "models--org--name" / "snapshots" / commit
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        return ModelConfig(path=str(directory))

    (run := tmp_path / "run").mkdir()
    first, elsewhere, other = cached("cache", "a" * 40), cached("another cache", "a" * 40), cached("cache", "b" * 40)
    assert pinned(session(run), "model", first) == first
    shutil.rmtree(tmp_path / "cache" / "models--org--name" / "snapshots" / ("a" * 40))
    assert pinned(session(run), "model", elsewhere) == elsewhere
    with pytest.raises(ConfigError, match=r"model.path=org/name@b+: this run began with org/name@a+ and would continue"):
        pinned(session(run), "model", other)
    assert model_digest(Path(elsewhere.path)) == model_digest(Path(first.path)) != model_digest(Path(other.path))


def test_random_weights_have_no_source(topology, tmp_path):
    assert pinned(session(tmp_path), "model", ModelConfig()) == ModelConfig()
    assert not (tmp_path / "sources").exists()
