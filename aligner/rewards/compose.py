"""Several rewards as one: the weighted sum of parts, which are scored at the same time and logged by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from aligner.errors import AlignerError, ConfigError
from aligner.protocols import RewardModel
from aligner.rewards.config import NamedRewardConfig, OnError
from aligner.rewards.endpoint import endpoint_function
from aligner.rewards.load import build_reward_function
from aligner.rewards.local import Complaints, FunctionReward, RewardError
from aligner.types import Rollout, Scores

SLACK_SECONDS = 2.0  # an endpoint's own error comes first, which says more than that time is over


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reward and its weight; `on_error` is for what the model raises (a FunctionReward has dealt with its own failures)."""

    model: RewardModel
    weight: float = 1.0
    on_error: OnError = OnError.stop


class WeightedReward:
    """A `RewardModel`: the sum of weight times part over all parts whose weight is not 0. A row that is invalid in a part is invalid."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ValueError("WeightedReward: no parts were given")
        self._parts = dict(parts)
        self.about = "\n".join(text for part in parts.values() if (text := getattr(part.model, "about", "")))
        self._complaints = {name: Complaints(f"reward {name}") for name in parts}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-sum")

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Start all parts. The future raises RewardError naming the part that failed."""
        if not rollouts:
            empty: Future[Scores] = Future()
            empty.set_result(
                Scores(rewards=torch.zeros(0), valid=torch.zeros(0, dtype=torch.bool), parts=dict.fromkeys(self._parts, torch.zeros(0)))
            )
            return empty
        pending = {name: part.model.score(rollouts) for name, part in self._parts.items()}
        return self._executor.submit(self._sum, pending, len(rollouts), max(rollout.policy_version for rollout in rollouts))

    def close(self) -> None:
        """Close the parts."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for part in self._parts.values():
            part.model.close()

    def _nothing(self) -> Scores:
        none = torch.zeros(0)
        return Scores(rewards=none, valid=none.bool(), parts=dict.fromkeys(self._parts, none))

    def _sum(self, pending: Mapping[str, Future[Scores]], rows: int, version: int) -> Scores:
        total, valid = torch.zeros(rows), torch.ones(rows, dtype=torch.bool)
        heard = torch.zeros(rows, dtype=torch.bool)  # by a part that counts
        values: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            scores = self._result(name, pending[name], rows, version)
            values[name] = torch.where(scores.valid, scores.rewards, math.nan)
            silent = torch.zeros_like(heard) if scores.silent is None else scores.silent
            valid &= scores.valid | silent
            if part.weight:
                total = total + part.weight * values[name].masked_fill(silent, 0.0)
                heard |= ~silent
        silent = valid & ~heard
        return Scores(rewards=torch.where(valid & heard, total, math.nan), valid=valid & heard, parts=values, silent=silent)

    def _result(self, name: str, pending: Future[Scores], rows: int, version: int) -> Scores:
        """What a part gave. Raises RewardError."""
        on_error = self._parts[name].on_error
        try:
            scores = pending.result()
        except RewardError as error:
            raise type(error)(f"reward {name}: {error}") from error
        except AlignerError as error:
            if on_error is OnError.stop:
                raise RewardError(f"reward {name}: {error}") from error
            self._complaints[name].say(f"all of {rows} samples have no reward: {error}", version)
            return Scores(rewards=torch.full((rows,), math.nan), valid=torch.zeros(rows, dtype=torch.bool))
        if scores.rewards.shape != (rows,):
            raise RewardError(f"reward {name}: {scores.rewards.shape[0]} rewards for {rows} responses")
        finite = scores.rewards.isfinite()
        if on_error is OnError.stop or finite[scores.valid].all():
            return scores
        missing = int((scores.valid & ~finite).sum())
        self._complaints[name].say(f"{missing} of {rows} rewards are not finite", version)
        return Scores(rewards=scores.rewards, valid=scores.valid & finite, silent=scores.silent)


def composed_reward(
    configs: Mapping[str, NamedRewardConfig], decode: Callable[[Sequence[int]], str], served: RewardModel | None = None
) -> WeightedReward:
    """The sum that `reward.functions` describes; `served` is the reward model for the part that says so. Raises ConfigError."""
    parts = {}
    for name, config in configs.items():
        if config.served and served is None:
            raise ConfigError(f"reward.functions.{name}.served=true: needs reward.serve=true")
        model = served if config.served else _function_part(name, config, decode)
        parts[name] = Part(model=model, weight=config.weight, on_error=config.on_error)
    return WeightedReward(parts)


def formula(configs: Mapping[str, NamedRewardConfig]) -> str:
    """The sum as people write it, for messages: `maths + 0.1 length`."""
    return " + ".join(name if config.weight == 1 else f"{config.weight:g} {name}" for name, config in configs.items())


def _function_part(name: str, config: NamedRewardConfig, decode: Callable[[Sequence[int]], str]) -> FunctionReward:
    if config.url:
        function = endpoint_function(config.url, config.timeout_seconds, config.token_variable)
        seconds = config.timeout_seconds + SLACK_SECONDS
    else:
        function, seconds = build_reward_function(config, f"reward.functions.{name}.function"), config.timeout_seconds
    spec = f"reward.functions.{name}." + (f"url={config.url}" if config.url else f"path={config.path}")
    return FunctionReward(function, decode, seconds, name=spec, on_error=config.on_error, num_threads=config.num_threads)
