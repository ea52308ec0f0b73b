"""Response metrics that `docs/diagnosis.md` watches: the policy's certainty, repetition, and which responses are rewarded.

In a large batch a bounded number of responses is examined, spread evenly: 10 ms for 512 of 1024 tokens, 25 ms for 2048 of 8192.

`episode_metrics` are of episodes: conversations of several turns with an environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from aligner.types import FinishReason, Rollout


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over episodes: the policy's turns, observation tokens, and the environment's counts; empty for other rollouts."""
    episodes = [rollout for rollout in rollouts if rollout.written is not None]
    if not episodes:
        return {}
    names = sorted({name for episode in episodes for name in episode.counts})
    sums = {"turns": sum(episode.num_turns for episode in episodes)}
    sums |= {"observation_tokens": sum(len(episode.response) - episode.num_written for episode in episodes)}
    sums |= {name: sum(episode.counts.get(name, 0.0) for episode in episodes) for name in names}
    number = sum(not episode.rows_left for episode in episodes)  # of which one may be several rows
    return {f"rollout/{name}": total / number for name, total in sums.items()}


def readable(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
    """The response as text, with observations in [[ ]]."""
    if rollout.written is None:
        return decode(rollout.response)
    parts = []
    for is_written, part in groupby(zip(rollout.response, rollout.written, strict=True), key=lambda pair: pair[1]):
        text = decode([token for token, _ in part])
        parts.append(text if is_written else f"[[{text}]]")
    return "".join(parts)


MAX_SAMPLED = 256  # responses whose log-probs are added up; prompts whose responses are compared
MIN_PROMPTS = 8  # fewer responses are easily the same by chance
COMPARED_TOKENS = 128  # of a response, from its beginning
NGRAM = 8  # tokens: shorter sequences recur in ordinary text, above all where tokens are characters
MAX_READ = 32  # responses whose n-grams are counted
READ_TOKENS = 512  # of a response, up to its end: where loops are
MIN_NGRAMS = 8  # of a response that is counted

Item = TypeVar("Item")


def health_metrics(rollouts: Sequence[Rollout], rewards: Tensor, valid: Tensor, parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of rollouts with `rewards` and their `parts` by name, float32 [B] each, where `valid` (bool [B]):

    rollout/entropy       nats per token, estimated as minus the mean log-prob of what was sampled
    rollout/same_response the part of the prompts, one response of each, that got the most frequent response
    rollout/repeated_ngrams  the part of a response's sequences of NGRAM tokens that occurred in it before, mean over responses
    rollout/empty_fraction   of responses without a token but the one that ends them
    rollout/reward_{ended, truncated, empty}  mean reward of responses that ended by themselves, were cut, are empty
    reward_std/<name>     of the parts of a composed reward
    """
    metrics = _entropy(_spread(rollouts, MAX_SAMPLED)) | _same_response(rollouts)
    metrics |= _repeated(_spread(rollouts, MAX_READ)) | _rewards_by_ending(rollouts, rewards, valid)
    parts = {name: part[valid].double() for name, part in parts.items()}
    return metrics | {f"reward_std/{name}": part.std(correction=0).item() for name, part in parts.items() if part.numel()}


def _entropy(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Tokens of an environment have log-prob 0."""
    written = sum(rollout.num_written for rollout in rollouts)
    return {"rollout/entropy": -sum(sum(rollout.logprobs) for rollout in rollouts) / written} if written else {}


def _same_response(rollouts: Sequence[Rollout]) -> dict[str, float]:
    first = {rollout.prompt.tokens: rollout for rollout in reversed(rollouts)}
    compared = _spread(list(first.values()), MAX_SAMPLED)
    if len(compared) < MIN_PROMPTS:
        return {}
    ((_, most),) = Counter(rollout.response[:COMPARED_TOKENS] for rollout in compared).most_common(1)
    return {"rollout/same_response": most / len(compared)}


def _repeated(rollouts: Sequence[Rollout]) -> dict[str, float]:
    shares = []
    for rollout in rollouts:
        tokens = rollout.response[-READ_TOKENS:]
        count = len(tokens) - NGRAM + 1
        if count >= MIN_NGRAMS:
            distinct = set(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))
            shares.append(1 - len(distinct) / count)
    return {"rollout/repeated_ngrams": sum(shares) / len(shares)} if shares else {}


def _rewards_by_ending(rollouts: Sequence[Rollout], rewards: Tensor, valid: Tensor) -> dict[str, float]:
    """An empty response does not count as ended."""
    empty = torch.tensor([len(one.response) <= (one.finish_reason is FinishReason.stop) for one in rollouts])
    truncated = torch.tensor([rollout.finish_reason is FinishReason.length for rollout in rollouts])
    metrics = {"rollout/empty_fraction": empty.double().mean().item()}
    for name, rows in {"ended": ~truncated & ~empty, "truncated": truncated, "empty": empty}.items():
        judged = rewards[rows & valid]
        if judged.numel():
            metrics[f"rollout/reward_{name}"] = judged.double().mean().item()
    return metrics


def _spread(items: Sequence[Item], count: int) -> Sequence[Item]:
    """At most `count` of the items, evenly spread."""
    if len(items) <= count:
        return items
    return [items[number * len(items) // count] for number in range(count)]
