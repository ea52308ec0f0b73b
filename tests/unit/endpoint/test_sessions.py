"""What the calls of a session become: rows of tokens by hand and of random agents, rewards over HTTP, and the weight of a session."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fake_live_engine import KEY, post, scripted, tokenizer_of
from fake_parts import FakeCritic, FakePolicy
from rollout_parts import Episode, scored

from aligner.algorithms.grpo import GRPO, GRPOConfig
from aligner.algorithms.ppo import PPO, PPOConfig
from aligner.data.collate import rollout_batch
from aligner.data.order import EpochSampler
from aligner.endpoint.sessions import Call, KeptSessions, SessionClosed, Trace
from aligner.losses.aggregation import Aggregation
from aligner.losses.value import value_loss
from aligner.online.collect import Scorers
from aligner.online.critics import ServedCritic
from aligner.online.policy_gradient import mini_batches
from aligner.online.task import OnlineTask, Validation
from aligner.protocols import Loss
from aligner.rollout.engine import GenResult
from aligner.rollout.engine.episodes import turn_seed
from aligner.servers import wire
from aligner.servers.config import RequestLimits
from aligner.servers.ledger import Ledger
from aligner.servers.payloads import TrainIdentity, digest_of
from aligner.servers.services import CriticService
from aligner.telemetry.metrics import Metric
from aligner.types import (
    FinishReason,
    Images,
    LogprobKind,
    LossOutput,
    PolicyBatch,
    Prompt,
    Rollout,
    SamplingConfig,
    TokenOutputs,
    ValueBatch,
)

PROMPT = Prompt(id=3, tokens=(99, 98), source="tasks.jsonl:4", text="a task", answer="7")


def call(prompt, tokens, *, first: float = 1.0, version: int = 0, versions=(), session: str = "s", **sampling) -> Call:
    """Its log-probs are -first, -first - 1, ..."""
    result = GenResult(
        index=0,
        tokens=tuple(tokens),
        logprobs=tuple(-first - place for place in range(len(tokens))),
        kind=LogprobKind.sampled,
        finish_reason=FinishReason.stop,
        weight_version=version,
        versions=versions,
        extras={"routes": torch.arange(len(prompt) + len(tokens) - 1, dtype=torch.uint8).view(-1, 1, 1)},
    )
    return Call(session=session, prompt=tuple(prompt), result=result, seed=1, sampling=SamplingConfig(**sampling))


def rows(*calls: Call, **fields) -> tuple[Rollout, ...]:
    return Trace(calls=calls, **fields).rows(PROMPT, seed=5, version=9)


def test_one_row_where_the_client_sends_back_what_was_sampled() -> None:
    (row,) = rows(call([1, 2], [7, 8], version=1), call([1, 2, 7, 8, 3], [9], first=10, version=2), turn_rewards={1: 0.5})
    assert (row.prompt.tokens, row.prompt.text, row.prompt.answer) == ((1, 2), "a task", "7")
    assert row.response == (7, 8, 3, 9) and row.written == (True, True, False, True) and row.logprobs == (-1, -2, 0, -10)
    assert (row.seed, row.num_turns, row.rows_left, row.policy_version, row.oldest_version) == (5, 2, 0, 2, 1)
    assert [(mark.start, mark.end, mark.number, mark.reward) for mark in row.turns] == [(0, 2, 0, 0.0), (3, 4, 1, 0.5)]
    assert [mark.state for mark in row.turns] == [hash((1, 2)), hash((3,))]
    assert row.extras["routes"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_branches() -> None:
    """A stripped thought, an edited history, and two choices of one call, of which the second was continued."""
    first, thought = call([1], [5, 6, 7]), call([1, 6, 7, 2], [8], first=10)
    found = rows(first, thought)
    assert [(one.prompt.tokens, one.response, one.written) for one in found] == [
        ((1,), (5, 6, 7), (True,) * 3),
        ((1, 6, 7, 2), (8,), (True,)),
    ]
    assert [one.rows_left for one in found] == [1, 0] and Trace(calls=(first, thought)).changed() == 3
    edited = call([1, 5, 6, 4, 2], [8], first=20)
    assert Trace(calls=(first, edited)).changed() == 1 and len(rows(first, edited)) == 2
    other, after = call([1], [5, 6], first=30), call([1, 5, 6, 9], [3], first=40)
    found = rows(first, other, after)
    assert [(one.response, one.num_turns) for one in found] == [((5, 6, 7), 1), ((5, 6, 9, 3), 2)]
    assert Trace(calls=(first, other, after)).changed() == 0


def test_two_calls_that_continue_one() -> None:
    """What both rows hold is the policy's in the first of them alone."""
    start, left, right = call([1], [5, 6]), call([1, 5, 6, 2], [7], first=10), call([1, 5, 6, 3], [7], first=20)
    one, other = rows(start, left, right)
    assert one.written == (True, True, False, True) and other.written == (False, False, False, True)
    assert other.logprobs == (0, 0, 0, -20) and [mark.number for mark in other.turns] == [2] and other.num_turns == 1


