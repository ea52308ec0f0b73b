"""Collecting rollouts with their scores, sample seeds, and cutting a step into updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from fake_parts import done
from rollout_parts import Episode, scored

from aligner.errors import EngineError, RunHalted, ServerTimeout
from aligner.online import collect as rollouts
from aligner.online.collect import (
    SampleRequest,
    Scorers,
    collect,
    finish,
    joined,
    response_metrics,
    sample_rows,
    sample_seeds,
    start,
)
from aligner.online.policy_gradient import mini_batches
from aligner.protocols import Replica
from aligner.types import FinishReason, PolicyBatch, SampleTurn, Scores, TokenTable, TurnMark


@pytest.fixture
def prompts(fakes):
    return [fakes.prompt(number) for number in range(5)]


def scorers(fakes, critic=True) -> Scorers:
    reward = fakes.FakeReward(lambda r: 10.0 * r.prompt.id)
    return Scorers(reward=reward, critic=fakes.FakeCritic([]) if critic else None, pad_id=9)


SEEDS = [50, 40, 30, 20, 10]
NAN = math.nan


@pytest.fixture(autouse=True)
def _world(topology) -> None: ...


def test_everything_comes_back_in_the_order_of_the_prompts(fakes, prompts) -> None:
    engine = fakes.FakeEngine([])  # answers the last prompt first, two at a time
    collected = collect(engine, prompts, SEEDS, scorers=scorers(fakes))
    assert [r.prompt.id for r in collected.rollouts] == [0, 1, 2, 3, 4]
    assert [r.seed for r in collected.rollouts] == SEEDS
    assert collected.rewards.dtype == torch.float32
    assert collected.rewards.tolist() == [0, 10, 20, 30, 40]
    # Prompt i is the token i + 1 and its response i + 1 sevens and the end; the critic says token / 10, without what padded its request.
    for number, values in enumerate(collected.values):
        assert values.tolist() == pytest.approx([(number + 1) / 10, *[0.7] * (number + 1), 0.0])


def test_judges_on_the_same_gpus_are_asked_when_the_engine_sleeps(fakes, prompts) -> None:
    log: list[str] = []

    class Shared:
        @contextmanager
        def given_away(self):
            log.append("given away")
            yield
            log.append("taken back")

    apart = scorers(fakes)
    plain = collect(fakes.FakeEngine([]), prompts, SEEDS, scorers=apart)
    reward = fakes.FakeReward(lambda r: log.append("asked") or 10.0 * r.prompt.id)
    collected = collect(fakes.FakeEngine(log), prompts, SEEDS, scorers=replace(apart, reward=reward, shared=Shared()))
    assert log == ["engine wakes", "generate", "engine sleeps", "given away", *["asked"] * 5, "taken back"]
    assert torch.equal(collected.rewards, plain.rewards) and len(collected.values) == 5


def test_the_same_prompt_twice(fakes) -> None:
    same = [fakes.prompt(1)] * 4
    collected = collect(fakes.FakeEngine([]), same, [4, 3, 2, 1], scorers=scorers(fakes, critic=False))
    assert [r.seed for r in collected.rollouts] == [4, 3, 2, 1]
    assert collected.values is None


def test_replicas_get_all_prompts_and_share_what_they_sampled(fakes, prompts, monkeypatch) -> None:
    """Two replicas of the engine one after the other in this process: the second one's gather joins both parts."""
    parts = []
    first = fakes.FakeEngine([], Replica(index=0, count=2), share=[4, 1])
    second = fakes.FakeEngine([], Replica(index=1, count=2), share=[0, 2, 3])

    def gather(local):
        parts.append(local)
        return list(parts)

    monkeypatch.setattr(rollouts, "gather_objects", gather)
    with pytest.raises(EngineError, match="2 responses to 5 prompts"):  # the first one's part alone is not enough
        collect(first, prompts, SEEDS, scorers=scorers(fakes))
    whole = collect(second, prompts, SEEDS, scorers=scorers(fakes))
    assert first.asked == second.asked == [([0, 1, 2, 3, 4], SEEDS)]
    assert [r.prompt.id for r in whole.rollouts] == [0, 1, 2, 3, 4]
    assert whole.rewards.tolist() == [0, 10, 20, 30, 40]
    # Prompt i gets i + 2 tokens.
    assert [share.tokens for share in whole.replica_stats] == [6 + 3, 2 + 4 + 5]
    assert response_metrics(whole, 1.0)["rollout/tokens_imbalance"] == pytest.approx(11 / 10)


