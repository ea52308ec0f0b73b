"""Pins the source checkpoint of a run's frozen models: `latest` of another run may point elsewhere at the next start. `create_critic`
builds the critic of a PPO run, in its own component or in the actor.

`check_same_architecture` checks that one model's weights fit another's modules (`ReferencePolicy.restore`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aligner.data.tokenizer import Tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.files import publish
from aligner.hub.names import name_of
from aligner.jobs.parts import load_model_files, tokenizer_directory
from aligner.models import create
from aligner.models.checkpoint.files import MARKER
from aligner.models.config import Architecture, ModelConfig
from aligner.models.training.guard import ReportingGuard
from aligner.models.training.policy import MegatronPolicy, MegatronValueModel, ReferencePolicy
from aligner.parallel.collectives import from_rank_0
from aligner.run.session import Session
from aligner.servers.components import in_section


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
    """A digest that changes with the weights: of a checkpoint's marker, or a Hugging Face model's config and files; "" if random."""
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


class FrozenModels:
    """Other models of a job, whose weights can take the place of its own model's."""

    __slots__ = ()
    session: Session
    config: Any

    def frozen_model(self, role: str, path: str, **texts: str) -> tuple[ModelConfig, Tokenizer]:
        """The model at `path`, the same one at every start of the run, and its tokenizer. Raises as `check_same_architecture`."""
        model = pinned(self.session, role, replace(self.config.model, path=path, tokenizer=""))
        return model, check_same_architecture(self.config.model, model, **texts)

    def frozen(self, policy: MegatronPolicy, model: ModelConfig) -> ReferencePolicy:
        """The other model's weights, which wait in host memory and take the place of the policy's for a pass."""
        frozen = ReferencePolicy(policy, whole=True)
        frozen.restore(lambda chunks: create.load_source(chunks, model))
        return frozen


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSource:
    """What a critic begins with."""

    config: ModelConfig
    tokenizer: Tokenizer
    architecture: Architecture

    @property
    def tokenizer_files(self) -> Path:
        """The folder of its tokenizer."""
        return tokenizer_directory(self.config)


def critic_source(session: Session, config: Any) -> CriticSource:
    """The files of a PPO run's critic, in the version that the run began with. Every rank calls it."""
    model = pinned_base(session, "critic.model", config.critic.model.or_else(config.model))
    with in_section("critic"):
        tokenizer, architecture = load_model_files(model, session=session)
    return CriticSource(config=model, tokenizer=tokenizer, architecture=architecture)


def create_critic(session: Session, config: Any, source: CriticSource, *, steps: int) -> MegatronValueModel:
    """The critic with its first weights, in the layout of the session, for a run of `steps` training steps. Every rank calls it."""
    critic = config.critic
    updates = -(-config.algorithm.rollouts_per_step // critic.mini_batch_size) * critic.num_epochs
    training = create.training(
        source.config, critic.optimizer, total_steps=steps * updates, guard=ReportingGuard(config.guard), vision=source.tokenizer.vision
    )
    weights = config.reward.attribute_weights
    with in_section("critic", own_layout=critic.is_served):
        return create.create_value_model(
            source.config, source.architecture, config.critic_parallel, session.topology, training, output_weights=weights
        )
