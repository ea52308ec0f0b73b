"""A good checkpoint is never given up for a bad one: updates that spoil the weights, pruning, and damage found at the start of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from model_steps import keeper, make_batch, steps

from aligner.cluster.run_directory import CRITIC, POLICY
from aligner.errors import CheckpointError, RunHalted
from aligner.loop.checkpointing import keep, load_critic
from aligner.loop.loop import Clock, StepResult, run
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint, files
from aligner.models.training.optimizer import OptimizerConfig
from aligner.run.session import Session
from aligner.run.settings import CheckpointConfig, DamagedCheckpoint, LoopConfig
from aligner.servers.ledger import Ledger


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

    made = Critic([])
    made.model = model
    return made


def shorten(path: Path) -> None:
    """Take the last byte of the largest file of a checkpoint."""
    largest = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


class Steps:
    """An algorithm whose step is one update; that of step `bad` leaves a NaN in the weights. It is its own reporter."""

    def __init__(self, policy, bad: int) -> None:
        self.policy, self.bad, self.notes = policy, bad, []

    def step(self, step: int, clock: Clock) -> StepResult:
        if step == self.bad:
            self.policy.model.optimizer.param_groups[0]["eps"] = math.nan
        self.policy.train_step(make_batch(number=step), sft_loss)
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


# Damage that is found when a run starts again.


def flip(path: Path) -> None:
    """One bit in the middle of the largest file: its size stays."""
    largest = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0x04
    largest.write_bytes(data)


def saved(session: Session, policy, *numbers: int, critic=None) -> Path:
    """A folder with these steps, whose state says which step they are."""
    for step in numbers:
        policy.model.version = 0
        keeper(session, policy.model, critic).save(step, {"step": step}, {})
    return session.directory.checkpoints / POLICY


def test_a_run_goes_on_from_the_newest_intact_checkpoint(session, policy, capsys):
    folder = saved(session, policy, 1, 2, 3, 4)
    flip(folder / "step_000004")
    (folder / "step_000003" / "aligner.json").write_text("{")
    assert keeper(session, policy.model).load() == (2, {"step": 2})
    said = capsys.readouterr().out
    assert "step_000004: weights/__0_" in said and "step_000003/aligner.json is damaged" in said
    assert "The run continues after step 2, the newest that is intact (run.damaged_checkpoint=fall_back)" in said
    assert steps(session) == [1, 2] and (folder / "latest").read_text() == "step_000002\n"
    assert all((folder / f"damaged_step_00000{step}" / "weights").is_dir() for step in (3, 4))  # nothing is deleted
    assert keeper(session, policy.model).load() == (2, {"step": 2})
    assert "damaged" not in capsys.readouterr().out
    saved(session, policy, 3)
    flip(folder / "step_000003")
    keeper(session, policy.model).load()
    assert (folder / "damaged_step_000003").is_dir() and (folder / "damaged_step_000003.2").is_dir()


def test_a_run_may_stop_instead(session, policy):
    folder = saved(session, policy, 1, 2)
    flip(folder / "step_000002")
    with pytest.raises(CheckpointError, match="step_000001 is intact: .*or let run.damaged_checkpoint=fall_back do it"):
        keeper(session, policy.model, damaged=DamagedCheckpoint.stop).load()
    assert steps(session) == [1, 2]


def test_a_run_does_not_begin_anew_by_itself(session, policy):
    folder = saved(session, policy, 1, 2)
    for step in (1, 2):
        flip(folder / f"step_00000{step}")
    for _ in range(2):  # and none is set aside, or the second start would
        with pytest.raises(CheckpointError, match="no intact checkpoint is left to continue from: .*step_000002.*step_000001"):
            keeper(session, policy.model).load()


@pytest.mark.parametrize("first", ["actor", "critic"])
@pytest.mark.parametrize("part", [POLICY, CRITIC])
def test_actor_and_critic_fall_back_alike(session, policy, critic, part, first):
    """Whichever part is damaged, and whichever component starts first and sets it aside."""
    saved(session, policy, 2, 4, 6, critic=critic)
    flip(session.directory.checkpoints / part / "step_000006")
    starts = {
        "actor": lambda: keeper(session, policy.model, critic).load()[0],
        "critic": lambda: load_critic(session, critic.model, CheckpointConfig()).checkpoint_step,
    }
    assert starts[first]() == 4
    assert [start() for start in starts.values()] == [4, 4]
    assert (session.directory.checkpoints / part / "damaged_step_000006").is_dir()


@pytest.mark.parametrize("damaged", list(DamagedCheckpoint))
def test_tensors_that_were_written_wrongly_are_set_aside_for_the_next_start(damaged, session, policy, monkeypatch):
    """Every file has its SHA-256; only in memory it shows that the tensors of step 2 are others."""
    from aligner.models.checkpoint import sums as checkpoint_sums

    Steps(policy, bad=0).step(1, Clock())
    run = keeper(session, policy.model)
    run.save(1, {"at": 1}, {})
    real = checkpoint_sums.saved
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_sums, "saved", lambda found: {key: replace(one, sum="0" * 16) for key, one in real(found).items()})
        run.save(2, {"at": 2}, {})
    again = keeper(session, policy.model, damaged=damaged)
    with pytest.raises(CheckpointError, match=r"not those that were in memory") as raised:
        again.load()
    if damaged is DamagedCheckpoint.stop:
        assert steps(session) == [1, 2] and "set aside" not in str(raised.value)
        return
    assert "it is set aside as damaged_step_000002; start again" in str(raised.value)
    assert steps(session) == [1] and (session.directory.checkpoints / POLICY / "damaged_step_000002").is_dir()
    assert keeper(session, policy.model).load() == (1, {"at": 1})
