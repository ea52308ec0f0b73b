"""Which checkpoint each frozen model of a run was made from: `latest` of another run's directory may point elsewhere at the next start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from aligner.errors import CheckpointError, ConfigError
from aligner.jobs.session import Session
from aligner.models import create
from aligner.models.config import ModelConfig
from aligner.parallel.collectives import from_rank_0


def pinned(here: Session, role: str, model: ModelConfig) -> ModelConfig:
    """`model` with the directory that this run found behind `model.path` at its first start. Collective.

    For models whose weights no checkpoint of the run holds: the reference policy and the reward model. `role` is "model" or
    "reward.model", the setting's name.

    Raises:
        ConfigError: `model.path` is another one than at the first start: the run would go on with another reference or reward.
        CheckpointError: what was found then no longer exists.
    """
    if not model.path:
        return model
    found = from_rank_0(lambda: _pin(here.directory.path / "sources" / f"{role}.json", role, model))
    return replace(model, path=found)


def _pin(record: Path, role: str, model: ModelConfig) -> str:
    if not record.exists():
        found = str(create.source_directory(model).absolute())
        record.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps({"path": model.path, "found": found}) + "\n")
        os.replace(temporary, record)
        return found
    first = json.loads(record.read_text())
    if first["path"] != model.path:
        raise ConfigError(
            f"{role}.path={model.path}: this run began with {first['path']} and would go on with another frozen model; allowed: that path, "
            f"another run.directory, or to remove {record}"
        )
    if not Path(first["found"]).is_dir():
        raise CheckpointError(f"{role}.path={model.path}: this run began with {first['found']}, which no longer exists")
    return first["found"]
