"""Reward functions run in the actor's own process, beside generation. Every failure is raised; none becomes a number."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import AlignerError, ConfigError
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.load import RewardFunction, build_reward_function
from aligner.types import Rollout

FLOAT32_MAX = torch.finfo(torch.float32).max
EXCERPT_CHARACTERS = 120


class RewardError(AlignerError):
    """A reward function failed, hung or returned something that is not one number per response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Samples:
    """What a reward function is called with, and where each sample came from."""

    prompts: list[str]
    responses: list[str]
    answers: list[str | None]
    sources: list[str]

    def __len__(self) -> int:
        return len(self.sources)

    def at(self, i: int) -> _Samples:
        """Sample i alone."""
        return _Samples(prompts=[self.prompts[i]], responses=[self.responses[i]], answers=[self.answers[i]], sources=[self.sources[i]])

    def describe(self, i: int) -> str:
        """Where sample i came from and how its response begins."""
        response = self.responses[i]
        excerpt = response[:EXCERPT_CHARACTERS] + ("..." if len(response) > EXCERPT_CHARACTERS else "")
        return f"sample {i} of {len(self)} (prompt {self.sources[i]}, response {excerpt!r})"


class FunctionReward:
    """A `RewardModel` (aligner.protocols) made of a Python function.

    `function(prompts, responses, answers) -> list[float]`, plain or `async def`, gets the samples of one `score` call. Calls are made one
    after another in a thread of their own, so it need not be thread-safe. `decode` turns tokens into text, without special tokens.
    `name` stands for the function in error messages.
    """

    def __init__(
        self,
        function: RewardFunction,
        decode: Callable[[Sequence[int]], str],
        timeout_seconds: float,
        *,
        name: str = "",
    ) -> None:
        self._function = function
        self._decode = decode
        self._timeout_seconds = timeout_seconds
        self._name = name or repr(function)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")

    def score(self, rollouts: Sequence[Rollout]) -> Future[Tensor]:
        """Start scoring; resolves to float32 [B] on CPU.

        The future raises RewardError, naming function and sample, where the function raises, takes longer than `timeout_seconds` for the
        call, or returns anything but a list of B numbers.
        """
        return self._executor.submit(self._score, list(rollouts))

    def close(self) -> None:
        """Drop calls that have not begun. One that runs goes on, for at most `timeout_seconds`."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _score(self, rollouts: list[Rollout]) -> Tensor:
        if not rollouts:
            return torch.zeros(0)
        samples = _Samples(
            prompts=[rollout.prompt.text or self._decode(rollout.prompt.tokens) for rollout in rollouts],
            responses=[self._decode(rollout.response) for rollout in rollouts],
            answers=[rollout.prompt.answer for rollout in rollouts],
            sources=[rollout.prompt.source for rollout in rollouts],
        )
        deadline = time.monotonic() + self._timeout_seconds
        try:
            result = self._call(samples, deadline)
        except RewardError:
            raise
        except Exception as error:
            culprit = self._culprit(samples, deadline)
            raise RewardError(f"reward function {self._name} raised {type(error).__name__}: {error}; {culprit}") from error
        return torch.tensor(self._checked(result, samples), dtype=torch.float32)

    def _call(self, samples: _Samples, deadline: float) -> object:
        """What the function returns or raises; RewardError where it has done neither by `deadline` (of time.monotonic)."""
        outcome: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                result = self._function(list(samples.prompts), list(samples.responses), list(samples.answers))
                outcome.put((asyncio.run(_await(result)) if inspect.isawaitable(result) else result, None))
            except BaseException as error:  # handed to the waiting thread, which raises it
                outcome.put((None, error))

        # A thread cannot be killed: as a daemon, one that hangs does not keep the process alive.
        thread = threading.Thread(target=run, name=f"reward-call {self._name}", daemon=True)
        thread.start()
        try:
            result, error = outcome.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RewardError(
                f"reward function {self._name} returned nothing within timeout_seconds={self._timeout_seconds}; "
                f"it was {_position(thread)}; it was given {len(samples)} samples, from {samples.describe(0)}"
            ) from None
        if isinstance(error, Exception):
            raise error
        if error is not None:  # SystemExit and the like would end this thread silently
            raise RuntimeError(f"the function ended its thread with {error!r}") from error
        return result

    def _culprit(self, samples: _Samples, deadline: float) -> str:
        """The first sample for which the function fails when called with it alone: an exception from a batch does not say which it was."""
        for i in range(len(samples)):
            try:
                self._call(samples.at(i), deadline)
            except RewardError:
                return f"which of {len(samples)} samples it fails for was not found in time; they start with {samples.describe(0)}"
            except Exception:  # not swallowed: the caller raises the error of the whole batch, with this sample's name
                return f"it fails for {samples.describe(i)}"
        return f"it fails for no sample alone, only for the {len(samples)} together, from {samples.describe(0)}"

    def _checked(self, result: object, samples: _Samples) -> list[float]:
        """The result as B numbers; RewardError naming the first sample whose entry is none.

        NaN and infinity are numbers here, whatever gave them: what they lead to is the same for every kind of reward (`guard.reward`).
        """
        if not isinstance(result, (list, tuple)):
            raise RewardError(
                f"reward function {self._name} returned a {type(result).__name__}, expected a list of {len(samples)} numbers; "
                f"it was given {samples.describe(0)}"
            )
        if len(result) != len(samples):
            raise RewardError(
                f"reward function {self._name} returned {len(result)} numbers for {len(samples)} responses, from {samples.describe(0)}"
            )
        for i, x in enumerate(result):
            if not isinstance(x, numbers.Real):
                raise RewardError(
                    f"reward function {self._name} returned {x!r} ({type(x).__name__}), expected a number, for {samples.describe(i)}"
                )
        return [_float32(x) for x in result]


def function_reward(config: RewardFunctionConfig, decode: Callable[[Sequence[int]], str]) -> FunctionReward:
    """The FunctionReward that a config describes. Raises ConfigError."""
    if not config.function:
        raise ConfigError("function is empty; name a reward function, or use a reward model")
    return FunctionReward(build_reward_function(config), decode, config.timeout_seconds, name=config.function)


def _float32(x: numbers.Real) -> float:
    """x, infinite where float32 holds no such number."""
    return (math.inf if x > 0 else -math.inf) if abs(x) > FLOAT32_MAX else float(x)


async def _await(awaitable: Awaitable[object]) -> object:
    """A coroutine, which is all that asyncio.run takes, of anything that can be awaited."""
    return await awaitable


def _position(thread: threading.Thread) -> str:
    """File and line where a running thread is, innermost frame."""
    frame = sys._current_frames().get(thread.ident)  # type: ignore[arg-type]
    if frame is None:
        return "about to return"
    last = traceback.extract_stack(frame)[-1]
    return f"at {last.filename}:{last.lineno} ({last.name})"
