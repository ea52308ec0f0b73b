"""Which checkpoint each frozen model of a run was made from: `latest` of another run's directory may point elsewhere at the next start.

`check_same_architecture` says whether one model's weights can be put into another one's modules for a pass (`ReferencePolicy.restore`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from aligner.data.tokenizer import Tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.files import publish
from aligner.loop.parts import load_model_files
from aligner.loop.session import Session
from aligner.models import create
from aligner.models.checkpoint_files import MARKER
from aligner.models.config import ModelConfig
from aligner.parallel.collectives import from_rank_0


def pinned(session: Session, role: str, model: ModelConfig) -> ModelConfig:
    """`model` with the directory that this run found behind `model.path` at its first start. Collective.

    For models whose weights no checkpoint of the run holds: the reference policy, the reward model, what adapters belong to. `role` is
    "model" or "reward.model", the setting's name.

    Raises:
        ConfigError: `model.path` is another one than at the first start: the run would go on with another reference or reward.
        CheckpointError: what was found then no longer exists.
    """
    if not model.path:
        return model
    found = from_rank_0(lambda: _pin(session.directory.path / "sources" / f"{role}.json", role, model))
    return replace(model, path=found)


def pinned_base(session: Session, role: str, model: ModelConfig) -> ModelConfig:
    """`pinned` where adapters are trained: the run's checkpoints do not hold the weights that these belong to. Collective."""
    return pinned(session, role, model) if model.lora.is_on else model


def _pin(record: Path, role: str, model: ModelConfig) -> str:
    if not record.exists():
        found = str(create.source_directory(model, key=role).absolute())
        record.parent.mkdir(mode=0o700, exist_ok=True)
        publish(record, lambda new: new.write_text(json.dumps({"path": model.path, "found": found}) + "\n"))
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


def model_digest(source: Path | None) -> str:
    """Changes with the weights: of a checkpoint its marker (which has the digest of every file), of a Hugging Face model its config and the
    names, sizes and times of its weight files (their content would take minutes to read). Empty for random weights."""
    if source is None:
        return ""
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
    """The tokenizer of `other`, which takes the place of `own`'s weights.

    Raises ConfigError where it has another architecture or vocabulary; `setting` (`teacher.path=...`) is what named it, `whose` stands for
    `own`, and `otherwise` says what to do with a model of another shape.
    """
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
