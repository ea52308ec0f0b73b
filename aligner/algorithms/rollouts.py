"""One batch of rollouts with rewards (and values): sampled on every replica of the engine, scored while sampling goes on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.errors import AlignerError, EngineError, RunHalted
from aligner.models.guard import Guard, GuardConfig, NonFinite, NonFiniteReward
from aligner.parallel.collectives import gather_objects
from aligner.protocols import Critic, RewardModel, RolloutEngine
from aligner.types import (
    FinishReason,
    PolicyBatch,
    Prompt,
    Rollout,
    SampleRow,
    SamplingConfig,
    TokenBatch,
    num_rows,
    select_rows,
    take_rows,
)

MAX_SEED = 2**62
NUM_NAMED = 3  # rollouts that an error names
EXCERPT_CHARACTERS = 80

_Row = tuple[int, Rollout, float, Tensor | None]  # position of its prompt, rollout, reward, values
_Pending = tuple[list[Rollout], Future[Tensor], Future[Tensor] | None]  # what was sent to the scorers, their answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one replica of the engine did of a batch: response tokens, and seconds until it had nothing left to sample."""

    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollouts:
    """Rollouts in the order of their prompts; one tensor of values per rollout, [length], where a critic was asked.

    `rewards` float32 [B] are finite; those of rollouts that are not in `valid` (bool [B]; all, unless given) stand for none: 0.
    """

    rollouts: list[Rollout]
    rewards: Tensor
    values: list[Tensor] | None
    valid: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    shares: tuple[Share, ...] = ()  # of the engine's replicas

    def __post_init__(self) -> None:
        if not self.valid.numel():
            object.__setattr__(self, "valid", torch.ones(len(self.rollouts), dtype=torch.bool))

    @property
    def valid_rewards(self) -> Tensor:
        """The rewards that were given, float32."""
        return self.rewards[self.valid]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorers:
    """Who judges finished rollouts. `critic` is None where no values are wanted.

    `reward_name` stands for the reward in errors; `non_finite` says what happens where it is NaN or infinite. `beat` is called whenever
    some responses are finished or scored: sampling may take long without any other sign of life.
    """

    reward: RewardModel
    critic: Critic | None = None
    pad_id: int = 0
    reward_name: str = "the reward"
    non_finite: NonFiniteReward = NonFiniteReward.stop
    beat: Callable[[], None] = lambda: None


def sample_seeds(run_seed: int, step: int, count: int) -> list[int]:
    """A distinct seed per sample, a pure function of (run seed, step, index); never negative."""
    generator = torch.Generator().manual_seed((run_seed * 1_000_003 + step) % MAX_SEED)
    base = int(torch.randint(MAX_SEED, (), generator=generator))
    return [(base + index) % MAX_SEED for index in range(count)]


def collect(
    engine: RolloutEngine, prompts: Sequence[Prompt], seeds: Sequence[int], *, scorers: Scorers, sampling: SamplingConfig | None = None
) -> ScoredRollouts:
    """Sample one response per (prompt, seed) and score it. Collective; every rank gets the whole result.

    `sampling` replaces the engine's own settings (validation). The engine's replicas share the prompts. The leading rank of each sends
    what has ended to the scorers at once and awaits the answers after the last one; an error of the engine or of a scorer on any replica
    is raised on every rank. Raises EngineError where responses are missing, RunHalted where a reward is not finite and the scorers say
    that this ends the run.
    """
    index_of = {seed: index for index, seed in enumerate(seeds)}
    engine.wake()
    part = _sample(engine, prompts, seeds, scorers, sampling)
    error, scored = part.error, []
    if error is None:
        try:
            scored = _await(part.pending, index_of, scorers.beat)
            _check_finite(scored, scorers)
        except AlignerError as failed:  # raised on every rank below: none may be left waiting for this one
            error = failed
    share = (
        Share(tokens=sum(len(rollout.response) for _, rollout, _, _ in scored), seconds=part.seconds) if engine.replica.is_leader else None
    )
    everything = gather_objects((scored, error, share))
    engine.sleep()  # every replica has finished
    for _, failed, _ in everything:
        if failed is not None:
            raise failed
    rows = sorted((row for part, _, _ in everything for row in part), key=lambda row: row[0])
    if [row[0] for row in rows] != list(range(len(prompts))):
        raise EngineError(f"the engine gave {len(rows)} responses to {len(prompts)} prompts; one to each is needed")
    rewards = torch.tensor([reward for _, _, reward, _ in rows], dtype=torch.float32)
    return ScoredRollouts(
        rollouts=[rollout for _, rollout, _, _ in rows],
        rewards=torch.where(rewards.isfinite(), rewards, 0.0),
        valid=rewards.isfinite(),
        values=None if scorers.critic is None else [values for _, _, _, values in rows],
        shares=tuple(share for _, _, share in everything if share is not None),
    )


def finite_rows(x: Tensor, guard: GuardConfig, what: str) -> Tensor:
    """Which rows of x [B, S] are finite everywhere, bool [B]. Every rank calls it with the same tensor.

    Where some are not, and the guard does not skip such updates, it raises RunHalted or RollBack as for an update.
    """
    finite = x.isfinite().all(dim=1)
    if not finite.all() and guard.non_finite is not NonFinite.skip:
        Guard(guard).refuse(f"{what} of {int((~finite).sum())} of {len(finite)} rollouts are not finite")
    return finite


