"""Prompts, how they are answered, and what comes back: responses, scores, and episodes of several token sequences (sub-agents, branches,
compacted contexts), which share one reward and one place in a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from aligner.errors import FINITE, NOT_NEGATIVE, POSITIVE, SHARE, UP_TO_1, ConfigError, check_range
from aligner.types.batches import check_tensors
from aligner.types.extras import check_rows


class FinishReason(str, Enum):
    """Why a response ended."""

    stop = "stop"  # the policy produced a stop token (which is part of the response)
    length = "length"  # the response was cut at the allowed length


class LogprobKind(str, Enum):
    """What an engine's log-probs are of: the whole vocabulary, before top-k, top-p and penalties, in both cases."""

    sampled = "sampled"  # at the sampling temperature
    raw = "raw"  # at temperature 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt: `id` is its position in the data set (stable across epochs and resumes), `source` is `file:line`.

    For reward functions: `columns` are the fields of its record, `messages` its turns as chat templates read them, if it is a conversation.
    `extras`: see `aligner.types.extras`.
    """

    id: int
    tokens: tuple[int, ...]
    source: str
    text: str = ""
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    extras: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows(self.extras, len(self.tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMark:
    """A turn of the policy in a rollout: its tokens are those from `start` to `end` of the response.

    `state` is equal for turns that answer equal tokens: those between the policy's turn before and this one, or the prompt.
    """

    start: int
    end: int
    number: int  # from 0, in the order of the episode's turns
    state: int
    reward: float = 0.0  # given for this turn: a part of the episode's


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response. `logprobs` are the sampler's over the whole vocabulary: at the sampling temperature, unless `logprob_kind`
    says otherwise.

    In a conversation with an environment the response is everything after the prompt, and `written` says which of its tokens the policy
    wrote; those of the environment have log-prob 0 and are never learnt from. `reward` is the environment's, where it gives one, and
    `counts` what it counted; where it `failed` (and by option did not end the run) there is no reward. `turns` are those of the policy, in
    order, where a response may have several.

    An episode of several rows has a rollout for each, with the same seed: the last one (`rows_left` 0) is what judges see.

    `extras` are what the engine recorded of prompt and response together (`aligner.types.extras`); the prompt has its own.
    """

    prompt: Prompt
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int  # that sampled its last token
    seed: int
    logprob_kind: LogprobKind = LogprobKind.sampled
    oldest_version: int | None = None  # that sampled its first token, where the weights changed on the way
    written: tuple[bool, ...] | None = None  # None: all
    num_turns: int = 1
    turns: tuple[TurnMark, ...] = field(default=(), repr=False)  # (): one, or unknown
    rows_left: int = 0  # of its episode, behind this one
    reward: float | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False
    extras: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows(self.extras, len(self.tokens))
        if len(self.response) != len(self.logprobs):
            raise ValueError(f"Rollout.logprobs has {len(self.logprobs)} entries for {len(self.response)} response tokens")
        if self.written is not None and len(self.written) != len(self.response):
            raise ValueError(f"Rollout.written has {len(self.written)} entries for {len(self.response)} response tokens")

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt.tokens + self.response

    @property
    def all_extras(self) -> dict[str, Tensor]:
        """The prompt's, and the engine's in place of those of the same kind."""
        return {**self.prompt.extras, **self.extras}

    @property
    def num_written(self) -> int:
        """Tokens of the response that the policy wrote."""
        return len(self.response) if self.written is None else sum(self.written)


