"""Megatron-Core's local layer specification with the modules that it lacks, plugged in through that specification (nothing is patched):
norms for sequence parallelism, layers with other sums and norms, the core attention of `attention.py`, the router of `router.py`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.config import Architecture, Normalization, ParallelResidual
from aligner.models.modules.attention import CoreAttention, split_for_checkpoint
from aligner.models.modules.gated_delta_net import GatedAttention, GatedDeltaNet
from aligner.models.modules.latent_attention import LatentAttention
from aligner.models.modules.router import Router
from aligner.parallel.mcore import (
    ColumnParallelLinear,
    IdentityOp,
    ModuleSpec,
    PackedSeqParams,
    RowParallelLinear,
    SelfAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    build_module,
    copy_to_tensor_model_parallel_region,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
    submodules_of,
    transformer_engine_specs,
)


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

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> the same shape."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Norm:
    """RMSNorm or LayerNorm whose weights say whether their gradients must be summed over the tensor-parallel ranks."""

    rms_norm: type[torch.nn.Module] = torch.nn.RMSNorm
    layer_norm: type[torch.nn.Module] = torch.nn.LayerNorm
    layer_norm_1p: type[torch.nn.Module] = ZeroCenteredLayerNorm
    rms_norm_1p: type[torch.nn.Module] = ZeroCenteredRMSNorm
    layer_norm_no_bias: type[torch.nn.Module] = LayerNormWithoutBias

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, kind: Normalization, **_: Any) -> torch.nn.Module:
        # None is torch's default device: the CPU, or the meta device while a plan is made.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = getattr(cls, kind.value)(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def needs_own_layer(architecture: Architecture) -> bool:
    """Whether a layer of this architecture is an `OwnLayer`."""
    kinds = architecture.post_norms, architecture.residual_norms, architecture.rope_local_theta
    return architecture.parallel_residual != ParallelResidual.none or any(kinds)


class OwnLayer(TransformerLayer):
    """A dense layer without dropout. With two rotary bases its angles come side by side, those of layers without a window first."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, architecture: Architecture, norm: ModuleSpec, **options: Any
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
            self.post_attention_layernorm, self.post_mlp_layernorm = (build_module(norm, config=config, **sizes) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
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


def needs_own_rotation(architecture: Architecture) -> bool:
    """Whether attention of this architecture is an `OwnRotation`."""
    factored = architecture.rope_attention_factor != rope.factor_of_scores(architecture)
    return not architecture.latent_size and (architecture.rotary_interleaved or factored)


class OwnRotation(SelfAttention):
    """Rotates neighbouring dimensions together: they are put half of the rotated ones apart, where Megatron-Core rotates them. Queries and
    keys are reordered alike, so that scores do not change. Of heads that are rotated in part it multiplies that part by its factor."""

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
    """A linear layer's output and the bias that it leaves to its caller."""
    return output[0] if output[1] is None else output[0] + output[1]


class NormOfHeads(torch.nn.Module):
    """What norms of the queries, or of the keys, share whose weights are of all heads side by side. Each tensor-parallel rank has its
    heads'."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, **_: Any) -> None:
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        self.ranks = config.tensor_model_parallel_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(self.size // self.ranks, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For checkpoints: the weight by its rank's share."""
        return split_for_checkpoint({"weight": self.weight}, prefix, sharded_offsets)


class WholeNorm(NormOfHeads):
    """RMSNorm over the heads of the queries, or of the keys, together (OLMo 2, 2501.00656)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] of this rank."""
        flat = x.flatten(-2).float()
        squares = flat.square().sum(dim=-1, keepdim=True)
        if self.ranks > 1:  # every rank's output depends on the sum of all: it is summed forward, and its gradient backward
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normed.to(x.dtype) * self.weight).view(x.shape)


class HeadNorm(NormOfHeads):
    """LayerNorm without biases over each head, which has weights of its own (Cohere's Command R+)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] of this rank."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModules:
    """What the local specification's layers are made of."""

    norm: type[Norm] = Norm
    core_attention: type[CoreAttention] = CoreAttention
    column_linear: type[ColumnParallelLinear] = ColumnParallelLinear
    row_linear: type[RowParallelLinear] = RowParallelLinear


ORDINARY = LayerModules()


