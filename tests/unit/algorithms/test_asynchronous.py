"""Rounds that are sampled ahead: which are begun when, how old they get, what happens to what goes wrong in the thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from training_jobs import eventually

from aligner.errors import EngineError
from aligner.loop.loop import Clock
from aligner.online.critics import ServedCritic
from aligner.online.rollout_source import OnPolicyRolloutSource, sample_requests
from aligner.protocols import Replica
from aligner.rollout.config import AsynchronousConfig
from aligner.rollout.engine import Capabilities, GenRequest, GenResult, Memory, Work
from aligner.types import FinishReason, LogprobKind, SamplingConfig

LENGTH = 6  # steps of a generation, tokens of a response


@pytest.fixture(autouse=True)
def _world(topology) -> None: ...


class StepEngine:
    """An engine whose tokens are the versions of the weights that sampled them. It takes no step that `may_step` does not allow."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(name="steps", logprobs=LogprobKind.sampled)
        self.replica = Replica()
        self.max_sequence_length = 64
        self.gate = None
        self.version = 0
        self.may_step: Callable[[], bool] = lambda: True
        self.fails_in: int | None = None  # the round, by its number
        self.begun: list[int] = []  # versions at which rounds were begun
        self.steps = 0

    def wake(self, memory: frozenset[Memory]) -> None: ...

    def sleep(self, memory: frozenset[Memory]) -> None: ...

    def shutdown(self) -> None: ...

    def refit(self, version: int) -> int:
        self.version = version
        return 0

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        requests = work.take(64)
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            self.gate.between_steps(lambda: None)
            if not tokens:
                self.begun.append(self.version)
                if len(self.begun) == self.fails_in:
                    raise ZeroDivisionError("a bug")
            if self.may_step():
                tokens.append(self.version)
                self.steps += 1
            time.sleep(0.0002)
        yield [self._result(request, tokens) for request in requests]

    def _result(self, request: GenRequest, tokens: list[int]) -> GenResult:
        versions = tuple((tokens.index(version), version) for version in dict.fromkeys(tokens))
        return GenResult(
            index=request.index,
            tokens=tuple(tokens),
            logprobs=(-1.0,) * LENGTH,
            kind=LogprobKind.sampled,
            finish_reason=FinishReason.length,
            weight_version=tokens[-1],
            versions=versions if len(versions) > 1 else (),
        )


class Ahead:
    """Rounds of two responses each, over a `StepEngine`; the policy makes one optimizer step per training step."""

    def __init__(self, make_task, *, max_staleness: int = 1, partial: bool = True, timeout_seconds: float = 20.0, **options) -> None:
        from aligner.online.async_rollout_source import AsyncRolloutSource
        from aligner.rollout.engine.gate import Gate
        from aligner.rollout.engine.lifecycle import PhasedEngine
        from aligner.rollout.engine.work import WorkSharing

        self.steps = StepEngine()
        self.steps.gate = gate = Gate(timeout_seconds=timeout_seconds)
        self.engine = PhasedEngine(self.steps, SamplingConfig(), WorkSharing(Replica(), None), offload=False, gate=gate)
        self.log: list[str] = []
        self.task = make_task(self.log, num_prompts=40, batch_size=2, engine=self.engine)
        settings = AsynchronousConfig(max_staleness=max_staleness, partial=partial, timeout_seconds=timeout_seconds)
        self.rounds = AsyncRolloutSource(self.task, 1, settings, gate, **options)
        self.version = 0

    def take(self, step: int):
        return self.rounds.take(step, Clock())

    def trained(self) -> None:
        self.version += 1
        self.rounds.trained(self.version)

    def rest(self, count: int) -> None:
        """Wait until the thread has begun so many rounds and ended them."""
        assert eventually(lambda: len(self.steps.begun) == count and self.steps.steps == count * LENGTH)
        time.sleep(0.02)
        assert len(self.steps.begun) == count


