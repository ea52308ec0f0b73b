"""Incremental decoding: the arithmetic of the policy's Megatron-Core layers without their training machinery.

A decode step through the training modules takes several times as long on small batches, mostly in Python; the tests keep this pass equal to
the modules' forward. It computes with `ModelWeights`, which may be the training parameters themselves.

With `kernels=auto` a decode step uses compiled kernels on CPU in float32 (`aligner.rollout.builtin.native`), FlashAttention over the pages
on GPU if available (`aligner.rollout.builtin.paged_kernels`), else plain torch. On GPU it is a CUDA graph. Tensor parallelism: each rank
holds its heads, its share of the MLP (of every expert) and of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.architecture.rope import neighbours_apart
from aligner.models.config import Architecture, ParallelResidual
from aligner.models.modules.attention import LATENT_EPS
from aligner.models.modules.build import rounded_scale
from aligner.models.modules.megatron_config import activation_of
from aligner.models.modules.windowed_attention import form_of
from aligner.models.training.tracing import Operation, Tap
from aligner.parallel.logprobs import beside, float32_product, row_sums, shaped
from aligner.rollout.builtin import native
from aligner.rollout.builtin.attention import (
    DecodeBatch,
    DecodePlan,
    FormedAttention,
    GatheredAttention,
    PagedKV,
    PrefillChunk,
    PrefillPlan,
    SeatStates,
    plan_decode,
    plan_prefill,
    prefill_attention,
)
from aligner.rollout.builtin.decode_layers import (
    DeltaHeads,
    LatentHeads,
    Rotary,
    Stack,
    mix,
    mix_all,
    mix_grouped,
    multiplies_groups,
    norm_of,
    norm_of_heads,
    route,
    stack_of,
)
from aligner.rollout.builtin.graphs import CudaCapture, DecodeGraphs
from aligner.rollout.builtin.paged_kernels import flash_attention
from aligner.rollout.builtin.quantized import CODES
from aligner.rollout.builtin.sampling import FusedDraw
from aligner.rollout.builtin.weights import Affine, FeedForward, LayerWeights, ModelWeights, linear, tensors
from aligner.rollout.config import PAGE_SIZE, Kernels, Precision
from aligner.types import route_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """This rank's share of the model in decoding: `group` is None if it has all of it."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None