@cache
def biased(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same with a bias, where `TransformerConfig` would give all linear layers one or none."""

    def init(self: torch.nn.Module, *args: Any, bias: bool, **options: Any) -> None:
        linear.__init__(self, *args, bias=True, **options)

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})


class BiasedExpertOut(RowParallelLinear):
    """An expert's second matrix with a bias. Of ranks that share the expert, whose outputs are summed, the first one adds it."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)
        self.bias.sequence_parallel = False  # its ranks see all tokens of the expert: their gradients are the same, not parts
        set_tensor_model_parallel_attributes(self.bias, self.tp_group.size() == 1, -1, 1)  # then other ranks have other experts

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The product and the bias: one without value, but with its gradient, where another rank adds it."""
        out, bias = super().forward(input_)
        # A copy: Megatron-Core adds to the product in place, which a view of an autograd function does not allow.
        return out.clone(), bias if self.tp_group.rank() == 0 else bias - bias.detach()


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

    `split_norms`: no norm is fused with the linear layer behind it, whose input somebody wants to see.
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
        kinds = {_kind(architecture, 0): layer}
    else:
        norm = _norm(architecture, modules)
        numbers = {_kind(architecture, number): number for number in range(architecture.num_layers)}
        kinds = {kind: _local_layer(config, architecture, modules, number) for kind, number in numbers.items()}
    for spec in (spec for (mixture, *_), spec in kinds.items() if mixture):
        submodules_of(spec.submodules.mlp).router = ModuleSpec(module=Router, params={"architecture": architecture})
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [kinds[_kind(architecture, number)] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=None if architecture.residual_norms else norm)


def _kind(architecture: Architecture, layer: int) -> tuple[bool, bool]:
    """Whether a layer, counted from 0, is a mixture of experts, whether it has rotary positions, and whether it is a delta net."""
    return architecture.has_experts(layer), architecture.rotates(layer), architecture.is_linear(layer)


def finish_transformer_engine(decoder: torch.nn.Module) -> None:
    """Mend what Megatron-Core's config cannot say of Transformer Engine's modules.

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


def _norm(architecture: Architecture, modules: LayerModules) -> ModuleSpec:
    return ModuleSpec(module=modules.norm, params={"kind": architecture.normalization})


def _local_layer(config: TransformerConfig, architecture: Architecture, modules: LayerModules, number: int) -> Any:
    mixture, rotates, linear = _kind(architecture, number)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=architecture.qk_norm_shared,
        normalization=config.normalization,
    )
    layer, norm = copy.deepcopy(spec), _norm(architecture, modules)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm if architecture.pre_norms else IdentityOp
    if architecture.parallel_residual is ParallelResidual.shared_norm:
        layer.submodules.pre_mlp_layernorm = IdentityOp
    if needs_own_layer(architecture):
        layer.module, layer.params = OwnLayer, {"architecture": architecture, "norm": norm}
    if needs_own_rotation(architecture):
        own = layer.submodules.self_attention
        own.module, own.params = OwnRotation, own.params | {"architecture": architecture}
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=modules.core_attention, params={"architecture": architecture})
    attention.linear_qkv = modules.column_linear
    attention.linear_proj = biased(modules.row_linear) if architecture.attention_out_bias else modules.row_linear
    if architecture.qk_norm_shared:
        attention.q_layernorm = attention.k_layernorm = norm
    if architecture.qk_l2_norm and rotates:
        attention.q_layernorm = attention.k_layernorm = UnitNorm
    if architecture.qk_norm_of_heads:
        kind = WholeNorm if architecture.qk_norm_whole else HeadNorm
        heads = architecture.num_attention_heads, architecture.num_key_value_heads
        attention.q_layernorm, attention.k_layernorm = (ModuleSpec(module=kind, params={"heads": count}) for count in heads)
    if architecture.latent_size:
        own = layer.submodules.self_attention
        own.module, attention.linear_qkv = LatentAttention, IdentityOp
        own.params = own.params | {"architecture": architecture, "norm": norm, "linear": modules.column_linear}
    if mixture and architecture.expert_biases:
        experts = submodules_of(submodules_of(layer.submodules.mlp).experts)
        experts.linear_fc1, experts.linear_fc2 = biased(modules.column_linear), BiasedExpertOut
    if architecture.attention_gate:
        layer.submodules.self_attention.module = GatedAttention
    if linear:
        linears = {"column_linear": modules.column_linear, "row_linear": modules.row_linear}
        layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"architecture": architecture, **linears})
    if not mixture:
        mlp = submodules_of(layer.submodules.mlp)
        plain = modules.column_linear, modules.row_linear
        mlp.linear_fc1, mlp.linear_fc2 = map(biased, plain) if architecture.mlp_bias else plain
    return layer