USUAL_RESPONSE_LENGTH = 256  # tokens, where no length is set


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How the next token is drawn. The log-probs of a rollout are at `temperature`, over the whole vocabulary, before all else here."""

    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0: off
    top_p: float = 1.0  # of these, the smallest set of likeliest tokens with this share of the probability; 1: off
    min_p: float = 0.0  # of these, the tokens at least this times as likely as the likeliest; 0: off
    min_response_length: int = 0  # tokens before which no stop token or stop string ends a response
    max_response_length: int = 0  # tokens, the end-of-sequence token included; 0: 256, less where the context leaves less (docs/data.md)
    stop_token_ids: list[int] = field(default_factory=list)  # besides the tokenizer's end-of-sequence token
    stop_strings: list[str] = field(default_factory=list)  # in the response's text; the token that completes one is kept and is the last
    repetition_penalty: float = 1.0  # divides (negative: multiplies) the logits of tokens in the prompt or the response; 1: off
    presence_penalty: float = 0.0  # taken from the logits of tokens in the response; 0: off
    frequency_penalty: float = 0.0  # taken from the logits of tokens in the response as often as they occur there; 0: off
    raw_logprobs: bool = False  # log-probs at temperature 1 too

    def __post_init__(self) -> None:
        check_range(self, "sampling", FINITE, "temperature", note=" (0 is greedy)")
        check_range(self, "sampling", NOT_NEGATIVE, "top_k", "min_response_length", note=" (0 is off)")
        check_range(self, "sampling", NOT_NEGATIVE, "max_response_length", note=" (0: 256, or what the context leaves)")
        check_range(self, "sampling", SHARE, "top_p", note=" (1 is off)")
        check_range(self, "sampling", UP_TO_1, "min_p", note=" (0 is off)")
        check_range(self, "sampling", POSITIVE, "repetition_penalty", note=" (1 is off)")
        between = (lambda value: -2 <= value <= 2, "must be from -2 to 2")
        check_range(self, "sampling", between, "presence_penalty", "frequency_penalty", note=" (0 is off)")
        if self.min_response_length > self.longest:
            raise ConfigError(
                f"sampling.min_response_length={self.min_response_length}: must be at most max_response_length={self.longest}"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ConfigError(f"sampling.stop_token_ids={self.stop_token_ids}: must not be negative")
        if "" in self.stop_strings:
            raise ConfigError(f"sampling.stop_strings={self.stop_strings}: must not be empty strings")

    @property
    def longest(self) -> int:
        """Tokens that a response may have in a context that is long enough."""
        return self.max_response_length or USUAL_RESPONSE_LENGTH

    def stopping_at(self, *strings: str) -> SamplingConfig:
        """With these stop strings too."""
        return replace(self, stop_strings=[*self.stop_strings, *(one for one in strings if one not in self.stop_strings)])

    def reshaping(self) -> list[str]:
        """The settings, as `name=value`, by which tokens are drawn from another distribution than that of their log-probs."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_response_length": 0, "repetition_penalty": 1.0}
        off |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        return [f"{name}={getattr(self, name)}" for name, value in off.items() if getattr(self, name) != value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What judges say of B rollouts: rewards float32 [B], `valid` bool [B], and by name the parts [B] that the rewards were made of.

    A row that is not valid has no reward (it failed, by option, instead of ending the run): nothing is learnt from it, and it is counted.
    A reward that is not finite in a valid row is the guard's business (`guard.reward`). Of the rows that are not valid those in `silent`
    (bool [B]) are ones that the judge abstains from: a sum continues without it.
    """

    rewards: Tensor
    valid: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    silent: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.rewards.shape)
        if len(shape) != 1:
            raise ValueError(f"Scores.rewards has shape {shape}, expected [B]")
        check_tensors(self, {"rewards": (self.rewards, torch.float32, shape), "valid": (self.valid, torch.bool, shape)})
        if self.silent is not None:
            check_tensors(self, {"silent": (self.silent, torch.bool, shape)})
        check_tensors(self, {f"parts[{name}]": (part, torch.float32, shape) for name, part in self.parts.items()})

    @classmethod
    def of(cls, rewards: Tensor) -> Scores:
        """All of them valid, made of no parts."""
        return cls(rewards=rewards, valid=torch.ones(rewards.shape, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The first tokens of a response as texts, and numbers by name, each one for every token: log-probs of the `sampler`, of the
    `trainer` before the step's updates and of the `reference`, the trainer's `entropy`, the `advantage`, the `value`, and the number of the
    `turn` (NaN: the environment's); a recipe has some of them."""

    texts: tuple[str, ...]
    numbers: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        for name, numbers in self.numbers.items():
            if len(numbers) != len(self.texts):
                raise ValueError(f"TokenTable.numbers[{name}] has {len(numbers)} entries for {len(self.texts)} tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTurn:
    """A turn of the policy as text, behind what it `heard` since its turn before; `number` and `reward` as in `TurnMark`."""

    number: int
    heard: str
    text: str
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One rollout as text, for people to read, and the digests of its images. `group` is the number of its prompt in the data, `parts`
    are what the reward is made of. `turns` are those of a response that has several, and of rows that share an episode: those have the
    same number `episode` in their step."""

    prompt: str
    response: str
    reward: float
    finish_reason: FinishReason
    images: tuple[str, ...] = ()
    group: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: TokenTable | None = None
    episode: int | None = None
    turns: tuple[SampleTurn, ...] = ()


@dataclass(frozen=True, eq=False)
class EpisodeRows:
    """The B rows of E episodes, those of an episode next to each other: `owner` int64 [B] is each row's episode.

    A tensor per row becomes one per episode, whose sequences then follow one another as one long row, and back. Where every episode is
    one row, all of these return their argument.
    """

    owner: Tensor
    _first: Tensor = field(init=False)  # int64 [E], the first row of each episode
    _place: Tensor = field(init=False)  # int64 [B], of each row in its episode

    def __post_init__(self) -> None:
        steps = self.owner.diff()
        if len(self.owner) and (self.owner[0] != 0 or ((steps != 0) & (steps != 1)).any()):
            raise ValueError(f"EpisodeRows.owner is {self.owner.tolist()}: must begin at 0 and stay or grow by 1")
        first = torch.cat([self.owner.new_zeros(min(1, len(self.owner))), (steps == 1).nonzero().flatten() + 1])
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_place", torch.arange(len(self.owner)) - first[self.owner])

    @classmethod
    def single(cls, count: int) -> EpisodeRows:
        """Episodes of one sequence each."""
        return cls(torch.arange(count))

    def __len__(self) -> int:
        """E."""
        return len(self._first)

    @property
    def are_single(self) -> bool:
        """Whether every episode is one row."""
        return len(self) == len(self.owner)

    def groups_of(self, size: int) -> Tensor:
        """The group of each episode, int64 [E]: `size` neighbours each."""
        return torch.arange(len(self)) // size

    def per_episode(self, x: Tensor) -> Tensor:
        """[E, ...] of x [B, ...], which is the same in all rows of an episode."""
        return x if self.are_single else x[self._first]

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] of x [E, ...]."""
        return x if self.are_single else x[self.owner]

    def total(self, x: Tensor) -> Tensor:
        """The sum [E] over the rows of each episode, of x [B]."""
        return x if self.are_single else x.new_zeros(len(self)).index_add_(0, self.owner, x)

    def rows_of(self, episodes: Tensor) -> Tensor:
        """The rows of these episodes, one episode's after the other's, int64."""
        if self.are_single:
            return episodes
        return torch.cat([(self.owner == episode).nonzero().flatten() for episode in episodes])

    def joined(self, x: Tensor) -> Tensor:
        """[E, K * S] of x [B, S], for episodes of at most K sequences: 0 (False) where an episode has fewer."""
        if self.are_single:
            return x
        long = x.new_zeros(len(self), int(self._place.max()) + 1, x.shape[1])
        long[self.owner, self._place] = x
        return long.flatten(1)

    def split(self, x: Tensor) -> Tensor:
        """[B, S] of x [E, K * S]; undoes `joined`."""
        return x if self.are_single else x.unflatten(1, (int(self._place.max()) + 1, -1))[self.owner, self._place]

    def take(self, rows: Tensor) -> EpisodeRows:
        """Those of the rows with these numbers (int64), each episode's next to each other."""
        return EpisodeRows(self.owner[rows].unique_consecutive(return_inverse=True)[1])

    def then(self, others: Sequence[EpisodeRows]) -> EpisodeRows:
        """These rows, and those of `others` behind them."""
        owner = self.owner
        for other in others:
            owner = torch.cat([owner, other.owner + int(owner[-1]) + 1])
        return EpisodeRows(owner)
