"""The weights that a rollout engine computes with, by role: the training parameters in place, or the engine's own in another split.

Reading in place costs nothing and needs no refit. The engine needs its own weights if the training layout leaves a rank without all
layers or experts (pipeline, expert parallelism), splits them over another number of ranks, or has adapters, which are merged; not if their
weights are packed, beside which they are read. Names are global (`aligner.models.modules.build`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Architecture, ParallelResidual, PositionEmbedding
from aligner.models.families import weight_names
from aligner.models.families.mapping import ADAPTER, EMBEDDING, OUTPUT_LAYER, OUTPUT_PROJECTION, PROJECTION, Layout
from aligner.models.modules.build import LanguageModel
from aligner.models.modules.chunk import global_name
from aligner.models.modules.layers import SPLIT_INPUTS
from aligner.models.modules.linear import PackedWeight, linear_weight
from aligner.models.modules.lora import Adapter, named_adapters
from aligner.models.modules.packed import LINEARS
from aligner.models.modules.scalar_head import HEAD
from aligner.models.weights import Place, all_places, tensor_group
from aligner.parallel import platform
from aligner.parallel.reshard import Move, Sharding, even, grouped, padded, replicated
from aligner.rollout.builtin.quantized import CODES, decoded, encoded, scales_of
from aligner.rollout.config import Precision

_MULTIPLE = 16  # of both sizes of a matrix, for `torch._scaled_mm`
POSITIONS = "embedding.position_embeddings.weight"


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """The packed weight of a linear layer, with its adapter (if any) beside it."""

    parameter: Tensor
    adapter: Adapter | None

    def product(self, x: Tensor) -> Tensor:
        """As `F.linear`. The weight is unpacked for it."""
        out = F.linear(x, linear_weight(self.parameter).read(x.dtype))
        return out if self.adapter is None else out + self.adapter.share(x)

    def numbers(self) -> Tensor:
        """All of it, dense, with the adapter added up in float32."""
        weight = linear_weight(self.parameter)
        return weight.read() if self.adapter is None else self.adapter.merged(weight)

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """All tensors of it."""
        return (*linear_weight(self.parameter).storage, *(() if self.adapter is None else self.adapter.parameters()))


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """This rank's share of a linear layer's weight as codes [rows, inputs], with the layer's adapter (if any) beside it, in its precision.

    Rows that the ranks of a replica share have one scale, so several ranks have the codes of one. On a GPU that multiplies FP8 (compute
    capability 8.9) in bfloat16 the product is `torch._scaled_mm`; elsewhere it is emulated by the same codes, multiplied in float32.
    """

    codes: Tensor
    scales: Tensor  # float32 [rows, 1]
    dtype: torch.dtype  # of the numbers
    group: dist.ProcessGroup | None  # the ranks that have the other inputs; None: all are here
    adapter: Adapter | None = None

    @torch.no_grad()
    def take(self, numbers: Tensor) -> None:
        """Become these numbers [rows, inputs]. Collective over the group."""
        self.scales.copy_(scales_of(numbers.detach(), self.codes.dtype, group=self.group))
        self.codes.copy_(encoded(numbers.detach(), self.scales, self.codes.dtype))

    def product(self, x: Tensor) -> Tensor:
        """As `F.linear`, of [N, inputs]. Collective over the group in FP8."""
        out = F.linear(x, self._dense()) if self.codes.dtype == torch.int8 else self._fp8_product(x)
        return out if self.adapter is None else out + self.adapter.share(x)

    def numbers(self) -> Tensor:
        """All of it, dense, with the adapter added up."""
        return self._dense() if self.adapter is None else self.adapter.merged(linear_weight(self._dense()))

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """The tensors that only the engine has."""
        return self.codes, self.scales

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """All tensors of it."""
        return (*self.own, *(() if self.adapter is None else self.adapter.parameters()))

    def _dense(self) -> Tensor:
        return decoded(self.codes, self.scales).to(self.dtype)

    def _fp8_product(self, x: Tensor) -> Tensor:
        scales = scales_of(x, self.codes.dtype, group=self.group)
        codes = encoded(x, scales, self.codes.dtype)
        if multiplies_fp8(x, self.codes):
            return torch._scaled_mm(codes, self.codes.t(), scales, self.scales.t(), out_dtype=x.dtype)
        return (F.linear(codes.float(), self.codes.float()) * scales * self.scales.t()).to(x.dtype)


def multiplies_fp8(x: Tensor, codes: Tensor) -> bool:
    """Whether the device has a kernel for the product of rows like `x` with a weight of these codes."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or any(size % _MULTIPLE for size in codes.shape):
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