def test_images() -> None:
    """They are part of what is compared, and of a row; equal tokens with another image are another prompt, and another state."""
    one, other = "01" * 32, "02" * 32

    def seen(made: Call, *images: str) -> Call:
        return replace(made, extras={Images.name: Images.of(images)})

    first, second = call([1, 4], [5]), call([1, 4, 5, 4], [7], first=10)
    (row,) = rows(seen(first, one), seen(second, one, other))
    assert row.response == (5, 4, 7) and Images.digests(row.all_extras[Images.name]) == [one, other]
    assert row.extras["routes"].flatten().tolist() == [0, 1, 2, 3]
    found = rows(seen(first, one), seen(second, other, other))
    assert [Images.digests(row.extras[Images.name]) for row in found] == [[one], [other, other]]
    assert Trace(calls=(seen(first, one), seen(second, other, other))).changed() == 0
    states = [rows(seen(first, one), seen(second, one, last))[0].turns[1].state for last in (one, other)]
    assert len({*states, rows(first, second)[0].turns[1].state}) == 3


def test_weights_that_change_within_a_session() -> None:
    (row,) = rows(call([1], [5, 6], version=4, versions=((0, 3), (1, 4))), call([1, 5, 6, 2], [7], version=5))
    assert (row.oldest_version, row.policy_version) == (3, 5)


def test_a_session_without_a_call_is_a_row_without_a_token() -> None:
    (row,) = rows()
    assert (row.response, row.written, row.num_turns, row.policy_version, row.prompt.tokens) == ((), (), 0, 9, PROMPT.tokens)
    batch = rollout_batch([row], 0)
    assert not batch.loss_mask.any()


def random_trace(draw: random.Random) -> Trace:
    """An agent that continues any call, edits what it sends back, asks twice, or begins anew. Every sampled token's log-prob is its own."""
    calls: list[Call] = []
    for _ in range(draw.randint(1, 9)):
        prompt: list[int] = [1]
        if calls and (how := draw.choice(["continue", "continue", "edit", "again", "new", "cut"])) != "new":
            earlier = draw.choice(calls)
            prompt = list(earlier.prompt if how == "again" else (*earlier.prompt, *earlier.result.tokens))
            if how == "edit":
                prompt[draw.randrange(len(prompt))] += 1
            if how == "cut":
                del prompt[draw.randrange(len(prompt)) :]
        prompt += [draw.randint(2, 4) for _ in range(draw.randint(not prompt, 2))]
        first = 1.0 + 100 * len(calls)
        calls.append(call(prompt, [draw.randint(2, 4) for _ in range(draw.randint(1, 3))], first=first))
    return Trace(calls=tuple(calls))


