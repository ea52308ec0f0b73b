"""Passes the policy's turns to an environment and its observations back, during decoding; errors name the episode.

An observation's text is tokenized alone, then put between the chat template's tokens before and after such a message.

The policy's tokens are never re-tokenized, and environment text never becomes a special token: a tool's output cannot end a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from aligner.data.messages import Image, Message
from aligner.data.tokenizer import Tokenizer
from aligner.environments.config import EnvironmentConfig, ObservationForm, OnEnvironmentError
from aligner.environments.elsewhere import Elsewhere, FailedElsewhere, late
from aligner.environments.environment import IMAGE, Environment, Observation, Turn, encodable
from aligner.environments.isolated import Isolated
from aligner.environments.kinds import build_environment
from aligner.environments.workers import Awaiting, Outcome, Workers
from aligner.errors import AlignerError, ConfigError, DataError, UserCodeError
from aligner.protocols import Exchange, Reply, RewardModel
from aligner.rewards.load import may_pass, raised
from aligner.telemetry import recording
from aligner.types import Prompt, Rollout, Scores

_ASKED, _TURN, _OBSERVED = "QUESTION", "ASSISTANTTURN", "OBSERVATION"  # placeholders in a conversation that is rendered once


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The tokens around an observation. If the turn already ended with the first of `before` (its end token), it is not repeated."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def around(self, inner: Sequence[int], last: int) -> tuple[int, ...]:
        """The observation as it follows a turn that ended with the token `last`."""
        before = self.before[1:] if self.before[:1] == (last,) else self.before
        return (*before, *inner, *self.behind)


def observation_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of an observation's text; special tokens spelled out in it stay text."""
    return tokenizer.continuation("\n", encodable(text), plain=True)


def with_images(tokenizer: Tokenizer, role: str, observation: Observation) -> tuple[list[int], tuple[str, ...]]:
    """(token ids of an observation's text with its images as the chat template writes them, their digests). Raises DataError."""
    if tokenizer.vision is None:
        raise DataError(f"the model of tokenizer {tokenizer.path} has no image processor")
    digests = tuple(map(tokenizer.vision.add, observation.images))
    pieces = observation.text.split(IMAGE) if IMAGE in observation.text else [*[""] * len(digests), observation.text]
    tokens = observation_tokens(tokenizer, pieces[0]) if pieces[0] else []
    plain = tokenizer.render_chat([Message(role=role, content=_OBSERVED)], add_generation_prompt=False).partition(_OBSERVED)[0]
    for digest, piece in zip(digests, pieces[1:], strict=True):
        seen = Message(role=role, content="").with_parts([Image(digest), _OBSERVED])
        written = tokenizer.render_chat([seen], add_generation_prompt=False).partition(_OBSERVED)[0]
        tokens += [*tokenizer.encode(written.removeprefix(plain)), *(observation_tokens(tokenizer, piece) if piece else [])]
    return tokens, digests


def surroundings(config: EnvironmentConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Surroundings:
    """The tokens that `config.form` puts around observations; `prompts` are the run's.

    Raises ConfigError if a chat is requested and the position of an observation in the tokenizer's template is unclear.
    """
    if config.form is ObservationForm.plain or config.form is ObservationForm.auto and not tokenizer.has_chat_template:
        return Surroundings(
            before=tuple(tokenizer.continuation("\n", config.prefix)), behind=tuple(tokenizer.continuation("\n", config.suffix))
        )
    chat = _of_template(tokenizer, config.role)
    if config.form is ObservationForm.chat:
        return chat
    text = _rendered(tokenizer, [Message(role="user", content=_ASKED)], "user")
    opening = tuple(tokenizer.encode(text.partition(_ASKED)[2]))
    is_chat = [prompt.tokens[-len(opening) :] == opening for prompt in prompts]
    if any(is_chat) and not all(is_chat):
        odd = prompts[is_chat.index(False)]
        raise ConfigError(
            f"environment.form=auto: some prompts end as the chat template ends a user's message, {odd.source} does not; "
            "allowed: chat or plain, or data.apply_chat_template=true"
        )
    return chat if all(is_chat) else Surroundings()


def _of_template(tokenizer: Tokenizer, role: str) -> Surroundings:
    question, turn = Message(role="user", content=_ASKED), Message(role="assistant", content=_TURN)
    text = _rendered(tokenizer, [question, turn, Message(role=role, content=_OBSERVED)], role)
    head, found, rest = text.partition(_TURN)
    before, also, behind = rest.partition(_OBSERVED)
    if not (found and also):
        raise ConfigError(
            f"environment.form=chat: the chat template of {tokenizer.path} writes no message of role {role!r} after the assistant's; "
            "allowed: another environment.role, or form=plain with a prefix and a suffix"
        )
    return Surroundings(before=tuple(tokenizer.encode(before)), behind=tuple(tokenizer.encode(behind)))


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], role: str) -> str:
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=True)
    except DataError as error:
        raise ConfigError(f"environment.role={role!r}: {error}; allowed: another role, or environment.form=plain") from error


