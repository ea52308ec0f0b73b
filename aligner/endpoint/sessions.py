"""Sessions: the calls that one agent makes, as a tree of token segments, and the rewards that it posts.

A call's prompt is what its client sent back. Where it begins with the whole prompt and response of an earlier call, token for token and
image for image, it continues that call; if it does not (another template, an edited history, a stripped thought, a sub-agent), the trace
branches. Each leaf is a row of tokens to learn from, and a sampled token that several rows hold is the policy's own in the first of them
alone.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from aligner.rollout.engine import GenResult
from aligner.rollout.engine.episodes import turn_seed
from aligner.servers.gateway import Refusal
from aligner.types import FinishReason, Images, Prompt, Rollout, SamplingConfig, TurnMark
from aligner.types.extras import continued

_FORCED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class SessionClosed(Refusal):
    """The session takes no more calls: `gone` if it has ended, else it cannot take this one now."""

    def __init__(self, message: str, *, gone: bool = True) -> None:
        super().__init__(410 if gone else 409, message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One finished generation of one client's call. A call with `n` > 1 is recorded once for each of its choices."""

    session: str  # that the key or the header X-Session-ID names; "": none
    prompt: tuple[int, ...]
    result: GenResult  # its tokens include an end token and what completes a stop string
    seed: int  # of this choice
    sampling: SamplingConfig
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # the prompt's (`aligner.types.extras`)
    messages: Sequence[Mapping[str, Any]] | None = None  # as the client sent them, in its own interface's form; None: it sent none

    @property
    def images(self) -> list[str]:
        """The digests of the prompt's images, in their order."""
        return Images.digests(self.extras[Images.name]) if Images.name in self.extras else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The finished calls of one session in the order of their ends; the reward of the whole session, and those of turns by number (from 0:
    a call is a turn), where they were posted."""

    calls: tuple[Call, ...] = ()
    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float | None:
        """The session's reward, of all its parts; None if it was given none."""
        if self.reward is None and not self.turn_rewards:
            return None
        return (self.reward or 0.0) + sum(self.turn_rewards.values())

    def parents(self) -> list[int]:
        """The call that each one continues, of several the longest and of these the latest; -1: none."""
        found = []
        for number, call in enumerate(self.calls):
            longest, parent = 0, -1
            for earlier in range(number - 1, -1, -1):
                size = self._size(earlier)
                if longest < size <= len(call.prompt) and self._begins(call, earlier):
                    longest, parent = size, earlier
            found.append(parent)
        return found

    def changed(self) -> int:
        """Sampled tokens that a client has sent back otherwise, or not at all, where it sent back the prompt before them and more."""
        total = 0
        for number, call in enumerate(self.calls):
            known = [one for one in range(number) if len(self.calls[one].prompt) < len(call.prompt) and self._begins(call, one, 0)]
            deepest = max((len(self.calls[one].prompt) for one in known), default=0)
            lost = [self._lost(call.prompt, one) for one in known if len(self.calls[one].prompt) == deepest]
            total += min(lost, default=0)
        return total

    def rows(self, prompt: Prompt, *, seed: int, version: int, **whole: Any) -> tuple[Rollout, ...]:
        """A rollout for each branch, in the order in which the branches ended; one without a token where there was no call.

        `prompt` is the session's, in place of whose tokens each row has those of its first call. `version`: of the weights of now; `whole`:
        fields of each.
        """
        if not self.calls:
            none: dict[str, Any] = {"response": (), "logprobs": (), "written": (), "num_turns": 0, "finish_reason": FinishReason.stop}
            return (Rollout(prompt=replace(prompt, extras={}), seed=seed, policy_version=version, **none, **whole),)
        parents = self.parents()
        leaves = [number for number in range(len(self.calls)) if number not in parents]
        held: set[int] = set()
        found = []
        for place, leaf in enumerate(leaves):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            found.append(self._row(path, held, prompt, seed=seed, rows_left=len(leaves) - 1 - place, **whole))
            held.update(path)
        return tuple(found)

    def _row(self, path: Sequence[int], held: set[int], prompt: Prompt, **whole: Any) -> Rollout:
        first, last = self.calls[path[0]], self.calls[path[-1]]
        start = len(first.prompt)
        response = (*last.prompt[start:], *last.result.tokens)
        logprobs, written, turns = [0.0] * len(response), [False] * len(response), []
        seen, shown, oldest = 0, 0, last.result.weight_version
        for number in path:
            call = self.calls[number]
            begin, end = len(call.prompt) - start, self._size(number) - start
            if number not in held:
                logprobs[begin:end], written[begin:end] = call.result.logprobs, [True] * (end - begin)
                heard = (*call.prompt[seen:], *(int(digest, 16) for digest in call.images[shown:]))  # numbers: equal in every process
                state, reward = hash(heard), self.turn_rewards.get(number, 0.0)
                turns.append(TurnMark(start=begin, end=end, number=number, state=state, reward=reward))
                oldest = min(oldest, *(version for _, version in call.result.versions), call.result.weight_version)
            seen, shown = self._size(number), len(call.images)
        return Rollout(
            prompt=replace(prompt, tokens=first.prompt, extras={}),
            response=response,
            logprobs=tuple(logprobs),
            written=tuple(written),
            finish_reason=last.result.finish_reason,
            policy_version=last.result.weight_version,
            oldest_version=oldest if oldest != last.result.weight_version else None,
            logprob_kind=last.result.kind,
            num_turns=len(turns),
            turns=tuple(turns),
            extras={**continued([self.calls[number].result.extras for number in path]), **last.extras},
            **whole,
        )

    def _size(self, number: int) -> int:
        return len(self.calls[number].prompt) + len(self.calls[number].result.tokens)

    def _begins(self, later: Call, number: int, sampled: int | None = None) -> bool:
        """Whether a call's prompt begins with that of an earlier one, and (so many of) the tokens sampled for it."""
        call, tokens = self.calls[number], later.prompt
        start, own = len(call.prompt), call.result.tokens[:sampled]
        is_same = tokens[start : start + len(own)] == own and tokens[:start] == call.prompt
        return is_same and later.images[: len(call.images)] == call.images

    def _lost(self, tokens: Sequence[int], number: int) -> int:
        call = self.calls[number]
        pairs = zip(tokens[len(call.prompt) :], call.result.tokens, strict=False)
        kept = next((place for place, (one, other) in enumerate(pairs) if one != other), len(tokens) - len(call.prompt))
        return max(0, len(call.result.tokens) - kept)


