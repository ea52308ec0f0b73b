"""Reward functions in the actor's own process, concurrent with generation. Failures are raised or, optionally, mark samples as invalid.

`Samples` are rollouts as the texts that reward functions receive. `NoReward` is for runs that learn from their own samples without one.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import TypeGuard

import numpy as np
import torch

from aligner.errors import AlignerError, ConfigError, UserCodeError
from aligner.rewards.config import OnError, RewardFunctionConfig
from aligner.rewards.forms import RewardFunction, Sample, called, is_trl
from aligner.rewards.load import build_reward_function, may_pass, position, raised
from aligner.settings.user_code import calling
from aligner.telemetry import recording
from aligner.types import Rollout, Scores

EXCERPT_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The samples of one call of a reward function."""

    samples: tuple[Sample, ...]
    version: int  # of the policy that sampled them

    def __len__(self) -> int:
        return len(self.samples)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> Samples:
        """Their texts, as `decode` reads tokens."""
        samples = tuple(
            Sample(
                prompt=rollout.prompt.text or decode(rollout.prompt.tokens),
                response=decode(rollout.response),
                answer=rollout.prompt.answer,
                source=rollout.prompt.source,
                rollout=rollout,
            )
            for rollout in rollouts
        )
        return cls(samples=samples, version=max((rollout.policy_version for rollout in rollouts), default=0))

    def at(self, i: int) -> Samples:
        return Samples(samples=self.samples[i : i + 1], version=self.version)

    def describe(self, i: int) -> str:
        """Where sample i came from and how its response begins."""
        response = self.samples[i].response
        excerpt = response[:EXCERPT_CHARACTERS] + ("..." if len(response) > EXCERPT_CHARACTERS else "")
        return f"sample {i} of {len(self)} (prompt {self.samples[i].source}, response {excerpt!r})"


FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_HANGING = 8  # calls that may hang for ever: each keeps a thread


class RewardError(AlignerError):
    """A reward function failed, hung or returned something that is not one number per response."""


class RewardRefused(RewardError, UserCodeError):
    """A failure that would repeat: an error in the function's code, or a wrong return value."""


class RewardHung(RewardError):
    """A reward function did not return in time."""


