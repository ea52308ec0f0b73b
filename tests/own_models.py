"""Tiny random models of kinds that have no layers here, written by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import VOCAB

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15}
ENDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
# None of them is a family with layers here.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3Config", ENDS),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "exaone4": ("Exaone4Config", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "ernie4_5": ("Ernie4_5Config", {}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "attention_dropout": 0.1, "residual_dropout": 0.1}),
    "gemma4_text": (
        "Gemma4TextConfig",
        {"head_dim": 16, "sliding_window": 8, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
}

# Those that hide something: training modes that draw, an output layer with a bias, a limit under another name, routers in float32.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "phimoe": ("PhimoeConfig", ENDS | _EXPERTS),
    "biogpt": ("BioGptConfig", ENDS | {"layerdrop": 0.5}),
    "phi": ("PhiConfig", ENDS),
    "unused": ("PhiConfig", ENDS),  # a bias of zeros, which gets no gradient
    "recurrent_gemma": ("RecurrentGemmaConfig", {"lru_width": 32, "attention_window_size": 8, "head_dim": 8, "num_hidden_layers": 3}),
    "jetmoe": ("JetMoeConfig", _EXPERTS | {"kv_channels": 8}),
    # Caches that cannot be rearranged: blocks of compressed keys, states of another class, masks that ask the cache for its window.
    "deepseek_v4": (
        "DeepseekV4Config",
        {"head_dim": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "o_lora_rank": 16, "o_groups": 2, "hc_mult": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16}
        | {"index_n_heads": 2, "index_head_dim": 16, "sliding_window": 8},
    ),
    "xlstm": ("xLSTMConfig", ENDS | {"num_heads": 4, "chunk_size": 16}),
    "dory": ("DoryConfig", {"head_dim": 16, "sliding_window": 16}),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0}),
}


def make_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory(name)`: a random model of `CONFIGS` or `ODD`, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            kind, more = (CONFIGS | ODD)[name]
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | more)))
            for key, parameter in model.named_parameters():
                if key.endswith("lm_head.bias") and name == "phi":
                    torch.nn.init.normal_(parameter, std=0.1)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
_QWEN_PATCHES = {"spatial_merge_size": 2, "in_channels": 3, "temporal_patch_size": 2}
_QWEN_TOWER |= _QWEN_PATCHES
_QWEN_IDS = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
_DELTA = {f"linear_{name}": value for name, value in {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 16}.items()}
_DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 1e4, **more}}


# Models that also see: their class, the text part's sizes beyond `SIZES`, the tower's, and further fields.
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", _rope(1, 1, 2), _QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}, _QWEN_IDS),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 16} | _rope(2, 3, 3),
        _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        _QWEN_IDS,
    ),
    "qwen3_5": (
        "Qwen3_5",
        _DELTA | _rope(1, 1, 0, partial_rotary_factor=0.25, mrope_interleaved=True),
        _QWEN_TOWER | {"deepstack_visual_indexes": [], "num_position_embeddings": 64},
        _QWEN_IDS,
    ),
    "qwen2_vl": (
        "Qwen2VL",
        _rope(1, 1, 2),
        {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4} | _QWEN_PATCHES,
        _QWEN_IDS,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": []} | _rope(2, 3, 3),
        _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        _QWEN_IDS,
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
        | _DELTA
        | _rope(1, 1, 0, partial_rotary_factor=0.25, mrope_interleaved=True),
        _QWEN_TOWER | {"deepstack_visual_indexes": [], "num_position_embeddings": 64},
        _QWEN_IDS,
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
        _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_id": 50, "boi_token_id": 51, "eoi_token_id": 52},
    ),
    "llava": (
        "Llava",
        {"model_type": "llama"},
        _TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        {"image_token_index": 50},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, _TOWER | {"model_type": "pixtral"}, {"image_token_index": 50}),
    "smolvlm": ("SmolVLM", {"model_type": "llama"}, _TOWER, {"image_token_id": 50, "scale_factor": 2}),
}

# Its language model has an output layer of its own, and its processor does not say which tokens an image takes.
BLIP2: dict[str, Any] = {
    "vision_config": _TOWER,
    "qformer_config": _TOWER | {"encoder_hidden_size": 32, "vocab_size": VOCAB},
    "text_config": SIZES | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32} | ENDS,
    "num_query_tokens": 4,
    "image_token_index": 50,
}


def write_vision(name: str, directory: Path) -> None:
    """A random model that also sees."""
    kind, text, tower, more = VISION.get(name, ("Blip2", {}, {}, {}))
    torch.manual_seed(0)
    own = {"text_config": SIZES | text, "vision_config": tower, **more} if name in VISION else BLIP2
    getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")(**own)).save_pretrained(directory)


def write_granite(directory: Path, tokenizer: Path, *, vocab_size: int, seed: int = 0, positions: int = 64, spread: float = 0.02) -> Path:
    """A random Granite, whose logits have a factor, with the files of a tokenizer."""
    sizes = SIZES | {"vocab_size": vocab_size, "max_position_embeddings": positions, "initializer_range": spread}
    torch.manual_seed(seed)
    config = transformers.GraniteConfig(logits_scaling=2.0, bos_token_id=0, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in tokenizer.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory
