"""An environment's reward for an episode: alone, or added to other rewards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from aligner.protocols import RewardModel
from aligner.types import Rollout, Scores


class EnvironmentReward:
    """`aligner.protocols.RewardModel`: an episode's own reward, plus `others`' if any. The part is named `environment`.

    Episodes whose environment failed have no reward.
    """

    def __init__(self, others: RewardModel | None = None) -> None:
        self._others = others

    def score(self, rollouts: Sequence[Rollout]) -> Future[Scores]:
        """Resolves when the others' scores have come. Raises ValueError for a response that is no episode of an environment."""
        if single := [rollout for rollout in rollouts if rollout.reward is None]:
            raise ValueError(f"a response to {single[0].prompt.source} has no environment's reward: the engine used no environment")
        own = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
        valid = torch.tensor([not rollout.failed for rollout in rollouts], dtype=torch.bool)
        scores: Future[Scores] = Future()
        if self._others is None:
            scores.set_result(Scores(rewards=own, valid=valid, parts={"environment": own}))
            return scores

        def add(others: Future[Scores]) -> None:
            try:
                given = others.result()
                parts = {"environment": own} | dict(given.parts)
                silent = torch.zeros_like(valid) if given.silent is None else given.silent
                rewards = own + given.rewards.masked_fill(silent, 0.0)
                scores.set_result(Scores(rewards=rewards, valid=valid & (given.valid | silent), parts=parts))
            except BaseException as error:  # raised where the sum is awaited
                scores.set_exception(error)

        self._others.score(rollouts).add_done_callback(add)
        return scores

    def close(self) -> None:
        """Close the others."""
        if self._others is not None:
            self._others.close()