@pytest.mark.parametrize("seed", range(200))
def test_every_sampled_token_is_learnt_from_once_whatever_agents_do(seed: int) -> None:
    trace = random_trace(random.Random(seed))
    found = trace.rows(PROMPT, seed=5, version=0)
    sampled = sorted(logprob for call in trace.calls for logprob in call.result.logprobs)
    learnt = [(logprob, token) for row in found for logprob, token, own in zip(row.logprobs, row.response, row.written, strict=True) if own]
    assert sorted(logprob for logprob, _ in learnt) == sampled
    by_logprob = {lp: token for call in trace.calls for lp, token in zip(call.result.logprobs, call.result.tokens, strict=True)}
    assert all(by_logprob[logprob] == token for logprob, token in learnt)
    assert not any(logprob for row in found for logprob, own in zip(row.logprobs, row.written, strict=True) if not own)
    assert sorted(mark.number for row in found for mark in row.turns) == list(range(len(trace.calls)))
    for row in found:
        for mark in row.turns:  # the row holds what the call was asked, and what it answered
            own, end = trace.calls[mark.number], len(row.prompt.tokens) + mark.end
            assert row.tokens[:end] == (*own.prompt, *own.result.tokens)
            assert all(row.written[mark.start : mark.end])
    assert found[-1].written[-1] and [row.rows_left for row in found] == list(range(len(found)))[::-1]


def split(rollout: Rollout, at: int) -> tuple[Rollout, Rollout]:
    """The same sampled tokens as two rows: the second begins at a token of the response."""
    fields = {"finish_reason": rollout.finish_reason, "policy_version": 0, "seed": rollout.seed, "written": None}
    one = Rollout(prompt=rollout.prompt, response=rollout.response[:at], logprobs=rollout.logprobs[:at], rows_left=1, **fields)
    prompt = Prompt(id=rollout.prompt.id, tokens=(*rollout.prompt.tokens, *rollout.response[:at]), source="split")
    return one, Rollout(prompt=prompt, response=rollout.response[at:], logprobs=rollout.logprobs[at:], **fields)


