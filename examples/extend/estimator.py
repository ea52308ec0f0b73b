"""An advantage estimator of one's own: OPO (Hao et al. 2025, 2505.23585), whose baseline weighs the rewards of a group by length.

python examples/nlp/train_grpo.py ... algorithm.advantage_estimator=examples/extend/estimator.py:opo
"""

import torch
from torch import Tensor


def opo(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """R - sum(length * R) / sum(length) over the group, for every token. rewards float, mask bool [B, S]; group_ids [B] -> [B, S]."""
    _, groups = group_ids.unique(return_inverse=True)
    total, length = rewards.sum(dim=1), mask.sum(dim=1).to(rewards.dtype)

    def over_group(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, groups, x)[groups]

    baseline = over_group(length * total) / over_group(length).clamp(min=1)
    return (total - baseline)[:, None] * mask
