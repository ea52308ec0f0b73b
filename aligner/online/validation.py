"""Validation of a policy on held-out prompts: one greedy response each, and with `validation.num_samples` several sampled ones.

Seeds are the same at every validation, so that a curve shows the policy and not the draw.

pass@k is the probability that of k responses to a prompt at least one is right, estimated without bias from n of which c are right:
1 - C(n - c, k) / C(n, k) (Chen et al. 2021, 2107.03374, equation 1). best@k is the same of rewards: the mean, over all choices of k among
the n, of the largest. Both are averaged over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from aligner.online.collect import ScoredRollouts, collect, sample_rows
from aligner.online.config import ValidationConfig
from aligner.online.task import OnlineTask
from aligner.protocols import RewardModel
from aligner.types import FinishReason, Rollout

NUM_KEPT = 16  # prompts whose greedy responses a run keeps


Rejudge = Callable[[ScoredRollouts], ScoredRollouts]  # rollouts with other rewards; collective


def validate(task: OnlineTask, rejudge: Rejudge = lambda collected: collected) -> dict[str, float]:
    """The metrics of `ValidationConfig.reports`, NaN if nothing was judged; none without validation prompts. Collective.

    `rejudge` gets the samples with the task's rewards, before any metric is computed.
    """
    if not task.validation.prompts:
        return {}
    prompts = list(task.validation.prompts)
    greedy = rejudge(collect(task.engine, prompts, list(range(len(prompts))), scorers=task.scorers(), sampling=task.validation.sampling))
    task.validation.keep_samples(sample_rows(greedy, task.decode, count=NUM_KEPT))
    metrics = {
        "validation/reward": greedy.valid_rewards.double().mean().item(),
        "validation/response_length": _mean([float(len(rollout.response)) for rollout in greedy.rollouts]),
        "validation/truncated_fraction": cut_share(greedy.rollouts),
    }
    if task.validation.scorer is not None:
        scores, valid = _judge(task.validation.scorer, greedy.rollouts)
        metrics["validation/accuracy"] = scores[valid].double().mean().item()
    return metrics | _sampled(task, task.validation.config, rejudge) if task.validation.config.num_samples else metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), as a product of factors from 0 to 1. Raises ValueError unless 1 <= k <= n."""
    _check_k(num_samples, k)
    wrong = num_samples - num_right
    return 1.0 - math.prod((wrong - i) / (num_samples - i) for i in range(k)) if wrong >= k else 1.0


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The mean, over all choices of k among n rewards, of the largest: sum over the i-th smallest of C(i - 1, k - 1) / C(n, k) times it."""
    n = len(rewards)
    _check_k(n, k)
    weight, total = k / n, 0.0
    for i, reward in zip(range(n, k - 1, -1), sorted(rewards, reverse=True), strict=False):
        total += weight * reward
        weight *= (i - k) / (i - 1) if i > 1 else 0.0
    return total


def _sampled(task: OnlineTask, config: ValidationConfig, rejudge: Rejudge) -> dict[str, float]:
    """Of `num_samples` responses per prompt, all in one generation. A response without a score counts as not sampled."""
    n = config.num_samples
    prompts = [prompt for prompt in task.validation.prompts for _ in range(n)]
    sampling = replace(task.validation.sampling, temperature=config.temperature, top_p=config.top_p)
    collected = rejudge(collect(task.engine, prompts, list(range(len(prompts))), scorers=task.scorers(), sampling=sampling))
    rewards = _by_prompt(collected.rewards, collected.valid, n)
    metrics = {
        f"validation/reward_mean@{n}": _over_prompts(rewards, 1, lambda own: sum(own) / len(own)),
        f"validation/truncated@{n}": cut_share(collected.rollouts),
    }
    for k in config.ks:
        metrics[f"validation/reward_best@{k}"] = _over_prompts(rewards, k, lambda own, k=k: best_at_k(own, k))
    return metrics | _accuracy(task.validation.scorer, collected, config) if task.validation.scorer is not None else metrics


def _accuracy(judge: RewardModel, collected: ScoredRollouts, config: ValidationConfig) -> dict[str, float]:
    n = config.num_samples
    scores = _by_prompt(*_judge(judge, collected.rollouts), n)
    right = [[score >= config.pass_threshold for score in own] for own in scores]
    metrics = {f"validation/mean@{n}": _over_prompts(scores, 1, lambda own: sum(own) / len(own))}
    for k in config.ks:
        metrics[f"validation/pass@{k}"] = _over_prompts(right, k, lambda own, k=k: pass_at_k(len(own), sum(own), k))
    return metrics


def _judge(judge: RewardModel, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """(scores float32 [B], which were given bool [B]). On every rank: a Python function of texts that all of them hold."""
    scores = judge.score(rollouts).result()
    return scores.rewards, scores.valid & scores.rewards.isfinite()


def _by_prompt(scores: Tensor, valid: Tensor, size: int) -> list[list[float]]:
    """The scores that were given, prompt by prompt."""
    rows = zip(scores.view(-1, size).tolist(), valid.view(-1, size).tolist(), strict=True)
    return [[score for score, given in zip(own, flags, strict=True) if given] for own, flags in rows]


def _over_prompts(scores: Sequence[Sequence[float]], least: int, estimate: Callable[[Sequence[float]], float]) -> float:
    """The mean over the prompts that have at least so many scores."""
    return _mean([estimate(own) for own in scores if len(own) >= least])


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("nan")


def cut_share(rollouts: Sequence[Rollout]) -> float:
    """The part of responses that reached their most tokens."""
    return _mean([float(rollout.finish_reason == FinishReason.length) for rollout in rollouts])


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of {n} samples: must be from 1 to {n}")
