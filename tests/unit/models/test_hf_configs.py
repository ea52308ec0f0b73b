"""A Hugging Face config.json is read as transformers reads it; what changes the numbers and is not computed is refused by name."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import re
from dataclasses import asdict
from importlib import import_module

import pytest

from aligner.errors import ConfigError
from aligner.models.config import ROPE_FACTORS, Family
from aligner.models.families import architecture_from_hf, architecture_to_hf

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 32,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
LATENT = LLAMA | MIXTURE | {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 10}
GROUPED = {"n_group": 2, "topk_group": 1}
FILES = {
    **{
        name: LLAMA | {"model_type": name} for name in ("llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "olmo2", "glm4", "olmo3")
    },
    **{name: LLAMA | {"model_type": name} for name in ("cohere", "cohere2")},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": LLAMA | {"model_type": "qwen3_moe"} | EXPERTS,
    "nemotron": LLAMA | {"model_type": "nemotron", "hidden_size": 128},
    "gpt_neox": LLAMA | {"model_type": "gpt_neox", "num_attention_heads": 8},
    "opt": {"model_type": "opt", "ffn_dim": 48}
    | {key: value for key, value in LLAMA.items() if key not in ("model_type", "intermediate_size")},
    "gemma2": LLAMA | {"model_type": "gemma2", "num_attention_heads": 8},
    "gemma3_text": LLAMA | {"model_type": "gemma3_text", "num_attention_heads": 8},
    "deepseek_v2": LATENT | {"model_type": "deepseek_v2"},
    "deepseek_v3": LATENT | GROUPED | {"model_type": "deepseek_v3"},
    "glm4_moe": LLAMA | MIXTURE | {"model_type": "glm4_moe", "num_attention_heads": 8},
    "qwen2_moe": LLAMA | {"model_type": "qwen2_moe", "num_attention_heads": 16} | EXPERTS,
    "llama4_text": LLAMA
    | {"model_type": "llama4_text", "num_attention_heads": 8, "intermediate_size_mlp": 40, "num_local_experts": 4}
    | {"attention_chunk_size": 9},
    "gpt_oss": LLAMA | {"model_type": "gpt_oss", "num_attention_heads": 8},
    "qwen3_next": LLAMA | {"model_type": "qwen3_next", "num_hidden_layers": 5} | EXPERTS,
    "qwen3_5_text": LLAMA | {"model_type": "qwen3_5_text", "num_hidden_layers": 5},
    "qwen3_5_moe_text": {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    | {"model_type": "qwen3_5_moe_text"}
    | EXPERTS,
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 61},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


WINDOW = "sliding_attention"
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")


ATTRIBUTES = {"attention_softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping", "logits_scale": "logit_scale"}
ATTRIBUTES |= {"latent_size": "kv_lora_rank", "query_latent_size": "q_lora_rank", "value_head_dim": "v_head_dim"}
ATTRIBUTES |= {"router_scale": "routed_scaling_factor", "glu_limit": "swiglu_limit", "normalize_expert_weights": "norm_topk_prob"}
ATTRIBUTES |= {"linear_key_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads"}
ATTRIBUTES |= {name: name for name in ("linear_key_head_dim", "linear_value_head_dim")} | {"linear_conv_size": "linear_conv_kernel_dim"}


def theirs(hf: dict) -> dict:
    """What transformers makes of a file, in our terms."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[hf["model_type"]].from_dict(copy.deepcopy(hf))
    heads = config.num_attention_heads
    read = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tied_embeddings": config.tie_word_embeddings,
        "initializer_range": config.init_std if hf["model_type"] == "opt" else config.initializer_range,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "norm_eps": next((getattr(config, key) for key in _EPSILONS if hasattr(config, key)), 1e-5),
    }
    if hf["model_type"] == "opt":
        narrow, before = config.word_embed_proj_dim, config.do_layer_norm_before
        read |= {"pre_norms": before, "residual_norms": not before, "embedding_size": narrow if narrow != config.hidden_size else 0}
        return read | {"ffn_hidden_size": config.ffn_dim}
    if hf["model_type"] == "gpt2":
        scales = {"attention_scale": 0.0 if config.scale_attn_weights else 1.0}
        scales["attention_scale_by_layer"] = config.scale_attn_by_inverse_layer_idx
        return read | scales | {"ffn_hidden_size": config.n_inner or 4 * config.n_embd}
    read |= {name: getattr(config, key) or 0 for name, key in ATTRIBUTES.items() if hasattr(config, key)}
    if hf["model_type"].startswith("gemma"):
        read |= {"attention_scale": 0.0 if config.query_pre_attn_scalar == config.head_dim else config.query_pre_attn_scalar**-0.5}
    if hf["model_type"].startswith("cohere"):
        read |= {"qk_norm_by_head": getattr(config, "use_qk_norm", False)}
    if hasattr(config, "kv_lora_rank"):
        read |= {"head_dim": config.qk_head_dim, "num_key_value_heads": heads}
        read |= {"rotary_interleaved": getattr(config, "rope_interleave", True)}
    if hasattr(config, "first_k_dense_replace"):
        limited = 0 if hf["model_type"] == "deepseek_v2" and config.topk_method == "greedy" else config.n_group
        read |= {"dense_layers": list(range(min(config.first_k_dense_replace, config.num_hidden_layers)))}
        read |= {"shared_ffn_hidden_size": config.n_shared_experts * config.moe_intermediate_size}
        read |= {"router_groups": limited if (limited or 0) > 1 else 0}
    if hf["model_type"].startswith("qwen") and hasattr(config, "mlp_only_layers"):
        listed, step = config.mlp_only_layers or [], config.decoder_sparse_step
        read |= {"dense_layers": [n for n in range(config.num_hidden_layers) if n in listed or (n + 1) % step]}
    if hf["model_type"] == "gpt_oss":
        read |= {"qkv_bias": config.attention_bias, "attention_out_bias": config.attention_bias}
    if hasattr(config, "linear_num_key_heads"):
        linear = [number for number, kind in enumerate(config.layer_types) if kind == "linear_attention"]
        read |= {"linear_attention_layers": linear, "shared_ffn_hidden_size": getattr(config, "shared_expert_intermediate_size", 0)}
        read |= {} if linear else {name: 0 for name in ATTRIBUTES if name.startswith("linear_")}
    if hf["model_type"] in ("glm4", "glm4_moe"):
        read |= {"qkv_bias": config.attention_bias}
    if hf["model_type"] == "llama4_text":
        numbers = range(config.num_hidden_layers)
        chunked = "chunked_attention" in config.layer_types
        read |= {"attention_chunk": config.attention_chunk_size if chunked else 0, "qk_l2_norm": config.use_qk_norm}
        read |= {"no_rope_layers": [n for n in numbers if not config.no_rope_layers[n]]}
        read |= {"dense_layers": [n for n in numbers if n not in config.moe_layers], "qkv_bias": config.attention_bias}
        read |= {"attention_temperature": config.attn_scale if config.attn_temperature_tuning else 0.0}
        read |= {"attention_temperature_length": config.floor_scale, "shared_ffn_hidden_size": config.intermediate_size}
    config.standardize_rope_params()  # as the model does once more, which then sees the keys that are not the family's own
    rope = config.rope_parameters
    if "full_attention" in rope:
        read |= {"rope_local_theta": rope[WINDOW]["rope_theta"] if WINDOW in config.layer_types else 0.0}
        rope = rope["full_attention"]
    read |= {"rope_theta": rope["rope_theta"]} | dict.fromkeys(ROPE_FACTORS, 0.0)
    if rope["rope_type"] == "longrope":
        read |= {f"rope_{kind}_factors": rope[f"{kind}_factor"] for kind in ("short", "long")}
        read |= {"rope_attention_factor": ROPE_INIT_FUNCTIONS["longrope"](config)[1]}
    elif rope["rope_type"] != "default":
        read |= {f"rope_{rope['rope_type']}_factor": rope["factor"]}
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        read |= {"rope_original_length": rope["original_max_position_embeddings"]}
    if rope["rope_type"] == "llama3":
        read |= {"rope_low_freq_factor": rope["low_freq_factor"], "rope_high_freq_factor": rope["high_freq_factor"]}
    fraction = config.qk_rope_head_dim / config.qk_head_dim if hasattr(config, "qk_head_dim") else rope.get("partial_rotary_factor", 1.0)
    read |= {"rotary_fraction": fraction}
    if hf["model_type"] != "qwen3_5_moe_text":  # none of whose layers is dense
        read |= {"ffn_hidden_size": config.intermediate_size}
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) if WINDOW in types else None
    full = [number for number, kind in enumerate(types) if kind != WINDOW]
    if hf["model_type"] == "llama4_text":
        full = [number for number, kind in enumerate(types) if kind == "full_attention" and read["attention_chunk"]]
        read |= {"ffn_hidden_size": config.intermediate_size_mlp, "full_attention_layers": full}
    else:
        read |= {"sliding_window": window or 0, "full_attention_layers": full if window else []}
    if hasattr(config, "num_local_experts") or hasattr(config, "num_experts"):
        read |= {
            "num_experts": getattr(config, "num_local_experts", None) or config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
        }
        read |= {"expert_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size}
    return read


LONGROPE = {"type": "longrope", "short_factor": [1.5], "long_factor": [4]}
ROPES = {
    "v4": {"rope_theta": 5e5},
    "v4 with null": {"rope_theta": 5e5, "rope_scaling": None},
    "v5": {"rope_parameters": PLAIN},
    "v5 and nothing else": {"rope_parameters": {"rope_theta": 3e4}},
    "empty": {"rope_parameters": {}, "rope_scaling": {}},
    "type, as it was first called": {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    "both names of the type": {"rope_scaling": {"type": "yarn", "rope_type": "default"}, "rope_theta": 5e5},
    "both objects": {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "default", "rope_theta": 2e4}},
    "both objects, the base in the one that does not count": {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "default"}},
    "the base in both places": {"rope_parameters": {"rope_theta": 2e4}, "rope_theta": 5e5},
}
SCALED = {
    "v4": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "v5": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "both objects": {"rope_parameters": PLAIN, "rope_scaling": LLAMA3, "rope_theta": 5e5},
    "the length it was trained for is the model's": {"rope_scaling": {k: v for k, v in LLAMA3.items() if k[:8] != "original"}},
    "that length at the top": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4}, "rope_theta": 5e5}
    | {"original_max_position_embeddings": 8192},
    "other constants": {"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0, "original_max_position_embeddings": 4096}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN | {"beta_fast": 16, "truncate": False}},
}
USUAL = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "harmless keys": {"_name_or_path": "x", "torch_dtype": "float16", "use_cache": False, "made_up": 3, "architectures": None},
}
DELTA_NETS = [family for family in FILES if family.startswith(("qwen3_next", "qwen3_5"))]
DEEPSEEK, MIXTRALS, WINDOWS = ("deepseek_v2", "deepseek_v3"), ("qwen2_moe", "qwen3_moe"), {"use_sliding_window": True}
ROTATED = [family for family in FILES if family not in ("gpt2", "opt")]
# What their keys are called.
LLAMA_LIKE = [family for family in ROTATED if family not in ("gpt_neox", "gemma3_text", "olmo3", *DEEPSEEK)]
SCALING = [family for family in LLAMA_LIKE if family not in ("nemotron", "phi3")]
NO_YARN = ("glm4", "glm4_moe", "llama4_text", *DELTA_NETS)
ALL_FULL, MIXED = ["full_attention"] * 2, ["full_attention", WINDOW]
LONG = {"max_position_embeddings": 131072, "rope_theta": 3e4}
EPSILON = dict.fromkeys(_EPSILONS, 1e-3)
CHANGES = [  # (families, changes by name)
    (FILES, USUAL),
    (LLAMA_LIKE, ROPES),
    (SCALING, {name: change for name, change in SCALED.items() if name != "yarn"}),
    ([family for family in SCALING if family not in NO_YARN], {"yarn": SCALED["yarn"]}),
    ([family for family in FILES if family != "opt"], {"epsilon": EPSILON}),
    (("llama", "qwen2", "qwen3", "nemotron"), {"null heads": {"num_key_value_heads": None}}),
    (("llama", "mistral", "mixtral", "nemotron"), {"null head_dim": {"head_dim": None}}),
    (("llama",), {"biases": {"attention_bias": True, "mlp_bias": True}, "the other name of silu": {"hidden_act": "swish"}}),
    (("mistral", "mixtral"), {"no window": {"sliding_window": None}, "a window": {"sliding_window": 9}}),
    (("ministral",), {"layers": {"layer_types": MIXED, "sliding_window": 9}, "null": {"sliding_window": None}}),
    (("nemotron",), {"fraction": {"partial_rotary_factor": 0.25, "head_dim": 8}}),
    (("nemotron",), {"fraction of v5": {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}, "head_dim": 8}}),
    (("qwen2",), {"a window that is off": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}}),
    (
        ("qwen2", "qwen3", "qwen2_moe"),
        {
            "upper windows": WINDOWS | {"max_window_layers": 1},
            "windows": WINDOWS | {"max_window_layers": 0, "sliding_window": 7},
            "windows nowhere": WINDOWS | {"max_window_layers": 9},
            "no window": WINDOWS | {"sliding_window": None},
            "windows by name": WINDOWS | {"layer_types": MIXED[::-1]},
        },
    ),
    (("qwen3",), {"full layers by name": {"layer_types": ALL_FULL}}),
    (("qwen3_moe",), {"a window": WINDOWS | {"sliding_window": 9}, "normalised": {"norm_topk_prob": True}}),
    (MIXTRALS, {"dense layers": {"mlp_only_layers": [1]}, "every other layer": {"decoder_sparse_step": 2}}),
    (("qwen3_5_text",), {"several positions": {"rope_parameters": PLAIN | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}}}),
    (
        ("qwen3_5_moe_text",),
        {"types": {"layer_types": ["full_attention", "linear_attention"], "shared_expert_intermediate_size": 40}},
    ),
    (
        ("qwen3_next",),
        {
            "types": {"layer_types": ["full_attention", *["linear_attention"] * 4]},
            "an interval": {"full_attention_interval": 2, "mlp_only_layers": [1]},
            "attention alone": {"layer_types": ["full_attention"] * 5, "norm_topk_prob": False},
            "sizes": {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 9, "linear_value_head_dim": 11}
            | {"linear_conv_kernel_dim": 3, "shared_expert_intermediate_size": 40},
        },
    ),
    (
        ("phi3",),
        {
            "fraction": {"partial_rotary_factor": 0.5, "head_dim": 4},
            "a window": {"sliding_window": 9},
            "longrope": LONG | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 8192},
            "longrope, its length by default": LONG | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 99}},
            "longrope of v5": LONG | {"rope_parameters": LONGROPE | {"rope_theta": 5e5, "factor": 16.0}},
            "longrope with a factor": LONG | {"rope_scaling": LONGROPE | {"attention_factor": 1.25, "factor": 2.0}},
            "longrope, nothing stretched": LONG | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 131072},
            "longrope of a part": LONG | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "head_dim": 4, "hidden_size": 128},
        },
    ),
    (
        ("gpt_neox",),
        {
            "its own names": {"rotary_pct": 0.5, "rotary_emb_base": 500},
            "v5": {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
            "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 1.0},
            "yarn": {"rope_scaling": YARN, "rotary_pct": 0.5},
            "names of others": {"rope_theta": 7.0, "partial_rotary_factor": 1.0},
        },
    ),
    (("gemma2",), {"caps": {"attn_logit_softcapping": None, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 224}}),
    (("gemma2",), {"layers": {"layer_types": MIXED, "sliding_window": 9}}),
    (
        ("gemma3_text",),
        {
            "v4": {"rope_theta": 3e5, "rope_local_base_freq": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "v5": {"rope_parameters": {"full_attention": LLAMA3 | {"rope_theta": 5e5}, WINDOW: PLAIN}},
            "one kind": {"rope_parameters": {"full_attention": PLAIN}},
            "the pattern": {"num_hidden_layers": 5, "sliding_window_pattern": 2},
            "a cap": {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 168},
            "full layers alone": {"layer_types": ALL_FULL},
        },
    ),
    (("olmo3",), {"v4": {"rope_theta": 5e5, "rope_scaling": YARN}, "full layers": {"layer_types": ALL_FULL}}),
    (("olmo3",), {"v5": {"rope_parameters": {"full_attention": YARN | {"rope_theta": 3e4}, WINDOW: PLAIN}, "sliding_window": 9}}),
    (("cohere",), {"norms": {"use_qk_norm": True}, "scale": {"logit_scale": 1.0}}),
    (("cohere2",), {"pattern": {"num_hidden_layers": 5, "sliding_window_pattern": 2, "sliding_window": 9, "logit_scale": 1.0}}),
    (("cohere2",), {"layers": {"layer_types": MIXED}}),
    (("glm4", "glm4_moe"), {"yarn": {"rope_scaling": YARN}}),
    (("glm4",), {"no biases": {"attention_bias": False, "partial_rotary_factor": 1.0}}),
    (("glm4_moe",), {"groups": {"n_group": 2, "topk_group": 1, "attention_bias": True, "partial_rotary_factor": 1.0}}),
    (
        DEEPSEEK,
        {
            "yarn": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}, "rope_theta": 5e5},
            "no latent of queries": {"q_lora_rank": None},
            "no shared experts' layers": {"first_k_dense_replace": 1},
            "a scale": {"routed_scaling_factor": 3.0},
        },
    ),
    (("deepseek_v2",), {"groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}}),
    (("deepseek_v3",), {"groups": {"n_group": 4, "topk_group": 2, "rope_interleave": False}}),
    (
        ("llama4_text",),
        {
            "Scout's step": {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0, "factor": 16.0}, "no_rope_layers": []},
            "Maverick": {"num_hidden_layers": 8, "interleave_moe_layer_step": 2, "use_qk_norm": False},
            "layers by number": {"num_hidden_layers": 4, "moe_layers": [1, 2], "no_rope_layers": [1, 0, 1, 1]},
            "intervals": {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 3},
            "full layers alone": {"layer_types": ALL_FULL, "attention_bias": True},
            "chunks without positions": {"layer_types": ["chunked_attention"] * 2, "no_rope_layers": [0, 1], "attn_scale": 0.3},
            "no temperature": {"attn_temperature_tuning": False, "floor_scale": 16},
        },
    ),
    (("gpt_oss",), {"its own": {"attention_bias": False, "swiglu_limit": 5.0, "layer_types": ALL_FULL, "sliding_window": 9}}),
    (("opt",), {"its width by name": {"word_embed_proj_dim": 64}, "projected": {"word_embed_proj_dim": 32}}),
    (("opt",), {"norms behind": {"do_layer_norm_before": False}, "spread": {"init_std": 0.006}}),
    (("gpt2",), {"inner": {"n_inner": 40}, "null inner": {"n_inner": None}, "no dropout": {"resid_pdrop": 0.0}}),
    (("gpt2",), {"another activation": {"activation_function": "gelu"}}),
    (("qwen3_next",), {"odd": {"linear_num_key_heads": 2, "full_attention_interval": 3, "partial_rotary_factor": 0.5}}),
    (("gpt2",), {"scales": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}}),
]
READ = [(family, name, change) for families, changes in CHANGES for family in families for name, change in changes.items()]
READ += [(family, "heads", {"head_dim": 8, "num_key_value_heads": FILES[family]["num_attention_heads"] // 2}) for family in LLAMA_LIKE]


@pytest.mark.parametrize(("family", "change"), [(f, c) for f, _, c in READ], ids=[f"{f}: {name}" for f, name, _ in READ])
def test_an_architecture_is_what_transformers_reads(family, change):
    """And what we write is the same to both."""
    hf = FILES[family] | change
    before, architecture = copy.deepcopy(hf), architecture_from_hf(hf)
    written, ours = json.loads(json.dumps(architecture_to_hf(architecture))), asdict(architecture)
    assert hf == before and architecture_from_hf(written) == architecture and architecture.family is Family[family]
    for expected in (theirs(hf), theirs(written)):
        assert {name: ours[name] for name in expected} == expected


def test_early_files_of_llama4_say_four_for_true():
    assert architecture_from_hf(FILES["llama4_text"] | {"attn_temperature_tuning": 4}) == architecture_from_hf(FILES["llama4_text"])


def test_the_number_of_experts_has_two_names():
    """Qwen3's own files say `num_experts`, transformers 5 writes `num_local_experts`."""
    renamed = {key: value for key, value in FILES["qwen3_moe"].items() if key != "num_experts"} | {"num_local_experts": 4}
    assert architecture_from_hf(renamed) == architecture_from_hf(FILES["qwen3_moe"])
    assert theirs(renamed)["num_experts"] == 4


REFUSED = [
    # Rotary embeddings: the kinds of transformers that are not computed, and what is none.
    *[
        (family, {"rope_parameters": PLAIN, "rope_scaling": YARN | {"rope_type": "longrope"}}, 'rope_type="longrope"')
        for family in LLAMA_LIKE
        if family != "phi3"
    ],
    ("gemma3_text", {"rope_scaling": YARN | {"rope_type": "longrope"}}, 'rope_type="longrope"'),
    ("phi3", {"rope_scaling": YARN}, 'rope_scaling.rope_type="yarn"'),
    *[(family, {"rope_scaling": LLAMA3}, 'rope_type="llama3"') for family in ("nemotron", "phi3")],
    ("phi3", {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "rope_scaling.short_factor=null is not supported for model_type phi3"),
    ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0, -2.0]}}, "rope_scaling.long_factor=-2.0"),
    ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0, 2.0]}}, "rope_long_factors=[1.0, 2.0]: must be 1 finite numbers above 0"),
    ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "rope_scaling.attention_factor=0.0"),
    ("gpt_neox", {"rotary_pct": 1.5}, "rotary_fraction=1.5"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias=false"),
    ("gpt_neox", {"head_dim": 16}, "head_dim=16"),
    ("gpt_neox", {"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
    ("opt", {"do_layer_norm_before": None}, "do_layer_norm_before=null is not supported for model_type opt; allowed: true or false"),
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim=0 is not supported for model_type opt; allowed: a whole number >= 1"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=false"),
    ("opt", {"activation_function": "tanh"}, 'activation_function="tanh"'),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0 is not supported for model_type gemma2; allowed: a number > 0"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ("gemma2", {"sliding_window": None}, "layer_types="),
    ("gemma3_text", {"rope_parameters": PLAIN}, "rope_parameters="),
    ("gemma3_text", {"rope_parameters": {WINDOW: YARN}}, 'rope_parameters.sliding_attention.rope_type="yarn"'),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling="),
    ("cohere", {"use_qk_norm": 1}, "use_qk_norm=1 is not supported for model_type cohere; allowed: true or false"),
    ("cohere2", {"sliding_window": None}, "layer_types="),
    ("cohere2", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ("cohere", {"logit_scale": 0.0}, "logits_scale=0.0: must be finite and above 0"),
    ("llama", {"rope_parameters": {"rope_type": "invented"}}, 'rope_parameters.rope_type="invented" is not supported for model_type llama'),
    *[("llama", {"rope_parameters": {"rope_type": kind}}, "rope_parameters.factor=null") for kind in ("linear", "dynamic", "yarn")],
    ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate=1"),
    ("llama", {"rope_scaling": YARN | {"beta_fast": -1}}, "rope_scaling.beta_fast=-1"),
    ("llama", {"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "rope_scaling.original_max_position_embeddings=0"),
    ("llama", {"rope_scaling": {"rope_type": None}}, "rope_scaling.rope_type=null"),
    ("llama", {"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor=4.0"),
    ("llama", {"rope_scaling": "yarn"}, 'rope_scaling="yarn"'),
    ("llama", {"rope_parameters": {"full_attention": PLAIN}}, "rope_parameters="),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor=null"),
    ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "rope_scaling.low_freq_factor=1.0 is not supported"),
    ("llama", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "rope_scaling.factor=0.5"),
    ("llama", {"rope_theta": None}, "rope_theta=null"),
    ("llama", {"rope_theta": 0}, "rope_theta=0"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("nemotron", {"rope_percent": 0.25}, "rope_percent=0.25"),
    # Attention and feed-forward layers.
    *[
        (family, {"attention_bias": True}, "attention_bias=true")
        for family in ("qwen3", "qwen3_moe", "nemotron", "gemma2", "olmo2", "cohere", "cohere2")
    ],
    ("nemotron", {"mlp_bias": True}, "mlp_bias=true"),
    *[(family, {"use_sliding_window": 1}, "use_sliding_window=1") for family in ("qwen2", "qwen3", "qwen3_moe")],
    *[(family, {"layer_types": ["full_attention", WINDOW]}, "layer_types=") for family in ("qwen2", "qwen3")],  # there is no window
    *[("qwen2", {"use_sliding_window": True, "layer_types": types}, "layer_types=") for types in ("x", [WINDOW], [WINDOW, "chunked"])],
    *[(family, {"sliding_window": 0}, "sliding_window=0 is not supported") for family in ("mistral", "mixtral")],
    ("mistral", {"layer_types": [WINDOW] * 2}, "layer_types="),
    ("ministral", {"layer_types": [WINDOW] * 2, "sliding_window": None}, "layer_types="),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    *[(family, {"hidden_act": "gelu"}, 'hidden_act="gelu"') for family in LLAMA_LIKE if family != "gemma2"],
    *[(family, {"hidden_activation": "silu"}, 'hidden_activation="silu"') for family in ("gemma2", "gemma3_text")],
    *[(family, {"attention_dropout": 0.1}, "attention_dropout=0.1") for family in ROTATED],
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, 'mlp_only_layers=["0"] is not supported for model_type qwen3_moe; allowed: a list of'),
    ("qwen2_moe", {"layer_types": [WINDOW, "full_attention"]}, "layer_types="),
    *[(family, {"v_head_dim": 17}, "v_head_dim=17 is not supported") for family in ("deepseek_v2", "deepseek_v3")],
    *[(family, {"rope_scaling": {"type": "linear", "factor": 2}}, 'rope_type="linear"') for family in ("deepseek_v2", "deepseek_v3")],
    *[(family, {"attention_bias": True}, "attention_bias=true") for family in ("deepseek_v2", "deepseek_v3", "olmo3", *DELTA_NETS)],
    *[(family, {"norm_topk_prob": False}, "norm_topk_prob=false") for family in ("deepseek_v3", "glm4_moe")],
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, 'topk_method="noaux_tc"'),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "router_groups=3: must divide num_experts=8"),
    ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func="softmax" is not supported for model_type deepseek_v3; allowed: "sigmoid"'),
    ("deepseek_v3", {"n_group": 8}, "router_group_best=2: must be from 1 to the 1 experts of a group"),
    ("deepseek_v3", {"topk_group": 3}, "router_groups_per_token=3: must be from 1 to router_groups=2"),
    *[(family, {"rope_scaling": YARN}, 'rope_scaling.rope_type="yarn"') for family in DELTA_NETS],
    ("qwen3_next", {"layer_types": [WINDOW] * 5}, "layer_types="),
    ("qwen3_next", {"layer_types": ["full_attention"]}, 'allowed: 5 of "full_attention" and "linear_attention", one for each layer'),
    ("qwen3_next", {"linear_num_value_heads": 24}, "linear_key_heads=16: must divide linear_value_heads=24"),
    ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 is not supported for model_type qwen3_next"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported for model_type gpt_oss; allowed: 1.702"),
    *[("gpt_oss", {"swiglu_limit": limit}, f"swiglu_limit={shown}") for limit, shown in ((0, "0.0"), (None, "null"))],
    ("gpt_oss", {"sliding_window": None}, "layer_types="),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "experts_per_token=5: must be from 1 to num_experts=4"),
    ("qwen3_moe", {"num_local_experts": 8}, "num_experts=4 and num_local_experts=8"),
    ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported for model_type llama4_text; allowed: 1"),
    ("llama4_text", {"moe_layers": []}, "moe_layers=[] is not supported for model_type llama4_text; allowed: a list of layers' numbers"),
    ("llama4_text", {"interleave_moe_layer_step": 3}, "interleave_moe_layer_step=3 is not supported for model_type llama4_text; allowed"),
    *[("llama4_text", {"no_rope_layers": found}, f"no_rope_layers={found}") for found in ([1], [[1], 1], [2, 1])],
    ("llama4_text", {"layer_types": [WINDOW, "full_attention"]}, "layer_types="),
    ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size=null"),
    ("llama4_text", {"attn_temperature_tuning": "yes"}, 'attn_temperature_tuning="yes"'),
    ("llama4_text", {"rope_scaling": YARN}, 'rope_scaling.rope_type="yarn"'),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=true"),
    ("gpt2", {"activation_function": "tanh"}, 'activation_function="tanh"'),
    ("gpt2", {"attn_pdrop": 0.3}, "attn_pdrop=0.3"),
    ("gpt2", {"hidden_size": 128}, "n_embd=64 and hidden_size=128"),
    # Of every family.
    *[(family, {"is_causal": False}, "is_causal=false") for family in FILES],
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, 'quantization_config.quant_method="gptq" is not supported'),
    (
        "llama",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}},
        'bnb_4bit_quant_storage="bfloat16" is not supported for model_type llama; allowed: "uint8"',
    ),
    *[
        ("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]} | change}, message)
        for change, message in (
            ({"weight_block_size": None}, "quantization_config.weight_block_size=null is not supported"),
            ({"weight_block_size": [128, 0]}, "quantization_config.weight_block_size=[128, 0]"),
            ({"activation_scheme": "static"}, 'activation_scheme="static" is not supported for model_type llama; allowed: "dynamic"'),
            ({"fmt": "e5m2"}, 'fmt="e5m2"'),
        )
    ],
    ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config="),
    ("qwen2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
    ("llama", {"architectures": ["MistralForCausalLM"]}, 'architectures=["MistralForCausalLM"] is not supported for model_type llama'),
    ("qwen2", {"architectures": ["Qwen2ForRewardModel"]}, 'architectures=["Qwen2ForRewardModel"]'),
    ("llama", {"architectures": "LlamaForCausalLM"}, 'architectures="LlamaForCausalLM"'),
    # Values of another kind than transformers' own checks allow.
    ("llama", {"hidden_size": "64"}, 'hidden_size="64"'),
    ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads=true"),
    ("llama", {"vocab_size": 0}, "vocab_size=0"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN"),
    ("llama", {"tie_word_embeddings": "false"}, 'tie_word_embeddings="false"'),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide"),
    ("llama", {"head_dim": 7}, "head_dim=7"),
    ("llama", {"model_type": "mamba"}, "model_type='mamba' is not supported; allowed: llama, qwen2, qwen3, mistral, mixtral, qwen3_moe"),
    ("llama", {"model_type": None}, "model_type=None"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=[f"{f}: {message}" for f, _, message in REFUSED])
def test_what_is_not_computed_is_refused_by_name_and_value(family, change, message):
    with pytest.raises(ConfigError) as caught:
        architecture_from_hf(FILES[family] | change, where="some/config.json")
    assert str(caught.value).startswith("some/config.json: ") and message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FILES)
def test_a_size_that_is_missing_is_named(family):
    for key in FILES[family].keys() - {"model_type"}:
        rest = {name: value for name, value in FILES[family].items() if name != key}
        if family == "mixtral" and key in ("num_local_experts", "num_experts_per_tok") or key == "q_lora_rank":
            continue
        if family == "llama4_text" and key in ("num_local_experts", "intermediate_size_mlp", "attention_chunk_size"):
            continue
        with pytest.raises(ConfigError, match=f"{key} is missing, which every file of model_type {family} has"):
            architecture_from_hf(rest)


class Recorder(dict):
    """Notes which keys were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked: set[str] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


# What transformers' models look at besides, and why it does not matter here.
NO_MATTER = {
    "pad_token_id",  # no gradient into one row of the embedding
    "_attn_implementation",  # how, not what
    "use_cache",
    "text_config",  # of a Gemma 3 with images
    "is_decoder",  # in an example
    "original_max_position_embeddings",  # of scaled rotary embeddings, where it is looked at
    *("output_router_logits", "router_aux_loss_coef"),  # `model.router_aux_loss_coef` is ours
    "sliding_window",  # where `use_sliding_window` is off (Mixtral's is looked at)
    *(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout", "last_dropout")),  # not loaded
    *("problem_type", "num_labels", "classifier_dropout", "hidden_dropout"),  # nor are these heads
}


OF_IMAGES = re.compile(r"class Qwen3_5(Moe)?(Vision|Model\(|ForConditionalGeneration)")


@pytest.mark.parametrize("family", FILES)
def test_every_key_that_transformers_looks_at_is_looked_at_here(family):
    folder = family.removesuffix("_text")
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    classes = re.split(r"\n(?=class )", inspect.getsource(modeling))
    classes = list(itertools.takewhile(lambda one: not re.match("class (Gemma3MultiModalProjector|Llama4CausalLMOutput)", one), classes))
    source = "\n".join(one for one in classes if not OF_IMAGES.match(one))  # what else is of images comes behind those
    used = set(re.findall(r"config\.([a-z_0-9]+)", source)) | set(re.findall(r'getattr\((?:self\.)?config, "([a-z_0-9]+)"', source))
    assert len(used) > 10
    mixture, latent = "n_routed_experts" in FILES[family], "kv_lora_rank" in FILES[family]
    recorder = Recorder(FILES[family] | (GROUPED | {"topk_method": "noaux_tc"} if mixture else {}))
    if family == "deepseek_v2":
        recorder["topk_method"] = "group_limited_greedy"
    architecture_from_hf(recorder)
    of_heads = {"head_dim", "num_key_value_heads"} if latent else set()  # other keys say it, or there are as many as heads
    assert used - recorder.asked - NO_MATTER - of_heads == set()


@pytest.mark.parametrize("family", FILES)
def test_transformers_own_defaults_are_read(family):
    """A file that transformers writes of a config nobody changed, and of one that was read, is the same architecture to both."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = [CONFIG_MAPPING[family].from_dict(copy.deepcopy(FILES[family]))]
    if family not in ("deepseek_v2", "glm4_moe"):  # which no model can be made of
        read.append(CONFIG_MAPPING[family]())
    for config in read:
        written = json.loads(config.to_json_string(use_diff=False))
        expected, ours = theirs(written), asdict(architecture_from_hf(written))
        assert {name: ours[name] for name in expected} == expected
