"""Checkpoints of a run: the policy's and the critic's are pairs, and what happens where one of a pair is missing."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from model_steps import keeper, steps
from training_jobs import eventually

from aligner.errors import CheckpointError, ConfigError, ServerUnreachable
from aligner.loop.checkpointing import CRITIC, POLICY, CriticCheckpointer, RunCheckpointer, load_critic, newest_pair
from aligner.loop.loop import BY_TIME
from aligner.models.checkpoint import checkpoint
from aligner.models.training.optimizer import OptimizerConfig
from aligner.run.session import Session
from aligner.run.settings import BestMode, CheckpointConfig
from aligner.servers.ledger import Ledger, Refused
from aligner.servers.payloads import SaveRequest, TrainIdentity, TrainReply


def stepped(model):
    """With an optimizer that has moments, as after any number of steps."""
    model.optimizer.step()
    return model


@pytest.fixture
def model(make_model):
    return stepped(make_model("policy", optimizer=OptimizerConfig()).model)


@pytest.fixture
def value_model(make_model):
    return stepped(make_model("value", optimizer=OptimizerConfig()).model)


def trained(session: Session, *steps: int) -> Ledger:
    """The ledger of a critic that was trained on these steps."""
    ledger = Ledger(session.directory.run_id())
    for step in steps:
        identity = TrainIdentity(run=ledger.run, step=step, part=0, digest="ab" * 32, previous=ledger.mark)
        ledger.record(identity, TrainReply(loss_mean=0.5, metrics={"value/loss": 0.5}))
    return ledger


def save_critic(session: Session, model, step: int) -> None:
    state = {"ledger": trained(session, step).state()}
    checkpoint.save(session.directory.checkpoints / CRITIC, model, checkpoint.SaveRequest(step=step, state=state))


def test_save_and_load(session, model, fakes) -> None:
    log: list[str] = []
    model.version = 12
    keeper(session, model, fakes.FakeCritic(log)).save(3, {"kl_coef": 0.25}, {})
    assert log == ["critic saves 3", "critic has 3"]
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
        keeper(session, model, critic).save(3, {}, {})
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
    assert load_critic(session, value_model, CheckpointConfig()).checkpoint_step == 4
    assert weight.unique().tolist() == [4]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (3, "the newest critic checkpoint is of step 3: it is behind"),
        (0, "there is no critic checkpoint up to it: the critic starts anew"),  # it died before its first one
    ],
)
def test_a_critic_without_the_policys_step_is_said(session, model, value_model, capsys, saved, said) -> None:
    keeper(session, model).rescue(5, {})
    if saved:
        save_critic(session, value_model, saved)
    assert load_critic(session, value_model, CheckpointConfig()).checkpoint_step == saved
    assert f"the policy resumes after step 5, {said}" in capsys.readouterr().out


def test_a_new_run_has_a_new_critic(session, value_model, capsys) -> None:
    assert load_critic(session, value_model, CheckpointConfig()).checkpoint_step == 0
    assert capsys.readouterr().out == ""


# Pairs.


def test_the_newest_step_that_both_have_is_resumed(session, model, value_model, capsys) -> None:
    """The critic died before it could save step 6: the policy of that step is put aside, it would be taken for a later one's partner."""
    for step in (2, 4, 6):
        model.version = 10 * step
        keeper(session, model).rescue(step, {"step": step})
    for step in (2, 4):
        save_critic(session, value_model, step)
    critic = object()
    assert keeper(session, model, critic).load() == (4, {"step": 4})
    assert model.version == 40
    warning = "warning: there is no critic checkpoint of step 6: the run resumes after step 4, the newest that has both"
    assert capsys.readouterr().out.count(warning) == 1
    folder = session.directory.checkpoints / POLICY
    assert steps(session) == [2, 4] and (folder / "unpaired_step_000006" / "aligner.json").exists()
    assert (folder / "latest").read_text() == "step_000004\n"
    assert load_critic(session, value_model, CheckpointConfig()).checkpoint_step == 4
    assert warning not in capsys.readouterr().out  # there is no step 6 any more
    assert keeper(session, model, critic).load() == (4, {"step": 4})


