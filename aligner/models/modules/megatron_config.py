"""A model's `TransformerConfig` for Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.architecture import rope
from aligner.models.architecture.divisible import FP8_FORMATS, check_fp8, check_together, fp8_recipe
from aligner.models.config import Activation, Architecture, Dtype, ModelConfig, Normalization, Recompute
from aligner.models.modules import batch_invariant
from aligner.models.modules.fusions import Fusions, Kernel, fusions
from aligner.parallel import mcore, platform
from aligner.parallel.mcore import TransformerConfig
from aligner.parallel.topology import ParallelConfig

# The non-linearities of feed-forward layers, the trainer's and the engine's.
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.squared_relu: lambda x: F.relu(x).square(),
    Activation.relu: F.relu,
    Activation.quick_gelu: lambda x: x * torch.sigmoid(1.702 * x),
}


def activation_of(architecture: Architecture) -> Callable[[Tensor], Tensor]:
    """What comes between a feed-forward layer's two matrices: [..., inner] of [gate x; up x] side by side, or of up x."""
    activation = ACTIVATIONS[architecture.activation]
    if not architecture.gated_mlp:
        return activation
    return partial(_gated, activation=activation, limit=architecture.glu_limit, offset=architecture.glu_offset)


def _gated(inner: Tensor, *, activation: Callable[[Tensor], Tensor], limit: float, offset: float) -> Tensor:
    """activation(gate x) * (up x + offset), both cut at the limit if there is one."""
    gate, up = inner.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + offset if offset else up)


def resolve_dtype(dtype: Dtype) -> torch.dtype:
    return platform.default_dtype() if dtype == Dtype.auto else getattr(torch, Dtype(dtype).value)


