"""Tiny random models of images and text whose text part has layers here; their config.json is laid out as that of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from hf_models import VOCAB, randomize

_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TEXT |= {"max_position_embeddings": 128, "vocab_size": VOCAB, "initializer_range": 0.15, "attention_dropout": 0.0}
_QWEN = _TEXT | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_cache": True}
_VL_IDS = {"vision_start_token_id": 52, "vision_end_token_id": 53, "image_token_id": 50, "video_token_id": 51}
_QWEN2_VL = (
    _QWEN | _VL_IDS | {"bos_token_id": 5, "eos_token_id": 6, "max_window_layers": 2, "sliding_window": 128, "use_sliding_window": False}
)
_QWEN2_VL |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "torch_dtype": "float32"}
_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
_TOWER |= {"spatial_merge_size": 2, "in_channels": 3, "temporal_patch_size": 2}
_TOWER3 = _TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_QWEN3 = _QWEN | {"head_dim": 16, "attention_bias": False, "bos_token_id": 5, "eos_token_id": 6, "rope_theta": 1e4, "dtype": "float32"}
_QWEN3 |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default"}}
_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_DELTA = {"attn_output_gate": True, "full_attention_interval": 4, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
_DELTA |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_value_head_dim": 16, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "attention_bias": False}
_DELTA |= {
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e4,
        "rope_type": "default",
    }
}
_EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
_CLIP = _EYES | {"model_type": "clip_vision_model", "projection_dim": 32}
_LLAMA = _TEXT | {"model_type": "llama", "rms_norm_eps": 1e-5}
_LLAMA4 = _TEXT | {"model_type": "llama4_text", "head_dim": 8, "attention_bias": False, "attn_scale": 0.1, "attn_temperature_tuning": True}
_LLAMA4 |= {"floor_scale": 16, "attention_chunk_size": 8, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 56, "rms_norm_eps": 1e-5}
_LLAMA4 |= {"no_rope_layers": [], "num_experts_per_tok": 1, "num_local_experts": 4, "use_qk_norm": True, "tie_word_embeddings": False}
_LLAMA4 |= {"rope_scaling": None, "rope_theta": 1e4, "hidden_act": "silu", "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}
_EYES4 = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vision_output_dim": 16}
_EYES4 |= {"image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16, "model_type": "llama4_vision_model"}


def _whole(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": name, "architectures": [f"{kind}ForConditionalGeneration"], **more}


# config.json as published, with smaller sizes: of Qwen2-VL-7B, Qwen2.5-VL-3B and 7B, Qwen3-VL-8B and 30B-A3B, Qwen3.5, Gemma-3-4b-it,
# Mistral-Small-3.1, Llama-4-Scout, llava-1.5-7b-hf, Idefics3-8B and SmolVLM.
FILES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _whole("qwen2_vl", "Qwen2VL", **_QWEN2_VL, tie_word_embeddings=False)
    | {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}},
    "qwen2_5_vl": _whole("qwen2_5_vl", "Qwen2_5_VL", **_QWEN2_VL, tie_word_embeddings=False)
    | {"vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}},
    "qwen2_5_vl_tied": _whole("qwen2_5_vl", "Qwen2_5_VL", **_QWEN2_VL, tie_word_embeddings=True)
    | {"vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}},
    "qwen3_vl": _whole("qwen3_vl", "Qwen3VL", **_VL_IDS, tie_word_embeddings=False)
    | {"text_config": _QWEN3 | {"model_type": "qwen3_vl_text"}, "vision_config": _TOWER3 | {"model_type": "qwen3_vl"}},
    "qwen3_vl_moe": _whole("qwen3_vl_moe", "Qwen3VLMoe", **_VL_IDS, tie_word_embeddings=False)
    | {"text_config": _QWEN3 | _MOE | {"model_type": "qwen3_vl_moe_text", "norm_topk_prob": True}}
    | {"vision_config": _TOWER3 | {"model_type": "qwen3_vl_moe"}},
    "qwen3_5": _whole("qwen3_5", "Qwen3_5", **_VL_IDS, tie_word_embeddings=True)
    | {"text_config": _QWEN | _DELTA | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "eos_token_id": 6}}
    | {"vision_config": _TOWER3 | {"deepstack_visual_indexes": [], "model_type": "qwen3_5"}},
    "qwen3_5_moe": _whole("qwen3_5_moe", "Qwen3_5Moe", **_VL_IDS, tie_word_embeddings=False)
    | {"text_config": _QWEN | _DELTA | _MOE | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 28, "eos_token_id": 6}}
    | {"vision_config": _TOWER3 | {"deepstack_visual_indexes": [], "model_type": "qwen3_5_moe"}},
    "gemma3": _whole("gemma3", "Gemma3", boi_token_index=51, eoi_token_index=52, eos_token_id=[1, 6], image_token_index=50)
    | {"initializer_range": 0.02, "mm_tokens_per_image": 4, "torch_dtype": "float32"}
    | {
        "text_config": {key: _TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
        | {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 7}
        | {"sliding_window_pattern": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    }
    | {"vision_config": _EYES | {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "mistral3": _whole("mistral3", "Mistral3", image_token_index=50, multimodal_projector_bias=False, projector_hidden_act="gelu")
    | {"spatial_merge_size": 2, "torch_dtype": "float32", "vision_feature_layer": -1, "vision_config": _EYES | {"model_type": "pixtral"}}
    | {
        "text_config": _TEXT
        | {"model_type": "mistral", "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e9}
        | {"sliding_window": None, "use_cache": True}
    },
    "llama4": _whole("llama4", "Llama4", boi_token_index=51, eoi_token_index=52, image_token_index=50, text_config=_LLAMA4)
    | {"tie_word_embeddings": False, "torch_dtype": "float32", "vision_config": _EYES4},
    "llava": _whole("llava", "Llava", ignore_index=-100, image_token_index=50, pad_token_id=8, projector_hidden_act="gelu")
    | {"text_config": _LLAMA | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}}
    | {"tie_word_embeddings": False, "vision_config": _CLIP | {"vocab_size": 32000}}
    | {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "torch_dtype": "float32"},
    "llava_qwen2": _whole("llava", "Llava", image_token_index=50, text_config=_TEXT | {"model_type": "qwen2", "tie_word_embeddings": True})
    | {"vision_config": _CLIP},
    "idefics3": _whole("idefics3", "Idefics3", image_token_id=50, scale_factor=2, tie_word_embeddings=False)
    | {"text_config": _LLAMA | {"pad_token_id": 8}, "vision_config": _EYES},
    "smolvlm": _whole("smolvlm", "SmolVLM", image_token_id=50, scale_factor=2, tie_word_embeddings=False)
    | {"text_config": _LLAMA | {"head_dim": 8, "pad_token_id": 8}, "vision_config": _EYES},
}


def write_wrapped(name: str, directory: Path) -> None:
    """A random model in `transformers`' own files, but with its config.json as published."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.json"
    unlike = {"tie_word_embeddings": False} if name == "mistral3" else {}  # published weights have an output layer of their own
    file.write_text(json.dumps(FILES[name] | unlike))
    made = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(directory))
    randomize(made, seed=3)
    made.save_pretrained(directory)
    file.write_text(json.dumps(FILES[name], indent=2))
    (directory / "preprocessor_config.json").write_text('{"size": {"height": 16}}')