EXCERPT_CHARACTERS = 120


class EpisodeError(AlignerError):
    """An environment failed, hung or returned no observation: names the prompt, the turn and the policy's text."""


class EpisodeRefused(EpisodeError, UserCodeError):
    """A failure that would repeat: an error in the environment's code, or a wrong return value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converting:
    """Converts tokens to text, and observations to the tokens after a turn with a given last token; None: any id is a token's.

    `show`: those of an observation with images, and the images' digests.
    """

    decode: Callable[[Sequence[int]], str]
    observe: Callable[[str, int], tuple[int, ...]]
    token_ids: frozenset[int] | None = None
    show: Callable[[Observation, int], tuple[tuple[int, ...], tuple[str, ...]]] | None = None


@dataclass
class EnvironmentFollowUp:
    """`aligner.protocols.FollowUp` over an environment; `name` is its name in messages."""

    environment: Environment
    converting: Converting
    _: KW_ONLY
    max_turns: int
    timeout_seconds: float
    num_workers: int = 32
    on_error: OnEnvironmentError = OnEnvironmentError.stop
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or f"environment {type(self.environment).__name__}"
        self.awaiting = Awaiting(self.name)

    def open(self) -> Exchange:
        """One generation's conversations."""
        return _Exchange(self)

    def close(self) -> None:
        """End what the environment has started, if it has a `close`."""
        if close := getattr(self.environment, "close", None):
            close()


@dataclass(slots=True)
class _Episode:
    """`state` is the environment's: touched by one call at a time."""

    prompt: Prompt
    turn: Turn
    state: Any = None
    has_begun: bool = False


class _Exchange:
    """`aligner.protocols.Exchange`."""

    def __init__(self, owner: EnvironmentFollowUp) -> None:
        self.owner = owner
        seconds = math.inf if isinstance(owner.environment, Elsewhere) else owner.timeout_seconds  # that has limits of its own
        self.workers = Workers(num_workers=owner.num_workers, timeout_seconds=seconds, name=owner.name)
        self.episodes: dict[int, _Episode] = {}

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
        """In a worker thread."""
        environment, lane = self.owner.environment, recording.rank_lane("environment")
        settle = partial(self.owner.awaiting.settle, timeout_seconds=self.owner.timeout_seconds + 1.0)  # the worker is abandoned before
        if not episode.has_begun:
            with recording.span("reset", lane):
                episode.state = settle(environment.reset(episode.prompt))
            episode.has_begun = True
        with recording.span("step", lane, turn=episode.turn.number):
            return settle(environment.step(episode.state, episode.turn))

    def _reply(self, outcome: Outcome) -> Reply:
        episode, observation = self.episodes[outcome.key], outcome.value
        if trouble := self._trouble(outcome):
            message = f"{self.owner.name} {trouble}; {_where(episode)}"
            if self.owner.on_error is OnEnvironmentError.stop:
                error = outcome.error
                passes = outcome.late or (error.passes if isinstance(error, FailedElsewhere) else error is not None and may_pass(error))
                raise (EpisodeError if passes else EpisodeRefused)(message) from outcome.error
            print(f"{message}; left out", flush=True)
            del self.episodes[outcome.key]
            return Reply(done=True, failed=True)
        if observation.done:
            del self.episodes[outcome.key]
            return Reply(done=True, reward=float(observation.reward), counts=observation.counts)
        tokens, images, converting = observation.tokens, (), self.owner.converting
        if observation.images and converting.show is not None:
            try:
                tokens, images = converting.show(observation, episode.turn.tokens[-1])
            except DataError as error:
                refused = f"{self.owner.name} returned an image from step that cannot be used: {error}"
                raise EpisodeRefused(f"{refused}; {_where(episode)}") from error
        elif tokens is None:
            tokens = converting.observe(observation.text, episode.turn.tokens[-1])
        return Reply(tokens=tuple(tokens), images=images, reward=float(observation.reward), counts=observation.counts)

    def _trouble(self, outcome: Outcome) -> str:
        if outcome.late:
            return late(self.owner.timeout_seconds, outcome.late)
        if isinstance(outcome.error, FailedElsewhere):
            return outcome.error.text
        if outcome.error is not None:
            return f"raised {raised(outcome.error)}"
        if not isinstance(outcome.value, Observation):
            return f"returned a {type(outcome.value).__name__} from step, expected an Observation"
        known, given = self.owner.converting.token_ids, outcome.value.tokens or ()
        if known is not None and (strange := [token for token in given if token not in known]):
            return f"returned ids from step that are not tokens: {strange[:5]}, expected the tokenizer's, from 0 to {max(known)}"
        return ""