Stored = AdaptedWeight | QuantizedWeight  # a linear layer's weight in another form than a tensor of its numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """Weight and bias (if any) of a linear layer or a norm."""

    weight: Tensor  # or a `Stored`, of the linear layers that `linear` computes
    bias: Tensor | None


def linear(x: Tensor, weight: Tensor | Stored, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of a weight in either form."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    out = weight.product(x)
    return out if bias is None else out + bias


def dense(weight: Tensor | Stored) -> Tensor:
    """A weight's numbers in either form."""
    return weight if isinstance(weight, Tensor) else weight.numbers()


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """The two matrices of a dense layer or an expert; `up` is `[gate; up]` if the model gates."""

    up: Affine
    down: Affine


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentWeights:
    """Latent attention; `q_down` is None if queries have no latent. The projections onto latents are whole on every rank."""

    q_down: Tensor | None
    q_norm: Affine | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Affine
    kv_up: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaWeights:
    """This rank's heads of a gated delta net; names as in `aligner.models.modules.gated_delta_net`."""

    qkvz: Tensor
    ba: Tensor
    conv: Tensor  # [channels, 1, W]
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's parameters on this rank. Parts that the architecture lacks are None or empty. Without a router, the MLP is the expert."""

    input_norm: Affine | None
    qkv: Affine | None  # None with a latent, and in a delta net
    latent: LatentWeights | None
    delta: DeltaWeights | None
    q_norm: Affine | None
    k_norm: Affine | None
    attention_out: Affine
    post_attention_norm: Affine | None
    mlp_norm: Affine | None
    post_mlp_norm: Affine | None
    sinks: Tensor | None  # a learned score for each head of this rank, [heads]
    router: Affine | None
    router_bias: Tensor | None
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None  # the experts that every token passes
    shared_gate: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All layers, and the rows of the vocabulary that this rank holds; `output` may have rows of padding after the real ones."""

    embedding: Tensor
    positions: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Affine | None
    output: Tensor
    projections: tuple[Tensor, Tensor] | None = None  # after the embedding and before the output layer


def tensors(weights: Any) -> Iterator[Tensor]:
    """All tensors of a `ModelWeights` (or of a part of one), always in the same order."""
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, Stored):
        yield from weights.storage
    elif weights is not None:
        for part in weights if isinstance(weights, tuple) else [getattr(weights, one.name) for one in fields(weights)]:
            yield from tensors(part)


def by_role(tensors: Mapping[str, Tensor], architecture: Architecture) -> ModelWeights:
    """Assign the named tensors of a whole model (on one rank of a split) to their roles."""

    def affine(name: str, *, bias: bool) -> Affine:
        return Affine(weight=tensors[name + ".weight"], bias=tensors[name + ".bias"] if bias else None)

    return ModelWeights(
        embedding=tensors[EMBEDDING],
        positions=tensors[POSITIONS] if architecture.position_embedding == PositionEmbedding.learned else None,
        layers=tuple(_layer(number, affine, tensors, architecture) for number in range(architecture.num_layers)),
        final_norm=None if architecture.residual_norms else affine("decoder.final_layernorm", bias=architecture.normalization.has_bias),
        output=tensors[EMBEDDING if architecture.tied_embeddings else OUTPUT_LAYER],
        projections=(tensors[PROJECTION], tensors[OUTPUT_PROJECTION]) if architecture.embedding_size else None,
    )


def _layer(number: int, affine: Callable[..., Affine], tensors: Mapping[str, Tensor], architecture: Architecture) -> LayerWeights:
    prefix, mixture = f"decoder.layers.{number}.", architecture.has_experts(number)
    norm_bias, bias = architecture.normalization.has_bias, architecture.linear_bias
    own_norm = architecture.pre_norms and architecture.parallel_residual != ParallelResidual.shared_norm

    behind = architecture.post_norms or architecture.residual_norms

    def norm(name: str, present: bool) -> Affine | None:
        return affine(prefix + name, bias=norm_bias) if present else None

    linear = architecture.is_linear(number)
    attention_bias, out = bias or architecture.attention_out_bias, "linear_out" if linear else "linear_proj"
    mlp_bias = bias or (architecture.expert_biases if mixture else architecture.mlp_bias)
    experts = [f"mlp.experts.local_experts.{number}." for number in range(architecture.num_experts)] if mixture else ["mlp."]

    def feed_forward(mlp: str) -> FeedForward:
        return FeedForward(up=affine(prefix + mlp + "linear_fc1", bias=mlp_bias), down=affine(prefix + mlp + "linear_fc2", bias=mlp_bias))

    return LayerWeights(
        input_norm=norm("input_layernorm", architecture.pre_norms),
        qkv=None
        if architecture.latent_size or linear
        else affine(prefix + "self_attention.linear_qkv", bias=bias or architecture.qkv_bias),
        latent=_latent(prefix + "self_attention.", affine, tensors, architecture) if architecture.latent_size else None,
        delta=_delta(prefix + "self_attention.", tensors) if linear else None,
        q_norm=norm("self_attention.q_layernorm", architecture.qk_norm and not linear),
        k_norm=norm("self_attention.k_layernorm", architecture.qk_norm and not linear),
        attention_out=affine(f"{prefix}self_attention.{out}", bias=attention_bias and not linear),
        post_attention_norm=norm("post_attention_layernorm", behind),
        mlp_norm=norm("pre_mlp_layernorm", own_norm),
        post_mlp_norm=norm("post_mlp_layernorm", behind),
        sinks=tensors[prefix + "self_attention.core_attention.sinks"] if architecture.attention_sinks else None,
        router=affine(prefix + "mlp.router", bias=architecture.expert_biases) if mixture else None,
        router_bias=tensors[prefix + "mlp.router.expert_bias"] if mixture and architecture.router_bias else None,
        experts=tuple(feed_forward(mlp) for mlp in experts),
        shared=feed_forward("mlp.shared_experts.") if mixture and architecture.shared_ffn_hidden_size else None,
        shared_gate=tensors[prefix + "mlp.shared_experts.gate_weight"] if mixture and architecture.shared_expert_gate else None,
    )


def _latent(prefix: str, affine: Callable[..., Affine], tensors: Mapping[str, Tensor], architecture: Architecture) -> LatentWeights:
    own = architecture.query_latent_size > 0
    return LatentWeights(
        q_down=tensors[prefix + "linear_q_down_proj.weight"] if own else None,
        q_norm=affine(prefix + "q_layernorm", bias=False) if own else None,
        q_up=tensors[prefix + ("linear_q_up_proj" if own else "linear_q_proj") + ".weight"],
        kv_down=tensors[prefix + "linear_kv_down_proj.weight"],
        kv_norm=affine(prefix + "kv_layernorm", bias=False),
        kv_up=tensors[prefix + "linear_kv_up_proj.weight"],
    )


def _delta(prefix: str, tensors: Mapping[str, Tensor]) -> DeltaWeights:
    names = {"qkvz": "linear_qkvz.weight", "ba": "linear_ba.weight", "conv": "conv_weight", "norm": "out_norm.weight"}
    names |= {"a_log": "A_log", "dt_bias": "dt_bias"}
    return DeltaWeights(**{role: tensors[prefix + name] for role, name in names.items()})


def named_parameters(chunks: Sequence[LanguageModel]) -> dict[str, Tensor]:
    """This rank's training parameters by global name, without those of adapters and of a head of values, and a tied embedding's copy."""
    return {
        global_name(chunk, name): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if ADAPTER not in name and not name.startswith(HEAD) and not (name == OUTPUT_LAYER and chunk.share_embeddings_and_output_weights)
    }


def adapters_of(chunk: LanguageModel) -> dict[str, Adapter]:
    """A chunk's adapters by the global names of their layers' weights."""
    return {global_name(chunk, f"{name}.weight"): adapter for name, adapter in named_adapters(chunk)}


def with_adapters(chunk: LanguageModel, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """`parameters` of a chunk by global name, the packed ones as `AdaptedWeight`."""
    adapters = adapters_of(chunk)
    return {
        name: AdaptedWeight(parameter, adapters.get(name)) if isinstance(linear_weight(parameter), PackedWeight) else parameter
        for name, parameter in parameters.items()
    }


def moves(chunks: Sequence[LanguageModel], *, tp: int) -> list[Move]:
    """The move of every tensor of the model from the training layout to `tp` tensor-parallel ranks: the same list on every rank.

    Collective over each pipeline group. Raises ConfigError if the model's sizes cannot be split over `tp` ranks.
    """
    found = []
    for place in all_places(chunks):
        source, target = _shardings(place, chunks[0].architecture, old_tp=tensor_group(chunks[0], place).size(), tp=tp)
        shard = {name: getattr(place, name) for name in ("name", "shape", "dtype", "stage", "expert_rank")}
        found.append(Move(source=source, target=target, **shard))
    return found


def _shardings(place: Place, architecture: Architecture, *, old_tp: int, tp: int) -> tuple[Sharding, Sharding]:
    """(training, rollout): each rank's part of the full tensor."""
    dim = place.split_dim
    if dim is None:
        return replicated(place.shape[0]), replicated(place.shape[0])
    size = place.shape[dim] * old_tp
    layout = weight_names(architecture).find(place.name).layout
    if layout == Layout.vocabulary:
        # Keep the training layout's padding if it fits: then equal splits stay equal and nothing must be gathered.
        rows = size if size % tp == 0 else -(-architecture.vocab_size // tp) * tp
        return even(size, old_tp), padded(architecture.vocab_size, rows, tp)
    if layout.is_qkv:
        groups = architecture.num_key_value_heads
        heads = architecture.num_attention_heads * (1 + architecture.attention_gate)  # a gate is a head's width, and beside its query
        return even(size, old_tp), grouped(groups, heads // groups, architecture.head_dim, tp)
    return even(size, old_tp, dim=dim, blocks=layout.blocks), even(size, tp, dim=dim, blocks=layout.blocks)


def usable_in_place(chunk: LanguageModel, *, tp: int, rounds: bool = False) -> bool:
    """Whether rollouts with `tp` ranks to a model can read the training parameters: every rank holds all that it needs.

    Of models with adapters only those whose weights are packed, or are rounded by the engine, without DoRA: with others the engine computes
    with merged weights.
    """
    groups, architecture = chunk.pg_collection, chunk.architecture
    if chunk.lora.is_on and (chunk.lora.dora or not (chunk.quantization.is_on or rounds)):
        return False
    same = groups.tp.size() == tp and groups.pp.size() == 1 and architecture.num_key_value_heads % tp == 0
    if not architecture.num_experts:
        return same
    return same and groups.ep.size() == 1 and groups.expt_tp.size() == tp


def is_quantized(name: str) -> bool:
    """Whether `rollout.precision` is about the tensor with this global name: weights of the layers' linear layers; not embeddings, the
    output layer, norms, routers, projections onto latents, nor a vision tower."""
    layer, _, kind = name.rpartition(".")
    return name.startswith("decoder.layers.") and kind == "weight" and layer.rsplit(".", 1)[-1] in LINEARS


def quantized_room(
    tensors: Mapping[str, Any],
    precision: Precision,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    adapters: Mapping[str, Adapter] | None = None,
) -> dict[str, QuantizedWeight]:
    """Room for those of the named tensors that are quantized, of any contents; none with `model`. `group`: the ranks of a replica."""
    found, device = {}, platform.device()
    for name in filter(is_quantized, tensors if precision.is_on else ()):
        shape, splits_inputs = tensors[name].shape, name.split(".")[-2] in SPLIT_INPUTS
        codes, scales = torch.empty(shape, dtype=CODES[precision], device=device), torch.ones(shape[0], 1, device=device)
        found[name] = QuantizedWeight(codes, scales, dtype, group if splits_inputs else None, (adapters or {}).get(name))
    return found