def four_sessions(count: Callable[[], int]) -> list[Episode]:
    """Of one row each, in two groups; `count` numbers the sampled tokens, whose log-probs tell them apart."""
    draw = random.Random(4)
    episodes = []
    for place, reward in enumerate([1.0, 0.0, 0.25, 0.5]):
        length = draw.randint(3, 6)
        logprobs = tuple(-0.01 * count() for _ in range(length))
        fields = {"finish_reason": FinishReason.stop, "policy_version": 0, "seed": place}
        prompt = Prompt(id=place // 2, tokens=(1, 2), source="x")
        rollout = Rollout(prompt=prompt, response=(3,) * length, logprobs=logprobs, **fields)
        episodes.append(Episode(rollouts=(rollout,), reward=reward))
    return episodes


def each_split(episodes: list[Episode]) -> Iterator[list[Episode]]:
    """The same sessions, one of them in two rows: at every token of each."""
    for place, episode in enumerate(episodes):
        (rollout,) = episode.rollouts
        for at in range(1, len(rollout.response)):
            yield [*episodes[:place], replace(episode, rollouts=split(rollout, at)), *episodes[place + 1 :]]


def slopes_of(loss: Callable[[torch.Tensor], LossOutput], names: torch.Tensor, mask: torch.Tensor) -> dict[float, float]:
    """The gradient with regard to the output of each sampled token, by its log-prob."""
    outputs = names.clone().requires_grad_()
    found = loss(outputs)
    (found.total / found.count).backward()
    return dict(zip(names[mask].tolist(), outputs.grad[mask].tolist(), strict=True))


def update_slopes(loss: Loss, part: PolicyBatch) -> dict[float, float]:
    def of(logprobs: torch.Tensor) -> LossOutput:
        return loss(TokenOutputs(logprobs=logprobs, entropy=-logprobs), part)

    return slopes_of(of, part.rollout_logprobs, part.loss_mask)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize(
    "settings", [{}, {"advantage_estimator": "rloo"}, {"advantage_estimator": "per_turn"}, {"mini_batch_size": 2}], ids=str
)
def test_a_session_of_two_rows_weighs_as_one(aggregation: Aggregation, settings: dict) -> None:
    """The gradient of every sampled token, its own ones' and all others', through experience, mini-batches and loss of GRPO."""

    def gradients(episodes: list[Episode]) -> dict[float, float]:
        config = {"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4, "kl_coef": 0.0, "entropy_coef": 0.1} | settings
        algorithm = GRPO(GRPOConfig(aggregation=aggregation, **config), FakePolicy([]), make_task())
        collected = scored(episodes)
        batch = rollout_batch(collected.rollouts, pad_id=0)
        whole = algorithm.experience(batch, collected, batch.rollout_logprobs, None)
        parts = mini_batches(whole, config["mini_batch_size"], 1, key="k", episodes=collected.episodes)
        assert len(parts) == 4 // config["mini_batch_size"]
        return joined([update_slopes(algorithm.loss(), part) for part in parts])

    numbers = itertools.count(1)
    episodes = four_sessions(lambda: next(numbers))
    whole = gradients(episodes)
    for parts in each_split(episodes):
        assert gradients(parts) == pytest.approx(whole, rel=1e-5, abs=1e-9) and len(whole) == next(copy(numbers)) - 1


def joined(parts: list[dict[float, float]]) -> dict[float, float]:
    """Of parts that have no token in common."""
    found = {name: slope for part in parts for name, slope in part.items()}
    assert len(found) == sum(map(len, parts))
    return found


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_session_of_two_rows_weighs_as_one_in_ppo_and_for_its_critic(aggregation: Aggregation, size: int) -> None:
    """As above, with values and a KL of each token: gradients of the policy's updates, and of the critic's as its server cuts them."""

    def gradients(episodes: list[Episode]) -> tuple[dict[float, float], dict[float, float]]:
        config = {"rollouts_per_step": 4, "mini_batch_size": size, "kl_coef": 0.1, "gamma": 0.9, "gae_lambda": 0.8, "entropy_coef": 0.1}
        algorithm = PPO(
            PPOConfig(aggregation=aggregation, **config), FakePolicy([]), (task := make_task()), ServedCritic(task, FakeCritic([]))
        )
        collected = scored(episodes)
        batch = rollout_batch(collected.rollouts, pad_id=0)
        names = batch.rollout_logprobs
        whole, values = algorithm.experience(batch, replace(collected, values=list(torch.sin(50 * names))), names, torch.cos(70 * names))
        critic = CriticSlopes()
        service = CriticService(critic, partial(value_loss, clip=0.2), Ledger("r"), mini_batch_size=size, num_epochs=1, save=str)
        arrays = wire.encode_value_batch(replace(values, old_values=names))  # by which its tokens are known
        identity = TrainIdentity(run="r", step=1, part=0, digest=digest_of(arrays), previous="start")
        limits = RequestLimits(vocab_size=100, max_sequence_length=100)
        service.train(wire.CRITIC_TRAIN.payload(arrays | wire.encode_fields(identity), limits))
        parts = mini_batches(whole, size, 1, key="k", episodes=collected.episodes)
        assert len(parts) == len(critic.found) == 4 // size
        return joined([update_slopes(algorithm.loss, part) for part in parts]), joined(critic.found)

    numbers = itertools.count(1)
    episodes = four_sessions(lambda: next(numbers))
    whole = gradients(episodes)
    for parts in each_split(episodes):
        for found, wanted in zip(gradients(parts), whole, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-8) and len(wanted) == next(copy(numbers)) - 1


def served() -> ServedCritic:
    return ServedCritic(make_task(), FakeCritic([]))


class CriticSlopes:
    """A value model that learns nothing, and keeps the gradient of each update."""

    def __init__(self) -> None:
        self.found: list[dict[float, float]] = []

    def train_step(self, part: ValueBatch, loss: Loss) -> dict[str, Metric]:
        self.found.append(slopes_of(lambda values: loss(TokenOutputs(values=values), part), part.old_values, part.loss_mask))
        return dict(loss(TokenOutputs(values=part.old_values), part).metrics)


def returns_of(trace: Trace, values: dict[float, float], gamma: float, gae_lambda: float, reward: float = 1.0) -> dict[float, float]:
    """PPO's returns of a session's tokens by their log-probs, and of one of a single token; the values of which are given."""
    sessions = (trace, Trace(calls=(call([1], [2], first=0.5),)))
    rollouts = [one.rows(PROMPT, seed=place, version=0) for place, one in enumerate(sessions)]
    collected = scored([Episode(rollouts=rows, reward=reward) for rows in rollouts])
    batch = rollout_batch(collected.rollouts, pad_id=0)
    names, mask = batch.rollout_logprobs, batch.loss_mask
    # What a critic says of tokens that are not the policy's own must not matter.
    given = [torch.tensor([values.get(-name, 0.0) if own else 99.0 for name, own in zip(*row, strict=True)]) for row in both(names, mask)]
    settings = PPOConfig(rollouts_per_step=2, mini_batch_size=2, kl_coef=0.0, gamma=gamma, gae_lambda=gae_lambda)
    algorithm = PPO(settings, FakePolicy([]), make_task(), served())
    found = algorithm.experience(batch, replace(collected, values=given), names, torch.zeros_like(names))[1]
    assert torch.equal(found.loss_mask, mask) and found.returns[~mask].eq(0).all()
    return {-name: value for name, value in zip(names[mask].tolist(), found.returns[mask].tolist(), strict=True)}


def both(names: torch.Tensor, mask: torch.Tensor) -> list[tuple[list[float], list[bool]]]:
    return list(zip(names.tolist(), mask.tolist(), strict=True))


def test_a_call_is_followed_by_the_one_that_continues_it_and_a_branch_by_the_next_call() -> None:
    """Call 2 continues call 0 while call 1 is a sub-agent's: 0 and 1 are both followed by 2, which begins in the middle of a row.

    Advantages (gamma and lambda 0.5; values 0.5 | 0.25 | 0.75): 2: 0.25; 1: 0.375 - 0.25 + 0.25 * 0.25; 0: 0.375 - 0.5 + 0.25 * 0.25.
    """
    trace = Trace(calls=(call([1], [5], first=1), call([8], [6], first=10), call([1, 5, 2], [7], first=20)))
    assert [row.response for row in trace.rows(PROMPT, seed=5, version=0)] == [(6,), (5, 2, 7)]
    found = returns_of(trace, {1: 0.5, 10: 0.25, 20: 0.75}, 0.5, 0.5)
    assert found == pytest.approx({1: 0.4375, 10: 0.4375, 20: 1.0, 0.5: 1.0})


@pytest.mark.parametrize("seed", range(100))
def test_returns_of_random_sessions_are_those_of_the_equation(seed: int) -> None:
    """Token by token, from the last call to the first; without discounts every token's return is the reward, however a session branches."""
    draw = random.Random(seed)
    trace = random_trace(draw)
    names = [[-logprob for logprob in call.result.logprobs] for call in trace.calls]
    values = {name: draw.uniform(-1, 1) for own in names for name in own}
    assert returns_of(trace, values, 1.0, 1.0) == pytest.approx(dict.fromkeys([*values, 0.5], 1.0), abs=1e-5)
    following = {}
    for row in trace.rows(PROMPT, seed=5, version=0):
        own = [mark.number for mark in row.turns]
        following |= dict(zip(own, [*own[1:], own[-1] + 1], strict=True))
    gamma, decay = 0.9, 0.9 * 0.7
    advantages: dict[float, float] = {}
    for number in reversed(range(len(names))):
        after = names[following[number]][0] if following[number] < len(names) else None
        for name in reversed(names[number]):
            reward = float(after is None)
            later = 0.0 if after is None else gamma * values[after] + decay * advantages[after]
            advantages[name], after = reward + later - values[name], name
    wanted = {name: advantages[name] + values[name] for name in values} | {0.5: 1.0}
    assert returns_of(trace, values, gamma, 0.7) == pytest.approx(wanted, abs=1e-5)


def make_task() -> OnlineTask:
    """A task whose reward, engine and prompts nobody asks for."""
    return OnlineTask(
        engine=None,
        reference=None,
        judges=Scorers(reward=None),
        validation=Validation(),
        topology=None,
        train=[PROMPT] * 2,
        order=EpochSampler(2, 2, seed=1, shuffle=False),
        decode=str,
        seed=3,
        max_response_length=8,
    )


def test_keys_and_seeds() -> None:
    sessions = KeptSessions(max_calls=2)
    (one, key), (other, _) = (sessions.open(seed=seed, sampling=SamplingConfig()) for seed in (11, 12))
    assert sessions.of_key(key) == one and one != other
    for wrong in ("", ".", key[:-1], key + "x", key.replace(one, other), f"{one}.", "x.y", key + "\udcff"):
        assert sessions.of_key(wrong) is None
    assert [sessions.begin(one, (1,)), sessions.begin(one, (1,))] == [11, turn_seed(11, 2)]
    with pytest.raises(SessionClosed, match="environment.sessions.max_calls=2") as refused:
        sessions.begin(one, (1,))
    assert refused.value.status == 409
    sessions.close(one)
    assert sessions.of_key(key) is None
    with pytest.raises(SessionClosed, match="has ended") as refused:
        sessions.begin(one, (1,))
    assert refused.value.status == 410
    sessions.record(call([1], [2], session=one))  # it was under way
    assert sessions.close(one).calls == () and sessions.num_recorded == 0


def test_agents_choose_lengths_and_ends_but_not_the_distribution() -> None:
    sessions = KeptSessions(max_calls=2)
    own = SamplingConfig(temperature=0.5, top_p=0.9, max_response_length=10, min_response_length=4, stop_strings=["a"])
    name, _ = sessions.open(seed=1, sampling=own)
    asked = SamplingConfig(temperature=0.0, top_k=1, max_response_length=3, stop_strings=["b"], stop_token_ids=[7])
    assert sessions.settings(name, asked) == SamplingConfig(
        temperature=0.5, top_p=0.9, max_response_length=3, min_response_length=3, stop_strings=["a", "b"], stop_token_ids=[7]
    )
    assert sessions.settings(name, SamplingConfig(max_response_length=99)).max_response_length == 10
    assert sessions.settings("", asked) == asked
    sessions.record(call([1], [2], session=name, temperature=0.5, top_p=0.9))
    assert not sessions.trouble(name)
    sessions.record(call([1], [2], session=name, temperature=1.0, top_p=0.9))
    assert sessions.trouble(name) == "a call was sampled with temperature=1.0, not 0.5"


def test_rewards_are_posted(tmp_path: Path) -> None:
    sessions = KeptSessions(max_calls=9)
    name, key = sessions.open(seed=1, sampling=SamplingConfig())
    _, other = sessions.open(seed=1, sampling=SamplingConfig())
    for prompt in ([1], [1, 2]):
        sessions.record(call(prompt, [2], session=name))
    with scripted(tokenizer_of(tmp_path), lambda _: "", sessions=sessions) as (endpoint, _):
        place = f"{endpoint.url}/sessions/{name}/reward"
        for wrong, said in (
            ([1], "expected"),
            ({}, "expected {"),
            ({"reward": None, "done": None}, "expected {"),
            ({"rewards": 1}, "unknown parameter rewards; known here: done, reward, turn"),
            ({"reward": "1"}, "expected a number"),
            ({"reward": True}, "expected a number"),
            ({"reward": float("nan")}, "expected a finite number"),
            ({"reward": 10**400}, "expected a number"),
            ({"reward": 1, "turn": 3}, "from 1 to 2"),
            ({"reward": 1, "turn": 0}, "from 1 to 2"),
            ({"reward": 1, "turn": 1.0}, "expected a whole number"),
            ({"turn": 1}, "with a reward"),
            ({"done": 1}, "expected true or false"),
        ):
            status, answer = post(place, key, wrong)
            assert status == 400 and said in answer["error"]["message"], (wrong, answer)
        assert post(place, other, {"reward": 1})[0] == 403 and post(place, "no", {"reward": 1})[0] == 401
        assert post(place, key, {"reward": 7})[0] == 200
        assert post(place, key, {"reward": 1.5}) == (200, {"session": name, "calls": 2})  # in the other's place
        assert post(place, KEY, {"reward": -0.5, "turn": 2, "done": True})[0] == 200
        with pytest.raises(SessionClosed):
            sessions.begin(name, (1,))
        trace = sessions.close(name)
        assert (trace.reward, trace.turn_rewards, trace.total) == (1.5, {1: -0.5}, 1.0)
        assert post(place, KEY, {"reward": 1})[0] == 410
    assert Trace().total is None and Trace(turn_rewards={0: 0.0}).total == 0.0
