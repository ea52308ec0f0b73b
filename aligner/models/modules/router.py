"""The experts' router with auxiliary losses that keep their weight under this project's token counts.

Gradients here are sums over micro-batches and ranks that are divided once, by the loss's own count: response tokens, pairs or sequences.
Megatron-Core's router scales its auxiliary losses for a division by *all* tokens, and by the tokens of one rank where several share a
sequence. Here each micro-batch's auxiliary loss is multiplied by the number of its real tokens, on whatever ranks they are, and
`weigh_auxiliary_losses` turns the later division by the loss's count into one by the tokens of the whole batch. So the objective is

    main loss per count  +  coefficient * (mean over the batch's tokens of their micro-batch's auxiliary loss),

whatever the layout. (A load-balancing loss is quadratic in a micro-batch's routing, so unlike everything else it does depend on which rows
share a micro-batch.) Load balancing: 2101.03961, equation 4; z-loss: 2202.08906, equation 5.

`AuxiliaryLosses` are those of one model in training: their weight in each step, and what is reported of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models.config import Architecture
from aligner.models.modules.expert_groups import GroupLimit
from aligner.models.modules.route_replay import LayerRoutes, routed
from aligner.parallel import platform
from aligner.parallel.mcore import (
    MoEAuxLossAutoScaler,
    TopKRouter,
    TransformerConfig,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from aligner.protocols import Loss
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import Batch, DistillationBatch, LabeledBatch, TokenOutputs


class Router(TopKRouter):
    """Top-k router of one layer. `balance` adds up what it saw in training passes: load-balancing loss per token, summed over tokens."""

    def __init__(self, *args, architecture: Architecture, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.balance = Mean(total=0.0, count=0)
        self.routes = LayerRoutes()
        if self.expert_bias is not None:  # a parameter without gradient: files, checkpoints and refits have it
            bias = self.expert_bias
            del self.expert_bias
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
        if architecture.expert_biases:  # Megatron-Core's has a bias where all linear layers have one
            self.bias = torch.nn.Parameter(torch.zeros_like(self.weight[:, 0]))
            self.bias.sequence_parallel = self.config.sequence_parallel
        if architecture.router_groups:
            self.router_replay = GroupLimit(architecture)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return routed(self, lambda: super(Router, self).routing(logits, padding_mask=padding_mask))

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        own_tokens = routing_map.sum() / self.topk  # first: the reduction below happens in place
        per_expert, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map, reduce_group=self.tp_cp_group, topk=self.topk, with_padding_mask=with_padding_mask
        )
        share = switch_load_balancing_loss_func(  # of this rank's tokens; summed over the ranks of the sequence it is the whole
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=torch.as_tensor(tokens).clamp(min=1),  # a filler micro-batch has none
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        seen = share.detach() / coefficient * tokens
        self.balance = Mean(total=self.balance.total + seen, count=self.balance.count + own_tokens)
        return MoEAuxLossAutoScaler.apply(probs, share * tokens)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        real = squares if padding_mask is None else squares.masked_fill(padding_mask, 0.0)
        return MoEAuxLossAutoScaler.apply(logits, real.sum() * coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens [N, experts] for the step's change of the biases; Megatron-Core's mask of padding [N] does not fit."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real.sum(dim=0)


def weigh_auxiliary_losses(config: TransformerConfig, *, aux: float, z: float, count: int, tokens: int) -> None:
    """Set the coefficients for one optimizer step over a batch with `tokens` real tokens whose loss will be divided by `count`."""
    scale = count / max(tokens, 1)
    if aux:
        config.moe_aux_loss_coeff = aux * scale
    if z:
        config.moe_z_loss_coeff = z * scale


def routers(chunks: Sequence[torch.nn.Module]) -> list[Router]:
    """Every router of a model's chunks, in the order of the layers."""
    return [layer.mlp.router for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]


def take_balance(chunks: Sequence[torch.nn.Module]) -> Mean:
    """Load-balancing loss over this rank's tokens and layers since the last call (1 is perfect balance)."""
    found = routers(chunks)
    total = Mean(total=sum(float(r.balance.total) for r in found), count=round(sum(float(r.balance.count) for r in found)))
    for router in found:
        router.balance = Mean(total=0.0, count=0)
    return total


class AuxiliaryLosses:
    """Nothing for a dense model. `aux` and `z` are the coefficients of load-balancing loss and z-loss, averages over tokens."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, aux: float, z: float) -> None:
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
