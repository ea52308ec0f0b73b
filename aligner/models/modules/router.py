"""The experts' router with auxiliary losses that keep their weight under this project's token counts, and replay of a sampler's choice.

Gradients are sums over micro-batches and ranks, divided once by the loss's count (tokens, pairs or sequences); Megatron-Core's router
scales its auxiliary losses for a division by *all* tokens. Here each micro-batch's is multiplied by its number of real tokens, and
`AuxiliaryLosses.weigh` turns the division by the count into one by the tokens of the whole batch. So the objective is, whatever the layout,

    main loss per count  +  coefficient * (mean over the batch's tokens of their micro-batch's auxiliary loss).

Load balancing (2101.03961, equation 4) is quadratic in a micro-batch's routing: it depends on which rows share one. z-loss: 2202.08906, 5.

Replay (R3: 2510.11370): small differences of arithmetic send some tokens to other experts, which changes their log-probs far more than the
rounding did. The choice alone is replayed: gate scores are the trainer's, so gradients reach the router. The last token of a row, and
padding, go where the router sends them. Megatron-Core's `RouterReplay` is not used: it learns from outside whether a pass recomputes, once
for all routers of the process, and in a pipeline some do while others do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models.config import Architecture
from aligner.parallel import mcore, platform
from aligner.protocols import Loss
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import Batch, DistillationBatch, LabeledBatch, TokenOutputs, no_expert


def limited(scores: Tensor, architecture: Architecture) -> Tensor:
    """Scores [N, experts] with -inf for experts of other groups than the token's best; unchanged if the experts have no groups."""
    if not architecture.router_groups:
        return scores
    grouped = scores.unflatten(-1, (architecture.router_groups, -1))
    of_groups = grouped.topk(architecture.router_group_best, dim=-1).values.sum(dim=-1)
    kept = of_groups.topk(architecture.router_groups_per_token, dim=-1).indices
    others = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)


MISMATCH = "rollout/route_mismatch"  # routes that are trained with other experts than sampled
REPLACED = "rollout/route_replaced"  # routes where the trainer's own choice would have been another

Choose = Callable[..., tuple[Tensor, Tensor]]  # (scores, k, groups, groups per token) -> the k best scores and their experts


class Choice:
    """What Megatron-Core's router asks for each token's experts: of its best groups alone (DeepSeek: 2405.04434, 2.2.2; 2412.19437, 2.1.2;
    Megatron-Core's own groups are scored by another number of their experts), and where a token `has_route` (bool [N, 1]) those in
    `routes` int64 [N, k]."""

    layer_number = 0  # set by Megatron-Core 0.19

    def __init__(self, architecture: Architecture, routes: Tensor | None = None, has_route: Tensor | None = None) -> None:
        self._architecture, self._routes, self._has_route = architecture, routes, has_route
        self.own_experts: Tensor | None = None  # int64 [N, k], what would have been chosen without routes

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) [N, topk]."""
        found = choose(limited(scores, self._architecture), topk, num_groups, group_topk)
        if self._routes is None:
            return found
        self.own_experts = found[1]
        experts = torch.where(self._has_route, self._routes, self.own_experts)
        return scores.gather(1, experts), experts


class LayerRoutes:
    """The routes that the micro-batches of one router were given, and what became of them.

    Layers that are recomputed make their first pass in training without gradient. Their second ones follow in the order of the first, since
    a chunk's micro-batches come back in the order in which they went.
    """

    def __init__(self) -> None:
        self.replays = False
        self._given: Tensor | None = None
        self._again: deque[Tensor | None] = deque()
        self.counts: Tensor | None = None  # float64 [3]: routes, of these mismatched, of these replaced; in training

    def give(self, routes: Tensor | None) -> None:
        """Those of the micro-batch that comes next, [N, k]."""
        self._given = routes

    def forget(self) -> None:
        """No micro-batch is under way."""
        self._given = None
        self._again.clear()

    def take(self, *, training: bool) -> tuple[Tensor | None, bool]:
        """The routes of this pass, and whether it is the first over its micro-batch."""
        if training and not torch.is_grad_enabled():
            self._again.append(self._given)
        elif training and self._again:
            return self._again.popleft(), False
        return self._given, True

    def count(self, chosen: Tensor, routes: Tensor, has_route: Tensor, own_experts: Tensor | None) -> None:
        """Compare what was `chosen` (bool [N, experts]), and what the router would have, with `routes` [N, k]: as sets."""
        wanted = torch.zeros_like(chosen).scatter_(1, routes.where(has_route, 0), True)
        own = wanted if own_experts is None else torch.zeros_like(chosen).scatter_(1, own_experts, True)
        differ = [((one != wanted).any(1, keepdim=True) & has_route).sum() for one in (chosen, own)]
        found = torch.stack([has_route.sum(), *differ]).double()
        self.counts = found if self.counts is None else self.counts + found


def routed(router: Any, routing: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What `routing()` of `router` gives (gate scores and choice, [N, experts] each), with the routes that its micro-batch was given."""
    layer: LayerRoutes = router.routes
    given, is_first = layer.take(training=router.training)
    if given is None:
        return routing()
    routes = given.long()
    has_route = routes[:, :1] != no_expert(given.dtype)
    own, replayed = router.router_replay, None
    if layer.replays:
        router.router_replay = replayed = Choice(router.architecture, routes, has_route)
    try:
        scores, chosen = routing()
    finally:
        router.router_replay = own
    if is_first and router.training:
        layer.count(chosen.bool(), routes, has_route, None if replayed is None else replayed.own_experts)
    return scores, chosen