def test_actor_and_critic_agree_before_either_has_changed_anything(tmp_path) -> None:
    def pair(policies: list[int], critics: list[int]) -> tuple[int, int, bool]:
        folder = tmp_path / f"{policies}{critics}"
        for name, numbers in (("policy", policies), ("critic", critics)):
            for number in numbers:
                (folder / name / f"step_{number:06d}").mkdir(parents=True)
                (folder / name / f"step_{number:06d}" / "aligner.json").write_text("")
        found = newest_pair(folder / "policy", folder / "critic")
        return found.policy, found.critic, bool(found.message)

    assert pair([], []) == pair([], [5]) == (0, 0, False)
    assert pair([5], [5]) == pair([5], [5, 10]) == pair([3, 5], [5]) == (5, 5, False)
    assert pair([5, 10], [5]) == (5, 5, True)
    assert pair([5, 10, 12], [5, 7, 11]) == (5, 5, True)
    assert pair([10], []) == pair([10], [20]) == (10, 0, True)
    assert pair([10], [3, 7]) == (10, 7, True)


def test_a_start_removes_half_written_checkpoints(session, model) -> None:
    stale = session.directory.checkpoints / POLICY / ".writing_step_000003.1234"
    stale.mkdir(parents=True)
    (stale / "state.json").write_text("half of it")
    assert keeper(session, model).load() == (0, {})
    assert not stale.exists()


# What stays.


class SavingCritic:
    """A critic that writes real checkpoints, into the run's folder. Those asked for before `free` wait for it."""

    def __init__(self, session: Session, model, *, free: bool = True) -> None:
        self.session, self.model, self.free = session, model, free
        self.asked: list[int] = []
        self.complete: list[int] = []
        self.futures: list[Future] = []

    def begin_save(self, step: int) -> Future:
        return self.save(step)

    def checkpointed(self, step: int) -> None:
        self.complete.append(step)

    def save(self, step: int) -> Future:
        self.asked.append(step)
        save_critic(self.session, self.model, step)
        future: Future = Future()
        self.futures.append(future)
        if self.free:
            future.set_result("path")
        return future


