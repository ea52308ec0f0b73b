"""The layers of a model. Modules that Megatron-Core's local layer specification lacks: norms that work with sequence parallelism, layers
with other sums and norms, rotated neighbours, biases on some linear layers. Then the kinds of attention and of feed-forward parts, one
`LayerKind` each, with what the specification, adapters, initialisation, traces and checks need to know of it. And that specification:
Megatron-Core's, into which the kinds plug their modules (nothing is patched).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.config import Architecture, LoraTarget, Normalization, ParallelResidual, SeeingArchitecture
from aligner.models.modules.attention import CoreAttention, LatentAttention, placed, split_for_checkpoint, split_parameter
from aligner.models.modules.gated_delta_net import GatedAttention, GatedDeltaNet
from aligner.models.modules.router import Router
from aligner.models.modules.vision import DeepLayer
from aligner.models.training.tracing import Operation
from aligner.parallel import mcore


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm that multiplies by 1 + weight (Nemotron's `LayerNorm1P`)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma's)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input.float(), self.normalized_shape, self.weight.float() + 1.0, self.eps).to(input.dtype)


class LayerNormWithoutBias(torch.nn.LayerNorm):
    """LayerNorm that adds nothing (Cohere's)."""

    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, bias=False, **options)


class UnitNorm(torch.nn.Module):
    """RMSNorm without weights, in float32. A head's mean square is the same before and after it is rotated: it may as well be set first."""

    def __init__(self, config: mcore.TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Norm:
    """RMSNorm or LayerNorm whose weights are marked if their gradients must be summed over the tensor-parallel ranks."""

    rms_norm: type[torch.nn.Module] = torch.nn.RMSNorm
    layer_norm: type[torch.nn.Module] = torch.nn.LayerNorm
    layer_norm_1p: type[torch.nn.Module] = ZeroCenteredLayerNorm
    rms_norm_1p: type[torch.nn.Module] = ZeroCenteredRMSNorm
    layer_norm_no_bias: type[torch.nn.Module] = LayerNormWithoutBias

    def __new__(
        cls, config: mcore.TransformerConfig, hidden_size: int, eps: float = 1e-5, *, kind: Normalization, **_: Any
    ) -> torch.nn.Module:
        norm = getattr(cls, kind.value)(hidden_size, eps=eps, **placed(config))
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class OwnLayer(mcore.TransformerLayer):
    """A dense layer without dropout. With two rotary bases its angles come side by side, those of layers without a window first."""

    def __init__(
        self,
        config: mcore.TransformerConfig,
        submodules: Any,
        *args: Any,
        architecture: Architecture,
        norm: mcore.ModuleSpec,
        **options: Any,
    ):
        super().__init__(config, submodules, *args, **options)
        self.parallel = architecture.parallel_residual
        self.angles = None
        if architecture.rope_local_theta:
            self.angles = int(architecture.window_of(self.layer_number - 1) > 0)
        self.post_attention_layernorm = self.post_mlp_layernorm = torch.nn.Identity()
        self.norms_sums = architecture.residual_norms
        if architecture.post_norms or architecture.residual_norms:
            sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.post_attention_layernorm, self.post_mlp_layernorm = (mcore.build_module(norm, config=config, **sizes) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: mcore.PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> the same shape, and no context."""
        if rotary_pos_emb is not None and self.angles is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[self.angles]
        normed = self.input_layernorm(hidden_states)
        attended = _sum(
            self.self_attention(normed, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params)
        )
        if self.parallel != ParallelResidual.none:
            read = normed if self.parallel is ParallelResidual.shared_norm else self.pre_mlp_layernorm(hidden_states)
            return hidden_states + attended + _sum(self.mlp(read)), None
        if self.norms_sums:
            hidden_states = self.post_attention_layernorm(hidden_states + attended)
            return self.post_mlp_layernorm(hidden_states + _sum(self.mlp(self.pre_mlp_layernorm(hidden_states)))), None
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_mlp_layernorm(_sum(self.mlp(self.pre_mlp_layernorm(hidden_states)))), None


class OwnRotation(mcore.SelfAttention):
    """Rotates neighbouring dimensions together: they are put half of the rotated ones apart, where Megatron-Core rotates them. Queries and
    keys are reordered in the same way, so scores do not change. In heads rotated in part, that part is multiplied by its factor."""

    def __init__(self, *args: Any, architecture: Architecture, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotated = architecture.rotated
        self.interleaved = architecture.rotary_interleaved and architecture.rotates(self.layer_number - 1)
        self.factor = architecture.rope_attention_factor / rope.factor_of_scores(architecture)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        """Megatron-Core's, with the first dimensions of queries and keys reordered and scaled."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **options)
        return self._before_rotation(query), self._before_rotation(key), *rest

    def _before_rotation(self, x: Tensor) -> Tensor:
        x = rope.neighbours_apart(x, self.rotated) if self.interleaved else x
        if self.factor == 1:
            return x
        return torch.cat([x[..., : self.rotated] * self.factor, x[..., self.rotated :]], dim=-1)


def _sum(output: tuple[Tensor, Tensor | None]) -> Tensor:
    return output[0] if output[1] is None else output[0] + output[1]


class NormOfHeads(torch.nn.Module):
    """What norms of the queries, or keys, share whose weights are of all heads side by side; each rank has its own heads'."""

    def __init__(self, config: mcore.TransformerConfig, hidden_size: int, eps: float, *, heads: int, **_: Any) -> None:
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        self.ranks = config.tensor_model_parallel_size
        self.weight = split_parameter(torch.ones(self.size // self.ranks, **placed(config)))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return split_for_checkpoint({"weight": self.weight}, prefix, sharded_offsets)


class WholeNorm(NormOfHeads):
    """RMSNorm over the heads of the queries, or of the keys, together (OLMo 2, 2501.00656)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        squares = flat.square().sum(dim=-1, keepdim=True)
        if self.ranks > 1:  # every rank's output depends on the sum of all: it is summed forward, and its gradient backward
            squares = mcore.copy_to_tensor_model_parallel_region(mcore.reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normed.to(x.dtype) * self.weight).view(x.shape)


class HeadNorm(NormOfHeads):
    """LayerNorm without biases over each head, which has weights of its own (Cohere's Command R+)."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModules:
    """What the local specification's layers are made of."""

    norm: type[Norm] = Norm
    core_attention: type[CoreAttention] = CoreAttention
    column_linear: type[mcore.ColumnParallelLinear] = mcore.ColumnParallelLinear
    row_linear: type[mcore.RowParallelLinear] = mcore.RowParallelLinear


ORDINARY = LayerModules()


@cache
def biased(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same with a bias, where `TransformerConfig` would give all linear layers one or none."""

    def init(self: torch.nn.Module, *args: Any, bias: bool, **options: Any) -> None:
        linear.__init__(self, *args, bias=True, **options)

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})


class BiasedExpertOut:
    """What an expert's second matrix has more with a bias. Of ranks that share the expert, whose outputs are summed, the first adds it."""

    bias: torch.nn.Parameter
    tp_group: Any

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)
        self.bias.sequence_parallel = False  # its ranks see all tokens of the expert: their gradients are the same, not parts
        mcore.set_tensor_model_parallel_attributes(self.bias, self.tp_group.size() == 1, -1, 1)  # then other ranks have other experts

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The product and the bias: one without value, but with its gradient, where another rank adds it."""
        out, bias = super().forward(input_)  # type: ignore[misc]  # of the linear layer beside it
        # A copy: Megatron-Core adds to the product in place, which a view of an autograd function does not allow.
        return out.clone(), bias if self.tp_group.rank() == 0 else bias - bias.detach()


@cache
def biased_expert_out(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`BiasedExpertOut` of this kind of linear layer."""
    return type(f"BiasedExpert{linear.__name__}", (BiasedExpertOut, linear), {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer's specification while its kinds plug their modules in; `number` counts from 0."""

    spec: Any
    architecture: Architecture
    modules: LayerModules
    norm: mcore.ModuleSpec
    number: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerKind:
    """A kind of attention, or of feed-forward part."""

    plug: Callable[[Layer], None]  # into Megatron-Core's local specification
    linears: Mapping[str, LoraTarget]  # linear layers that can get adapters, with the target that is all of each
    traced: Mapping[str, Operation]  # modules whose outputs are operations of a trace
    numbers: Callable[[Architecture], int]  # a lower bound of a layer's weights
    ones: tuple[str, ...] = ()  # vectors that start at 1, whatever the model's norms start at


def _plug_attention(layer: Layer) -> None:
    a, own = layer.architecture, layer.spec.submodules.self_attention
    parts = own.submodules
    factored = a.rope_attention_factor != rope.factor_of_scores(a)
    if not a.latent_size and (a.rotary_interleaved or factored):
        own.module, own.params = OwnRotation, own.params | {"architecture": a}
    parts.core_attention = mcore.ModuleSpec(module=layer.modules.core_attention, params={"architecture": a})
    parts.linear_qkv = layer.modules.column_linear
    parts.linear_proj = biased(layer.modules.row_linear) if a.attention_out_bias else layer.modules.row_linear
    if a.qk_norm_shared:
        parts.q_layernorm = parts.k_layernorm = layer.norm
    if a.qk_l2_norm and a.rotates(layer.number):
        parts.q_layernorm = parts.k_layernorm = UnitNorm
    if a.qk_norm_of_heads:
        kind, heads = WholeNorm if a.qk_norm_whole else HeadNorm, (a.num_attention_heads, a.num_key_value_heads)
        parts.q_layernorm, parts.k_layernorm = (mcore.ModuleSpec(module=kind, params={"heads": count}) for count in heads)
    if a.attention_gate:
        own.module = GatedAttention


def _plug_latent(layer: Layer) -> None:
    _plug_attention(layer)
    own = layer.spec.submodules.self_attention
    own.module, own.submodules.linear_qkv = LatentAttention, mcore.IdentityOp
    own.params = own.params | {"architecture": layer.architecture, "norm": layer.norm, "linear": layer.modules.column_linear}


def _plug_delta_net(layer: Layer) -> None:
    linears = {"column_linear": layer.modules.column_linear, "row_linear": layer.modules.row_linear}
    layer.spec.submodules.self_attention = mcore.ModuleSpec(module=GatedDeltaNet, params={"architecture": layer.architecture, **linears})


def _plug_dense(layer: Layer) -> None:
    mlp, plain = mcore.submodules_of(layer.spec.submodules.mlp), (layer.modules.column_linear, layer.modules.row_linear)
    mlp.linear_fc1, mlp.linear_fc2 = map(biased, plain) if layer.architecture.mlp_bias else plain


def _plug_mixture(layer: Layer) -> None:
    column, row = layer.modules.column_linear, layer.modules.row_linear
    parts = mcore.submodules_of(layer.spec.submodules.mlp)
    if layer.architecture.shared_ffn_hidden_size:
        shared = mcore.submodules_of(parts.shared_experts)
        shared.linear_fc1, shared.linear_fc2 = column, row
    experts, has_biases = mcore.submodules_of(parts.experts), layer.architecture.expert_biases
    experts.linear_fc1, experts.linear_fc2 = (biased(column), biased_expert_out(row)) if has_biases else (column, row)


_ATTENDED = {"linear_qkv": Operation.qkv, "core_attention": Operation.attention, "linear_proj": Operation.projection}
_FEED_FORWARD = {"linear_fc1": LoraTarget.fc1, "linear_fc2": LoraTarget.fc2}
ATTENTION = LayerKind(  # with windows, chunks, sinks or a gate too
    plug=_plug_attention,
    linears={"linear_qkv": LoraTarget.qkv, "linear_proj": LoraTarget.proj},
    traced=_ATTENDED | {"q_layernorm": Operation.q_norm, "k_layernorm": Operation.k_norm},
    numbers=lambda a: a.hidden_size * a.num_attention_heads * a.head_dim,
)
LATENT = LayerKind(  # its norms are of what all heads share
    plug=_plug_latent,
    linears={**dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), LoraTarget.qkv), "linear_proj": LoraTarget.proj},
    traced=_ATTENDED,
    numbers=lambda a: a.hidden_size * (a.num_attention_heads * a.head_dim + a.latent_size + a.query_latent_size),
)
DELTA_NET = LayerKind(
    plug=_plug_delta_net,
    linears={"linear_qkvz": LoraTarget.qkv, "linear_ba": LoraTarget.qkv, "linear_out": LoraTarget.proj},
    traced={"linear_out": Operation.projection},
    numbers=lambda a: (
        (a.hidden_size + a.linear_conv_size) * (a.linear_key_heads * a.linear_key_head_dim + a.linear_value_heads * a.linear_value_head_dim)
    ),
    ones=("dt_bias", "out_norm.weight"),  # its norm is not zero-centred
)
DENSE = LayerKind(
    plug=_plug_dense,
    linears=_FEED_FORWARD,
    traced={},
    numbers=lambda a: a.hidden_size * a.ffn_hidden_size,
)
MIXTURE = LayerKind(  # its linear layers are each expert's
    plug=_plug_mixture,
    linears=_FEED_FORWARD,
    traced={},
    numbers=lambda a: a.hidden_size * a.num_experts * a.expert_ffn_hidden_size,
)
KINDS = (ATTENTION, LATENT, DELTA_NET, DENSE, MIXTURE)
# Linear layers whose input tensor parallelism splits; of the others it splits the output. They add to the residual stream.
SPLIT_INPUTS = ("linear_proj", "linear_fc2", "linear_out")


def attention_of(architecture: Architecture, layer: int) -> LayerKind:
    """The kind of a layer's attention, or of what stands in its place; layers count from 0."""
    return DELTA_NET if architecture.is_linear(layer) else LATENT if architecture.latent_size else ATTENTION


def feed_forward_of(architecture: Architecture, layer: int) -> LayerKind:
    """The kind of a layer's feed-forward part; layers count from 0."""
    return MIXTURE if architecture.has_experts(layer) else DENSE


def block_spec(
    config: mcore.TransformerConfig,
    *,
    vp_stage: int | None = None,
    architecture: Architecture,
    share_prompts: bool = False,
    split_norms: bool = False,
    modules: LayerModules = ORDINARY,
) -> mcore.TransformerBlockSubmodules:
    """The layer specification with our router, for every layer of this rank's chunk `vp_stage`: Transformer Engine's modules where the
    config asks for them, else Megatron-Core's local ones with our `modules`, whose core attention alone knows shared prompts.

    `split_norms`: no norm is fused with the linear layer behind it: adapters read that layer's input.
    """
    if config.transformer_impl == "transformer_engine":
        layer, norm = mcore.transformer_engine_specs(
            num_experts=config.num_moe_experts,
            qk_layernorm=architecture.qk_norm_shared,
            grouped_experts=config.moe_grouped_gemm,
            split_norms=split_norms,
        )
        if share_prompts:
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
        kinds = {_kinds(architecture, 0): layer}
    else:
        norm = mcore.ModuleSpec(module=modules.norm, params={"kind": architecture.normalization})
        numbers = {_kinds(architecture, number): number for number in range(architecture.num_layers)}
        kinds = {kind: _local_layer(config, architecture, modules, norm, number) for kind, number in numbers.items()}
    if isinstance(architecture, SeeingArchitecture) and architecture.deep_layers:
        for spec in kinds.values():
            spec.module = DeepLayer
    for spec in (spec for (_, feed_forward, _), spec in kinds.items() if feed_forward is MIXTURE):
        mcore.submodules_of(spec.submodules.mlp).router = mcore.ModuleSpec(module=Router, params={"architecture": architecture})
    first = mcore.get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + mcore.get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [kinds[_kinds(architecture, number)] for number in numbers]
    return mcore.TransformerBlockSubmodules(layer_specs=specs, layer_norm=None if architecture.residual_norms else norm)


def _kinds(architecture: Architecture, layer: int) -> tuple[LayerKind, LayerKind, bool]:
    """What the specifications of layers differ by: their kinds, and whether they have rotary positions."""
    return attention_of(architecture, layer), feed_forward_of(architecture, layer), architecture.rotates(layer)


def _local_layer(
    config: mcore.TransformerConfig, architecture: Architecture, modules: LayerModules, norm: mcore.ModuleSpec, number: int
) -> Any:
    attention, feed_forward, _ = _kinds(architecture, number)
    spec = copy.deepcopy(
        mcore.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if feed_forward is MIXTURE else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=architecture.qk_norm_shared,
            normalization=config.normalization,
        )
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm if architecture.pre_norms else mcore.IdentityOp
    if architecture.parallel_residual is ParallelResidual.shared_norm:
        spec.submodules.pre_mlp_layernorm = mcore.IdentityOp
    sums = architecture.parallel_residual != ParallelResidual.none or architecture.post_norms or architecture.residual_norms
    if sums or architecture.rope_local_theta:
        spec.module, spec.params = OwnLayer, {"architecture": architecture, "norm": norm}
    for kind in (attention, feed_forward):
        kind.plug(Layer(spec=spec, architecture=architecture, modules=modules, norm=norm, number=number))
    return spec


def finish_transformer_engine(decoder: torch.nn.Module) -> None:
    """Set what Megatron-Core's config cannot express for Transformer Engine's modules.

    Their products add weight gradients to the float32 buffers themselves: `gradient_accumulation_fusion` would ask the output layer for it
    too, which needs Apex. And the weights of experts say that, and along which dimension, their ranks split them, which is not told to the
    modules.
    """
    for name, module in decoder.named_modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
        if ".experts." in name and name.endswith(("linear_fc1", "linear_fc2")):
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    parameter.tensor_model_parallel, parameter.partition_stride = True, 1
                    parameter.partition_dim = 0 if name.endswith("linear_fc1") else 1
