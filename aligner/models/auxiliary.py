"""The experts' auxiliary losses of one model in training: their weight in each step, and what is reported of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from aligner.metrics import Mean, Metric
from aligner.models.build import Transformer
from aligner.models.router import take_balance, weigh_auxiliary_losses
from aligner.parallel import platform
from aligner.parallel.mcore import TransformerConfig
from aligner.protocols import Loss
from aligner.types import Batch, DistillationBatch, LabeledBatch, TokenOutputs


class AuxiliaryLosses:
    """Nothing for a dense model. `aux` and `z` are the coefficients of load-balancing loss and z-loss, averages over tokens."""

    def __init__(self, chunks: Sequence[Transformer], *, aux: float, z: float) -> None:
        self._chunks = list(chunks)
        self._aux, self._z = aux, z
        self._active = bool(chunks[0].config.num_moe_experts) and bool(aux or z)

    def weigh(self, config: TransformerConfig, batch: Batch, loss: Loss) -> None:
        """Make the division by the loss's count, which comes after the backward pass, one by the batch's tokens for these losses."""
        if self._active:
            weigh_auxiliary_losses(config, aux=self._aux, z=self._z, count=_count(batch, loss), tokens=int(batch.lengths.sum()))

    def metrics(self) -> dict[str, Metric]:
        """`moe/load_balancing_loss` of the step: the mean over tokens and layers, 1 where experts are used evenly. Collective."""
        if not (self._active and self._aux):
            return {}
        seen = take_balance(self._chunks)
        both = torch.tensor([seen.total, seen.count], dtype=torch.float64, device=platform.device())
        if dist.get_world_size() > 1:
            dist.all_reduce(both)
        return {"moe/load_balancing_loss": Mean(total=both[0].item(), count=both[1].item())}


def _count(batch: Batch, loss: Loss) -> int:
    """What the loss will be divided by over the whole batch. It is a number of tokens, pairs or sequences, whatever the outputs are."""
    with torch.no_grad():
        zeros = torch.zeros(batch.tokens.shape)
        scores = torch.zeros_like(batch.labels) if isinstance(batch, LabeledBatch) and batch.labels is not None else zeros[:, :1]
        topk = torch.zeros_like(batch.teacher_logprobs) if isinstance(batch, DistillationBatch) else None
        outputs = TokenOutputs(logprobs=zeros, entropy=zeros, values=zeros, scores=scores, step_scores=zeros, topk_logprobs=topk)
        return int(loss(outputs, batch).count)