@pytest.fixture
def make_ahead(make_task):
    made = []

    def make(**options) -> Ahead:
        made.append(Ahead(make_task, **options))
        return made[-1]

    yield make
    for one in made:
        one.steps.may_step = lambda: True
        one.rounds.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_the_thread_is_as_far_ahead_as_it_may_be(make_ahead, max_staleness):
    ahead = make_ahead(max_staleness=max_staleness)
    expected = OnPolicyRolloutSource(ahead.task, 1)
    for step in range(1, 7):
        collected = ahead.take(step)
        # Round r is begun when step r - max_staleness begins: with the weights that the step before it made.
        ahead.rest(step + max_staleness)
        assert ahead.steps.begun == [max(0, number - max_staleness - 1) for number in range(1, step + max_staleness + 1)]
        age = min(step - 1, max_staleness)
        assert collected.ages.tolist() == [[age, age]] * 2
        ids = [2 * step - 2, 2 * step - 1]  # the rounds come in their order, whole, as an on-policy run's
        assert [one.prompt.id for one in collected.rollouts] == ids and collected.rewards.tolist() == ids
        assert [one.seed for one in collected.rollouts] == sample_requests(ahead.task, step, 1, greedy=False)[0].seeds
        ahead.trained()
    assert ahead.rounds.state() == expected.state() == {"extra_rounds": 0}


def test_a_round_under_way_goes_on_with_new_weights(make_ahead):
    ahead = make_ahead()
    allowed = threading.Semaphore(LENGTH)
    ahead.steps.may_step = lambda: allowed.acquire(blocking=False)
    assert ahead.take(1).rollouts[0].response == (0,) * LENGTH
    for _ in range(2):
        allowed.release()
    assert eventually(lambda: ahead.steps.steps == LENGTH + 2)  # of round 2
    ahead.trained()
    for _ in range(LENGTH - 2):
        allowed.release()
    collected = ahead.take(2)
    (one, _) = collected.rollouts
    assert one.response == (0, 0, 1, 1, 1, 1) and (one.oldest_version, one.policy_version) == (0, 1)
    assert collected.ages.tolist() == [[1, 0]] * 2
    from aligner.online.collect import response_metrics

    metrics = response_metrics(collected, 1e9)  # seconds of waiting say nothing about its speed
    assert (metrics["rollout/staleness"], metrics["rollout/staleness_max"], metrics["rollout/versions"]) == (1, 1, 2)
    assert metrics["rollout/tokens_per_second"] > 1


def test_without_partial_rollouts_new_weights_wait_for_the_end_of_the_round(make_ahead):
    ahead = make_ahead(partial=False, max_staleness=2)
    for step in range(1, 6):
        collected = ahead.take(step)
        assert all(len(set(one.response)) == 1 and one.oldest_version is None for one in collected.rollouts)
        assert collected.ages.max() <= 2
        ahead.trained()
    assert collected.ages.max() == 2