def response_metrics(collected: ScoredRollouts, seconds: float) -> dict[str, float]:
    """What every online algorithm reports of its rollouts. An imbalance is the most that a replica of the engine did over the mean."""
    lengths = torch.tensor([len(rollout.response) for rollout in collected.rollouts], dtype=torch.float64)
    truncated = [rollout.finish_reason == FinishReason.length for rollout in collected.rollouts]
    rewards = collected.valid_rewards.double()
    return {
        "rollout/reward": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item() if rewards.numel() else float("nan"),
        "rollout/rewards_not_finite": float((~collected.valid).sum()),
        "rollout/response_length": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/truncated_fraction": sum(truncated) / len(truncated),
        "rollout/tokens_per_second": lengths.sum().item() / max(seconds, 1e-9),
        "rollout/tokens_imbalance": _imbalance([share.tokens for share in collected.shares]),
        "rollout/seconds_imbalance": _imbalance([share.seconds for share in collected.shares]),
    }


def sample_rows(collected: ScoredRollouts, decode: Callable[[Sequence[int]], str], count: int = 4) -> list[SampleRow]:
    """The first few rollouts as text."""
    return [
        SampleRow(
            prompt=rollout.prompt.text or decode(rollout.prompt.tokens),
            response=decode(rollout.response),
            reward=reward,
            finish_reason=rollout.finish_reason,
        )
        for rollout, reward in zip(collected.rollouts[:count], collected.rewards[:count].tolist(), strict=True)
    ]


def mini_batches(batch: PolicyBatch, size: int, num_epochs: int, *, key: str) -> list[PolicyBatch]:
    """The updates of one step: in each epoch all rows (shuffled by `key` from the second epoch on) cut into equal parts.

    A part without any token to learn from (all of its responses were masked) is left out: it would only move the optimizer's momentum.
    """
    parts: list[PolicyBatch] = []
    for epoch in range(num_epochs):
        order = list(range(num_rows(batch)))
        if epoch:
            random.Random(f"{key}/{epoch}").shuffle(order)
        shuffled = take_rows(batch, torch.tensor(order)) if epoch else batch
        parts += [select_rows(shuffled, start, start + size) for start in range(0, len(order), size)]
    return [part for part in parts if part.loss_mask.any()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampled:
    """One rank's part of a batch: what its replica's leader sent to the scorers, or what went wrong."""

    pending: list[_Pending]
    error: AlignerError | None
    seconds: float


def _sample(
    engine: RolloutEngine, prompts: Sequence[Prompt], seeds: Sequence[int], scorers: Scorers, sampling: SamplingConfig | None
) -> _Sampled:
    """Consume what this replica samples to its end, also where a scorer refuses: the replica's other ranks are in it too."""
    pending: list[_Pending] = []
    error: AlignerError | None = None
    started = time.monotonic()
    try:
        for finished in engine.generate(prompts, seeds, sampling):
            scorers.beat()
            if engine.replica.is_leader and error is None:
                try:
                    pending.append((finished, *_submit(finished, scorers)))
                except AlignerError as failed:  # raised on every rank by `collect`
                    error = failed
    except AlignerError as failed:
        error = failed
    return _Sampled(pending=pending, error=error, seconds=time.monotonic() - started)


def _imbalance(work: Sequence[float]) -> float:
    """The most that a replica did, as a multiple of the mean: 1 where all did the same."""
    return max(work) * len(work) / sum(work) if work and sum(work) else 1.0


def _submit(rollouts: list[Rollout], scorers: Scorers) -> tuple[Future[Tensor], Future[Tensor] | None]:
    reward = scorers.reward.score(rollouts)
    if scorers.critic is None:
        return reward, None
    lengths = [len(rollout.tokens) for rollout in rollouts]
    tokens = torch.full((len(rollouts), max(lengths)), scorers.pad_id, dtype=torch.int64)
    for row, rollout in zip(tokens, rollouts, strict=True):
        row[: len(rollout.tokens)] = torch.tensor(rollout.tokens)
    return reward, scorers.critic.values(TokenBatch(tokens=tokens, lengths=torch.tensor(lengths)))


def _await(pending: Sequence[_Pending], index_of: dict[int, int], beat: Callable[[], None]) -> list[_Row]:
    rows: list[_Row] = []
    for rollouts, reward, values in pending:
        rewards = reward.result().tolist()
        states = [None] * len(rollouts) if values is None else list(values.result())
        beat()
        for rollout, number, state in zip(rollouts, rewards, states, strict=True):
            own = None if state is None else state[: len(rollout.tokens)].clone()
            rows.append((index_of[rollout.seed], rollout, number, own))
    return rows


def _check_finite(rows: Sequence[_Row], scorers: Scorers) -> None:
    """Raise RunHalted naming what got a reward that is not finite, unless such rollouts are to be left out."""
    bad = [(rollout, reward) for _, rollout, reward, _ in rows if not math.isfinite(reward)]
    if not bad:
        return
    named = "; ".join(f"{reward} for prompt {_where(rollout)}, {_excerpt(rollout)}" for rollout, reward in bad[:NUM_NAMED])
    message = f"{scorers.reward_name} gave {len(bad)} of {len(rows)} rewards that are not finite: {named}"
    if scorers.non_finite is NonFiniteReward.stop:
        raise RunHalted(f"{message} (guard.reward=stop; skip leaves such responses out)")
    print(f"guard: {message}; left out", flush=True)


def _where(rollout: Rollout) -> str:
    """File and line of its prompt, or the prompt's id."""
    return rollout.prompt.source or f"{rollout.prompt.id}"


def _excerpt(rollout: Rollout) -> str:
    text = rollout.prompt.text
    begins = f" that begins {text[:EXCERPT_CHARACTERS]!r}" if text else ""
    return f"a response of {len(rollout.response)} tokens to a prompt{begins}"
