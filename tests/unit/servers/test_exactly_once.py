"""A critic that is killed at any moment is trained on every request once, in order. Its model is one integer (fakes/fake_critic.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_critic import Disk, FakeLink, FakeServer, token_batch, updated, value_batch

from aligner.errors import RequestRejected, ServerError, ServerUnreachable
from aligner.servers.client import CriticHistory
from aligner.servers.config import ClientConfig
from aligner.servers.ledger import Journal, Ledger
from aligner.servers.payloads import START, position

CONFIG = ClientConfig(recovery_timeout_seconds=60, discovery_timeout_seconds=60, max_lost_servers=10**6)  # but time does not pass
NUM_STEPS = 7


def weights(num_steps: int) -> list[int]:
    """The weight after each step of an undisturbed run; first the initial one."""
    found = [1]
    for step in range(1, num_steps + 1):
        found.append(updated(found[-1], value_batch(step, 2 * step)))
    return found


EXPECTED = weights(NUM_STEPS)


def history(link: FakeLink, folder: Path | None, config: ClientConfig = CONFIG) -> CriticHistory:
    return CriticHistory(link, config, run="run", journal=None if folder is None else Journal(folder))


def train(critic: CriticHistory, step: int) -> float:
    return critic.train_now(value_batch(step, 2 * step), step).metrics["value/loss"]


def dies_at(*moments: tuple[str, str]) -> Callable[[str, str], str]:
    """Each (moment, endpoint) once."""
    left = list(moments)

    def fate(moment: str, endpoint: str) -> str:
        if (moment, endpoint) in left:
            left.remove((moment, endpoint))
            return "die"
        return ""

    return fate


def test_without_trouble(tmp_path: Path) -> None:
    disk = Disk()
    link = FakeLink(lambda: FakeServer(disk))
    critic = history(link, tmp_path)
    assert critic.ask_values(token_batch(5)).tolist() == [[1.0]]
    assert [train(critic, step) for step in (1, 2, 3)] == EXPECTED[1:4]
    assert critic.ask_values(token_batch(5)).tolist() == [[EXPECTED[3]]]
    assert critic.save_now(3) == "step 3" and disk.critics[3][0] == EXPECTED[3]
    # No request is sent more often than needed; the first one asks who is there.
    assert link.requests == ["critic_status", "critic_infer", *["critic_train"] * 3, "critic_infer", "critic_save"]


def test_several_trainings_in_one_step(tmp_path: Path) -> None:
    """They are parts 0, 1 and 0 of the next step; a successor gets all of them again."""
    link = FakeLink(lambda: FakeServer(Disk()))
    critic = history(link, tmp_path)
    weight, marks = 1, []
    for number, step in ((3, 1), (5, 1), (7, 2)):
        weight = updated(weight, value_batch(number))
        assert critic.train_now(value_batch(number), step).metrics["value/loss"] == weight
        marks.append(position(critic.mark))
    assert marks == [(1, 0), (1, 1), (2, 0)]
    link.fate = dies_at(("before", "critic_infer"))
    assert critic.ask_values(token_batch(5)).tolist() == [[weight]] and link.num_deaths == 1


def test_a_server_that_fell_behind_under_the_same_name_gets_what_it_lacks(tmp_path: Path) -> None:
    """Refused as `behind` or `gap`, a request is made again once the server fits; what it has by then is not sent."""
    server = FakeServer(Disk())
    link = FakeLink(lambda: server)
    critic = history(link, tmp_path)
    for step in (1, 2):
        train(critic, step)
    for ask in (lambda: critic.ask_values(token_batch(5)).item() == EXPECTED[2], lambda: train(critic, 3) == EXPECTED[3]):
        server.model.weight = 1
        server.ledger.load_state(Ledger("run").state(), checkpoint_step=0)
        assert ask()
    assert server.ledger.count == 3


def test_no_values_of_a_critic_that_is_behind(tmp_path: Path) -> None:
    """A rank without the journal asks for values after step 2 of the server that it knows, which has had step 1 alone."""
    link = FakeLink(lambda: FakeServer(Disk()))
    critic = history(link, tmp_path / "trains")
    train(critic, 1)
    follower = history(link, None, ClientConfig(recovery_timeout_seconds=0.2, discovery_timeout_seconds=0.2, max_lost_servers=1))
    follower.follow(critic.mark)
    assert follower.ask_values(token_batch(5)).tolist() == [[EXPECTED[1]]]
    ahead = history(FakeLink(lambda: FakeServer(Disk())), tmp_path / "elsewhere")
    for step in (1, 2):
        train(ahead, step)
    follower.follow(ahead.mark)
    with pytest.raises(ServerError, match="trained last on step 1 part 0"):
        follower.ask_values(token_batch(5))
    train(critic, 2)
    assert critic.mark == ahead.mark


def test_a_critic_that_starts_while_a_pair_is_completed(tmp_path: Path) -> None:
    """It has chosen the pair of step 2 when that of step 4 is complete: the journal still has steps 3 and 4, and no longer 1 and 2."""
    disk = Disk()
    link = FakeLink(lambda: FakeServer(disk))
    critic = history(link, tmp_path)
    for step in (1, 2, 3, 4):
        train(critic, step)
        if step in (2, 4):
            critic.save_now(step)
            disk.policies.add(2)  # that of step 4 is published in this moment: the successor has not seen it
            critic.checkpointed(step)
    assert [entry.step for entry in Journal(tmp_path).entries] == [3, 4]
    link.fate = dies_at(("before", "critic_infer"))
    assert critic.ask_values(token_batch(5)).tolist() == [[EXPECTED[4]]]
    assert link.server.ledger.checkpoint_step == 2


def test_a_save_that_was_begun_is_begun_again_where_the_successor_passes_it(tmp_path: Path) -> None:
    """Begun after step 1, trained on, lost after step 2, completed: the checkpoint is that of step 1 all the same."""
    disk = Disk()
    link = FakeLink(lambda: FakeServer(disk))
    critic = history(link, tmp_path)
    train(critic, 1)
    critic.begin_save_now(1)
    train(critic, 2)
    link.fate = dies_at(("before", "critic_save"))
    assert critic.save_now(1) == "step 1"
    assert disk.critics[1][0] == EXPECTED[1] and link.server.model.weight == EXPECTED[2]


def test_a_client_without_a_journal_waits_for_the_one_with_it(tmp_path: Path) -> None:
    link = FakeLink(lambda: FakeServer(Disk()))
    critic, other = history(link, tmp_path), history(link, None)
    train(critic, 1)
    other.follow(critic.mark)
    assert other.ask_values(token_batch(5)).tolist() == [[EXPECTED[1]]]
    link.fate = dies_at(("before", "critic_infer"))
    link.pause = lambda seconds: critic.ask_values(token_batch(5))  # while it waits, the first rank comes by
    assert other.ask_values(token_batch(5)).tolist() == [[EXPECTED[1]]]
    with pytest.raises(ServerError, match="this client has no journal"):
        other.train_now(value_batch(1), 2)


def test_nobody_takes_the_place(tmp_path: Path) -> None:
    link = FakeLink(lambda: FakeServer(Disk()))
    critic = history(link, tmp_path, ClientConfig(recovery_timeout_seconds=0.05))
    train(critic, 1)
    link.restart = lambda: None
    link.fate = dies_at(("before", "critic_train"))
    expected = (
        r"critic_train: the connection broke Waited for another server \(0.05 s, server_client.recovery_timeout_seconds\): none has taken"
    )
    with pytest.raises(ServerUnreachable, match=expected):
        train(critic, 2)
    with pytest.raises(ServerUnreachable, match=expected):  # at once, without waiting anew
        critic.ask_values(token_batch(5))


def test_a_request_that_kills_every_server_is_given_up(tmp_path: Path) -> None:
    config = ClientConfig(recovery_timeout_seconds=60, max_lost_servers=2, retry_delay_seconds=0.01)
    link = FakeLink(lambda: FakeServer(Disk()), lambda moment, name: "die" if (moment, name) == ("before", "critic_train") else "")
    with pytest.raises(ServerUnreachable, match="critic_train: the connection broke"):
        train(history(link, tmp_path, config), 1)
    assert link.num_deaths <= 6


def test_a_bad_request_leaves_no_trace(tmp_path: Path) -> None:
    link = FakeLink(lambda: FakeServer(Disk()))
    critic = history(link, tmp_path)
    train(critic, 1)
    with pytest.raises(RequestRejected, match="tokens: ids from 0 to 1000; allowed are 0 to 999"):
        critic.train_now(value_batch(1000), 2)
    assert [entry.step for entry in Journal(tmp_path).entries] == [1]
    assert train(critic, 2) == EXPECTED[2]


# Resuming.


def resumed(link: FakeLink, folder: Path, mark: str) -> CriticHistory:
    critic = history(link, folder)
    critic.resume(mark)
    return critic


def test_an_actor_and_a_critic_that_both_come_back(tmp_path: Path) -> None:
    """The journal's later entries belong to a past that is over; the steps come again, with the same numbers."""
    disk = Disk()
    link = FakeLink(lambda: FakeServer(disk))
    first = history(link, tmp_path)
    train(first, 1)
    first.save_now(1)
    disk.policies.add(1)
    mark = first.mark
    train(first, 2)
    link.server = FakeServer(disk)
    second = resumed(link, tmp_path, mark)
    assert Journal(tmp_path).entries == Journal(tmp_path).between(START, mark)
    assert [train(second, step) for step in (2, 3)] == EXPECTED[2:4]