def test_steps_that_take_several_rounds_and_steps_that_are_left_out(make_ahead):
    ahead = make_ahead(max_staleness=2)
    taken = []
    for step, count in ((1, 3), (2, 1), (3, 2), (6, 2), (7, 1)):  # 4 and 5 are left out, and their first rounds with them
        for _ in range(count):
            collected = ahead.take(step)
            taken.append(collected.rollouts[0].prompt.id // 2 + 1)
            assert collected.ages.max() <= 2
        ahead.trained()
    assert taken == [1, 2, 3, 4, 5, 6, 9, 10, 11]
    assert ahead.rounds.state() == {"extra_rounds": 4}
    with pytest.raises(ValueError, match="step 6 asks for rollouts after step 7"):
        ahead.take(6)


def test_the_last_round_is_the_last_that_is_sampled(make_ahead):
    ahead = make_ahead(max_staleness=3, last=2)
    for step in (1, 2):
        ahead.take(step)
        ahead.trained()
    ahead.rest(2)


def test_a_resumed_run_samples_from_the_checkpoint_again(make_ahead):
    ahead = make_ahead()
    ahead.rounds.load_state({"extra_rounds": 3}, 40)
    ahead.version = 40
    for step, age in ((5, 0), (6, 1), (7, 1)):
        collected = ahead.take(step)
        assert collected.rollouts[0].prompt.id == 2 * (step + 3 - 1) and collected.ages.tolist() == [[age, age]] * 2
        ahead.rest(step - 3)
        ahead.trained()
    assert ahead.steps.begun == [40, 40, 41, 42]


def test_an_update_that_was_left_out_makes_nothing_older(make_ahead):
    ahead = make_ahead()
    for step in (1, 2, 3):
        assert ahead.take(step).ages.max() == 0
        ahead.rest(step + 1)
        ahead.rounds.trained(0)  # the guard skipped it: these are still the weights of version 0


def test_validation_waits_for_the_rounds_under_way(make_ahead):
    from aligner.online.collect import collect

    ahead = make_ahead()
    ahead.take(1)
    ahead.trained()
    prompts = ahead.task.validation.prompts
    collected = collect(ahead.engine, prompts, [0, 1], scorers=ahead.task.scorers())
    assert ahead.steps.steps == 3 * LENGTH  # rounds 1 and 2, then this
    assert [one.response for one in collected.rollouts] == [(1,) * LENGTH] * 2 and collected.ages is None
    assert ahead.take(2).rollouts[0].prompt.id == 2


def test_what_goes_wrong_in_the_thread_is_raised_where_the_round_is_taken(make_ahead):
    ahead = make_ahead()
    ahead.steps.fails_in = 2
    ahead.take(1)
    ahead.trained()  # holds nobody
    with pytest.raises(EngineError, match="sampling round 2 failed: ZeroDivisionError: a bug"):
        ahead.take(2)


def test_errors_of_judges_and_of_the_engine_are_those_of_an_on_policy_run(make_ahead, fakes):
    from aligner.rewards.local import RewardError

    class Broken(fakes.FakeReward):
        def __init__(self) -> None:
            super().__init__(lambda rollout: 1.0)

        def score(self, rollouts):
            return fakes.failed(RewardError("the judge is gone"))

    ahead = make_ahead()
    object.__setattr__(ahead.task, "judges", replace(ahead.task.judges, reward=Broken()))
    with pytest.raises(RewardError, match="the judge is gone"):
        ahead.take(1)


def test_a_round_that_does_not_come_ends_the_wait(make_ahead):
    ahead = make_ahead(timeout_seconds=0.1)
    ahead.steps.may_step = lambda: False
    with pytest.raises(EngineError, match="sampling round 1 failed: the thread `rollouts` has not sampled it within .*timeout_seconds=0.1"):
        ahead.take(1)


def test_closing_gives_up_the_round_under_way(make_ahead):
    ahead = make_ahead()
    allowed = threading.Semaphore(LENGTH)  # those of the first round
    ahead.steps.may_step = lambda: allowed.acquire(blocking=False)
    ahead.take(1)
    ahead.trained()
    ahead.engine.shutdown()  # as a job does at its end
    steps = ahead.steps.steps
    time.sleep(0.02)
    assert ahead.steps.steps == steps < 3 * LENGTH
    with pytest.raises(EngineError, match="stopped|after its shutdown"):
        ahead.take(2)


def test_greedy_responses_are_part_of_a_round(make_ahead):
    ahead = make_ahead(greedy=True)
    collected = ahead.take(1)
    assert collected.baselines.tolist() == [0, 1] and len(collected.rollouts) == 2
    ahead.trained()
    assert ahead.take(2).baselines.tolist() == [2, 3]


def test_values_are_those_of_the_critic_of_now(make_ahead, fakes):
    log: list[str] = []
    ahead = make_ahead(critic=fakes.FakeCritic(log))
    collected = ahead.take(1)
    assert log == ["values"]
    ahead.rest(2)
    assert log == ["values"]  # nothing was asked while round 2 was sampled
    row = collected.rollouts[1]
    assert torch.equal(collected.values[1], torch.tensor(row.tokens) / 10)
    ahead.trained()
    ahead.take(2)
    assert log == ["values"] * 2


def test_grpo_and_ppo_learn_from_them(make_ahead, fakes):
    from aligner.algorithms.grpo import GRPO, GRPOConfig
    from aligner.algorithms.ppo import PPO, PPOConfig

    class Policy(fakes.FakePolicy):
        """Learns when the next round has been sampled with the weights before."""

        def train_step(self, batch, loss, added=()):
            ahead.rest(self.version + 2)
            return super().train_step(batch, loss)

    ahead = make_ahead()
    policy = Policy(ahead.log)
    grpo = GRPO(GRPOConfig(prompts_per_step=1, group_size=2, mini_batch_size=2), policy, ahead.task, ahead.rounds)
    for step in (1, 2, 3):
        metrics = grpo.step(step, Clock()).metrics
    assert metrics["rollout/staleness_max"] == 1 and policy.version == ahead.steps.version == 3
    assert policy.trained[-1].old_logprobs is None  # the weight is then that of the policy of now: see `policy_loss`
    critic = fakes.FakeCritic(ahead.log)
    ahead = make_ahead(critic=critic)
    policy = Policy(ahead.log)
    ppo = PPO(PPOConfig(rollouts_per_step=2, mini_batch_size=2), policy, ahead.task, ServedCritic(ahead.task, critic), ahead.rounds)
    for step in (1, 2):
        metrics = ppo.step(step, Clock()).metrics
    assert metrics["rollout/staleness_max"] == 1 and len(critic.trained) == 2