def _where(episode: _Episode) -> str:
    turn, source = episode.turn, episode.prompt.source or f"{episode.prompt.id}"
    excerpt = turn.text[:EXCERPT_CHARACTERS] + ("..." if len(turn.text) > EXCERPT_CHARACTERS else "")
    return f"it was in turn {turn.number} of an episode of prompt {source}, where the policy wrote {excerpt!r}"


def environment_follow_up(config: EnvironmentConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> EnvironmentFollowUp:
    """The environment of a run, with observations in the form of the run's `prompts`. Raises ConfigError."""
    around = surroundings(config, tokenizer, prompts)

    def observe(text: str, last: int) -> tuple[int, ...]:
        return around.around(observation_tokens(tokenizer, text), last)

    def show(observation: Observation, last: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        tokens, images = with_images(tokenizer, config.role, observation)
        return around.around(tokens, last), images

    return EnvironmentFollowUp(
        Isolated(config) if config.num_processes else build_environment(config),
        Converting(decode=tokenizer.decode, observe=observe, token_ids=tokenizer.token_ids, show=show),
        max_turns=config.max_turns,
        timeout_seconds=config.timeout_seconds,
        num_workers=config.num_workers,
        on_error=config.on_error,
        name=config.title,
    )


class EnvironmentReward:
    """`aligner.protocols.RewardModel`: an episode's own reward, plus `others`' if any. The part is named `environment`.

    Episodes whose environment failed have no reward. `is_optional`: an episode may have none of its own, and then has the others' alone.
    """

    def __init__(self, others: RewardModel | None = None, *, is_optional: bool = False) -> None:
        self._others = others
        self.compare = getattr(others, "compare", None)  # what needs all of a batch (`aligner.rewards.compose.WeightedReward`)
        self._is_optional = is_optional

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Resolves when the others' scores have come. Raises ValueError for a response that is no episode of an environment."""
        single = [rollout for rollout in rollouts if rollout.reward is None]
        if single and not self._is_optional:
            raise ValueError(f"a response to {single[0].prompt.source} has no environment's reward: the engine used no environment")
        own = torch.tensor([math.nan if rollout.reward is None else rollout.reward for rollout in rollouts], dtype=torch.float32)
        has_own = torch.tensor([rollout.reward is not None for rollout in rollouts], dtype=torch.bool)
        valid = torch.tensor([not rollout.failed for rollout in rollouts], dtype=torch.bool)
        scores: Future[Scores] = Future()
        if self._others is None:
            scores.set_result(Scores(rewards=own, valid=valid & has_own, parts={"environment": own}))
            return scores

        def add(others: Future[Scores]) -> None:
            try:
                given = others.result()
                parts = {"environment": own} | dict(given.parts)
                silent = torch.zeros_like(valid) if given.silent is None else given.silent
                rewards = own.masked_fill(~has_own, 0.0) + given.rewards.masked_fill(silent, 0.0)
                scores.set_result(Scores(rewards=rewards, valid=valid & (given.valid | silent & has_own), parts=parts))
            except BaseException as error:  # raised where the sum is awaited
                scores.set_exception(error)

        self._others.score(rollouts).add_done_callback(add)
        return scores

    def close(self) -> None:
        if self._others is not None:
            self._others.close()
