"""One batch of rollouts with rewards (and values): sampled on every replica of the engine, scored during sampling."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from aligner.data.collate import token_batch
from aligner.data.images import images_in
from aligner.errors import AlignerError, EngineError, RunHalted
from aligner.models.training.guard import NonFiniteReward
from aligner.online.response_health import episode_metrics, health_metrics, readable
from aligner.parallel.collectives import from_rank_0, gather_objects
from aligner.protocols import Critic, RewardModel, RolloutEngine
from aligner.servers.turns import SharedDevice
from aligner.types import (
    EpisodeRows,
    FinishReason,
    Prompt,
    Rollout,
    SampleRow,
    SampleTurn,
    SamplingConfig,
    Scores,
    TokenBatch,
    TokenTable,
)

MAX_SEED = 2**62
HEARTBEAT_SECONDS = 1.0  # between two signs of life while a batch is compared
NUM_NAMED = 3  # rollouts that an error names
EXCERPT_CHARACTERS = 80
MAX_TABLE_TOKENS = 512  # of a response's table of tokens

_Pending = tuple[list[Rollout], Future[Scores] | None, Future[Tensor] | None]  # what the scorers are sent (None: not yet), their answers


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStats:
    """One replica's share of a batch: response tokens, and seconds until it had nothing left to sample."""

    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollouts:
    """Rollouts in the order of their prompts; one tensor of values per rollout, [length], if a critic was asked.

    `rewards` float32 [B] are finite; those of rollouts that are not in `valid` (bool [B]; all, unless given) stand for none: 0. Among these
    `failed` (bool [B]) are the ones that their judge gave none. `parts` are by name what the rewards were made of, float32 [B] each.
    `baselines` float32 [B], if they were asked for: the reward of the greedy response to each row's prompt. `ages` int64 [B, 2], if
    they were sampled ahead: training steps that the weights which sampled the first and the last token are behind the policy.
    `episodes`: which rows are one episode; they have the same reward, valid and failed. Each its own, unless given.
    """

    rollouts: list[Rollout]
    rewards: Tensor
    values: list[Tensor] | None = None
    valid: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    failed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    baselines: Tensor | None = None
    ages: Tensor | None = None
    replica_stats: tuple[ReplicaStats, ...] = ()  # of the engine's replicas
    episodes: EpisodeRows = field(default_factory=lambda: EpisodeRows.single(0))

    def __post_init__(self) -> None:
        if not self.valid.numel():
            object.__setattr__(self, "valid", torch.ones(len(self.rollouts), dtype=torch.bool))
        if not self.failed.numel():
            object.__setattr__(self, "failed", torch.zeros(len(self.rollouts), dtype=torch.bool))
        if not self.episodes.owner.numel():
            object.__setattr__(self, "episodes", EpisodeRows.single(len(self.rollouts)))

    @property
    def valid_rewards(self) -> Tensor:
        """The rewards that were given, float32, one per episode."""
        return self.episodes.per_episode(self.rewards)[self.episodes.per_episode(self.valid)]

    def select(self, rows: Tensor) -> ScoredRollouts:
        """The rows with these numbers (int64), in this order; the replicas' shares are those of the whole."""
        order = rows.tolist()
        return ScoredRollouts(
            rollouts=[self.rollouts[row] for row in order],
            rewards=self.rewards[rows],
            values=None if self.values is None else [self.values[row] for row in order],
            valid=self.valid[rows],
            failed=self.failed[rows],
            parts={name: part[rows] for name, part in self.parts.items()},
            baselines=None if self.baselines is None else self.baselines[rows],
            ages=None if self.ages is None else self.ages[rows],
            replica_stats=self.replica_stats,
            episodes=self.episodes.take(rows),
        )


