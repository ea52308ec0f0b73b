"""Whether one model's weights can be put into another one's modules for a pass (`aligner.models.policy.ReferencePolicy.restore`)."""

from __future__ import annotations

from dataclasses import asdict, replace

from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.loop.parts import load_model_files
from aligner.loop.session import Session
from aligner.loop.sources import pinned
from aligner.models.config import ModelConfig


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
