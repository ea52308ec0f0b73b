"""The kinds of attention and of feed-forward parts that layers have: one `LayerKind` each, with what the layer specification, adapters,
initialisation, traces and checks need to know of it. And that specification: Megatron-Core's, into which the kinds plug their modules
(nothing is patched).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aligner.models.config import Architecture, LoraTarget, ParallelResidual
from aligner.models.modules.attention import CoreAttention
from aligner.models.modules.gated_delta_net import GatedAttention, GatedDeltaNet
from aligner.models.modules.latent_attention import LatentAttention
from aligner.models.modules.layers import (
    ORDINARY,
    BiasedExpertOut,
    HeadNorm,
    LayerModules,
    OwnLayer,
    OwnRotation,
    UnitNorm,
    WholeNorm,
    biased,
    needs_own_layer,
    needs_own_rotation,
)
from aligner.models.modules.router import Router
from aligner.models.training.tracing import Operation
from aligner.parallel.mcore import (
    IdentityOp,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    submodules_of,
    transformer_engine_specs,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer's specification while its kinds plug their modules in; `number` counts from 0."""

    spec: Any
    architecture: Architecture
    modules: LayerModules
    norm: ModuleSpec
    number: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerKind:
    """A kind of attention, or of feed-forward part."""

    plug: Callable[[Layer], None]  # into Megatron-Core's local specification
    linears: Mapping[str, LoraTarget]  # linear layers that can get adapters, with the target that is all of each
    traced: Mapping[str, Operation]  # modules whose outputs are operations of a trace
    numbers: Callable[[Architecture], int]  # a lower bound of a layer's weights
    ones: tuple[str, ...] = field(default=())  # vectors that start at 1, whatever the model's norms start at


def _plug_attention(layer: Layer) -> None:
    a, own = layer.architecture, layer.spec.submodules.self_attention
    parts = own.submodules
    if needs_own_rotation(a):
        own.module, own.params = OwnRotation, own.params | {"architecture": a}
    parts.core_attention = ModuleSpec(module=layer.modules.core_attention, params={"architecture": a})
    parts.linear_qkv = layer.modules.column_linear
    parts.linear_proj = biased(layer.modules.row_linear) if a.attention_out_bias else layer.modules.row_linear
    if a.qk_norm_shared:
        parts.q_layernorm = parts.k_layernorm = layer.norm
    if a.qk_l2_norm and a.rotates(layer.number):
        parts.q_layernorm = parts.k_layernorm = UnitNorm
    if a.qk_norm_of_heads:
        kind, heads = WholeNorm if a.qk_norm_whole else HeadNorm, (a.num_attention_heads, a.num_key_value_heads)
        parts.q_layernorm, parts.k_layernorm = (ModuleSpec(module=kind, params={"heads": count}) for count in heads)
    if a.attention_gate:
        own.module = GatedAttention


def _plug_latent(layer: Layer) -> None:
    _plug_attention(layer)
    own = layer.spec.submodules.self_attention
    own.module, own.submodules.linear_qkv = LatentAttention, IdentityOp
    own.params = own.params | {"architecture": layer.architecture, "norm": layer.norm, "linear": layer.modules.column_linear}


def _plug_delta_net(layer: Layer) -> None:
    linears = {"column_linear": layer.modules.column_linear, "row_linear": layer.modules.row_linear}
    layer.spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"architecture": layer.architecture, **linears})


def _plug_dense(layer: Layer) -> None:
    mlp, plain = submodules_of(layer.spec.submodules.mlp), (layer.modules.column_linear, layer.modules.row_linear)
    mlp.linear_fc1, mlp.linear_fc2 = map(biased, plain) if layer.architecture.mlp_bias else plain


def _plug_mixture(layer: Layer) -> None:
    if layer.architecture.expert_biases:
        experts = submodules_of(submodules_of(layer.spec.submodules.mlp).experts)
        experts.linear_fc1, experts.linear_fc2 = biased(layer.modules.column_linear), BiasedExpertOut


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
    config: TransformerConfig,
    *,
    vp_stage: int | None = None,
    architecture: Architecture,
    share_prompts: bool = False,
    split_norms: bool = False,
    modules: LayerModules = ORDINARY,
) -> TransformerBlockSubmodules:
    """The layer specification with our router, for every layer of this rank's chunk `vp_stage`: Transformer Engine's modules where the
    config asks for them, else Megatron-Core's local ones with our `modules`, whose core attention alone knows shared prompts.

    `split_norms`: no norm is fused with the linear layer behind it: adapters read that layer's input.
    """
    if config.transformer_impl == "transformer_engine":
        layer, norm = transformer_engine_specs(
            num_experts=config.num_moe_experts,
            qk_layernorm=architecture.qk_norm_shared,
            grouped_experts=config.moe_grouped_gemm,
            split_norms=split_norms,
        )
        if share_prompts:
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
        kinds = {_kinds(architecture, 0): layer}
    else:
        norm = ModuleSpec(module=modules.norm, params={"kind": architecture.normalization})
        numbers = {_kinds(architecture, number): number for number in range(architecture.num_layers)}
        kinds = {kind: _local_layer(config, architecture, modules, norm, number) for kind, number in numbers.items()}
    for spec in (spec for (_, feed_forward, _), spec in kinds.items() if feed_forward is MIXTURE):
        submodules_of(spec.submodules.mlp).router = ModuleSpec(module=Router, params={"architecture": architecture})
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [kinds[_kinds(architecture, number)] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=None if architecture.residual_norms else norm)


def _kinds(architecture: Architecture, layer: int) -> tuple[LayerKind, LayerKind, bool]:
    """What the specifications of layers differ by: their kinds, and whether they have rotary positions."""
    return attention_of(architecture, layer), feed_forward_of(architecture, layer), architecture.rotates(layer)


def _local_layer(config: TransformerConfig, architecture: Architecture, modules: LayerModules, norm: ModuleSpec, number: int) -> Any:
    attention, feed_forward, _ = _kinds(architecture, number)
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if feed_forward is MIXTURE else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=architecture.qk_norm_shared,
            normalization=config.normalization,
        )
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm if architecture.pre_norms else IdentityOp
    if architecture.parallel_residual is ParallelResidual.shared_norm:
        spec.submodules.pre_mlp_layernorm = IdentityOp
    if needs_own_layer(architecture):
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