def give(routers: Sequence[Any], routes: Tensor | None) -> None:
    """The routes of the next micro-batch's tokens, [..., layers, k] in the order in which the routers see them, to each of a chunk."""
    for router in routers:
        router.routes.give(None if routes is None else routes[..., router.layer_number - 1, :].flatten(0, -2))


def take_metrics(routers: Sequence[Any]) -> dict[str, Metric]:
    """Shares of all routes (one for each token and layer) since the last call. Collective."""
    found = [router.routes.counts for router in routers if router.routes.counts is not None]
    total = torch.stack(found).sum(0) if found else torch.zeros(3, dtype=torch.float64, device=platform.device())
    for router in routers:
        router.routes.counts = None
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    count, mismatched, replaced = total.tolist()
    metrics: dict[str, Metric] = {MISMATCH: Mean(total=mismatched, count=round(count))}
    if routers and routers[0].routes.replays:
        metrics[REPLACED] = Mean(total=replaced, count=round(count))
    return metrics


class Router(mcore.TopKRouter):
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
        self.architecture = architecture
        if architecture.router_groups:
            self.router_replay = Choice(architecture)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return routed(self, lambda: super(Router, self).routing(logits, padding_mask=padding_mask))

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        own_tokens = routing_map.sum() / self.topk  # first: the reduction below happens in place
        per_expert, _, tokens = mcore.get_tokens_per_expert_and_token_count(
            routing_map=routing_map, reduce_group=self.tp_cp_group, topk=self.topk, with_padding_mask=with_padding_mask
        )
        share = mcore.switch_load_balancing_loss_func(  # of this rank's tokens; summed over the ranks of the sequence it is the whole
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=torch.as_tensor(tokens).clamp(min=1),  # a filler micro-batch has none
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
        )
        seen = share.detach() / coefficient * tokens
        self.balance = Mean(total=self.balance.total + seen, count=self.balance.count + own_tokens)
        return mcore.MoEAuxLossAutoScaler.apply(probs, share * tokens)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        real = squares if padding_mask is None else squares.masked_fill(padding_mask, 0.0)
        return mcore.MoEAuxLossAutoScaler.apply(logits, real.sum() * coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens [N, experts] for the step's change of the biases; Megatron-Core's mask of padding [N] does not fit."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real.sum(dim=0)


def routers(chunks: Sequence[torch.nn.Module]) -> list[Router]:
    """Every router of a model's chunks, in the order of the layers."""
    return [layer.mlp.router for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]


class AuxiliaryLosses:
    """Nothing for a dense model. `aux` and `z` are the coefficients of load-balancing loss and z-loss, averages over tokens."""

    def __init__(self, chunks: Sequence[torch.nn.Module], *, aux: float, z: float) -> None:
        self._chunks = list(chunks)
        self._aux, self._z = aux, z
        self._active = bool(chunks[0].config.num_moe_experts) and bool(aux or z)

    def weigh(self, config: mcore.TransformerConfig, batch: Batch, loss: Loss, added: Sequence[Batch] = ()) -> None:
        """Make the division by the loss's count, which comes after the backward pass, one by the tokens of all batches for these losses."""
        if not self._active:
            return
        scale = loss_count(batch, loss) / max(sum(int(one.lengths.sum()) for one in (batch, *added)), 1)
        if self._aux:
            config.moe_aux_loss_coeff = self._aux * scale
        if self._z:
            config.moe_z_loss_coeff = self._z * scale

    def metrics(self) -> dict[str, Metric]:
        """`moe/load_balancing_loss` of the step: the mean over tokens and layers, 1 where experts are used evenly. Collective."""
        if not (self._active and self._aux):
            return {}
        found = [router.balance for router in routers(self._chunks)]
        seen = [sum(float(one.total) for one in found), round(sum(float(one.count) for one in found))]
        for router in routers(self._chunks):
            router.balance = Mean(total=0.0, count=0)
        both = torch.tensor(seen, dtype=torch.float64, device=platform.device())
        if dist.get_world_size() > 1:
            dist.all_reduce(both)
        return {"moe/load_balancing_loss": Mean(total=both[0].item(), count=both[1].item())}


def loss_count(batch: Batch, loss: Loss) -> int:
    """What the loss will be divided by over the whole batch. It is a number of tokens, pairs or sequences, whatever the outputs are."""
    with torch.no_grad():
        zeros = torch.zeros(batch.tokens.shape)
        scores = torch.zeros_like(batch.labels) if isinstance(batch, LabeledBatch) and batch.labels is not None else zeros[:, :1]
        topk = torch.zeros_like(batch.teacher_logprobs) if isinstance(batch, DistillationBatch) else None
        outputs = TokenOutputs(logprobs=zeros, entropy=zeros, values=zeros, scores=scores, step_scores=zeros, topk_logprobs=topk)
        return int(loss(outputs, batch).count)
