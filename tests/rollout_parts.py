"""Prompts, decoders and scored episodes for tests of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aligner.models.config import PositionEmbedding
from aligner.online.collect import ScoredRollouts
from aligner.types import EpisodeRows, Prompt, Rollout, SamplingConfig


def prompts(*lengths: int, seed: int = 2) -> list[Prompt]:
    """Random tokens from 3 to 60."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(id=i, tokens=tuple(row), source=f"prompts.jsonl:{i + 1}") for i, row in enumerate(rows)]


def mixed_prompts() -> list[Prompt]:
    """Six prompts of 1 to 23 tokens: two are the same, and one begins like them."""
    rows = [prompt.tokens for prompt in prompts(3, 22, 1, 9, 22, 6, seed=12)]
    rows[4], rows[5] = rows[1], rows[1][:17] + rows[5]
    return [Prompt(id=number, tokens=row, source=f"prompt {number}") for number, row in enumerate(rows)]


def engine_of(policy: Any, *, eos_id: int = 2, sampling: dict[str, Any] | None = None, **config: Any):
    """An engine whose responses have up to 24 tokens."""
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    settings = SamplingConfig(**{"max_response_length": 24} | (sampling or {}))
    return create_engine(policy, RolloutConfig(sampling=settings, **config), eos_id=eos_id)


def sampled(
    engine: Any, given: Sequence[Prompt], seeds: Sequence[int] | None = None, sampling: SamplingConfig | None = None
) -> list[Rollout]:
    """In the order of the seeds, which are 0, 1, ... unless given."""
    found = [one for part in engine.generate(given, seeds or range(len(given)), sampling) for one in part]
    assert len(found) == len(given)
    return sorted(found, key=lambda one: one.seed)


def decoder_of(policy: Any, **options: Any):
    """The built-in engine's decoder over the parameters of a policy in one process."""
    from aligner.rollout.builtin.decode import Decoder, Shards
    from aligner.rollout.builtin.weights import by_role, named_parameters

    chunk = policy.chunks[0]
    rotates = chunk.architecture.position_embedding == PositionEmbedding.rope
    return Decoder(
        by_role(named_parameters([chunk]), chunk.architecture),
        chunk.architecture,
        Shards(),
        max_sequence_length=chunk.max_sequence_length,
        frequencies=chunk.rotary_pos_emb.inv_freq if rotates else None,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The sequences of one session, and its reward; None: its judge gave none."""

    rollouts: tuple[Rollout, ...]
    reward: float | None


def scored(episodes: Sequence[Episode]) -> ScoredRollouts:
    """Every sequence of these as a row with its episode's reward."""
    rows = EpisodeRows(torch.tensor([number for number, episode in enumerate(episodes) for _ in episode.rollouts]))
    given = torch.tensor([episode.reward is not None for episode in episodes])
    rewards = torch.tensor([episode.reward or 0.0 for episode in episodes], dtype=torch.float32)
    return ScoredRollouts(
        rollouts=[rollout for episode in episodes for rollout in episode.rollouts],
        rewards=rows.per_row(rewards),
        valid=rows.per_row(given),
        failed=rows.per_row(~given),
        episodes=rows,
    )
