"""Dynamic sampling (DAPO, 2503.14476, section 3.2): a step learns from groups of responses whose rewards differ.

If all responses to a prompt get the same reward, the group's advantages are 0 and the step learns nothing from it. So
further rounds are sampled until there are as many groups with a signal as the step has prompts. The surplus of the last round is dropped,
as DAPO's own code (verl) does: keeping it would train later steps on samples of older weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from aligner.errors import RunHalted
from aligner.loop.learnt import TOKENS_SEEN, accounted
from aligner.loop.loop import Clock
from aligner.online.collect import ScoredRollouts, joined
from aligner.online.rollout_source import RolloutSource
from aligner.online.selection import with_spread


class Exhausted(str, Enum):
    """How a step continues if its rounds together had too few groups with a signal."""

    stop = "stop"  # ends the run
    fill = "fill"  # continues, padded with groups without a signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The rollouts of one step. Episodes are in groups of neighbours, one group per prompt and round."""

    sampled: ScoredRollouts  # all of them: what is reported
    chosen: ScoredRollouts  # what is learnt from
    num_rounds: int
    num_surplus: int  # groups with a signal that were dropped
    without_signal: float | None  # the part of the sampled groups; None where a group is one response

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups."""
        metrics = {"rollout/rounds": float(self.num_rounds), "rollout/groups_surplus": float(self.num_surplus)}
        return metrics if self.without_signal is None else metrics | {"rollout/groups_without_signal": self.without_signal}

    def dropped(self, group_size: int) -> dict[str, float]:
        """The account (`aligner.loop.learnt`) of sampled responses that were not chosen."""
        rows, surplus = len(self.sampled.episodes) - len(self.chosen.episodes), self.num_surplus * group_size
        if not rows:
            return {}
        tokens = sum(one.num_written for one in self.sampled.rollouts) - sum(one.num_written for one in self.chosen.rollouts)
        return accounted(samples=0, seen=rows, surplus=surplus, no_signal=rows - surplus) | {TOKENS_SEEN: float(tokens)}


def groups_of(source: RolloutSource, step: int, clock: Clock, config: Any) -> Groups:
    """The groups that a step learns from, by the settings of GRPO. Collective: every rank sees the same rewards.

    With `dynamic_sampling` `prompts_per_step` groups whose rewards differ, of as many rounds as that takes; else one round as it is.
    Raises RunHalted if `max_rounds_per_step` were not enough and that is to end the run.
    """
    group_size, num_groups, max_rounds = config.group_size, config.prompts_per_step, config.max_rounds_per_step
    taken = [source.take(step, clock)]
    if not config.dynamic_sampling:
        without_signal = _share_without(has_signal(taken[0], group_size)) if group_size > 1 else None
        return Groups(sampled=taken[0], chosen=taken[0], num_rounds=1, num_surplus=0, without_signal=without_signal)
    while len(taken) < max_rounds and sum(int(has_signal(one, group_size).sum()) for one in taken) < num_groups:
        taken.append(source.take(step, clock))
    sampled = joined(taken)
    signal = has_signal(sampled, group_size)
    useful = signal.nonzero().flatten()
    if len(useful) < num_groups and config.exhausted is Exhausted.stop:
        raise RunHalted(
            f"step {step}: {len(useful)} of {len(signal)} groups have rewards that differ, and {num_groups} are needed, after "
            f"algorithm.max_rounds_per_step={max_rounds} rounds: the prompts are too easy or too hard, or the reward is uninformative "
            f"(algorithm.exhausted=fill continues with the groups that exist)"
        )
    chosen = torch.cat([useful, (~signal).nonzero().flatten()])[:num_groups].sort().values
    episodes = (chosen[:, None] * group_size + torch.arange(group_size)).flatten()
    return Groups(
        sampled=sampled,
        chosen=sampled.select(sampled.episodes.rows_of(episodes)),
        num_rounds=len(taken),
        num_surplus=max(0, len(useful) - num_groups),
        without_signal=_share_without(signal),
    )


def has_signal(collected: ScoredRollouts, group_size: int) -> Tensor:
    """bool [groups]: whether not all valid rewards of the group are equal. The rewards are those of the judges, before any shaping."""
    rows = collected.episodes
    return with_spread(rows.per_episode(collected.rewards), rows.per_episode(collected.valid), group_size)[::group_size]


def _share_without(signal: Tensor) -> float:
    return (~signal).double().mean().item()