def test_a_replica_that_gets_no_prompt(fakes, prompts, monkeypatch) -> None:
    """It still takes part in the generation and in the gather; only the leaders of the replicas count as such."""
    engine = fakes.FakeEngine([], Replica(index=0, count=2), share=[])
    one = fakes.rollout(prompts[0], 7, fakes.EOS, seed=50)
    row = rollouts._Row(position=0, rollout=one, reward=3.0, valid=True, parts={}, values=None)
    others = [([row], None, rollouts.ReplicaStats(tokens=2, seconds=3.0)), ([], None, None)]
    monkeypatch.setattr(rollouts, "gather_objects", lambda local: [local, *others])
    collected = collect(engine, prompts[:1], SEEDS[:1], scorers=scorers(fakes, critic=False))
    assert engine.asked == [([0], [50])] and collected.rollouts == [one] and collected.rewards.tolist() == [3.0]
    assert [share.tokens for share in collected.replica_stats] == [0, 2]


class Judge:
    """A reward, whether it is one, and what it is made of, each by the prompt's id."""

    def __init__(self, rewards, valid, **parts) -> None:
        self.rewards, self.valid = torch.tensor(rewards), torch.tensor(valid)
        self.parts = {name: torch.tensor(part) for name, part in parts.items()}

    def score(self, answers) -> Future:
        ids = [r.prompt.id for r in answers]
        parts = {name: part[ids] for name, part in self.parts.items()}
        return done(Scores(rewards=self.rewards[ids], valid=self.valid[ids], parts=parts))


# Of prompt 2 it has no reward, and says NaN for a part.
JUDGE = Judge([0, 10, NAN, 30, 40], [True, True, False, True, True], id=[0, 1, NAN, 3, 4], length=[2.0, 3, 4, 5, 6])


def test_what_rewards_are_made_of_and_rewards_that_are_none(fakes, prompts) -> None:
    """No reward, said so by the judge, is not a reward that is not finite: the run goes on without the row."""
    collected = collect(fakes.FakeEngine([]), prompts, SEEDS, scorers=Scorers(reward=JUDGE))
    assert collected.rewards.tolist() == [0, 10, 0, 30, 40]
    assert collected.valid.tolist() == [True, True, False, True, True] == (~collected.failed).tolist()
    metrics = response_metrics(collected, 1.0)
    assert (metrics["rollout/rewards_invalid"], metrics["rollout/rewards_not_finite"], metrics["rollout/reward"]) == (1, 0, 20)
    assert (metrics["reward/id"], metrics["reward/length"]) == (2.0, (2 + 3 + 5 + 6) / 4)  # of the four that have one
    twice = joined([collected, collected.select(torch.tensor([2, 1]))])
    assert [r.prompt.id for r in twice.rollouts] == [0, 1, 2, 3, 4, 2, 1]
    assert twice.rewards.tolist() == [0, 10, 0, 30, 40, 0, 10]
    assert twice.failed.nonzero().flatten().tolist() == [2, 5]
    assert twice.parts["length"].tolist() == [2, 3, 4, 5, 6, 4, 3]
    assert [share.tokens for share in twice.replica_stats] == [40]  # 20 each: shares are those of the whole
    plain = collect(fakes.FakeEngine([]), prompts, SEEDS, scorers=scorers(fakes, critic=False))
    with pytest.raises(ValueError, match=r"made of \['id', 'length'\], others of \[\]"):
        joined([collected, plain])


def test_a_number_in_a_row_that_is_not_valid_is_no_reward(fakes, prompts) -> None:
    judge = Judge([1.0] * 3, [True, False, True])
    found = collect(fakes.FakeEngine([]), prompts[:3], SEEDS[:3], scorers=Scorers(reward=judge))
    assert found.valid.tolist() == [True, False, True] and found.rewards.tolist() == [1, 0, 1]


def test_the_part_of_a_sum_that_is_not_finite_is_named(fakes, prompts) -> None:
    """Prompt 2 has no reward, which is no number either, and nobody's fault."""
    judge = Judge([0.5, NAN, NAN], [True, True, False], maths=[0.0, 1, 2], style=[0.5, NAN, 0.5])
    with pytest.raises(RunHalted, match=r"reward maths \+ style gave 1 of 3 rewards that are not finite: nan \(style=nan\) for prompt "):
        collect(fakes.FakeEngine([]), prompts[:3], SEEDS[:3], scorers=Scorers(reward=judge, reward_name="reward maths + style"))


