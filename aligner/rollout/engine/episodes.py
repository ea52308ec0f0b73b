"""Multi-turn episodes in one generation: a finished turn goes to the environment, and the next turn is another request.

The next turn of an episode takes any free seat once its observation is there, beside other episodes' turns: none waits for the slowest.
Everything is tokens: the request of the next turn is the prompt, the policy's tokens as sampled, and the observations' tokens. Each turn
draws with its own seed, a pure function of the episode's seed and the turn's number, so an episode depends on its prompt and seed alone (if
its environment does).

Only the replica's leading rank keeps the conversations, and sends the following requests to the other ranks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor

from aligner.errors import EngineError
from aligner.parallel.collectives import broadcast_object
from aligner.protocols import Exchange, FollowUp, Reply
from aligner.rollout.engine import GenRequest, GenResult, Work
from aligner.types import FinishReason, Images, Prompt, Rollout, TurnMark
from aligner.types.extras import MOST_IMAGES, continued

BEAT_SECONDS = 5.0  # between messages to the other ranks from a leading rank that waits for its environment
_SEED_BITS = 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversing:
    """The exchange between the engine's replicas and an environment.

    `group`: this replica's ranks, leader first, for tensors on the CPU; None for a single rank. `in_step`: wait for the replies to all
    finished turns before starting more requests, so that batches do not depend on timing.
    """

    follow_up: FollowUp
    group: dist.ProcessGroup | None = None
    in_step: bool = False


def turn_seed(seed: int, number: int) -> int:
    """The seed of turn `number` (from 1); the first turn has the episode's own."""
    return seed if number == 1 else random.Random(f"{seed}/{number}").getrandbits(_SEED_BITS)


@dataclass(slots=True)
class _Episode:
    """Everything after the prompt, so far."""

    prompt: Prompt
    seed: int
    limit: int  # its most tokens
    turns: list[GenResult] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # that the environment has shown
    marks: list[TurnMark] = field(default_factory=list)
    reward: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def add_turn(self, turn: GenResult) -> None:
        start, number = len(self.tokens), len(self.turns)
        seen = self.tokens[self.marks[-1].end :] if self.marks else self.prompt.tokens
        self.marks.append(TurnMark(start=start, end=start + len(turn.tokens), number=number, state=hash(tuple(seen))))
        self.turns.append(turn)
        self._extend(turn.tokens, turn.logprobs, is_written=True)

    def add_reply(self, reply: Reply) -> None:
        self.reward += reply.reward
        self.marks[-1] = replace(self.marks[-1], reward=reply.reward)
        for name, count in reply.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count

    def observe(self, reply: Reply) -> None:
        self.images += reply.images
        if (number := len(self.images) + len(self._asked)) > MOST_IMAGES:
            raise EngineError(
                f"{self.prompt.source}: the environment has shown image number {number}, allowed: {MOST_IMAGES} in an episode"
            )
        self._extend(reply.tokens, [0.0] * len(reply.tokens), is_written=False)

    @property
    def seen(self) -> dict[str, Tensor]:
        """The images so far, if the environment has shown some: the prompt's, and its own behind them."""
        return {Images.name: Images.of([*self._asked, *self.images])} if self.images else {}

    @property
    def _asked(self) -> list[str]:
        return Images.digests(self.prompt.extras[Images.name]) if Images.name in self.prompt.extras else []

    def request(self, index: int) -> GenRequest:
        tokens = (*self.prompt.tokens, *self.tokens)
        seed = turn_seed(self.seed, len(self.turns) + 1)
        return GenRequest(index=index, tokens=tokens, seed=seed, limit=self.room, extras={**self.prompt.extras, **self.seen})

    def rollout(self, *, is_done: bool, failed: bool) -> Rollout:
        """The whole episode. It counts as cut if its last turn was cut, or if the environment was not done."""
        first, last = self.turns[0], self.turns[-1]
        stopped = is_done and last.finish_reason is FinishReason.stop
        oldest = first.versions[0][1] if first.versions else first.weight_version
        return Rollout(
            prompt=self.prompt,
            response=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=FinishReason.stop if stopped else FinishReason.length,
            policy_version=last.weight_version,
            oldest_version=oldest if oldest != last.weight_version else None,
            seed=self.seed,
            logprob_kind=last.kind,
            written=tuple(self.written),
            num_turns=len(self.turns),
            turns=tuple(self.marks),
            reward=self.reward,
            counts=self.counts,
            failed=failed,
            extras=continued([turn.extras for turn in self.turns])
            | self.seen,  # of a token's first turn: a later one may have computed it again
        )

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float], *, is_written: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.written += [is_written] * len(tokens)


