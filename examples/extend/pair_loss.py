"""A loss on pairs of one's own: squared hinge. It gets the log-ratios of P pairs to the reference, and the settings of `algorithm`.

python examples/nlp/train_dpo.py ... algorithm.loss=examples/extend/pair_loss.py:squared_hinge
"""

from torch import Tensor

from aligner.losses.preference import LogRatios


def squared_hinge(ratios: LogRatios) -> Tensor:
    """max(0, 1 - beta D)^2 of each pair, [P]; D is the log-ratio of the chosen response minus that of the rejected one."""
    return (1 - ratios.logits).relu().square()
