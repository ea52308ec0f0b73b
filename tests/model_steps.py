"""Small models that take a few steps: what the tests of training and of checkpoints share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from aligner.cluster.run_directory import POLICY
from aligner.loop.checkpointing import RunCheckpointer
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models.checkpoint.checkpoint import SaveRequest, save as save_checkpoint
from aligner.models.checkpoint.files import complete_steps
from aligner.models.training.optimizer import OptimizerConfig
from aligner.run.session import Session
from aligner.run.settings import CheckpointConfig
from aligner.types import LabeledBatch, PreferenceBatch, ValueBatch

ROWS, WIDTH, VOCAB = 4, 12, 61
LOSSES = {"policy": sft_loss, "reward": partial(bradley_terry_loss, variant=BradleyTerry.standard), "value": partial(value_loss, clip=None)}


def adam(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2} | changes))


def make_batch(kind: str = "policy", number: int = 0) -> LabeledBatch | PreferenceBatch | ValueBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, VOCAB, (ROWS, WIDTH), generator=generator)
    common = {"tokens": tokens, "lengths": torch.full((ROWS,), WIDTH), "loss_mask": torch.arange(WIDTH).expand(ROWS, WIDTH) > 3}
    if kind == "value":
        old, returns = torch.randn(2, ROWS, WIDTH, generator=generator)
        return ValueBatch(**common, old_values=old, returns=returns)
    return PreferenceBatch(**common, margins=torch.zeros(ROWS // 2)) if kind == "reward" else LabeledBatch(**common)


def train(model: Any, numbers: range, kind: str = "policy") -> list[dict[str, float]]:
    """One step on each of the batches of these numbers."""
    steps = [model.train_step(make_batch(kind, number), LOSSES[kind]) for number in numbers]
    return [{name: metric.value() for name, metric in step.items()} for step in steps]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for chunk in model.model.chunks for name, p in chunk.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def keeper(session: Session, model: Any, critic: Any = None, **options: Any) -> RunCheckpointer:
    """Of a policy's checkpoints; `options`: fields of `CheckpointConfig`, or its own `damaged` and `resident`."""
    own = {name: options.pop(name) for name in ("damaged", "resident") if name in options}
    settings = CheckpointConfig(**{"asynchronous": False} | options)
    return RunCheckpointer(session, model, name=POLICY, tokenizer=session.directory.path, config=settings, critic=critic, **own)


def steps(session: Session, name: str = POLICY) -> list[int]:
    """Those with a complete checkpoint."""
    return list(complete_steps(session.directory.checkpoints / name))


def save(model: Any, directory: Path, step: int = 2, **state: Any) -> Path:
    return save_checkpoint(directory, model.model, SaveRequest(step=step, state=state))