@dataclass(slots=True)
class _Session:
    seed: int
    sampling: SamplingConfig
    secret: str
    calls: list[Call] = field(default_factory=list)
    begun: int = 0
    is_open: bool = True  # to further calls
    reward: float | None = None
    turn_rewards: dict[int, float] = field(default_factory=dict)
    trouble: str = ""


class KeptSessions:
    """`aligner.endpoint.calls.Sessions`: those of one endpoint, each with a key of its own (NAME.SECRET). Any thread may call anything."""

    def __init__(self, *, max_calls: int) -> None:
        self._max_calls = max_calls
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._count = itertools.count(1)
        self._run = secrets.token_hex(4)  # so that an agent of an earlier start meets no session of this one
        self.num_recorded = 0  # calls, of all sessions

    def open(self, *, seed: int, sampling: SamplingConfig) -> tuple[str, str]:
        """(name, key) of a new session."""
        with self._lock:
            name, secret = f"s{self._run}-{next(self._count)}", secrets.token_urlsafe(32)
            self._sessions[name] = _Session(seed, sampling, secret)
        return name, f"{name}.{secret}"

    def close(self, session: str) -> Trace:
        """End it: calls that are under way count no more. The trace of what has ended; an empty one the second time."""
        with self._lock:
            own = self._sessions.pop(session, None)
        return Trace() if own is None else Trace(calls=tuple(own.calls), reward=own.reward, turn_rewards=own.turn_rewards)

    def trouble(self, session: str) -> str:
        """Why nothing can be learnt from this open session; empty: it can."""
        with self._lock:
            own = self._sessions.get(session)
            return "" if own is None else own.trouble

    def settings(self, session: str, asked: SamplingConfig) -> SamplingConfig:
        """How a call of the session is sampled: as the run samples, for as many tokens and with the ends that its client asks for.

        What is learnt from has to come from the distribution that its log-probs are of, whatever temperature an agent has always set.
        """
        with self._lock:
            own = self._sessions[session].sampling if session in self._sessions else asked
        longest = [one.max_response_length for one in (own, asked) if one.max_response_length]
        return replace(
            own,
            max_response_length=min(longest, default=0),
            min_response_length=min(own.min_response_length, *longest) if longest else own.min_response_length,
            stop_token_ids=list(dict.fromkeys([*own.stop_token_ids, *asked.stop_token_ids])),
            stop_strings=list(dict.fromkeys([*own.stop_strings, *asked.stop_strings])),
        )

    # ---- what the endpoint asks, in its event loop: nothing here may block

    def of_key(self, key: str) -> str | None:
        """The session that this bearer key names; None if it is no session's (the comparison takes as long for a near miss)."""
        name, _, secret = key.partition(".")
        with self._lock:
            own = self._sessions.get(name)
        is_own = hmac.compare_digest((own.secret if own else " ").encode(), secret.encode(errors="replace"))
        return name if own and is_own else None

    def begin(self, session: str, prompt: Sequence[int]) -> int:
        """A call is about to be sampled; the seed of its first choice. Raises SessionClosed."""
        with self._lock:
            own = self._sessions.get(session)
            if own is None or not own.is_open:
                raise _ended(session)
            if own.begun == self._max_calls:
                raise SessionClosed(
                    f"session {session} has made environment.sessions.max_calls={self._max_calls} calls, as many as it may", gone=False
                )
            own.begun += 1
            return turn_seed(own.seed, own.begun)

    def record(self, call: Call) -> None:
        """A choice has been sampled, whether or not its client still listens. Thread-safe."""
        with self._lock:
            own = self._sessions.get(call.session)
            if own is None or not call.result.tokens:
                return
            self.num_recorded += 1
            own.calls.append(call)
            if changed := [name for name in _FORCED if getattr(call.sampling, name) != getattr(own.sampling, name)]:
                name = changed[0]
                own.trouble = f"a call was sampled with {name}={getattr(call.sampling, name)}, not {getattr(own.sampling, name)}"

    def reward(self, session: str, reward: float | None, turn: int | None, done: bool) -> int:
        """What `reward_of` reads; each replaces what was posted for the same before. The number of calls. Raises Refusal."""
        with self._lock:
            own = self._sessions.get(session)
            if own is None:
                raise _ended(session)
            if turn is not None and not (reward is not None and 1 <= turn <= len(own.calls)):
                expected = f"the number of a call that has ended, from 1 to {len(own.calls)}, with a reward"
                raise Refusal(400, f"turn is {turn}, expected {expected}")
            if reward is not None and turn is not None:
                own.turn_rewards[turn - 1] = reward
            elif reward is not None:
                own.reward = reward
            own.is_open &= not done
            return len(own.calls)


def _ended(session: str) -> SessionClosed:
    return SessionClosed(f"session {session[:64]!r} has ended, or never began")
