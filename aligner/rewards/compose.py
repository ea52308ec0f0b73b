"""Several rewards as one: the weighted sum of parts, which are scored at the same time and logged by name.

A part may be an HTTP endpoint: POST {"prompts", "responses", "answers"}, answered by {"rewards"}, all lists of one entry per sample; or a
model that judges (`aligner.rewards.judge`)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch

from aligner.errors import AlignerError
from aligner.protocols import RewardModel
from aligner.rewards.chat_client import EndpointRefused, Later, bearer_token, excerpt, insist, post
from aligner.rewards.config import NamedRewardConfig, OnError
from aligner.rewards.forms import TextFunction
from aligner.rewards.judge import JudgeReward
from aligner.rewards.load import build_reward_function
from aligner.rewards.local import Complaints, FunctionReward, RewardError
from aligner.types import Rollout, Scores

BUSY = (429, 502, 503, 504)  # what servers and their proxies answer while they restart or have too much to do
LONGEST_PAUSE_SECONDS = 2.0


def endpoint_function(url: str, timeout_seconds: float, token: str = "") -> TextFunction:
    """A thread-safe reward function that posts to `url`, retrying for up to `timeout_seconds` if it is busy or unreachable.

    It raises EndpointRefused, with the status and the start of the body, for a status other than 200 or an answer without rewards.
    The caller checks the number and type of the rewards. `token`: a bearer token.
    """

    async def reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        body, deadline = {"prompts": prompts, "responses": responses, "answers": answers}, time.monotonic() + timeout_seconds

        def gives_up(attempts: int, later: Later, wait: float) -> str:
            return f"timeout_seconds={timeout_seconds:g}" if time.monotonic() + wait >= deadline else ""

        async with aiohttp.ClientSession(trust_env=True) as session:
            content = await insist(
                lambda: post(session, url, body, max(0.01, deadline - time.monotonic()), token=token, retried=BUSY),
                url,
                gives_up,
                longest_pause=LONGEST_PAUSE_SECONDS,
            )
        try:
            return json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointRefused(f"{url} answered without rewards: {excerpt(content, token)}") from error

    return reward


Compare = Callable[[Sequence[Rollout], Scores], Future[Scores]]
SLACK_SECONDS = 2.0  # lets an endpoint's own error arrive first: it is more specific than a timeout


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reward and its weight; `on_error` applies to what the model raises (a FunctionReward handles its own failures)."""

    model: RewardModel
    weight: float = 1.0
    on_error: OnError = OnError.stop


class WeightedReward:
    """A `RewardModel`: the sum of weight times part over all parts whose weight is not 0. A row that is invalid in a part is invalid.

    Parts that compare the responses of a group are added by `compare`, once all responses are there; None without such parts.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ValueError("WeightedReward: no parts were given")
        self._parts = dict(parts)
        self._of_groups = [name for name, part in parts.items() if getattr(part.model, "needs_groups", False)]
        self.compare: Compare | None = self._compare if self._of_groups else None
        self.about = "\n".join(text for part in parts.values() if (text := getattr(part.model, "about", "")))
        self._complaints = {name: Complaints(f"reward {name}") for name in parts}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-sum")

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Start all parts. The future raises RewardError naming the part that failed."""
        if not rollouts:
            none, empty = torch.zeros(0), Future[Scores]()
            empty.set_result(Scores(rewards=none, valid=none.bool(), parts=dict.fromkeys(self._parts, none)))
            return empty
        return self._start([name for name in self._parts if name not in self._of_groups], rollouts)

    def _compare(self, rollouts: Sequence[Rollout], scores: Scores) -> Future[Scores]:
        """The scores that `score` gave of a whole batch with the parts that compare responses within groups. Raises as `score` does."""
        return self._start(self._of_groups, rollouts, scores)

    def _start(self, names: Sequence[str], rollouts: Sequence[Rollout], so_far: Scores | None = None) -> Future[Scores]:
        pending = {name: self._parts[name].model.score(rollouts) for name in names}
        version = max((rollout.policy_version for rollout in rollouts), default=0)
        return self._executor.submit(self._sum, pending, len(rollouts), version, so_far)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for part in self._parts.values():
            part.model.close()

    def _sum(self, pending: Mapping[str, Future[Scores]], rows: int, version: int, so_far: Scores | None) -> Scores:
        total, valid = torch.zeros(rows), torch.ones(rows, dtype=torch.bool)
        heard = torch.zeros(rows, dtype=torch.bool)  # has a score from a part with a weight
        values: dict[str, torch.Tensor] = {}
        if so_far is not None:
            silent = torch.zeros_like(heard) if so_far.silent is None else so_far.silent
            valid, heard, values = so_far.valid | silent, so_far.valid, dict(so_far.parts)
            total = torch.where(heard, so_far.rewards, 0.0)
        for name, waits in pending.items():
            part, scores = self._parts[name], self._result(name, waits, rows, version)
            values[name] = torch.where(scores.valid, scores.rewards, math.nan)
            none = torch.full((rows,), math.nan)
            values |= {more: scores.parts.get(more, none) for more in getattr(part.model, "part_names", ())}
            silent = torch.zeros_like(heard) if scores.silent is None else scores.silent
            valid &= scores.valid | silent
            if part.weight:
                total = total + part.weight * values[name].masked_fill(silent, 0.0)
                heard |= ~silent
        silent = valid & ~heard
        return Scores(rewards=torch.where(valid & heard, total, math.nan), valid=valid & heard, parts=values, silent=silent)

    def _result(self, name: str, pending: Future[Scores], rows: int, version: int) -> Scores:
        """The scores of one part. Raises RewardError."""
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
        return Scores(rewards=scores.rewards, valid=scores.valid & finite, parts=scores.parts, silent=scores.silent)


def composed_reward(
    configs: Mapping[str, NamedRewardConfig],
    decode: Callable[[Sequence[int]], str],
    served: RewardModel | None = None,
    *,
    answers: Path | None = None,
) -> WeightedReward:
    """The sum that `reward.functions` describes; `served` is the reward model of the part with served=true. Raises ConfigError.

    `answers`: this process's folder, among those of the others, for what judges answer; None: they are not kept.
    """
    parts = {}
    for name, config in configs.items():
        model = served
        if config.judge.model:
            model = JudgeReward(name, config, decode, answers and answers / f"{name}.jsonl")
        elif not config.served:
            model = _function_part(name, config, decode)
        parts[name] = Part(model=model, weight=config.weight, on_error=config.on_error)
    return WeightedReward(parts)


def _function_part(name: str, config: NamedRewardConfig, decode: Callable[[Sequence[int]], str]) -> FunctionReward:
    if config.url:
        token = bearer_token(config, f"reward.functions.{name}")
        function = endpoint_function(config.url, config.timeout_seconds, token)
        seconds = config.timeout_seconds + SLACK_SECONDS
    else:
        function, seconds = build_reward_function(config, f"reward.functions.{name}.function"), config.timeout_seconds
    spec = f"reward.functions.{name}." + (f"url={config.url}" if config.url else f"path={config.path}")
    return FunctionReward(function, decode, seconds, name=spec, on_error=config.on_error, num_threads=config.num_threads)