def test_sampling_and_scoring_as_two_halves(fakes, prompts) -> None:
    """An error of the first half is raised by the second, where every rank is."""
    engine, request = fakes.FakeEngine([]), SampleRequest(prompts=prompts, seeds=SEEDS)
    part = start(engine, request, scorers(fakes))
    assert finish(part, request, scorers(fakes)).rewards.tolist() == [0, 10, 20, 30, 40]
    assert engine.log == ["generate"]  # who calls the halves wakes the engine

    class Broken(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            yield []
            raise EngineError("no room for a response")

    broken = start(Broken([]), request, Scorers(reward=JUDGE))
    with pytest.raises(EngineError, match="no room"):
        finish(broken, request, Scorers(reward=JUDGE))


def test_only_the_leader_of_a_replica_asks_the_scorers(fakes, prompts) -> None:
    reward = fakes.FakeReward(lambda r: pytest.fail("asked by a follower"))
    follower = fakes.FakeEngine([], Replica(is_leader=False))
    with pytest.raises(EngineError):  # here nobody else brings the answers
        collect(follower, prompts, SEEDS, scorers=Scorers(reward=reward))


def test_an_error_of_a_scorer_is_raised(fakes, prompts) -> None:
    def score(rollout) -> float:
        if rollout.prompt.id == 3:
            raise ServerTimeout("the reward server did not answer")
        return 0.0

    judged = Scorers(reward=fakes.FakeReward(score))
    with pytest.raises(ServerTimeout, match="did not answer"):
        collect(fakes.FakeEngine([]), prompts, SEEDS, scorers=judged)


def test_an_error_of_another_replica_is_raised_here_too(fakes, prompts, monkeypatch) -> None:
    monkeypatch.setattr(rollouts, "gather_objects", lambda local: [local, ([], EngineError("the other one's engine"), None)])
    with pytest.raises(EngineError, match="the other one's"):
        collect(fakes.FakeEngine([]), prompts, SEEDS, scorers=scorers(fakes))


def test_an_error_of_this_engine_still_reaches_the_others(fakes, prompts, monkeypatch) -> None:
    sent = []
    monkeypatch.setattr(rollouts, "gather_objects", lambda local: sent.append(local) or [local])

    class Broken(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            yield from super().generate(prompts[:2], seeds[:2])
            raise EngineError("no room for a response")

    with pytest.raises(EngineError, match="no room"):
        collect(Broken([]), prompts, SEEDS, scorers=scorers(fakes))
    assert [type(error) for _, error, _ in sent] == [EngineError]


def test_where_a_scorer_refuses_at_once_the_engine_still_runs_to_its_end(fakes, prompts) -> None:
    """The other ranks of the replica are in it too, and would wait."""
    ended = []

    class Watched(fakes.FakeEngine):
        def generate(self, prompts, seeds, sampling=None):
            yield from super().generate(prompts, seeds)
            ended.append(True)

    class Refusing(fakes.FakeReward):
        def score(self, rollouts):
            raise ServerTimeout(f"no connection for {len(rollouts)}")

    with pytest.raises(ServerTimeout, match="no connection for 2"):
        collect(Watched([]), prompts, SEEDS, scorers=Scorers(reward=Refusing(float)))
    assert ended == [True]


def test_seeds_are_distinct_and_a_function_of_run_and_step() -> None:
    assert sample_seeds(1, 7, 100) == sample_seeds(1, 7, 100)
    assert sample_seeds(1, 7, 3) == sample_seeds(1, 7, 100)[:3]
    drawn = [seed for run in (0, 1, 2) for step in range(1, 50) for seed in sample_seeds(run, step, 64)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**62 for seed in drawn)


def batch_of(rows: int) -> PolicyBatch:
    numbers = torch.arange(rows, dtype=torch.float32)
    return PolicyBatch(
        tokens=torch.arange(rows)[:, None].expand(rows, 2).clone(),
        lengths=torch.full((rows,), 2),
        loss_mask=torch.tensor([[False, True]] * rows),
        old_logprobs=None,
        advantages=numbers[:, None].expand(rows, 2).clone(),
    )


def test_mini_batches_hold_every_row_once_an_epoch() -> None:
    parts = mini_batches(batch_of(8), 2, 3, key="1/5")
    rows = [part.tokens[:, 0].tolist() for part in parts]
    assert rows[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]  # the first epoch in order: a group of GRPO stays together
    for epoch in (1, 2):
        flat = sum(rows[4 * epoch : 4 * epoch + 4], [])
        assert sorted(flat) == list(range(8)) and flat != list(range(8))
    assert rows[4:8] != rows[8:]
    for part in parts:
        assert part.advantages[:, 1].tolist() == part.tokens[:, 0].tolist()  # the rows of all tensors move together
        assert part.old_logprobs is None
    assert rows == [part.tokens[:, 0].tolist() for part in mini_batches(batch_of(8), 2, 3, key="1/5")]
    assert rows[4:] != [part.tokens[:, 0].tolist() for part in mini_batches(batch_of(8), 2, 3, key="1/6")][4:]


def test_a_mini_batch_without_tokens_is_left_out() -> None:
    whole = batch_of(4)
    mask = whole.loss_mask.clone()
    mask[2:] = False
    parts = mini_batches(replace(whole, loss_mask=mask), 2, 1, key="1/5")
    assert [part.tokens[:, 0].tolist() for part in parts] == [[0, 1]]


def test_response_metrics_and_samples(fakes, prompts) -> None:
    cut = fakes.rollout(prompts[0], 7, 7, 7)
    whole = fakes.rollout(prompts[1], fakes.EOS)
    replica_stats = tuple(rollouts.ReplicaStats(tokens=tokens, seconds=seconds) for tokens, seconds in ((3, 0.5), (1, 2.0)))
    collected = rollouts.ScoredRollouts(rollouts=[cut, whole], rewards=torch.tensor([1.0, 4.0]), values=None, replica_stats=replica_stats)
    assert response_metrics(collected, 2.0) == {
        "rollout/reward": 2.5,
        "rollout/reward_std": 1.5,
        "rollout/rewards_not_finite": 0.0,
        "rollout/rewards_invalid": 0.0,
        "rollout/response_length": 2.0,
        "rollout/response_length_max": 3.0,
        "rollout/truncated_fraction": 0.5,
        "rollout/tokens_per_second": 2.0,  # 4 tokens in 2 s
        "rollout/tokens_imbalance": 1.5,  # 3 over a mean of 2
        "rollout/seconds_imbalance": 1.6,  # 2 s over a mean of 1.25 s
        "rollout/entropy": 1.0,  # minus the fakes' log-prob of every token
        "rollout/empty_fraction": 0.5,
        "rollout/reward_truncated": 1.0,
        "rollout/reward_empty": 4.0,
    }
    (row,) = sample_rows(collected, str, count=1)
    assert (row.prompt, row.response, row.reward, row.finish_reason) == ("p0", "(7, 7, 7)", 1.0, FinishReason.length)
    assert (row.group, row.parts, row.tokens) == (prompts[0].id, {}, None)


def test_sample_rows_of_a_session_are_complete_and_name_its_turns(fakes, prompts) -> None:
    """A session of two branches and one of one: a row is never without the rest of its session."""
    marks = [TurnMark(start=0, end=1, number=0, state=1, reward=0.25), TurnMark(start=2, end=3, number=2, state=2)]
    first = replace(fakes.rollout(prompts[0], 5, 6, 7), turns=tuple(marks), written=(True, False, True), rows_left=1)
    second = replace(fakes.rollout(prompts[0], 8), turns=(TurnMark(start=0, end=1, number=1, state=3),))
    episodes = [
        Episode(rollouts=(first, second), reward=1.0),
        Episode(rollouts=(fakes.rollout(prompts[1], 9),), reward=0.0),
    ]
    rows = sample_rows(scored(episodes), lambda ids: "-".join(map(str, ids)), count=1, per_token={})
    assert [(row.episode, row.reward) for row in rows] == [(0, 1.0), (0, 1.0)]
    assert rows[0].turns == (SampleTurn(number=0, heard="", text="5", reward=0.25), SampleTurn(number=2, heard="6", text="7", reward=0.0))
    assert rows[1].turns == (SampleTurn(number=1, heard="", text="8", reward=0.0),)
    turns = rows[0].tokens.numbers["turn"]
    assert (turns[0], turns[2]) == (0.0, 2.0) and math.isnan(turns[1]) and "turn" not in rows[1].tokens.numbers
    (*_, alone) = sample_rows(scored(episodes), str, count=3)
    assert (alone.episode, alone.turns) == (None, ())


def test_sample_rows_with_tokens(fakes, prompts) -> None:
    """Texts join to the response also if a token alone loses its space; numbers are those of the response, not of the prompt."""
    prompt = replace(prompts[0], tokens=(3, 4))
    rollout = replace(fakes.rollout(prompt, 5, 6, fakes.EOS), logprobs=(-0.5, -1 / 3, -0.25))
    parts = {"length": torch.tensor([0.5])}
    collected = rollouts.ScoredRollouts(rollouts=[rollout], rewards=torch.tensor([1.0]), parts=parts)
    words = {5: " two", 6: " words", fakes.EOS: ""}

    def decode(ids: Sequence[int]) -> str:
        return "".join(words.get(token, "") for token in ids).removeprefix(" ")

    per_token = {"advantage": torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0, 0.0]]), "trainer": None}
    (row,) = sample_rows(collected, decode, per_token=per_token)
    assert row.tokens == TokenTable(texts=("two", " words", ""), numbers={"sampler": (-0.5, -0.33333, -0.25), "advantage": (1.0, 2.0, 3.0)})
    assert row.response == "".join(row.tokens.texts) and (row.group, row.parts) == (prompt.id, {"length": 0.5})
    long = fakes.rollout(prompt, *[5] * 600)
    (row,) = sample_rows(rollouts.ScoredRollouts(rollouts=[long], rewards=torch.tensor([1.0])), decode, per_token={})
    assert len(row.tokens.texts) == len(row.tokens.numbers["sampler"]) == 512