def test_the_newest_pairs_stay(session, model, value_model) -> None:
    run = keeper(session, model, SavingCritic(session, value_model), keep=2)
    for step in (1, 2, 3, 4):
        run.save(step, {}, {})
    assert steps(session) == steps(session, CRITIC) == [3, 4]
    assert sorted(p.name for p in (session.directory.checkpoints / CRITIC).iterdir()) == ["latest", "step_000003", "step_000004"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_checkpoint_keeps_its_critic(session, model, value_model, asynchronous) -> None:
    """Step 2 is the best by pass@4: with keep=1 it outlives the later ones, and its critic, of the same step, with it."""
    critic = SavingCritic(session, value_model)
    run = keeper(session, model, critic, keep=1, best_metric="validation/pass@4", asynchronous=asynchronous)
    best = session.directory.checkpoints / POLICY / "best"
    weight = value_model.module.score_head.weight
    for step, value in enumerate((0.25, 0.75, 0.5, None, 0.5), start=1):
        with torch.no_grad():
            weight.fill_(step)
        run.save(step, {}, {} if value is None else {"validation/pass@4": value})
        run.wait()
    assert best.read_text().strip() == "step_000002"
    assert steps(session) == steps(session, CRITIC) == [2, 5]
    checkpoint.load(value_model, session.directory.checkpoints / CRITIC / "step_000002")
    assert weight.unique().tolist() == [2]
    # A new best in place of it: the old pair goes as a pair.
    run.save(6, {}, {"validation/pass@4": 1.0})
    run.save(7, {}, {"validation/pass@4": 0.0})
    run.wait()
    assert steps(session) == steps(session, CRITIC) == [6, 7] and best.read_text().strip() == "step_000006"


def test_the_best_checkpoints_stay(session, model) -> None:
    """keep=1 and keep_best=2: the newest one and the two of highest accuracy; of equals the newer is better."""
    run = keeper(session, model, keep=1, keep_best=2, best_metric="validation/accuracy")
    best = session.directory.checkpoints / POLICY / "best"
    seen = []
    for step, accuracy in enumerate((0.5, 0.8, None, 0.8, 0.1, 0.7), start=1):
        run.save(step, {}, {} if accuracy is None else {"validation/accuracy": accuracy, "validation/loss": 1.0})
        seen.append((steps(session), best.read_text().strip()))
    assert seen == [
        ([1], "step_000001"),
        ([1, 2], "step_000002"),
        ([1, 2, 3], "step_000002"),
        ([2, 4], "step_000004"),
        ([2, 4, 5], "step_000004"),
        ([2, 4, 6], "step_000004"),
    ]
    assert checkpoint.resolve(best).name == "step_000004"


def test_the_lowest_value_can_be_the_best(session, model) -> None:
    run = keeper(session, model, keep=1, best_metric="validation/loss", best_mode=BestMode.min)
    for step, loss in enumerate((0.5, 0.2, 0.3), start=1):
        run.save(step, {}, {"validation/loss": loss})
    assert steps(session) == [2, 3]


def test_a_metric_that_validation_does_not_report(session, model) -> None:
    run = keeper(session, model, best_metric="validation/acuracy")
    run.save(1, {}, {})
    with pytest.raises(ConfigError, match="best_metric=validation/acuracy: validation reports validation/accuracy, validation/r"):
        run.save(2, {}, {"validation/reward": 0.1, "validation/accuracy": 0.5})


# In the background.


def published(run: RunCheckpointer, session: Session) -> bool:
    run.poll()
    return bool(steps(session))


def test_a_save_is_published_by_a_later_poll(session, model) -> None:
    run = keeper(session, model, asynchronous=True)
    run.save(3, {"at": 3}, {})
    assert steps(session) == []
    model.version += 1  # the training goes on
    assert eventually(lambda: published(run, session))
    run.poll()
    run.wait()
    assert steps(session) == [3] and run.settle() == 3
    assert keeper(session, model).load() == (3, {"at": 3}) and model.version == 0


def test_the_next_save_and_the_end_publish_the_one_before(session, model) -> None:
    run = keeper(session, model, asynchronous=True)
    run.save(1, {}, {})
    run.save(2, {}, {})
    assert steps(session) == [1]
    run.wait()
    assert steps(session) == [1, 2]


def test_the_policy_is_published_after_its_critic(session, model, value_model) -> None:
    critic = SavingCritic(session, value_model, free=False)
    run = keeper(session, model, critic, asynchronous=True)
    run.save(3, {}, {})
    for requests in (1, 2):  # the first answer says that the critic's state is copied, the second that its checkpoint is complete
        time.sleep(0.3)
        assert not published(run, session)
        assert critic.asked == [3] * requests
        assert critic.complete == []
        critic.futures[-1].set_result("path")
        run.poll()
    assert steps(session) == critic.complete == [3]


def test_a_critic_that_does_not_answer_is_given_up(session, model, value_model) -> None:
    run = keeper(session, model, SavingCritic(session, value_model, free=False), asynchronous=True, write_timeout_seconds=0.2)
    run.save(3, {}, {})
    with pytest.raises(CheckpointError, match="the critic did not save step 3 within 0 s"):
        run.wait()


def test_a_critic_that_dies_does_not_cost_the_policys_part(session, model, value_model) -> None:
    critic = SavingCritic(session, value_model, free=False)
    run = keeper(session, model, critic, asynchronous=True)
    run.save(3, {}, {})
    critic.futures[0].set_exception(ServerUnreachable("the critic is gone"))
    with pytest.raises(ServerUnreachable):
        assert eventually(lambda: published(run, session))
    assert run.settle() == 3 and steps(session) == [3]


def test_an_error_of_the_writer_comes_with_a_poll(session, model, monkeypatch) -> None:
    from aligner.models.checkpoint import async_save

    def broken(part, number: int) -> None:
        raise OSError(28, "No space left on device")

    run = keeper(session, model, asynchronous=True)
    run.save(1, {}, {})
    run.wait()
    monkeypatch.setattr(async_save, "_write_bucket", broken)
    run.save(2, {}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        assert eventually(lambda: (run.poll(), False)[1])
    assert run.settle() == 1 and steps(session) == [1]


def critic_keeper(session, value_model, ledger: Ledger, **config) -> CriticCheckpointer:
    settings = CheckpointConfig(**{"asynchronous": False} | config)
    return CriticCheckpointer(session, value_model, ledger, tokenizer=session.directory.path, config=settings)


def test_a_critic_begins_a_checkpoint_and_completes_it(session, value_model) -> None:
    ledger = trained(session, 1, 2)
    critic = critic_keeper(session, value_model, ledger, asynchronous=True)
    folder = session.directory.checkpoints / CRITIC
    weight = value_model.module.score_head.weight
    with torch.no_grad():
        weight.fill_(1.0)
    begin, complete = (SaveRequest(step=2, after=ledger.mark, wait=wait) for wait in (False, True))
    for _ in range(2):  # said twice, begun once
        assert critic.save(begin) == str(folder / "step_000002") and steps(session, CRITIC) == []
    with torch.no_grad():
        weight.fill_(2.0)
    assert critic.save(complete) == str(folder / "step_000002") and steps(session, CRITIC) == [2]
    checkpoint.load(value_model, folder / "step_000002")
    assert weight.unique().tolist() == [1.0]
    critic.save(SaveRequest(step=3, wait=False))
    critic.save(SaveRequest(step=4, wait=False))
    assert steps(session, CRITIC) == [2, 3]


def test_the_same_checkpoint_again_changes_nothing(session, value_model) -> None:
    """A client that lost its answer asks again, also a critic that has come back from that very checkpoint."""
    ledger = trained(session, 1, 2)
    request = SaveRequest(step=2, after=ledger.mark)
    path = critic_keeper(session, value_model, ledger).save(request)
    marker = (Path(path) / "aligner.json").stat().st_mtime_ns
    keeper(session, value_model).rescue(2, {})
    restarted = load_critic(session, value_model, CheckpointConfig())
    assert (restarted.mark, restarted.count, restarted.checkpoint_step) == (ledger.mark, 2, 2)
    for again in (critic_keeper(session, value_model, ledger), critic_keeper(session, value_model, restarted)):
        assert again.save(request) == path
    assert (Path(path) / "aligner.json").stat().st_mtime_ns == marker


def test_a_checkpoint_of_another_moment_is_refused(session, value_model) -> None:
    then, now = trained(session, 1), trained(session, 1, 2)
    with pytest.raises(Refused, match=r"refused \(ahead\): .*trained last on step 2 part 0 .*step 1 part 0"):
        critic_keeper(session, value_model, now).save(SaveRequest(step=1, after=then.mark))
    with pytest.raises(Refused, match=r"refused \(behind\)"):
        critic_keeper(session, value_model, then).save(SaveRequest(step=2, after=now.mark))
    assert steps(session, CRITIC) == []


def test_a_critics_checkpoint_without_a_ledger_or_of_another_run(session, value_model) -> None:
    keeper(session, value_model).rescue(3, {})
    other = Ledger("another").state()
    for state, message in (({}, "does not say what the critic was trained on"), ({"ledger": other}, "belongs to run another")):
        checkpoint.save(session.directory.checkpoints / CRITIC, value_model, checkpoint.SaveRequest(step=3, state=state))
        with pytest.raises(CheckpointError, match=message):
            load_critic(session, value_model, CheckpointConfig())


def test_of_those_saved_by_time_the_newest_two_stay(session, model) -> None:
    keeping = keeper(session, model, asynchronous=True)
    for step, by_time in ((1, True), (2, False), (3, True), (4, True), (5, True), (6, False)):
        keeping.save(step, {BY_TIME: True} if by_time else {}, {})
        keeping.wait()
    assert steps(session) == [2, 5, 6]  # 5 is the one to go back to if 6 is damaged
    keeping = keeper(session, model, keep=1)
    keeping.save(7, {BY_TIME: True}, {})
    assert steps(session) == [7]


def test_what_was_put_aside_goes_when_its_step_is_reached_again(session, model, value_model, fakes) -> None:
    for step in (2, 6):
        keeper(session, model).rescue(step, {})
    save_critic(session, value_model, 2)
    critic = fakes.FakeCritic([])
    critic.save = lambda step: fakes.done(save_critic(session, value_model, step))
    keeping = keeper(session, model, critic)
    assert keeping.load()[0] == 2
    aside = session.directory.checkpoints / POLICY / "unpaired_step_000006"
    keeping.save(4, {}, {})
    assert aside.exists()
    keeping.save(7, {}, {})
    assert not aside.exists() and steps(session) == [2, 4, 7]
