"""A reward and an advantage estimator, named as `dft:brief` and `dft:centred`."""

import torch
from torch import Tensor


def brief(prompts: list[str], responses: list[str], answers: list[str]) -> list[float]:
    """1 for a right answer, less a hundredth for every character."""
    return [float(answer in response) - len(response) / 100 for response, answer in zip(responses, answers, strict=True)]


def centred(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """The reward less the median of its group. rewards float, mask bool [B, S]; group_ids [B] -> [B, S]."""
    total = rewards.sum(dim=1)
    medians = torch.stack([total[group_ids == group].median() for group in group_ids])
    return (total - medians)[:, None] * mask
