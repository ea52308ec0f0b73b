"""Rounds: the batches of rollouts that an algorithm learns from, as they follow one another.

Round r = 1, 2, ... is one batch of prompts, each `group_size` times, with their seeds: a pure function of r and the run's seed. A training
step takes one round, or more if it drops some of what it gets. So a step's first round is its own number plus how many rounds the steps
before took beyond their first; that count is all that a resumed run needs to know, and a step that is left out leaves out its first round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch

from aligner.data.collate import rollout_batch
from aligner.loop.loop import Clock, StepResult
from aligner.online import validation
from aligner.online.collect import SampleRequest, ScoredRollouts, collect_all, sample_rows, sample_seeds
from aligner.online.selection import SampledT, updates_of
from aligner.online.task import OnlineTask
from aligner.protocols import Critic, Loss, Policy
from aligner.telemetry.metrics import merge, values
from aligner.types import EpisodeRows, RolloutBatch

Config = TypeVar("Config")


@dataclass(kw_only=True, slots=True)
class Cursor:
    """Which round comes next."""

    extra: int = 0  # rounds that steps took beyond their first
    settled: int = 0  # the same, of the steps that are over
    step: int = 0  # that took the last round

    def next(self, step: int) -> int:
        """The number of the round that `step` takes now. Raises ValueError for a step before the last one."""
        if step < self.step:
            raise ValueError(f"step {step} asks for rollouts after step {self.step}")
        self.extra += step == self.step
        self.step = step
        return step + self.extra

    def settle(self) -> None:
        """The step is over."""
        self.settled = self.extra

    def state(self) -> dict[str, int]:
        return {"extra_rounds": self.settled}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """`state` may be empty: of a run whose steps took one round each."""
        self.extra = self.settled = state["extra_rounds"] if state else 0
        self.step = 0


def sample_requests(task: OnlineTask, number: int, group_size: int, *, greedy: bool) -> list[SampleRequest]:
    """The requests of a round (from 1): `group_size` responses to each prompt, side by side, and with `greedy` one more."""
    prompts = [prompt for prompt in task.prompts(number) for _ in range(group_size)]
    seeds = sample_seeds(task.seed, number, len(prompts))
    requests = [SampleRequest(prompts=prompts, seeds=seeds)]
    if greedy:
        first = slice(None, None, group_size)
        requests.append(SampleRequest(prompts=prompts[first], seeds=seeds[first], sampling=task.validation.sampling))
    return requests


def with_baselines(collected: ScoredRollouts, greedy: ScoredRollouts, group_size: int) -> ScoredRollouts:
    """The rollouts with the rewards of the greedy responses to their prompts; a row whose prompt's has none has no use either."""
    rewards, valid, failed = (
        collected.episodes.per_row(of.repeat_interleave(group_size)) for of in (greedy.rewards, greedy.valid, greedy.failed)
    )
    return replace(
        collected,
        baselines=rewards,
        rewards=torch.where(valid, collected.rewards, 0.0),
        valid=collected.valid & valid,
        failed=collected.failed | failed,
    )


class RolloutSource(ABC):
    """The source of rollouts, `group_size` to each prompt. Collective: every rank calls every method, at the same points.

    `greedy`: one greedy response per prompt is sampled and scored too, for its reward alone (`ScoredRollouts.baselines`). `critic` is asked
    for the values of responses.
    """

    def __init__(self, task: OnlineTask, group_size: int, *, greedy: bool = False, critic: Critic | None = None) -> None:
        self._task = task
        self._group_size = group_size
        self._greedy = greedy
        self._critic = critic
        self._cursor = Cursor()

    @abstractmethod
    def take(self, step: int, clock: Clock) -> ScoredRollouts:
        """The next round for training step `step`: rows in the order of their prompts, a prompt's responses side by side.

        Steps only grow; rounds that a step left out would have taken are never seen.
        """

    def trained(self, version: int) -> None:
        """The step is over and the policy has the weights of optimizer step `version`: sample from these as soon as may be."""
        self._task.engine.refit(version)
        self._cursor.settle()

    def state(self) -> dict[str, Any]:
        """State for resuming after the last complete step, besides its number; JSON-able."""
        return self._cursor.state()

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        """Continue after `state` (empty: of a run that took one round a step) with the policy's weights of `version`."""
        self._cursor.load_state(state)
        self._task.engine.refit(version)


class OnPolicyRolloutSource(RolloutSource):
    """Samples each round when it is asked for, from the policy's weights of now; the critic is asked while others are sampled."""

    def take(self, step: int, clock: Clock) -> ScoredRollouts:
        task = self._task
        requests = sample_requests(task, self._cursor.next(step), self._group_size, greedy=self._greedy)
        with clock.phase("generate"):
            collected, *greedy = collect_all(task.engine, requests, scorers=task.scorers(self._critic))
        return with_baselines(collected, greedy[0], self._group_size) if greedy else collected


class OnlineAlgorithm(Generic[Config]):
    """What online algorithms share: their parts, sampling, updates, and a state that is their rollout source's.

    Without a `source`, rounds are sampled when they are needed, `group_size` responses to each prompt.
    """

    def __init__(
        self, config: Config, policy: Policy, task: OnlineTask, source: RolloutSource | None, *, group_size: int, **sampled: Any
    ) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.rollout_source = source or OnPolicyRolloutSource(task, group_size, **sampled)

    def sample(self, step: int, clock: Clock) -> tuple[ScoredRollouts, RolloutBatch]:
        """The next round of `step`."""
        self.policy.sleep()  # a checkpoint may have woken it
        collected = self.rollout_source.take(step, clock)
        return collected, rollout_batch(collected.rollouts, self.task.pad_id)

    def update(self, examples: SampledT, loss: Loss[SampledT], step: int, episodes: EpisodeRows | None = None) -> dict[str, float]:
        """Train on the examples, of which there may be any number (`updates_of`); the metrics of all updates."""
        config, task = cast(Any, self.config), self.task
        key, least = f"{task.seed}/{step}", task.topology.dp_size
        parts = updates_of(examples, config.mini_batch_size, config.num_epochs, key=key, least=least, episodes=episodes)
        return values(merge([self.policy.train_step(part, loss) for part in parts]))

    def sample_again(self) -> None:
        """The policy has its weights of this step: sampling comes next."""
        self.policy.sleep()
        self.rollout_source.trained(self.policy.version)

    def result(self, collected: ScoredRollouts, metrics: Mapping[str, float]) -> StepResult:
        """The end of a step."""
        self.sample_again()
        samples = sample_rows(collected, self.task.decode, per_token={})
        return StepResult(metrics={**metrics, **self.task.shares(collected.rollouts)}, samples=samples)

    def validate(self) -> Mapping[str, float]:
        return validation.validate(self.task)

    def finish(self) -> None:
        """Nothing runs on after a step."""

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rollout_source.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rollout_source.load_state(state["rounds"], self.policy.version)
