"""Tiny random models of every family, written by transformers: what loading, training, generation and exports are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aligner.models.modules.linear import linear_weight

VOCAB = 61  # not a multiple of the vocabulary padding
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 2.0, "rope_theta": 1e4}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_HALF = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 9, "num_key_value_heads": 1, "sliding_window": 7, "intermediate_size": 40}
_NO_SPECIAL = {"pad_token_id": 0, "eos_token_id": 2}
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.3, 2.5], "long_factor": [1.1, 4.0, 9.5]}
_PHI3_LONG = {"model_type": "phi3", "num_key_value_heads": 1, "partial_rotary_factor": 0.75, "rope_theta": 100.0, **_NO_SPECIAL}
_GPT2 = {"model_type": "gpt2", "n_inner": 48, "bos_token_id": 0, "eos_token_id": 0}
_QWEN3_MOE = {"model_type": "qwen3_moe", "tie_word_embeddings": False, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
_MOE = {"n_routed_experts": 8, "moe_intermediate_size": 20, "n_shared_experts": 1, "first_k_dense_replace": 1}
_DEEPSEEK = _MOE | {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6}
_DEEPSEEK |= {"v_head_dim": 10, "rms_norm_eps": 1e-2}  # other than the 1e-6 of the latents' norms
_MLA_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
_LLAMA4 = {"model_type": "llama4_text", "intermediate_size": 20, "intermediate_size_mlp": 28, "num_local_experts": 4, **_NO_SPECIAL}
_LLAMA3_STEP = _LLAMA3 | {"rope_theta": 1e3, "high_freq_factor": 1.0, "original_max_position_embeddings": 64}  # as Llama 4 Scout's file
_GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "intermediate_size": 24}
_GPT_OSS |= {"rope_parameters": _MLA_YARN | {"truncate": False}}
_QWEN3_NEXT = {"model_type": "qwen3_next", "num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
_QWEN3_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 14, "linear_value_head_dim": 22}
_QWEN3_5 = {"num_key_value_heads": 1, "head_dim": 12, "rope_parameters": _HALF | {"mrope_section": [1, 1, 1], "mrope_interleaved": True}}
_QWEN3_5 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 14, "linear_value_head_dim": 22}
HF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 10000.0},
    "llama_tied_llama3_rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": _LLAMA3 | {"rope_theta": 1e6}},
    "llama_multi_head": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "llama_biases_llama3_rope": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 12}
    | {"rope_parameters": _LLAMA3 | {"high_freq_factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}},
    "llama_linear_rope": {"model_type": "llama", "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama_yarn": {"model_type": "llama", "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": _YARN},
    "qwen3_yarn": {"model_type": "qwen3", "head_dim": 16, "rope_scaling": _YARN | {"truncate": False, "beta_fast": 16, "mscale": 0.7}},
    "qwen2_dynamic_rope": {"model_type": "qwen2", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1000.0},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _QWEN3_MOE | {"num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen3_moe_unnormalized": _QWEN3_MOE | {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 1, "head_dim": 12, "hidden_size": 36},
    "mistral_no_window": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
    "qwen2_windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3_layer_types": {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 17}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "mixtral_window": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen3_moe_window": _QWEN3_MOE | {"num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 6},
    "phi3": {"model_type": "phi3", "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 2, "partial_rotary_factor": 0.5},
    "phi3_window": {"model_type": "phi3", "sliding_window": 7, "pad_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": True},
    "phi3_longrope": _PHI3_LONG | {"original_max_position_embeddings": 1, "rope_scaling": _LONGROPE | {"attention_factor": 1.3}},
    "phi3_longrope_short": _PHI3_LONG
    | {"original_max_position_embeddings": 128, "rope_scaling": _LONGROPE | {"factor": 32.0}, "tie_word_embeddings": True},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_act": "gelu_fast", "rotary_pct": 0.5, "rotary_emb_base": 500, "eos_token_id": 0},
    "gpt_neox_sequential": {"model_type": "gpt_neox", "use_parallel_residual": False, "tie_word_embeddings": True, "eos_token_id": 0}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "opt": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "opt_untied": {"model_type": "opt", "ffn_dim": 56, "word_embed_proj_dim": 32, "tie_word_embeddings": False},
    "opt_projected": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
    "opt_projected_untied": {"model_type": "opt", "ffn_dim": 56, "word_embed_proj_dim": 24, "tie_word_embeddings": False},
    "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gemma2_plain": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 4096},
    "gemma3_text": _GEMMA
    | {"model_type": "gemma3_text", "num_hidden_layers": 4, "layer_types": [_WINDOWED, _FULL, _WINDOWED, _FULL]}
    | {"rope_parameters": {_WINDOWED: {"rope_type": "default", "rope_theta": 100.0}, _FULL: _LINEAR | {"rope_theta": 1e4}}},
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "olmo2_tied": {"model_type": "olmo2", "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 500},
    "glm4": {"model_type": "glm4", "head_dim": 12, "num_key_value_heads": 2, "rope_parameters": _HALF, **_NO_SPECIAL},
    "glm4_tied": {"model_type": "glm4", "head_dim": 8, "attention_bias": False, "tie_word_embeddings": True, **_NO_SPECIAL}
    | {"rope_parameters": _MLA_YARN | {"partial_rotary_factor": 0.5}},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5, "num_key_value_heads": 1, "eos_token_id": 2},
    "cohere_untied": {"model_type": "cohere", "logit_scale": 1.5, "tie_word_embeddings": False, "eos_token_id": 2},
    "cohere_plus": {
        "model_type": "cohere",
        "use_qk_norm": True,
        "logit_scale": 1.0,
        "head_dim": 12,
        "num_key_value_heads": 2,
        "eos_token_id": 2,
    },
    "cohere2": {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 7, "sliding_window_pattern": 2}
    | {"logit_scale": 0.5, "num_key_value_heads": 1, "eos_token_id": 2},
    "cohere2_untied": {"model_type": "cohere2", "layer_types": [_FULL, _WINDOWED], "sliding_window": 9, "tie_word_embeddings": False}
    | {"logit_scale": 1.5, "rope_theta": 100.0, "eos_token_id": 2},
    "deepseek_v2": _DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None, "routed_scaling_factor": 1.5, "num_experts_per_tok": 3},
    "deepseek_v2_groups": _DEEPSEEK
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    | {"first_k_dense_replace": 0, "rope_parameters": _MLA_YARN | {"mscale": 0.7}},
    "deepseek_v3": _DEEPSEEK
    | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    | {"rope_parameters": _MLA_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3_plain": _DEEPSEEK
    | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": None}
    | {"rope_interleave": False, "tie_word_embeddings": True, "n_shared_experts": 2, "v_head_dim": 14},
    "glm4_moe": _MOE
    | {
        "model_type": "glm4_moe",
        "head_dim": 12,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_experts_per_tok": 3,
    }
    | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0, "rope_parameters": _HALF},
    "glm4_moe_plain": _MOE
    | {"model_type": "glm4_moe", "tie_word_embeddings": True, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_shared_experts": 2}
    | {"rope_parameters": _MLA_YARN | {"partial_rotary_factor": 0.5}},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 7, "num_key_value_heads": 4, **_NO_SPECIAL}
    | {"rope_parameters": {_WINDOWED: {"rope_type": "default", "rope_theta": 100.0}, _FULL: _MLA_YARN}},
    "olmo3_tied": {
        "model_type": "olmo3",
        "tie_word_embeddings": True,
        "layer_types": [_FULL, _WINDOWED],
        "sliding_window": 9,
        **_NO_SPECIAL,
    },
    "ministral": {"model_type": "ministral", "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 12, "sliding_window": 7}
    | {"layer_types": [_FULL, _WINDOWED, _WINDOWED, _WINDOWED], "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "tie_word_embeddings": True,
    }
    | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [0], "num_key_value_heads": 1},
    "qwen2_moe_normalized": {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 36, "qkv_bias": False, "norm_topk_prob": True},
    "qwen2_moe_windows": {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"shared_expert_intermediate_size": 28, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "llama4_text": _LLAMA4
    | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 7, "head_dim": 12}
    | {"num_key_value_heads": 1, "floor_scale": 5, "attn_scale": 0.7, "rope_parameters": _LLAMA3_STEP},
    "llama4_text_tied": _LLAMA4
    | {"head_dim": 8, "use_qk_norm": False, "no_rope_layers": [0, 1], "tie_word_embeddings": True, "attention_bias": True}
    | {"attn_temperature_tuning": False, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 9},
    "qwen3_moe_dense_layers": _QWEN3_MOE | {"num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": None},
    "gpt_oss": _GPT_OSS | {"num_key_value_heads": 1, "head_dim": 12, "num_experts_per_tok": 3, "swiglu_limit": 0.8},
    "gpt_oss_tied": _GPT_OSS
    | {"tie_word_embeddings": True, "attention_bias": False, "layer_types": [_FULL] * 2, "head_dim": 8}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    "qwen3_next": _QWEN3_NEXT
    | {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 12, "num_experts_per_tok": 3, "linear_conv_kernel_dim": 3}
    | {"rope_parameters": _HALF, "mlp_only_layers": [1], "full_attention_interval": 3},
    "qwen3_next_tied": _QWEN3_NEXT
    | {"tie_word_embeddings": True, "head_dim": 16, "num_experts_per_tok": 2, "norm_topk_prob": False}
    | {"layer_types": [_FULL, "linear_attention"], "linear_num_key_heads": 4},
    "qwen3_5_text": _QWEN3_5
    | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}
    | {"layer_types": ["linear_attention", _FULL, "linear_attention", "linear_attention"]},
    "qwen3_5_moe_text": _QWEN3_5
    | {"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"shared_expert_intermediate_size": 28, "layer_types": [_FULL, "linear_attention"], "linear_num_key_heads": 4},
    "nemotron": {"model_type": "nemotron"},
    "gpt2": _GPT2,
    "gpt2_scaled": _GPT2 | {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
}


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int) -> None:
    """Weights that matter everywhere: order-one logits, biases far from zero, norm weights far from one."""
    generator = torch.Generator().manual_seed(seed)
    router_biases = [named for named in module.named_buffers() if "e_score_correction_bias" in named[0]]
    zero_centred = getattr(getattr(module, "config", None), "model_type", "").startswith(("qwen3_next", "qwen3_5"))
    for name, parameter in (*module.named_parameters(), *router_biases):
        weight = linear_weight(parameter)  # which may be packed
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or ".ln_" in name:
            # Qwen3-Next and 3.5 multiply by 1 + these; around 2, their layers would make rounding errors larger than they are elsewhere.
            weight.write((0 if zero_centred and "linear_attn" not in name else 1) + 0.3 * noise)
        elif name.endswith("A_log"):  # states that last for many tokens
            weight.write(noise - 3)
        else:
            weight.write(noise * (0.5 if "bias" in name or "sinks" in name else 0.2))


def write(name: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(SIZES | HF_MODELS[name])))
    randomize(model, seed=len(name))
    model.save_pretrained(directory)
