"""No reward: for runs that learn from their own samples by other means."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from aligner.types import Rollout, Scores


class NoReward:
    """`aligner.protocols.RewardModel` that gives every rollout 0."""

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Resolved at once."""
        scores: Future[Scores] = Future()
        scores.set_result(Scores.of(torch.zeros(len(rollouts))))
        return scores

    def close(self) -> None:
        """There is nothing to close."""