@dataclass(eq=False)
class FunctionReward:
    """A `RewardModel` (aligner.protocols) from a Python function (aligner.rewards.forms) that receives the samples of one `score` call.

    Calls run in separate threads, `num_threads` at a time: with one, the function need not be thread-safe. `decode` turns tokens
    into text. `name` is the function's name in messages.

    With `on_error=invalid`, samples for which the function fails when called with each alone get no reward, and neither do samples that
    it scores NaN or infinity. The first of them is reported once per policy version.

    `about` is the function's attribute of that name, a description for the preflight; empty if it has none.
    """

    function: RewardFunction
    decode: Callable[[Sequence[int]], str]
    timeout_seconds: float
    _: KW_ONLY
    name: str = ""
    on_error: OnError = OnError.stop
    num_threads: int = 1

    def __post_init__(self) -> None:
        self.name = self.name or repr(self.function)
        self.about: str = getattr(self.function, "about", "")
        self._hanging: list[threading.Thread] = []
        self._complaints = Complaints(f"reward function {self.name}")
        self._executor = ThreadPoolExecutor(max_workers=self.num_threads, thread_name_prefix="reward")

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Start scoring; resolves to B rewards on CPU.

        The future raises RewardError, naming function and sample, if the function raises, takes longer than `timeout_seconds` for the
        call, or returns anything but B numbers (a list, a NumPy array, a tensor), unless `on_error` is `invalid`.
        """
        return self._executor.submit(self._score, list(rollouts))

    def close(self) -> None:
        """Drop calls that have not started. A running one continues, for at most `timeout_seconds`."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _score(self, rollouts: list[Rollout]) -> Scores:
        if not rollouts:
            return Scores.of(torch.zeros(0))
        with recording.span("rewards", recording.rank_lane("reward function"), samples=len(rollouts)):
            samples, deadline = Samples.of(rollouts, self.decode), time.monotonic() + self.timeout_seconds
            if self.on_error is OnError.stop:
                return _scores(self._rewards(samples, deadline))
            found, complaint = self._possible_rewards(samples, deadline)
        scores = _scores(found)
        failed = scores.valid & ~scores.rewards.isfinite()
        if failed.any():
            first = int(failed.nonzero()[0])
            reason = complaint or f"it returned {found[first]} for {samples.describe(first)}"
            self._complaints.say(f"{int(failed.sum())} of {len(samples)} samples have no reward: {reason}", samples.version)
        valid = scores.valid & ~failed
        return Scores(rewards=torch.where(valid, scores.rewards, math.nan), valid=valid, silent=scores.silent)

    def _rewards(self, samples: Samples, deadline: float) -> list[float | None]:
        """One per sample. Raises RewardError."""
        try:
            return self._checked(self._call(samples, deadline), samples)
        except RewardError:
            raise
        except Exception as error:
            culprit = self._culprit(samples, deadline)
            kind = RewardError if may_pass(error) else RewardRefused
            raise kind(f"reward function {self.name} raised {raised(error)}; {culprit}") from error

    def _possible_rewards(self, samples: Samples, deadline: float) -> tuple[list[float | None], str]:
        """One reward per sample, NaN for none, and the first failure. Raises RewardError if too many calls hang already."""
        try:
            return self._checked(self._call(samples, deadline), samples), ""
        except RewardHung as error:
            return [math.nan] * len(samples), self._tolerable(error)
        except Exception:  # not swallowed: it is raised again below, by the samples that cause it
            pass
        rewards: list[float | None] = [math.nan] * len(samples)
        complaint = ""
        for i in range(len(samples)):
            try:
                rewards[i] = self._checked(self._call(samples.at(i), deadline), samples.at(i))[0]
            except RewardHung as error:  # no time is left
                return rewards, complaint or self._tolerable(error)
            except Exception as error:
                complaint = complaint or f"{type(error).__name__}: {error}; for {samples.describe(i)}"
        return rewards, complaint

    def _tolerable(self, error: RewardHung) -> str:
        """The error's text. Raises the error if too many calls hang."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise RewardHung(f"{error}; {len(self._hanging)} calls hang, too many for on_error=invalid") from error
        return str(error)

    def _call(self, samples: Samples, deadline: float) -> object:
        """What the function returns or raises; RewardHung if it has done neither by `deadline` (time.monotonic)."""
        outcome: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        function = self.function

        def run() -> None:
            try:
                with calling(f"reward function {self.name}"):
                    result = called(function, samples.samples, samples.version)
                    result = asyncio.run(_await(result)) if inspect.isawaitable(result) else result
                outcome.put((result, None))
            except BaseException as error:  # handed to the waiting thread, which raises it
                outcome.put((None, error))

        # A thread cannot be killed: as a daemon, one that hangs does not keep the process alive.
        thread = threading.Thread(target=run, name=f"reward-call {self.name}", daemon=True)
        thread.start()
        try:
            result, error = outcome.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            self._hanging.append(thread)
            raise RewardHung(
                f"reward function {self.name} returned nothing within timeout_seconds={self.timeout_seconds}; "
                f"it was {position(thread)[0]}; it was given {len(samples)} samples, from {samples.describe(0)}"
            ) from None
        if isinstance(error, Exception):
            raise error
        if error is not None:  # SystemExit and the like would end this thread silently
            raise RuntimeError(f"the function ended its thread with {error!r}") from error
        return result

    def _culprit(self, samples: Samples, deadline: float) -> str:
        """The first sample for which the function fails when called with it alone: a batch's exception does not identify it."""
        for i in range(len(samples)):
            try:
                self._call(samples.at(i), deadline)
            except RewardError:
                return f"which of {len(samples)} samples it fails for was not found in time; they start with {samples.describe(0)}"
            except Exception:  # not swallowed: the caller raises the error of the whole batch, with this sample's name
                return f"it fails for {samples.describe(i)}"
        return f"it fails for no single sample, only for the {len(samples)} together, from {samples.describe(0)}"

    def _checked(self, result: object, samples: Samples) -> list[float | None]:
        """The result, a list, a NumPy array or a tensor, as B numbers; RewardError naming the first sample whose entry is not a number.

        For a function of TRL's signature None is allowed too. NaN and infinity count as numbers here: `guard.reward` handles them for
        every kind of reward.
        """
        result = result.tolist() if _is_array(result) else result
        if not isinstance(result, (list, tuple)):
            raise RewardRefused(
                f"reward function {self.name} returned a {type(result).__name__}, expected a list of {len(samples)} numbers; "
                f"it was given {samples.describe(0)}"
            )
        if len(result) != len(samples):
            raise RewardRefused(
                f"reward function {self.name} returned {len(result)} numbers for {len(samples)} responses, from {samples.describe(0)}"
            )
        rewards = [_only(x.tolist()) if _is_array(x) else x for x in result]
        for i, x in enumerate(rewards):
            if not isinstance(x, numbers.Real) and not (x is None and is_trl(self.function)):
                raise RewardRefused(
                    f"reward function {self.name} returned {result[i]!r} ({type(result[i]).__name__}), expected a number, "
                    f"for {samples.describe(i)}"
                )
        huge = {True: math.inf, False: -math.inf}  # beyond the range of float32
        return [None if x is None else huge[x > 0] if abs(x) > FLOAT32_MAX else float(x) for x in rewards]