class Decoder:
    """A language model's forward pass over a KV cache. Collective over the group of `shards`."""

    add_up = staticmethod(row_sums)  # the sampler's sum over the vocabulary; the trainer's, for log-probs of the same bits
    tap: Tap | None = None  # receives the output of every operation, for tokens as they lie in the pass; compiled kernels report fewer
    _rotate = staticmethod(rope.rotate)

    def __init__(
        self,
        weights: ModelWeights,
        architecture: Architecture,
        shards: Shards,
        *,
        max_sequence_length: int,
        frequencies: Tensor | None,
        kernels: Kernels = Kernels.auto,
        cuda_graphs: bool = True,
        records_routes: bool = False,
        float32_logits: bool = True,
        cache_precision: Precision = Precision.model,
    ) -> None:
        self.weights = weights
        self.architecture = architecture
        self.shards = shards
        self.max_sequence_length = max_sequence_length
        self.records_routes = records_routes
        self.cache_precision = cache_precision
        if cache_precision.is_on:
            kernels = Kernels.torch  # the others read numbers
        self._float32_logits = float32_logits and weights.output.dtype.itemsize <= 2
        self._recorded: tuple[Tensor, Tensor] | None = None  # the cache's routes, and the slots of this pass's tokens
        self.head_dim = architecture.head_dim
        self.groups = max(architecture.num_key_value_heads // shards.count, 1)
        self.queries = architecture.num_attention_heads // shards.count // self.groups  # per key-value group on this rank
        self.norm = norm_of(architecture)
        self._norm_of_heads = norm_of_heads(architecture, ranks=shards.count, add_up=self._sum)
        self.latent = None
        if architecture.latent_size:  # all heads read what one group of keys and values holds
            latent_norm = norm_of(replace(architecture, norm_eps=LATENT_EPS))
            self.latent = LatentHeads(architecture=architecture, heads=self.groups * self.queries, norm=latent_norm)
            self.groups, self.queries, self.head_dim = 1, self.groups * self.queries, architecture.latent_size + architecture.rotated
        # The number of each layer among the delta nets, or among the layers with keys and values.
        linear, layers = architecture.linear_attention_layers, range(architecture.num_layers)
        self._cached = {layer: number for number, layer in enumerate(layer for layer in layers if layer not in linear)}
        self.delta = DeltaHeads(architecture=architecture, number={layer: number for number, layer in enumerate(linear)})
        self.activate = activation_of(architecture)
        self.rotary = Rotary(architecture, frequencies, weights.embedding, max_sequence_length)
        self._embedding_scale = rounded_scale(architecture.embedding_scale, weights.embedding.dtype)
        flash = flash_attention(weights.embedding, (self.groups, self.queries, self.head_dim)) if kernels == Kernels.auto else None
        self.attention: GatheredAttention = flash or GatheredAttention(PAGE_SIZE)
        self.page_size = self.attention.page_size
        self._attentions = [self._attention_of(number) for number in range(len(weights.layers))]
        self._native = self._native_decode() if kernels == Kernels.auto else None
        self._graphs = None
        if cuda_graphs and weights.embedding.is_cuda and not linear:
            max_pages = -(-max_sequence_length // self.page_size)
            self._graphs = DecodeGraphs(self._step, CudaCapture, max_pages=max_pages, vocab_size=architecture.vocab_size)
        self.fixed_shapes = weights.embedding.is_cuda  # of decode steps for any routing: nothing is read on the host
        self._addresses: tuple[int, ...] = ()
        self._stacks: tuple[Stack | None, ...] = (None,) * len(weights.layers)  # experts whose products are grouped

    def new_cache(self, num_pages: int) -> PagedKV:
        """An empty cache of `num_pages` pages, and the scratch page."""
        weight = self.weights.embedding
        architecture, size = self.architecture, (num_pages + 1, self.page_size)
        shape = (len(self._cached), *size, self.groups, self.head_dim)
        dtype, scales, routes = CODES.get(self.cache_precision, weight.dtype), None, None
        keys, values = (torch.zeros(shape, dtype=dtype, device=weight.device) for _ in range(2))
        if self.cache_precision.is_on:
            scales = (weight.new_zeros(*shape[:-1], 1), weight.new_zeros(*shape[:-1], 1))
        if self.records_routes:
            shape, dtype = (len(self.weights.layers), *size, architecture.experts_per_token), route_dtype(architecture.num_experts)
            routes = torch.zeros(shape, dtype=dtype, device=weight.device)
        states = SeatStates(architecture, self.shards.count, weight) if self.delta.number else None
        return PagedKV(keys=keys, values=values, scales=scales, routes=routes, states=states)

    @property
    def keeps_addresses(self) -> bool:
        """Whether decode steps are cheaper on the previous generation's cache: for another one graphs are recorded again."""
        return self._graphs is not None

    @property
    def fused_draw(self) -> FusedDraw | None:
        """The sampler's kernel, if decode steps are compiled too."""
        return None if self._native is None else self._native.draw

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        """Put the chunks' tokens into the cache; logits float32 [chunks with `wants_logits`, V], after each one's last token."""
        if self.fixed_shapes:
            self._look_up()
        plan = plan_prefill(chunks, cache.page_size, self.weights.embedding.device)
        return self._finish(self._forward(plan.tokens, plan, cache)[plan.wanted])

    @torch.no_grad()
    def decode(self, batch: DecodeBatch, cache: PagedKV) -> Tensor:
        """Put one more token of each sequence into the cache; logits float32 [B, V] after it, valid until the next call."""
        if self._native is not None:
            self._recorded = None if cache.routes is None else (cache.routes, batch.slots(cache.page_size))
            logits = self._gather(self._native(batch, cache, self.architecture.vocab_size, self.tap))
            return self._note(Operation.logits, len(self.weights.layers), logits)
        if self._graphs is not None and self.tap is None:  # a replay reports nothing to a tap: then kernels are launched one by one
            return self._graphs(batch, cache, self._addresses)
        return self._step(batch, cache)

    def refitted(self) -> None:
        """The weights changed: forget everything computed from the old ones, here nothing."""

    def _look_up(self) -> None:
        addresses = tuple(tensor.data_ptr() for tensor in tensors(self.weights))
        if addresses != self._addresses:
            self._addresses = addresses
            if self.architecture.num_experts and multiplies_groups(self.weights.embedding):
                self._stacks = tuple(stack_of(layer.experts) if layer.router is not None else None for layer in self.weights.layers)

    def release(self) -> None:
        """Release the device memory that decode steps keep, and forget their cache. May be called between generations."""
        if self._graphs is not None:
            self._graphs.release()

    def _step(self, batch: DecodeBatch, cache: PagedKV, out: Tensor | None = None) -> Tensor:
        return self._finish(self._forward(batch.tokens, plan_decode(batch, cache.page_size), cache), out)

    def _finish(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of residual streams [N, H], float32 [N, V]; in `out` if given."""
        depth = len(self.weights.layers)
        normed = x if self.weights.final_norm is None else self._note(Operation.final_norm, depth, self.norm(x, self.weights.final_norm))
        if self.weights.projections is not None:
            normed = F.linear(normed, self.weights.projections[1])
        return self._note(Operation.logits, depth, self._logits(normed, out))

    def _note(self, operation: Operation, layer: int, output: Tensor) -> Tensor:
        """`output`, also passed to the tap."""
        if self.tap is not None:
            self.tap(operation, layer, output)
        return output

    def _attention_of(self, layer: int) -> GatheredAttention:
        """The layer's own attention if it sees a window or chunk, caps its scores or scales them otherwise."""
        form = form_of(self.architecture, layer).within(self.max_sequence_length)
        scale = self.architecture.attention_scale
        if self.latent is not None:
            scale = rope.score_scale(self.architecture)
        if self.architecture.attention_scale_by_layer:
            scale = (scale or self.head_dim**-0.5) / (layer + 1)
        if form.is_plain and not scale:
            return self.attention
        return FormedAttention(self.page_size, form, scale or self.head_dim**-0.5, self.weights.layers[layer].sinks)

    def _native_decode(self) -> native.NativeDecode | None:
        library = native.load() if native.fits(self.weights, self.architecture) else None
        if library is None:
            return None
        model = native.model_of(
            self.architecture, groups=self.groups, queries=self.queries, page_size=self.page_size, rotary=self.rotary.everywhere
        )
        own = {"embed": self._embed, "reduce": self._sum, "experts": self._experts}
        return native.NativeDecode(library, self.weights, model, **own, max_sequence_length=self.max_sequence_length)

    def _forward(self, tokens: Tensor, plan: PrefillPlan | DecodePlan, cache: PagedKV) -> Tensor:
        """Flat tokens [N] through all layers: [N, H]."""
        seen = plan.seen if isinstance(plan, PrefillPlan) else None
        x = self._embed(tokens, plan.positions)
        if seen is not None and seen.features is not None:
            x.index_copy_(0, seen.slots, seen.features[0].to(x.dtype))
        x = self._note(Operation.embedding, -1, x)
        if isinstance(plan, PrefillPlan):
            rotary = self.rotary.at(plan.positions, None if seen is None else seen.axes)
        else:
            rotary = self.rotary.at(plan.positions if plan.rotary is None else plan.rotary)
        fixed = self.fixed_shapes and isinstance(plan, DecodePlan)
        self._recorded = None if cache.routes is None else (cache.routes, plan.slots)
        for number, layer in enumerate(self.weights.layers):
            normed = self._note(Operation.input_norm, number, self._normed(x, layer.input_norm))
            read = self._attended(layer, number, normed, rotary[number], plan, cache)
            attended = self._note(Operation.projection, number, self._project(read, layer.attention_out))
            if self.architecture.parallel_residual != ParallelResidual.none:
                self._note(Operation.attention_residual, number, x)  # what the feed-forward layer's norm reads
                read = normed if layer.mlp_norm is None else self._normed(x, layer.mlp_norm)
                x = x + attended + self._feed_forward(layer, number, read, fixed=fixed)
            elif self.architecture.residual_norms:
                x = self._note(Operation.attention_residual, number, self._normed(x + attended, layer.post_attention_norm))
                x = self._normed(x + self._feed_forward(layer, number, x, fixed=fixed), layer.post_mlp_norm)
            else:
                x = self._note(Operation.attention_residual, number, x + self._normed(attended, layer.post_attention_norm))
                changed = self._feed_forward(layer, number, self._normed(x, layer.mlp_norm), fixed=fixed)
                x = x + self._normed(changed, layer.post_mlp_norm)
            if seen is not None and seen.features is not None and number + 1 < len(seen.features):
                x = x.index_add(0, seen.slots, seen.features[number + 1].to(x.dtype))
            self._note(Operation.residual, number, x)
        return x

    def _normed(self, x: Tensor, weights: Affine | None) -> Tensor:
        """`x` itself if the model has no norm there."""
        return x if weights is None else self.norm(x, weights)

    def _mixed(self, layer: LayerWeights, number: int, normed: Tensor, rotary: tuple | None) -> tuple[Tensor, ...]:
        """Queries [N, groups, queries per group, D], keys and values [N, groups, D], rotated; gates, shaped like queries, if any."""
        mixed = self._note(Operation.qkv, number, self._linear(normed, layer.qkv))
        mixed, gates = mixed.view(normed.shape[0], self.groups, -1, self.head_dim), ()
        if self.architecture.attention_gate:
            heads = mixed[..., :-2, :].unflatten(-2, (self.queries, 2))
            mixed, gates = torch.cat([heads[..., 0, :], mixed[..., -2:, :]], dim=-2), (heads[..., 1, :],)
        q_and_k = mixed[..., : self.queries + 1, :]
        if layer.q_norm is not None:
            q = self._note(Operation.q_norm, number, self._norm_of_heads(q_and_k[..., : self.queries, :], layer.q_norm))
            k = self._note(Operation.k_norm, number, self._norm_of_heads(q_and_k[..., self.queries :, :], layer.k_norm))
            q_and_k = torch.cat([q, k], dim=-2)
        if rotary is not None:
            if self.architecture.rotary_interleaved:
                q_and_k = neighbours_apart(q_and_k, rotary[0].shape[-1])
            q_and_k = self._rotate(q_and_k, *rotary)
            if self.architecture.qk_l2_norm:
                q_and_k = F.rms_norm(q_and_k.float(), (self.head_dim,), eps=self.architecture.norm_eps).to(q_and_k.dtype)
        queries = self._note(Operation.queries, number, q_and_k[..., : self.queries, :])
        keys = self._note(Operation.keys, number, q_and_k[..., self.queries, :])
        return queries, keys, mixed[..., self.queries + 1, :], *gates

    def _attended(
        self, layer: LayerWeights, number: int, normed: Tensor, rotary: tuple | None, plan: PrefillPlan | DecodePlan, cache: PagedKV
    ) -> Tensor:
        """The input of the layer after attention, [N, heads * D]."""
        if layer.delta is not None:
            return self.delta.mixed(normed, number, layer.delta, plan, cache.states)
        mixed = self._mixed(layer, number, normed, rotary) if self.latent is None else self.latent.mixed(normed, layer.latent, rotary)
        (queries, keys, values), gates = mixed[:3], mixed[3:]
        queries = self.rotary.tempered(queries, number, plan.positions)
        place = self._cached[number]
        keys, values = cache.put(place, plan.slots, (keys, values))  # every token reads what the cache has, in any pass
        if isinstance(plan, PrefillPlan):
            out = prefill_attention((queries, keys, values), cache, place, plan, self._attentions[number])
        else:
            out = self._attentions[number].decode(queries, cache, place, plan)
        own = out.reshape(queries.shape[0], -1) if layer.latent is None else self.latent.values(out, layer.latent)
        own = self._note(Operation.attention, number, own)
        return own * gates[0].reshape(own.shape).float().sigmoid().to(own.dtype) if gates else own

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weight = self.weights.embedding
        if self.shards.count == 1:
            x = F.embedding(tokens, weight)
        else:
            local = tokens - self.shards.index * weight.shape[0]
            owned = (local >= 0) & (local < weight.shape[0])
            # `where`, not a product: a rank whose rows are all vocabulary padding may hold anything there, NaN too.
            x = self._sum(torch.where(owned[..., None], F.embedding(torch.where(owned, local, 0), weight), 0.0))
        if self.weights.projections is not None:
            x = F.linear(x, self.weights.projections[0])
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.weights.positions is None:
            return x
        return x + F.embedding(positions + self.architecture.position_offset, self.weights.positions)

    def _feed_forward(self, layer: LayerWeights, number: int, x: Tensor, *, fixed: bool) -> Tensor:
        self._note(Operation.mlp_norm, number, x)
        if layer.router is not None:
            mixture = self._experts(layer, number, x, fixed=fixed)
            return self._note(Operation.mlp, number, mixture if layer.shared is None else mixture + self._shared(layer, x))
        inner = self._note(Operation.activation, number, self._expand(x, layer.experts[0]))
        return self._note(Operation.mlp, number, self._project(inner, layer.experts[0].down))

    def _experts(self, layer: LayerWeights, number: int, x: Tensor, *, fixed: bool = False) -> Tensor:
        """The mixture's output. `fixed`: by operations whose shapes do not depend on the routing."""
        tokens, architecture = x.flatten(0, -2), self.architecture
        routing = route(tokens, layer.router, layer.router_bias, architecture)
        if self.tap is not None:
            weights, chosen = routing
            self.tap(Operation.router, number, weights.new_zeros(len(weights), architecture.num_experts).scatter_(1, chosen, weights))
        if self._recorded is not None:
            routes, slots = self._recorded
            routes[number].flatten(0, 1).index_copy_(0, slots, routing[1].to(routes.dtype))
        if architecture.weighted_expert_inputs:  # each token has one expert
            weights, chosen = routing
            tokens, routing = (tokens * weights).to(x.dtype), (torch.ones_like(weights), chosen)
        biased = self.shards.index == 0  # each rank has a share of every expert; the outputs are summed
        if (stack := self._stacks[number]) is not None:
            return self._sum(mix_grouped(tokens, stack, routing, self.activate, biased=biased)).view_as(x)
        add_up = mix_all if fixed else mix
        return self._sum(add_up(tokens, layer.experts, routing, self._expand, biased=biased)).view_as(x)

    def _shared(self, layer: LayerWeights, x: Tensor) -> Tensor:
        out = self._project(self._expand(x, layer.shared), layer.shared.down)
        return out if layer.shared_gate is None else out * F.linear(x, layer.shared_gate).sigmoid()

    def _expand(self, x: Tensor, weights: FeedForward) -> Tensor:
        """This rank's share of the inner activations, [..., F / tp]."""
        return self.activate(self._linear(x, weights.up))

    def _linear(self, x: Tensor, weights: Affine) -> Tensor:
        """A matrix whose output is split over the ranks."""
        return linear(x, weights.weight, weights.bias)

    def _project(self, x: Tensor, weights: Affine) -> Tensor:
        """A matrix whose input is split over the ranks."""
        out = self._sum(linear(x, weights.weight))
        return out if weights.bias is None else out + weights.bias

    def _logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        architecture, weight = self.architecture, self.weights.output[: self.architecture.vocab_size]
        is_shaped = architecture.logits_softcap or architecture.logits_scale != 1
        whole = None if is_shaped or self.shards.count > 1 else out
        own = float32_product(hidden, weight.t(), whole) if self._float32_logits else F.linear(hidden, weight)
        if is_shaped:
            own = shaped(own.float(), scale=architecture.logits_scale, softcap=architecture.logits_softcap)
        if out is None:
            return self._gather(own.float())
        return out.copy_(own if self.shards.count == 1 else self._gather(own.float()))

    def _gather(self, logits: Tensor) -> Tensor:
        """Full rows, without padding, from every rank's equal number of columns."""
        return logits if self.shards.count == 1 else beside(logits, self.shards.group)[:, : self.architecture.vocab_size]

    def _sum(self, x: Tensor) -> Tensor:
        if self.shards.count > 1:
            dist.all_reduce(x, group=self.shards.group)
        return x
