"""The policy's turns to an environment and its observations back, beside decoding; what goes wrong names the episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aligner.environments.config import OnEnvironmentError
from aligner.environments.environment import Environment, Observation, Turn
from aligner.environments.workers import Awaiting, Outcome, Workers
from aligner.errors import AlignerError
from aligner.protocols import Exchange, Reply
from aligner.types import Prompt

EXCERPT_CHARACTERS = 120


class EpisodeError(AlignerError):
    """An environment failed, hung or returned something that is no observation: names the prompt, the turn and what the policy wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converting:
    """Tokens to text, and observations to the tokens that follow a turn which ended with a given one."""

    decode: Callable[[Sequence[int]], str]
    observe: Callable[[str, int], tuple[int, ...]]


class EnvironmentFollowUp:
    """`aligner.protocols.FollowUp` over an environment; `name` stands for it in messages."""

    def __init__(
        self,
        environment: Environment,
        converting: Converting,
        *,
        max_turns: int,
        timeout_seconds: float,
        num_workers: int = 32,
        on_error: OnEnvironmentError = OnEnvironmentError.stop,
        name: str = "",
    ) -> None:
        self.max_turns = max_turns
        self.environment = environment
        self.converting = converting
        self.timeout_seconds = timeout_seconds
        self.num_workers = num_workers
        self.on_error = on_error
        self.name = name or type(environment).__name__
        self._awaiting = Awaiting(f"environment {self.name}")

    def open(self) -> Exchange:
        """One generation's conversations."""
        return _Exchange(self)

    def settle(self, value: Any) -> Any:
        """The value, or what comes of awaiting it; from a worker's thread."""
        return self._awaiting.settle(value, self.timeout_seconds + 1.0)  # the worker is given up before


@dataclass(slots=True)
class _Episode:
    """`state` is the environment's: touched by one call at a time."""

    prompt: Prompt
    turn: Turn
    state: Any = None
    has_begun: bool = False


@dataclass(slots=True)
class _Exchange:
    """`aligner.protocols.Exchange`."""

    owner: EnvironmentFollowUp
    workers: Workers = field(init=False)
    episodes: dict[int, _Episode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner = self.owner
        self.workers = Workers(num_workers=owner.num_workers, timeout_seconds=owner.timeout_seconds, name=f"environment {owner.name}")

    def say(self, episode: int, prompt: Prompt, tokens: Sequence[int], *, number: int, is_cut: bool, is_last: bool) -> None:
        text = self.owner.converting.decode(tokens)
        turn = Turn(text=text, tokens=tuple(tokens), number=number, is_cut=is_cut, is_last=is_last)
        if number == 1:
            self.episodes[episode] = _Episode(prompt, turn)
        self.episodes[episode].turn = turn
        self.workers.submit(episode, partial(self._step, self.episodes[episode]))

    def hear(self, wait_seconds: float) -> list[tuple[int, Reply]]:
        return [(outcome.key, self._reply(outcome)) for outcome in self.workers.outcomes(wait_seconds)]

    def close(self) -> None:
        self.workers.close()
        self.episodes.clear()

    def _step(self, episode: _Episode) -> object:
        """In a worker's thread."""
        environment, settle = self.owner.environment, self.owner.settle
        if not episode.has_begun:
            episode.state = settle(environment.reset(episode.prompt))
            episode.has_begun = True
        return settle(environment.step(episode.state, episode.turn))

    def _reply(self, outcome: Outcome) -> Reply:
        episode, observation = self.episodes[outcome.key], outcome.value
        if trouble := self._trouble(outcome):
            message = f"environment {self.owner.name} {trouble}; {_where(episode)}"
            if self.owner.on_error is OnEnvironmentError.stop:
                raise EpisodeError(message) from outcome.error
            print(f"environment: {message}; left out", flush=True)
            del self.episodes[outcome.key]
            return Reply(done=True, failed=True)
        if observation.done:
            del self.episodes[outcome.key]
            return Reply(done=True, reward=float(observation.reward), counts=observation.counts)
        tokens = observation.tokens
        if tokens is None:
            tokens = self.owner.converting.observe(observation.text, episode.turn.tokens[-1])
        return Reply(tokens=tuple(tokens), reward=float(observation.reward), counts=observation.counts)

    def _trouble(self, outcome: Outcome) -> str:
        if outcome.late:
            return f"returned nothing within environment.timeout_seconds={self.owner.timeout_seconds:g}: it was {outcome.late}"
        if outcome.error is not None:
            return f"raised {type(outcome.error).__name__}: {outcome.error}"
        if not isinstance(outcome.value, Observation):
            return f"returned a {type(outcome.value).__name__} from step, expected an Observation"
        return ""


def _where(episode: _Episode) -> str:
    turn, source = episode.turn, episode.prompt.source or f"{episode.prompt.id}"
    excerpt = turn.text[:EXCERPT_CHARACTERS] + ("..." if len(turn.text) > EXCERPT_CHARACTERS else "")
    return f"it was in turn {turn.number} of an episode of prompt {source}, where the policy wrote {excerpt!r}"
