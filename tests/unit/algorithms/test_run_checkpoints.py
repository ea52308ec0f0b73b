"""Checkpoints of a run: the policy's and the critic's are pairs, and what happens where one of a pair is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aligner.cluster.run_directory import RunDirectory
from aligner.errors import ServerUnreachable
from aligner.jobs.checkpointing import CRITIC, POLICY, RunCheckpointer, load_critic
from aligner.jobs.session import Session
from aligner.models import checkpoint
from aligner.models.optimizer import OptimizerConfig


@pytest.fixture
def session(topology, tmp_path: Path) -> Session:
    return Session(topology=topology, directory=RunDirectory(tmp_path / "run").create(), config_yaml="run: {}\n")


@pytest.fixture
def model(make_model):
    return make_model("policy", optimizer=OptimizerConfig()).model


@pytest.fixture
def value_model(make_model):
    return make_model("value", optimizer=OptimizerConfig()).model


def keeper(session: Session, model, critic=None) -> RunCheckpointer:
    return RunCheckpointer(session, model, name=POLICY, tokenizer=session.directory.path, critic=critic)


def save_critic(session: Session, model, step: int) -> None:
    checkpoint.save(session.directory.checkpoints / CRITIC, model, checkpoint.SaveRequest(step=step, state={}))


def test_a_new_run_has_nothing_to_load(session, model) -> None:
    assert keeper(session, model).load() == (0, {})


def test_save_and_load(session, model, fakes) -> None:
    log: list[str] = []
    model.version = 12
    keeper(session, model, fakes.FakeCritic(log)).save(3, {"kl_coef": 0.25})
    assert log == ["critic saves 3"]
    folder = session.directory.checkpoints / POLICY / "step_000003"
    assert (folder / "config.yaml").read_text() == "run: {}\n"
    model.version = 0
    again = keeper(session, model)
    assert again.load() == (3, {"kl_coef": 0.25})
    assert again.version() == 12


def test_the_critic_saves_first_and_its_failure_leaves_no_half_pair(session, model, fakes) -> None:
    critic = fakes.FakeCritic([])
    critic.save = lambda step: fakes.failed(ServerUnreachable("the critic is gone"))
    with pytest.raises(ServerUnreachable):
        keeper(session, model, critic).save(3, {})
    assert not (session.directory.checkpoints / POLICY).exists()
    keeper(session, model, critic).rescue(3, {})
    assert (session.directory.checkpoints / POLICY / "step_000003" / "aligner.json").exists()


def test_the_critic_takes_the_step_of_the_policy(session, model, value_model) -> None:
    """The critic saves first, so it may be one save ahead of the policy: that one is not the pair."""
    keeper(session, model).rescue(4, {})
    weight = value_model.module.score_head.weight
    for step in (2, 4, 6):
        with torch.no_grad():
            weight.fill_(step)
        save_critic(session, value_model, step)
    assert load_critic(session, value_model) == 4
    assert weight.unique().tolist() == [4]


def test_a_critic_that_is_behind_is_said(session, model, value_model, capsys) -> None:
    keeper(session, model).rescue(5, {})
    save_critic(session, value_model, 3)
    assert load_critic(session, value_model) == 3
    assert "the policy resumes after step 5, the newest critic checkpoint is of step 3: it is behind" in capsys.readouterr().out


def test_a_critic_that_died_before_its_first_checkpoint_starts_anew(session, model, value_model, capsys) -> None:
    keeper(session, model).rescue(5, {})
    assert load_critic(session, value_model) == 0
    assert "the policy resumes after step 5, there is no critic checkpoint up to it: the critic starts anew" in capsys.readouterr().out


def test_a_new_run_has_a_new_critic(session, value_model, capsys) -> None:
    assert load_critic(session, value_model) == 0
    assert capsys.readouterr().out == ""