def joined(rounds: Sequence[ScoredRollouts]) -> ScoredRollouts:
    """The rows of all of them, one after the other; what a replica did is summed. Raises ValueError if their rewards' parts differ."""
    first, *others = rounds
    if not others:
        return first
    return ScoredRollouts(
        rollouts=[rollout for one in rounds for rollout in one.rollouts],
        rewards=torch.cat([one.rewards for one in rounds]),
        values=None if first.values is None else [values for one in rounds for values in one.values],
        valid=torch.cat([one.valid for one in rounds]),
        failed=torch.cat([one.failed for one in rounds]),
        parts={name: torch.cat([one.parts[name] for one in rounds]) for name in _same_names([one.parts for one in rounds])},
        baselines=None if first.baselines is None else torch.cat([one.baselines for one in rounds]),
        ages=None if first.ages is None else torch.cat([one.ages for one in rounds]),
        replica_stats=tuple(
            ReplicaStats(tokens=sum(stats.tokens for stats in replica_stats), seconds=sum(stats.seconds for stats in replica_stats))
            for replica_stats in zip(*(one.replica_stats for one in rounds), strict=True)
        ),
        episodes=first.episodes.then([one.episodes for one in others]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorers:
    """Who judges finished rollouts. `critic` is None if no values are wanted.

    `reward_name` stands for the reward in errors; `non_finite` says what happens if it is NaN or infinite. `heartbeat` is called when
    some responses are finished or scored: sampling may take long without any other sign of life. Where the judges compute on `shared` GPUs,
    they are asked when all has been sampled.
    """

    reward: RewardModel
    critic: Critic | None = None
    pad_id: int = 0
    reward_name: str = "the reward"
    non_finite: NonFiniteReward = NonFiniteReward.stop
    heartbeat: Callable[[], None] = lambda: None
    shared: SharedDevice | None = None
    compare: Callable[[Sequence[Rollout], Scores], Future[Scores]] | None = None  # adds what needs whole groups (`WeightedReward.compare`)


def sample_seeds(run_seed: int, step: int, count: int) -> list[int]:
    """A distinct seed per sample, a pure function of (run seed, step, index); never negative."""
    generator = torch.Generator().manual_seed((run_seed * 1_000_003 + step) % MAX_SEED)
    base = int(torch.randint(MAX_SEED, (), generator=generator))
    return [(base + index) % MAX_SEED for index in range(count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRollouts:
    """One rank's part of a batch, between `start` and `finish`: what its replica's leader sent to the scorers, or what went wrong."""

    pending: list[_Pending]
    error: AlignerError | None
    seconds: float  # until this replica had nothing left to sample
    is_leader: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One response per (prompt, seed); `sampling` replaces the engine's own settings."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    sampling: SamplingConfig | None = None


def collect(
    engine: RolloutEngine, prompts: Sequence[Prompt], seeds: Sequence[int], *, scorers: Scorers, sampling: SamplingConfig | None = None
) -> ScoredRollouts:
    """Sample one response per (prompt, seed) and score it: `start` and `finish`, with the engine awake in between. Collective."""
    return collect_all(engine, [SampleRequest(prompts=prompts, seeds=seeds, sampling=sampling)], scorers=scorers)[0]


def collect_all(engine: RolloutEngine, requests: Sequence[SampleRequest], *, scorers: Scorers) -> list[ScoredRollouts]:
    """`collect` of several batches from the same weights, one after the other: answers are awaited when all are sampled. Collective."""
    engine.wake()
    parts = [start(engine, one, scorers) for one in requests]
    if scorers.shared is not None:
        engine.sleep()
    with nullcontext() if scorers.shared is None else scorers.shared.given_away():
        everything = [_gather(part, one.seeds, scorers) for part, one in zip(parts, requests, strict=True)]
    if scorers.shared is None:
        engine.sleep()  # every replica has finished
    return [_assembled(gathered, len(one.prompts), scorers) for gathered, one in zip(everything, requests, strict=True)]


def start(engine: RolloutEngine, request: SampleRequest, scorers: Scorers) -> PendingRollouts:
    """Sample what is requested on an engine that is awake; returns when this replica has nothing left to sample.

    The engine's replicas share the prompts, and the leading rank of each sends
    what has ended to the scorers at once. Every rank calls it with the same arguments, but none waits for another replica here, and an
    error is kept for `finish`: it may run in a thread beside other work.
    """
    pending: list[_Pending] = []
    error: AlignerError | None = None
    started = time.monotonic()
    try:
        # Consumed to its end, also where a scorer refuses: the replica's other ranks are in it too.
        for finished in engine.generate(request.prompts, request.seeds, request.sampling):
            scorers.heartbeat()
            if request.sampling is not None:  # these are not trained on
                finished = [replace(one, extras={}) for one in finished]
            if engine.replica.is_leader and error is None:
                try:
                    pending.append((finished, *(_submit(finished, scorers) if scorers.shared is None else (None, None))))
                except AlignerError as failed:
                    error = failed
    except AlignerError as failed:
        error = failed
    return PendingRollouts(pending=pending, error=error, seconds=time.monotonic() - started, is_leader=engine.replica.is_leader)


def with_values(part: PendingRollouts, critic: Critic, pad_id: int) -> PendingRollouts:
    """The part, with values from the current critic for responses that were sampled without a critic."""
    return replace(part, pending=[(rollouts, scores, critic.values(token_rows(rollouts, pad_id))) for rollouts, scores, _ in part.pending])


def finish(part: PendingRollouts, request: SampleRequest, scorers: Scorers) -> ScoredRollouts:
    """What `start` sampled for this request, on every replica, with its scores. Collective; every rank gets the whole result.

    Awaits the scorers' answers; an error of the engine or of a scorer on any replica is raised on every rank. Raises EngineError if
    responses are missing, RunHalted if a reward is not finite and the scorers say that this ends the run.
    """
    return _assembled(_gather(part, request.seeds, scorers), len(request.prompts), scorers)


def response_metrics(collected: ScoredRollouts, seconds: float) -> dict[str, float]:
    """Rollout metrics of every online algorithm. An imbalance is the largest share of a replica of the engine, divided by the mean.

    `seconds` were spent on sampling; if it was done ahead, the replicas' own are reported instead: the step waited for the rest of it.
    """
    if collected.ages is not None:
        seconds = max(stats.seconds for stats in collected.replica_stats)
    lengths = torch.tensor([len(rollout.response) for rollout in collected.rollouts], dtype=torch.float64)
    truncated = [rollout.finish_reason == FinishReason.length for rollout in collected.rollouts]
    rewards = collected.valid_rewards.double()
    return {
        "rollout/reward": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item() if rewards.numel() else float("nan"),
        "rollout/rewards_not_finite": float((~collected.valid & ~collected.failed).sum()),
        "rollout/rewards_invalid": float(collected.failed.sum()),
        "rollout/response_length": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/truncated_fraction": sum(truncated) / len(truncated),
        "rollout/tokens_per_second": sum(rollout.num_written for rollout in collected.rollouts) / max(seconds, 1e-9),
        "rollout/tokens_imbalance": _imbalance([stats.tokens for stats in collected.replica_stats]),
        "rollout/seconds_imbalance": _imbalance([stats.seconds for stats in collected.replica_stats]),
        **_age_metrics(collected.ages),
        **episode_metrics(collected.rollouts),
        **health_metrics(collected.rollouts, collected.rewards, collected.valid, collected.parts),
    } | {f"reward/{name}": part[collected.valid].double().nanmean().item() for name, part in collected.parts.items()}


def _age_metrics(ages: Tensor | None) -> dict[str, float]:
    """Of rollouts that were sampled ahead: how far their oldest tokens are behind, and how many versions of the weights sampled one."""
    if ages is None:
        return {}
    staleness = ages[:, 0].double()
    return {
        "rollout/staleness": staleness.mean().item(),
        "rollout/staleness_max": staleness.max().item(),
        "rollout/versions": (ages[:, 0] - ages[:, 1] + 1).double().mean().item(),
    }


def sample_rows(
    collected: ScoredRollouts,
    decode: Callable[[Sequence[int]], str],
    count: int = 4,
    *,
    per_token: Mapping[str, Tensor | None] | None = None,
) -> list[SampleRow]:
    """The first few rollouts as text, and those that complete the last one's episode; with `per_token`, their tokens with these numbers by
    name, float32 [B, S] (None: left out).

    A step calls it when it has trained: advantages, values and the trainer's log-probs are then at hand, of the policy before the step.
    """
    owners = collected.episodes.owner.tolist()
    count = sum(owner <= owners[:count][-1] for owner in owners) if owners else 0
    return [
        SampleRow(
            prompt=rollout.prompt.text or decode(rollout.prompt.tokens),
            response=readable(rollout, decode),
            reward=reward,
            finish_reason=rollout.finish_reason,
            images=images_in({**rollout.prompt.extras, **rollout.extras}),
            group=rollout.prompt.id,
            parts={name: part[row].item() for name, part in collected.parts.items()},
            tokens=None if per_token is None else _token_table(rollout, row, decode, per_token),
            episode=owners[row] if owners.count(owners[row]) > 1 else None,
            turns=_turns(rollout, decode) if len(rollout.turns) > 1 or owners.count(owners[row]) > 1 else (),
        )
        for row, (rollout, reward) in enumerate(zip(collected.rollouts[:count], collected.rewards[:count].tolist(), strict=True))
    ]


def _turns(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> tuple[SampleTurn, ...]:
    begins = [0, *(mark.end for mark in rollout.turns)]
    return tuple(
        SampleTurn(
            number=mark.number,
            heard=decode(rollout.response[begin : mark.start]),
            text=decode(rollout.response[mark.start : mark.end]),
            reward=mark.reward,
        )
        for begin, mark in zip(begins, rollout.turns, strict=False)
    )


def _token_table(rollout: Rollout, row: int, decode: Callable[[Sequence[int]], str], known: Mapping[str, Tensor | None]) -> TokenTable:
    ids, first = rollout.response[:MAX_TABLE_TOKENS], len(rollout.prompt.tokens)
    of_row = {name: x[row, first : first + len(ids)].tolist() for name, x in known.items() if x is not None}
    texts = []
    for place in range(len(ids)):  # after the token before it: alone a token would lose its space with some tokenizers
        before, both = decode(ids[max(0, place - 1) : place]), decode(ids[max(0, place - 1) : place + 1])
        texts.append(both[len(before) :] if both.startswith(before) else decode(ids[place : place + 1]))
    numbers = {"sampler": rollout.logprobs[: len(ids)], **of_row}
    if len(rollout.turns) > 1:
        marks = [next((mark.number for mark in rollout.turns if mark.start <= place < mark.end), math.nan) for place in range(len(ids))]
        numbers["turn"] = tuple(map(float, marks))
    return TokenTable(texts=tuple(texts), numbers={name: tuple(float(f"{x:.5g}") for x in own) for name, own in numbers.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One scored rollout, on its way to the other ranks. Without `valid` its judge gave no reward."""

    position: int  # of its prompt
    rollout: Rollout
    reward: float
    valid: bool
    parts: dict[str, float]
    values: Tensor | None
    silent: bool = False  # its judge abstains


_Gathered = tuple[list[_Row], AlignerError | None, ReplicaStats | None]  # of one rank


def _imbalance(work: Sequence[float]) -> float:
    """The most that a replica did, as a multiple of the mean: 1 if all did the same."""
    return max(work) * len(work) / sum(work) if work and sum(work) else 1.0


def _submit(rollouts: list[Rollout], scorers: Scorers) -> tuple[Future[Scores], Future[Tensor] | None]:
    reward = scorers.reward.score([one for one in rollouts if not one.rows_left])
    if scorers.critic is None:
        return reward, None
    return reward, scorers.critic.values(token_rows(rollouts, scorers.pad_id))


def token_rows(rollouts: Sequence[Rollout], pad_id: int) -> TokenBatch:
    """Prompts and responses, for a model that gives values."""
    return token_batch([rollout.tokens for rollout in rollouts], pad_id, extras=[one.all_extras for one in rollouts])


def _gather(part: PendingRollouts, seeds: Sequence[int], scorers: Scorers) -> list[_Gathered]:
    error, rows = part.error, []
    if error is None:
        try:
            asked = [one if one[1] is not None else (one[0], *_submit(one[0], scorers)) for one in part.pending]
            rows = _await(asked, {seed: index for index, seed in enumerate(seeds)}, scorers.heartbeat)
            _check_finite(rows, scorers)
        except AlignerError as failed:  # raised on every rank by `_assembled`: none may be left waiting for this one
            error = failed
    stats = ReplicaStats(tokens=sum(row.rollout.num_written for row in rows), seconds=part.seconds) if part.is_leader else None
    return gather_objects((rows, error, stats))


def _await(pending: Sequence[_Pending], index_of: dict[int, int], heartbeat: Callable[[], None]) -> list[_Row]:
    rows: list[_Row] = []
    for rollouts, scores, values in pending:
        judged = scores.result()
        parts = {name: part.tolist() for name, part in judged.parts.items()}
        states = [None] * len(rollouts) if values is None else list(values.result())
        silent = [False] * len(rollouts) if judged.silent is None else judged.silent.tolist()
        heartbeat()
        number_of = {one.seed: number for number, one in enumerate(one for one in rollouts if not one.rows_left)}
        rewards, valid = judged.rewards.tolist(), judged.valid.tolist()
        for rollout, state in zip(rollouts, states, strict=True):
            number = number_of[rollout.seed]  # the rows of an episode come together, and share the reward of the last
            rows.append(
                _Row(
                    position=index_of[rollout.seed],
                    rollout=rollout,
                    reward=rewards[number],
                    valid=valid[number],
                    parts={name: part[number] for name, part in parts.items()},
                    values=None if state is None else state[: len(rollout.tokens)].clone(),
                    silent=silent[number],
                )
            )
    return rows


def _assembled(everything: Sequence[_Gathered], num_prompts: int, scorers: Scorers) -> ScoredRollouts:
    for _, failed, _ in everything:
        if failed is not None:
            raise failed
    rows = sorted((row for part, _, _ in everything for row in part), key=lambda row: (row.position, -row.rollout.rows_left))
    ends = [row for row in rows if not row.rollout.rows_left]  # the last of each episode, for which its others have the reward too
    if [row.position for row in ends] != list(range(num_prompts)):
        raise EngineError(f"the engine gave {len(ends)} responses to {num_prompts} prompts; one to each is needed")
    names = _same_names([row.parts for row in ends])
    scores = Scores(
        rewards=torch.tensor([row.reward for row in ends], dtype=torch.float32),
        valid=torch.tensor([row.valid for row in ends], dtype=torch.bool),
        parts={name: torch.tensor([row.parts[name] for row in ends], dtype=torch.float32) for name in names},
        silent=torch.tensor([row.silent for row in ends], dtype=torch.bool),
    )
    scores = _compared([row.rollout for row in ends], scores, scorers)
    episodes = EpisodeRows(torch.tensor([row.position for row in rows], dtype=torch.int64))
    rewards, failed = episodes.per_row(scores.rewards), episodes.per_row(~scores.valid)
    valid = rewards.isfinite() & ~failed
    return ScoredRollouts(
        rollouts=[row.rollout for row in rows],
        rewards=torch.where(valid, rewards, 0.0),
        valid=valid,
        failed=failed,
        parts={name: episodes.per_row(part) for name, part in scores.parts.items()},
        values=None if scorers.critic is None else [row.values for row in rows],
        replica_stats=tuple(stats for _, _, stats in everything if stats is not None),
        episodes=episodes,
    )


def _compared(rollouts: Sequence[Rollout], scores: Scores, scorers: Scorers) -> Scores:
    """The scores with those that need whole groups, which rank 0 asks for: the responses of a group may be of several replicas."""
    compare = scorers.compare
    if compare is None:
        return scores

    def ask() -> Scores:
        asked = compare(rollouts, scores)
        while not wait([asked], HEARTBEAT_SECONDS).done:
            scorers.heartbeat()
        return asked.result()

    return from_rank_0(ask)


def _same_names(parts: Sequence[Mapping[str, object]]) -> list[str]:
    """The names of the rewards' parts, which every one of these has. Raises ValueError if they differ."""
    names = list(parts[0]) if parts else []
    other = next((list(one) for one in parts if one.keys() != set(names)), None)
    if other is not None:
        raise ValueError(f"some rewards are made of {names}, others of {other}: all responses are to be judged by the same parts")
    return names


def _check_finite(rows: Sequence[_Row], scorers: Scorers) -> None:
    """Raise RunHalted naming what got a reward that is not finite, unless such rollouts are to be left out."""
    bad = [row for row in rows if row.valid and not math.isfinite(row.reward)]
    if not bad:
        return
    named = []
    for row in bad[:NUM_NAMED]:
        parts = ", ".join(f"{name}={part}" for name, part in row.parts.items() if not math.isfinite(part))
        prompt, of_parts = row.rollout.prompt, f" ({parts})" if parts else ""
        begins = f" that begins {prompt.text[:EXCERPT_CHARACTERS]!r}" if prompt.text else ""
        response = f"a response of {len(row.rollout.response)} tokens to a prompt{begins}"
        named.append(f"{row.reward}{of_parts} for prompt {prompt.source or prompt.id}, {response}")
    message = f"{scorers.reward_name} gave {len(bad)} of {len(rows)} rewards that are not finite: {'; '.join(named)}"
    if scorers.non_finite is NonFiniteReward.stop:
        raise RunHalted(f"{message} (guard.reward=stop; skip leaves such responses out)")
    print(f"guard: {message}; left out", flush=True)