def test_an_older_actor_meets_a_critic_that_has_gone_on(tmp_path: Path) -> None:
    link = FakeLink(lambda: FakeServer(Disk()))
    critic = history(link, tmp_path)
    marks = [critic.mark]
    for step in (1, 2):
        train(critic, step)
        marks.append(critic.mark)
    with pytest.raises(
        ServerError, match=r"trained last on step 2 part 0 .* actor's critic was trained last on step 1 .*Restart the critic"
    ):
        resumed(link, tmp_path, marks[1])
    # One that begins anew is told the same before it has done anything.
    with pytest.raises(ServerError, match=r"trained last on nothing of this run: the critic is ahead"):
        history(link, tmp_path).ask_values(token_batch(5))
    assert link.server.ledger.count == 2
    # Another run's actor is turned away with both names.
    stranger = CriticHistory(link, CONFIG, run="other", journal=None)
    with pytest.raises(RequestRejected, match="refused .foreign.: this critic belongs to run run, the request to run other"):
        stranger.ask_values(token_batch(5))


def test_a_critic_that_starts_anew_gets_the_whole_history_or_none(tmp_path: Path) -> None:
    """The policy has come to step 3 without a checkpoint of the critic. With its journal that is no loss; without, somebody must decide."""
    link = FakeLink(lambda: FakeServer(Disk()))
    first = history(link, tmp_path)
    for step in (1, 2, 3):
        train(first, step)
    mark = first.mark
    link.server = FakeServer(Disk())
    second = resumed(link, tmp_path, mark)
    assert second.ask_values(token_batch(5)).tolist() == [[EXPECTED[3]]] and link.server.ledger.count == 3

    next(tmp_path.glob("00000002.*")).unlink()
    link.server = FakeServer(Disk())
    with pytest.raises(ServerError, match=r"began at its first weights .*step 3 part 0 .*the journal holds .*critic.accept_gap=true"):
        resumed(link, tmp_path, mark)


