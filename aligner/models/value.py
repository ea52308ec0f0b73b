"""The value model (critic): a transformer with a scalar head, trained on returns."""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.metrics import Metric
from aligner.models import heads
from aligner.models.placement import Placement
from aligner.models.trainable import TrainableModel
from aligner.protocols import Loss
from aligner.types import TokenBatch, TokenOutputs, ValueBatch


class MegatronValueModel:
    """Values aligned with the token that is chosen in the state. Methods are collective over the component."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    def values(self, batch: TokenBatch) -> Tensor:
        """Float32 [B, S] on the CPU; position 0 and padding are 0. No gradient."""
        return self.model.run(batch, self._outputs, "values")

    def train_step(self, batch: ValueBatch, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a loss of values. Returns metrics over the global batch."""
        return self.model.train_step(batch, self._outputs, loss)

    def _outputs(self, hidden: Tensor, batch: TokenBatch | ValueBatch, placement: Placement) -> TokenOutputs:
        module = self.model.chunks[-1]
        if isinstance(batch, ValueBatch):
            return heads.value_outputs(module, hidden, placement, mask=batch.loss_mask)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        mask = (positions > 0) & (positions < batch.lengths[:, None])
        return heads.value_outputs(module, hidden, placement, mask=mask)
