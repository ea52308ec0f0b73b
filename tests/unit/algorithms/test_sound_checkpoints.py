"""A good checkpoint is never given up for a bad one: updates that spoil the weights, pruning, and damage found at the start of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from aligner.algorithms.loop import Clock, LoopConfig, StepResult, run
from aligner.cluster.run_directory import CRITIC, POLICY, RunDirectory
from aligner.errors import RunHalted
from aligner.jobs.checkpointing import RunCheckpointer, keep
from aligner.jobs.session import Session
from aligner.losses.sft import sft_loss
from aligner.models import checkpoint
from aligner.models import checkpoint_files as files
from aligner.models.checkpoint_config import CheckpointConfig
from aligner.models.optimizer import OptimizerConfig
from aligner.servers.ledger import Ledger
from aligner.types import LabeledBatch


@pytest.fixture
def session(topology, tmp_path: Path) -> Session:
    return Session(topology=topology, directory=RunDirectory(tmp_path / "run").create(), config_yaml="run: {}\n")


@pytest.fixture
def policy(make_model):
    return make_model("policy", optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-3, warmup_steps=0))


@pytest.fixture
def critic(session, make_model, fakes):
    """A critic that writes real checkpoints into the run's folder; `damage` is done to each."""
    model = make_model("value", optimizer=OptimizerConfig()).model

    class Critic(fakes.FakeCritic):
        damage = staticmethod(lambda path: None)

        def save(self, step: int):
            state = {"ledger": Ledger(session.directory.run_id()).state()}
            self.damage(checkpoint.save(session.directory.checkpoints / CRITIC, model, checkpoint.SaveRequest(step=step, state=state)))
            return super().save(step)

    return Critic([])


def keeper(session: Session, model, critic=None, **config) -> RunCheckpointer:
    return RunCheckpointer(session, model, name=POLICY, tokenizer=session.directory.path, config=CheckpointConfig(**config), critic=critic)


def steps(session: Session, name: str = POLICY) -> list[int]:
    return list(files.complete_steps(session.directory.checkpoints / name))


def shorten(path: Path) -> None:
    """Take the last byte of the largest file of a checkpoint."""
    largest = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


class Steps:
    """An algorithm whose step is one update; that of step `bad` leaves a NaN in the weights. It is its own reporter."""

    def __init__(self, policy, bad: int) -> None:
        self.policy, self.bad, self.notes = policy, bad, []

    def step(self, step: int, clock: Clock) -> StepResult:
        tokens = torch.randint(1, 61, (4, 12), generator=torch.Generator().manual_seed(step))
        batch = LabeledBatch(tokens=tokens, lengths=torch.full((4,), 12), loss_mask=torch.arange(12).expand(4, 12) > 3)
        if step == self.bad:
            self.policy.model.optimizer.param_groups[0]["eps"] = math.nan
        self.policy.train_step(batch, sft_loss)
        return StepResult(metrics={})

    def note(self, text: str) -> None:
        self.notes.append(text)

    def log(self, step, metrics) -> None: ...
    def finish(self) -> None: ...
    def state(self) -> dict:
        return {}


def test_a_step_that_spoils_the_weights_does_not_replace_a_good_checkpoint(session, policy):
    algorithm = Steps(policy, bad=3)
    with pytest.raises(RunHalted, match="optimizer step 3 was made and left") as raised:
        config = LoopConfig(max_steps=6, save_every=1, table_every=0)
        run(algorithm, config, checkpointer=keeper(session, policy.model, keep=1), open_reporter=lambda start: algorithm)
    assert "the weights are those of" not in str(raised.value)
    folder = session.directory.checkpoints / POLICY
    assert steps(session) == [2] and (folder / "latest").read_text() == "step_000002\n" and files.is_sound(folder / "step_000002")


def test_a_step_that_was_not_saved_is_said(session, policy):
    algorithm = Steps(policy, bad=3)
    with pytest.raises(RunHalted):
        config = LoopConfig(max_steps=6, table_every=0)
        run(algorithm, config, checkpointer=keeper(session, policy.model), open_reporter=lambda start: algorithm)
    assert steps(session) == []
    assert algorithm.notes[-1].startswith("step 3 failed after it had changed the weights")


def test_pruning_keeps_the_newest_pair_that_is_whole(session, policy, critic):
    """keep=1, and the critic's part of steps 3 and 4 is damaged on its way to the disk."""
    run = keeper(session, policy.model, critic, keep=1)
    for step in (1, 2, 3, 4):
        critic.damage = shorten if step > 2 else lambda path: None
        run.save(step, {}, {})
    assert steps(session) == steps(session, CRITIC) == [2, 4]
    critic.damage = lambda path: None
    run.save(5, {}, {})
    assert steps(session) == steps(session, CRITIC) == [5]


def test_nothing_is_pruned_where_no_checkpoint_is_known_to_be_finite(session, policy):
    """Those of an earlier version do not say it."""
    folder = session.directory.checkpoints / POLICY
    for step in (1, 2):
        keeper(session, policy.model).save(step, {}, {})
        path = files.step_directory(folder, step)
        files.write_marker(path, {key: value for key, value in files.read_marker(path).items() if key not in ("finite", "checksum")})
    keep([folder], CheckpointConfig(keep=1))
    assert steps(session) == [1, 2]
    keeper(session, policy.model, keep=1).save(3, {}, {})
    assert steps(session) == [3]