def test_a_gap_that_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = FakeLink(lambda: FakeServer(Disk()))
    first = history(link, tmp_path / "lost")
    for step in (1, 2, 3):
        train(first, step)
    link.server = FakeServer(Disk(), accept_gap=True)
    second = resumed(link, tmp_path / "new", first.mark)
    told = capsys.readouterr().out
    assert "warning: critic.accept_gap: critic at" in told and "trained last on nothing of this run, while" in told
    other = history(link, None)
    other.follow(first.mark)
    assert other.ask_values(token_batch(5)).tolist() == [[1.0]]
    assert second.ask_values(token_batch(5)).tolist() == [[1.0]]
    joined = updated(1, value_batch(4, 8))
    assert train(second, 4) == joined
    # From here on nothing is lost any more.
    link.fate = dies_at(("before", "critic_train"))
    link.restart = lambda: FakeServer(Disk(), accept_gap=True)
    assert train(second, 5) == updated(updated(1, value_batch(4, 8)), value_batch(5, 10))


# Any moment.


def act(link: FakeLink, disk: Disk, folder: Path, rng: random.Random) -> int:
    """One run of an actor with checkpoints, in the way of PPO and RunCheckpointer; the actor too may be killed. The final weight."""
    marks = {0: START}
    background = rng.random() < 0.5
    every = rng.choice((1, 2, 3))
    while True:
        start = disk.newest_pair()
        critic = resumed(link, folder, marks[start]) if start else history(link, folder)
        killed_at = rng.choice((0, 0, *range(start + 1, NUM_STEPS + 1)))
        begun = 0
        for step in range(start + 1, NUM_STEPS + 1):
            assert critic.ask_values(token_batch(5)).tolist() == [[EXPECTED[step - 1]]]
            if step == killed_at:
                break
            assert train(critic, step) == EXPECTED[step]
            marks[step] = critic.mark
            if begun:
                complete(critic, disk, begun)
                begun = 0
            if step % every == 0 and background:
                critic.begin_save_now(step)
                begun = step
            elif step % every == 0:
                complete(critic, disk, step)
            if rng.random() < 0.1:
                link.server = FakeServer(disk)  # while nobody asks anything of it
        else:
            critic.save_now(NUM_STEPS + 1)
            return disk.critics[NUM_STEPS + 1][0]
        link.server = FakeServer(disk)  # the launcher starts all of them again


def complete(critic: CriticHistory, disk: Disk, step: int) -> None:
    critic.save_now(step)
    assert disk.critics[step][0] == EXPECTED[step]
    disk.policies.add(step)
    critic.checkpointed(step)


def test_random_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 schedules: at every request the server may die before it, in it or after it, answer late, or get it twice."""
    monkeypatch.setattr("aligner.files.os.fsync", lambda descriptor: None)  # the machine stays up in this test
    monkeypatch.setattr("builtins.print", lambda *words, **options: None)
    num_deaths = 0
    for seed in range(100):
        rng = random.Random(seed)
        rate = rng.choice((0.01, 0.03, 0.08))
        disk = Disk()

        def fate(moment: str, name: str, rng: random.Random = rng, rate: float = rate) -> str:
            if rng.random() >= rate:
                return ""
            return "twice" if moment == "twice" else rng.choice(("die", "die", "silence"))

        link = FakeLink(lambda disk=disk: FakeServer(disk), fate)
        assert act(link, disk, tmp_path / str(seed), rng) == EXPECTED[-1]
        num_deaths += link.num_deaths
    assert num_deaths > 160