class Episodes:
    """One generation's conversations, on its replica's leading rank. `limits[i]`: the most tokens in the episode of request i."""

    def __init__(
        self, exchange: Exchange, prompts: Sequence[Prompt], requests: Sequence[GenRequest], limits: Sequence[int], *, max_turns: int
    ) -> None:
        self._exchange = exchange
        self._max_turns = max_turns
        self._episodes = {
            request.index: _Episode(prompt=prompt, seed=request.seed, limit=limit)
            for request, prompt, limit in zip(requests, prompts, limits, strict=True)
        }
        self._lasting: set[int] = set()  # episodes whose last turn is with the environment
        self._ended: list[Rollout] = []
        self.follow_ups: deque[GenRequest] = deque()
        self.num_sampling = 0  # requests with the engine
        self.num_waiting = 0  # turns with the environment

    @property
    def is_open(self) -> bool:
        """Whether the existing requests may lead to more."""
        return bool(self.num_sampling or self.num_waiting or self.follow_ups)

    def began(self, requests: Sequence[GenRequest]) -> None:
        """The engine has taken these."""
        self.num_sampling += len(requests)

    def record(self, results: Sequence[GenResult]) -> None:
        """Turns have ended: pass them to the environment."""
        for turn in results:
            episode = self._episodes[turn.index]
            episode.add_turn(turn)
            number, is_cut = len(episode.turns), turn.finish_reason is FinishReason.length
            is_last = is_cut or number == self._max_turns or episode.room < 1
            if is_last:
                self._lasting.add(turn.index)
            self._exchange.say(turn.index, episode.prompt, turn.tokens, number=number, is_cut=is_cut, is_last=is_last)
        self.num_sampling -= len(results)
        self.num_waiting += len(results)

    def hear(self, wait_seconds: float) -> None:
        """Take the replies that have arrived; waits at most this long for the first one."""
        for index, reply in self._exchange.hear(wait_seconds):
            self.num_waiting -= 1
            episode = self._episodes[index]
            episode.add_reply(reply)
            if reply.done or index in self._lasting or len(reply.tokens) >= episode.room:
                self._ended.append(episode.rollout(is_done=reply.done, failed=reply.failed))
                del self._episodes[index]
            else:
                episode.observe(reply)
                self.follow_ups.append(episode.request(index))

    def take_ended(self) -> list[Rollout]:
        """The episodes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


@dataclass(frozen=True, slots=True)
class _News:
    """A message of the leading rank to the others of its replica."""

    requests: tuple[GenRequest, ...] = ()
    is_open: bool = True
    is_idle: bool = False  # the engine has nothing to do
    again: bool = False  # it still waits for the environment: another message follows
    failed: bool = False


class EpisodeWork:
    """`aligner.rollout.engine.Work`: next turns first, then new episodes, from `work`. `episodes` is None but on the leading rank."""

    def __init__(self, work: Work, conversing: Conversing, episodes: Episodes | None) -> None:
        self._work = work
        self._conversing = conversing
        self._episodes = episodes
        self._is_fresh = True  # whether `work` may have more
        self.is_open = True

    def take(self, room: int) -> Sequence[GenRequest]:
        """See `Work.take`. If the engine has nothing else to do, waits until the environment has replied.

        Raises the environment's error on the leading rank, EngineError on the others.
        """
        news = self._agree(room, is_needed=False)
        fresh = self._fresh(room - len(news.requests))
        if news.is_idle and not news.requests and not fresh:
            news = self._agree(room, is_needed=True)
        self.is_open = news.is_open or bool(fresh)
        return [*news.requests, *fresh]

    def _fresh(self, room: int) -> Sequence[GenRequest]:
        if not room or not self._is_fresh:
            return ()
        requests = self._work.take(room)
        self._is_fresh = bool(requests)
        if self._episodes is not None:
            self._episodes.began(requests)
        return requests

    def _agree(self, room: int, *, is_needed: bool) -> _News:
        """The leading rank's message, on every rank of the replica."""
        group = self._conversing.group
        while True:
            news, error = _News(), None
            if self._episodes is not None:
                try:
                    news = self._news(self._episodes, room, is_needed=is_needed)
                except Exception as failed:  # raised once the other ranks of this replica know
                    news, error = _News(failed=True), failed
            if group is not None:
                news = broadcast_object(news, src=dist.get_global_rank(group, 0), group=group)
            if error is not None:
                raise error
            if news.failed:
                raise EngineError("the leading rank of this replica could not continue its episodes; see its own message")
            if not news.again:
                return news

    def _news(self, episodes: Episodes, room: int, *, is_needed: bool) -> _News:
        is_due = self._conversing.in_step or is_needed
        episodes.hear(BEAT_SECONDS if is_due and episodes.num_waiting else 0.0)
        if episodes.num_waiting and (self._conversing.in_step or is_needed and not episodes.follow_ups):
            return _News(again=True)
        if self._conversing.in_step:  # in the order of the prompts, not of the replies
            episodes.follow_ups = deque(sorted(episodes.follow_ups, key=lambda request: request.index))
        requests = tuple(episodes.follow_ups.popleft() for _ in range(min(room, len(episodes.follow_ups))))
        is_idle = not episodes.num_sampling and not requests
        episodes.began(requests)
        return _News(requests=requests, is_open=episodes.is_open, is_idle=is_idle)
