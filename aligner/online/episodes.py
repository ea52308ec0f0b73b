"""Metrics of episodes: multi-turn conversations with an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from aligner.types import Rollout


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over episodes: the policy's turns, observation tokens, and the environment's counts; empty for other rollouts."""
    episodes = [rollout for rollout in rollouts if rollout.written is not None]
    if not episodes:
        return {}
    names = sorted({name for episode in episodes for name in episode.counts})
    sums = {"turns": sum(episode.num_turns for episode in episodes)}
    sums |= {"observation_tokens": sum(len(episode.response) - episode.num_written for episode in episodes)}
    sums |= {name: sum(episode.counts.get(name, 0.0) for episode in episodes) for name in names}
    return {f"rollout/{name}": total / len(episodes) for name, total in sums.items()}


def readable(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
    """The response as text, with observations in [[ ]]."""
    if rollout.written is None:
        return decode(rollout.response)
    parts = []
    for is_written, part in groupby(zip(rollout.response, rollout.written, strict=True), key=lambda pair: pair[1]):
        text = decode([token for token, _ in part])
        parts.append(text if is_written else f"[[{text}]]")
    return "".join(parts)
