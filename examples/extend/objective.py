"""A policy objective of one's own: truncated importance sampling, whose weight max(ratio) has no gradient and no lower clip.

python examples/nlp/train_grpo.py ... algorithm.objective=examples/extend/objective.py:truncated
"""

from torch import Tensor

from aligner.losses.policy import Clip, ratios


def truncated(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """-sg(min(r, 1 + high)) * A * log-prob per token, and where it was truncated; all [B, S]. `log_ratios` has the log-probs' gradient."""
    ratio = ratios(log_ratios.detach())
    return -ratio.clamp(max=1 + clip.high) * advantages * log_ratios, ratio > 1 + clip.high
