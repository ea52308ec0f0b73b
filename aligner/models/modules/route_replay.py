"""The experts that a sampler chose, in training: replayed, or compared with the router's own choice.

Small differences of arithmetic between sampler and trainer send some tokens to other experts, which changes their log-probs far more than
the rounding did. With replay the experts that sampled a token are those that train it (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers", 2510.11370). The choice alone is replayed: gate scores are the trainer's, at the
sampler's experts and normalised over these, so gradients reach the router through them. Tokens that the sampler computed nothing after (the
last of each row) and padding go where the router sends them.

Megatron-Core's hook for it is used (`router_replay.get_replay_topk`, which it asks for a choice of experts), not its `RouterReplay`: that
is told from outside whether a pass recomputes, once for all routers of the process, and in a pipeline some do while others do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.parallel import platform
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import no_expert

MISMATCH = "rollout/route_mismatch"  # routes that are trained with other experts than sampled
REPLACED = "rollout/route_replaced"  # routes where the trainer's own choice would have been another

Choose = Callable[..., tuple[Tensor, Tensor]]  # (scores, k, groups, groups per token) -> the k best scores and their experts


class Choice(Protocol):
    """What Megatron-Core's router asks for each token's experts."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]: ...


class Replayed:
    """`Choice` of the experts in `routes` int64 [N, k], where a token `has_route` (bool [N, 1]); elsewhere of `own`, or Megatron-Core's."""

    def __init__(self, routes: Tensor, has_route: Tensor, own: Choice | None) -> None:
        self._routes, self._has_route, self._own = routes, has_route, own
        self.own_experts: Tensor | None = None  # int64 [N, k], what would have been chosen

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[Tensor, Tensor]:
        if self._own is None:
            _, self.own_experts = choose(scores, topk, num_groups, group_topk)
        else:
            _, self.own_experts = self._own.get_replay_topk(scores, topk, num_groups, group_topk, choose)
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
    own = router.router_replay
    replayed = Replayed(routes, has_route, own) if layer.replays else None
    router.router_replay = replayed or own
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