class Complaints:
    """Reports repeated failures once per policy version, that is, once per step."""

    def __init__(self, about: str, rule: str = "on_error=invalid; ") -> None:
        self._about, self._rule = about, rule
        self._last: int | None = None

    def say(self, text: str, version: int) -> None:
        """Print the text, unless a message was printed for this version."""
        if self._last != version:
            self._last = version
            print(f"warning: {self._about}: {text} ({self._rule}left out and counted)", flush=True)


def function_reward(
    config: RewardFunctionConfig, decode: Callable[[Sequence[int]], str], setting: str = "reward.function"
) -> FunctionReward:
    """The FunctionReward that a config at `setting` describes. Raises ConfigError."""
    if not config.path:
        raise ConfigError("reward.function.path='': name a reward function, or use a reward model")
    function = build_reward_function(config, "reward function" if setting == "reward.function" else f"{setting}.path")
    return FunctionReward(function, decode, config.timeout_seconds, name=f"{setting}.path={config.path}", on_error=config.on_error)


def _scores(rewards: Sequence[float | None]) -> Scores:
    """The scores of a function's result; None means that it is silent, and the row has no reward from it."""
    silent = torch.tensor([reward is None for reward in rewards])
    values = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float32)
    return Scores(rewards=values, valid=~silent, silent=silent)


def _is_array(x: object) -> TypeGuard[np.generic | np.ndarray | torch.Tensor]:
    return isinstance(x, (np.generic, np.ndarray, torch.Tensor))


def _only(x: object) -> object:
    """The element of a list of one: a model's output for one sample often has a dimension of one."""
    return _only(x[0]) if isinstance(x, list) and len(x) == 1 else x


async def _await(awaitable: Awaitable[object]) -> object:
    """Any awaitable as a coroutine, the only thing that asyncio.run accepts."""
    return await awaitable


class NoReward:
    """`aligner.protocols.RewardModel` that gives every rollout 0."""

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Resolved at once."""
        scores: Future[Scores] = Future()
        scores.set_result(Scores.of(torch.zeros(len(rollouts))))
        return scores

    def close(self) -> None:
        """Does nothing."""
