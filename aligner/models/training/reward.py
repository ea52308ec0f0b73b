"""Models that score. The reward model: a transformer with a linear head on the last token, the mean of all, or the ends of steps. The value
model (critic): a transformer with a scalar head, trained on returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.models.modules import heads
from aligner.models.modules.scalar_head import ScalarHead
from aligner.models.training.forward import MicroBatch
from aligner.models.training.trainable import TrainableModel
from aligner.protocols import Loss
from aligner.telemetry.metrics import Metric
from aligner.types import Batch, LabeledBatch, PreferenceBatch, StepBatch, TokenBatch, TokenOutputs, ValueBatch


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

    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        module, batch = self.model.chunks[-1], part.host
        if isinstance(batch, ValueBatch):
            return heads.value_outputs(module, hidden, part.placement, mask=batch.loss_mask)
        positions = torch.arange(batch.tokens.shape[1])
        mask = (positions > 0) & (positions < batch.lengths[:, None])
        return heads.value_outputs(module, hidden, part.placement, mask=mask)


ScoredBatch = TokenBatch | PreferenceBatch | LabeledBatch


class MegatronRewardModel:
    """Scores of whole sequences (prompt and response), or of their steps. Methods are collective over the component."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    @property
    def head(self) -> ScalarHead:
        """The model's head."""
        return self.model.chunks[-1].head

    def scores(self, batch: ScoredBatch) -> Tensor:
        """Float32 [B, K] on the CPU. No gradient."""
        return self.model.run(batch, self._outputs, "scores")

    def step_scores(self, batch: StepBatch) -> Tensor:
        """Float32 [B, S] on the CPU: of the steps that end at the tokens in `loss_mask`; 0 elsewhere. No gradient."""
        return self.model.run(batch, self._outputs, "step_scores")

    def train_step(self, batch: Batch, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a loss of scores. Returns metrics over the global batch."""
        return self.model.train_step(batch, self._outputs, loss)

    def _outputs(self, hidden: Tensor, part: MicroBatch) -> TokenOutputs:
        module, batch = self.model.chunks[-1], part.host
        if isinstance(batch, StepBatch):
            return heads.step_outputs(module, hidden, part.placement, mask=batch.loss_mask)
        return heads.score_outputs(module, hidden, part.placement, lengths=batch.lengths, width=batch.tokens.shape[1])
