"""Pins the source checkpoint of a run's frozen models: `latest` of another run may point elsewhere at the next start.

`check_same_architecture` checks that one model's weights fit another's modules (`ReferencePolicy.restore`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from aligner.data.tokenizer import Tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.files import publish
from aligner.hub.names import name_of
from aligner.jobs.parts import load_model_files
from aligner.models import create
from aligner.models.checkpoint.files import MARKER
from aligner.models.config import ModelConfig
from aligner.parallel.collectives import from_rank_0
from aligner.run.session import Session


def pinned(session: Session, role: str, model: ModelConfig) -> ModelConfig:
    """`model` with the directory that `model.path` resolved to at the run's first start, for weights that no checkpoint of the run holds.
    `role` is the setting's name. Raises ConfigError if `model.path` has changed since, CheckpointError if the directory is gone.
    Collective."""
    if not model.path:
        return model
    found = from_rank_0(lambda: _pin(session.directory.path / "sources" / f"{role}.json", role, model))
    return model if name_of(model.path) else replace(model, path=found)


def pinned_base(session: Session, role: str, model: ModelConfig) -> ModelConfig:
    """`pinned` if adapters are trained: the run's checkpoints do not hold the base weights. Collective."""
    return pinned(session, role, model) if model.lora.is_on else model


def _pin(record: Path, role: str, model: ModelConfig) -> str:
    asked = str(name_of(model.path) or model.path)
    if not record.exists():
        found = str(create.source_directory(model, key=role).absolute())
        record.parent.mkdir(mode=0o700, exist_ok=True)
        publish(record, lambda new: new.write_text(json.dumps({"path": asked, "found": found}) + "\n"))
        return found
    first = json.loads(record.read_text())
    if first["path"] != asked:
        raise ConfigError(
            f"{role}.path={asked}: this run began with {first['path']} and would continue with another frozen model; allowed: that path, "
            f"another run.directory, or to remove {record}"
        )
    if not name_of(model.path) and not Path(first["found"]).is_dir():
        raise CheckpointError(f"{role}.path={model.path}: this run began with {first['found']}, which no longer exists")
    return first["found"]


def model_digest(source: Path | None) -> str:
    """A digest that changes with the weights; empty for random ones. For a checkpoint: of its marker, which has every file's digest. For a
    Hugging Face model: of its config and its weight files' names, sizes and times; in the Hub's cache of its commit."""
    if source is None:
        return ""
    if (name := name_of(source)) is not None:
        return hashlib.sha256(str(name).encode()).hexdigest()
    content = hashlib.sha256()
    if (source / MARKER).exists():
        content.update((source / MARKER).read_bytes())
    else:
        content.update((source / "config.json").read_bytes())
        for path in sorted(source.glob("*.safetensors")):
            status = path.stat()
            content.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return content.hexdigest()


def check_same_architecture(own: ModelConfig, other: ModelConfig, *, setting: str, whose: str, otherwise: str) -> Tokenizer:
    """The tokenizer of `other`, whose weights replace `own`'s. Raises ConfigError if architecture or vocabulary differ; for messages
    `setting` (`teacher.path=...`) selected `other`, `whose` names `own`, `otherwise` advises on a model of another shape."""
    (tokenizer, architecture), (its_tokenizer, its) = load_model_files(own), load_model_files(other)
    ours, theirs = asdict(architecture), asdict(its)
    names = [name for name in ours if name != "initializer_range"]  # how random weights would be drawn
    differs = [f"{name} ({theirs[name]}, {whose} is {ours[name]})" for name in names if ours[name] != theirs[name]]
    if differs:
        raise ConfigError(
            f"{setting}: another architecture than {whose}: {', '.join(differs)}; allowed: one of the same shape. {otherwise}"
        )
    if tokenizer.digest != its_tokenizer.digest:
        raise ConfigError(f"{setting}: its tokenizer has other words than {whose}")
    return its_tokenizer


def frozen_model(session: Session, own: ModelConfig, role: str, path: str, **texts: str) -> tuple[ModelConfig, Tokenizer]:
    """The model at `path`, the same one at every start of the run, and its tokenizer. Raises as `check_same_architecture`."""
    model = pinned(session, role, replace(own, path=path, tokenizer=""))
    return model, check_same_architecture(own, model, **texts)
