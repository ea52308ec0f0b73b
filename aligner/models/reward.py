"""The reward model: a transformer with a linear head on the last token."""

from __future__ import annotations

from torch import Tensor

from aligner.metrics import Metric
from aligner.models import heads
from aligner.models.placement import Placement
from aligner.models.trainable import TrainableModel
from aligner.protocols import Loss
from aligner.types import PreferenceBatch, TokenBatch, TokenOutputs


class MegatronRewardModel:
    """Scores of whole sequences (prompt and response). Methods are collective over the component."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    def scores(self, batch: TokenBatch | PreferenceBatch) -> Tensor:
        """Float32 [B, K] on the CPU. No gradient."""
        return self.model.run(batch, self._outputs, "scores")

    def train_step(self, batch: PreferenceBatch, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a loss of scores. Returns metrics over the global batch."""
        return self.model.train_step(batch, self._outputs, loss)

    def _outputs(self, hidden: Tensor, batch: TokenBatch | PreferenceBatch, placement: Placement) -> TokenOutputs:
        module, width = self.model.chunks[-1], batch.tokens.shape[1]
        return heads.score_outputs(module, hidden, placement, lengths=batch.lengths, width=width)