def transformer_config(architecture: Architecture, model: ModelConfig, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron-Core's config. It initialises no weight, but not through `perform_initialization=False`, which also leaves out the
    tensor-parallel attributes and so corrupts gradient norms."""
    check_together(architecture, model, parallel)
    dtype = resolve_dtype(model.dtype)
    fused = fusions(architecture, model, dtype)
    if parallel.tp_comm_overlap and not fused.transformer_engine:
        raise ConfigError(f"parallel.tp_comm_overlap=true: needs Transformer Engine's layers: {fused.reason}; allowed: false")
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        gated_linear_unit=architecture.gated_mlp,
        activation_func=(batch_invariant.ACTIVATIONS if model.batch_invariant else ACTIVATIONS)[architecture.activation],
        activation_func_clamp_value=architecture.glu_limit or None,
        glu_linear_offset=architecture.glu_offset,
        normalization="RMSNorm" if architecture.normalization in (Normalization.rms_norm, Normalization.rms_norm_1p) else "LayerNorm",
        layernorm_zero_centered_gamma=architecture.normalization == Normalization.layer_norm_1p,
        layernorm_epsilon=architecture.norm_eps,
        add_bias_linear=architecture.linear_bias,
        add_qkv_bias=architecture.qkv_bias,
        attention_output_gate=architecture.attention_gate,
        hetereogenous_dist_checkpoint=bool(architecture.linear_attention_layers),  # equal layers would be saved as one tensor
        # Megatron-Core sums such norms' gradients over tensor-parallel ranks; those of all heads are each rank's own.
        qk_layernorm=architecture.qk_norm_shared,
        no_rope_freq=[int(not architecture.rotates(layer)) for layer in range(architecture.num_layers)]
        if architecture.no_rope_layers
        else None,
        softmax_scale=softmax_scale(architecture),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **dict.fromkeys(("init_method", "output_layer_init_method"), lambda weight: weight),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        calculate_per_token_loss=True,  # gradients of sums; divided once by the global count
        use_cpu_initialization=not torch.cuda.is_available(),
        # Of torch's layers; the output layer, which is never called, would refuse it where Apex is absent. See `fuse_weight_gradients`.
        gradient_accumulation_fusion=not fused.transformer_engine and fused.on(Kernel.weight_gradients),
        masked_softmax_fusion=False,  # of a core attention that is not used
        bias_activation_fusion=fused.on(Kernel.swiglu),
        bias_dropout_fusion=fused.on(Kernel.residual),
        apply_rope_fusion=fused.on(Kernel.rope),
        cross_entropy_loss_fusion=False,  # its backward pass is in bfloat16; `aligner.parallel.logprobs` has one of our own
        transformer_impl="transformer_engine" if fused.transformer_engine else "local",
        **_fp8(architecture, model, parallel),
        **_layout(parallel),
        **_experts(architecture, model, fused),
        **_RECOMPUTATION[model.recompute],
    )


def _fp8(architecture: Architecture, model: ModelConfig, parallel: ParallelConfig) -> dict[str, str]:
    if not model.fp8:
        return {}
    major, minor = torch.cuda.get_device_capability()
    recipe = fp8_recipe(model, major + minor / 10)
    check_fp8(architecture, model, parallel, recipe)
    if problem := mcore.fp8_problem(recipe.value):
        raise ConfigError(
            f"model.fp8_recipe={model.fp8_recipe.value}: transformer-engine {mcore.transformer_engine_version()} cannot compute with "
            f"{recipe.value} here: {problem}; allowed: another recipe, or model.fp8=false"
        )
    return {"fp8": FP8_FORMATS[recipe], "fp8_recipe": recipe.value}


def softmax_scale(architecture: Architecture) -> float | None:
    """What scores are multiplied by; None is 1 / sqrt(head_dim). A factor on all cosines and sines is its square on scores."""
    if architecture.latent_size:  # Megatron-Core's config has the values' size; of each head a part is rotated
        return rope.score_scale(architecture)
    scale, factor = architecture.attention_scale, rope.factor_of_scores(architecture)
    return (scale or 1 / math.sqrt(architecture.head_dim)) * factor**2 if scale or factor != 1 else None


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel.vpp > 1
    return {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        "tp_comm_overlap": parallel.tp_comm_overlap,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers or None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "variable_seq_lengths": False,
        # Batched exchanges under the interleaved schedule corrupt gradients silently on gloo, and so do outputs that are freed early:
        # gloo's send reads them after it has returned.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": platform.backend() == "gloo",  # a wait after each exchange that old versions of PyTorch need
        "deallocate_pipeline_outputs": platform.backend() != "gloo",
    }


def _experts(architecture: Architecture, model: ModelConfig, fused: Fusions) -> dict[str, Any]:
    if not architecture.num_experts:
        return {}
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn_hidden_size,
        # A softmax over the chosen experts' logits is the softmax over all experts, divided by the chosen ones' sum.
        "moe_router_pre_softmax": not architecture.normalize_expert_weights,
        "moe_layer_freq": [int(architecture.has_experts(layer)) for layer in range(architecture.num_layers)],
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if architecture.router_sigmoid else "softmax",
        "moe_router_enable_expert_bias": architecture.router_bias,
        "moe_router_bias_update_rate": model.router_bias_update_rate,
        "moe_router_topk_scaling_factor": architecture.router_scale if architecture.router_scale != 1 else None,
        "moe_shared_expert_intermediate_size": architecture.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": architecture.shared_expert_gate,
        "moe_apply_probs_on_input": architecture.weighted_expert_inputs,
        "moe_router_load_balancing_type": "aux_loss" if model.router_aux_loss_coef else "none",
        "moe_aux_loss_coeff": model.router_aux_loss_coef,
        "moe_z_loss_coeff": model.router_z_loss_coef or None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fused.on(Kernel.experts),
        "moe_permute_fusion": fused.on(Kernel.permutation),
    }


_RECOMPUTATION: dict[Recompute, dict[str, Any]] = {
    Recompute.none: {},
    Recompute.selective: {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    Recompute.full: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
