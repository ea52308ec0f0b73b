"""GPT and its open relatives: GPT-2 and GPT-3, OPT, GPT-NeoX and Pythia, gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, ParallelResidual, PositionEmbedding
from aligner.models.families import llama, mapping
from aligner.models.families.hf_config import HFConfig, layer_types, rope_to_hf
from aligner.models.families.llama import HFFamily
from aligner.models.families.mapping import Layout, NameTable, affine, llama_like, rule

_SIZES = {name: (name,) for name in ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")}
_SIZES["num_layers"] = ("num_hidden_layers",)  # our names -> the file's, the one that is written first


def _common_from_hf(hf: HFConfig, *, sizes: Mapping[str, tuple[str, ...]] = _SIZES, tied: bool) -> dict[str, Any]:
    """Fields that GPT-2, OPT and GPT-NeoX share: LayerNorm, biases everywhere, no grouped queries. `tied`: the default."""
    found = {name: hf.size(*keys) for name, keys in sizes.items()}
    return found | {
        "family": Family[hf.model_type],
        "num_key_value_heads": found["num_attention_heads"],
        "tied_embeddings": hf.flag("tie_word_embeddings", tied),
        "gated_mlp": False,
        "normalization": Normalization.layer_norm,
        "linear_bias": True,
    }


def _common_to_hf(a: Architecture, *, sizes: Mapping[str, tuple[str, ...]] = _SIZES) -> dict[str, Any]:
    """The inverse."""
    return {keys[0]: getattr(a, name) for name, keys in sizes.items()} | {"tie_word_embeddings": a.tied_embeddings}


# GPT-2, and GPT-3 as far as its paper describes it: learned positions, LayerNorm, biases everywhere, tied embeddings. Its Hugging Face
# linear layers are `Conv1D`, whose weights are stored as [in, out].
_GPT2_NAMES = NameTable(
    before={
        mapping.EMBEDDING: rule("transformer.wte.weight", layout=Layout.vocabulary),
        "embedding.position_embeddings.weight": rule("transformer.wpe.weight"),
    },
    layer=affine("input_layernorm", "ln_1")
    | affine("self_attention.linear_qkv", "attn.c_attn", layout=Layout.packed_qkv, transposed=True)
    | affine("self_attention.linear_proj", "attn.c_proj", transposed=True)
    | affine("pre_mlp_layernorm", "ln_2")
    | affine("mlp.linear_fc1", "mlp.c_fc", transposed=True)
    | affine("mlp.linear_fc2", "mlp.c_proj", transposed=True),
    after=affine("decoder.final_layernorm", "transformer.ln_f") | {mapping.OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)},
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",  # causal masks
)
_GPT2_ACTIVATIONS = {
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu": Activation.gelu,
    "silu": Activation.silu,
    "relu2": Activation.squared_relu,
}
_GPT2_SIZES = {
    "num_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
# What else of a GPT-2 config changes the numbers, and the only values of it that are computed here. Dropout is not, but every file of GPT-2
# itself has 0.1.
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_GPT2_FIXED = {
    "reorder_and_upcast_attn": (False, True),  # the order of the same sums
    "add_cross_attention": (False,),
    **dict.fromkeys(_GPT2_DROPOUT, (0.1, 0.0)),
}


def _gpt2_from_hf(hf: HFConfig) -> Architecture:
    common = _common_from_hf(hf, sizes=_GPT2_SIZES, tied=True)
    return Architecture(
        **common,
        ffn_hidden_size=hf.size("n_inner", absent=4 * common["hidden_size"], null=4 * common["hidden_size"]),
        norm_eps=hf.number("layer_norm_epsilon", 1e-5),
        initializer_range=hf.number("initializer_range", 0.02),
        activation=hf.choice("activation_function", _GPT2_ACTIVATIONS, "gelu_new"),
        position_embedding=PositionEmbedding.learned,
        attention_scale=0.0 if hf.flag("scale_attn_weights", True) else 1.0,
        attention_scale_by_layer=hf.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _gpt2_to_hf(a: Architecture) -> dict[str, Any]:
    return _common_to_hf(a, sizes=_GPT2_SIZES) | {
        "scale_attn_weights": not a.attention_scale,
        "scale_attn_by_inverse_layer_idx": a.attention_scale_by_layer,
        "n_inner": a.ffn_hidden_size,
        "n_ctx": a.max_position_embeddings,
        "layer_norm_epsilon": a.norm_eps,
        "initializer_range": a.initializer_range,
        "activation_function": next(name for name, activation in _GPT2_ACTIVATIONS.items() if activation == a.activation),
        **dict.fromkeys(_GPT2_DROPOUT, 0.0),
    }


# OPT (2205.01068): GPT-3's layers with ReLU, and a table of positions whose first two rows no position has.
_OPT_QKV = {
    f"self_attention.linear_qkv.{kind}": rule(*(f"self_attn.{name}_proj.{kind}" for name in "qkv"), layout=Layout.qkv)
    for kind in ("weight", "bias")
}
_OPT_EMBEDDINGS = {
    mapping.EMBEDDING: rule("model.decoder.embed_tokens.weight", layout=Layout.vocabulary),
    "embedding.position_embeddings.weight": rule("model.decoder.embed_positions.weight"),
}


def _opt_names(architecture: Architecture) -> NameTable:
    behind, projected = architecture.residual_norms, bool(architecture.embedding_size)
    norms = ("post_attention_layernorm", "post_mlp_layernorm") if behind else ("input_layernorm", "pre_mlp_layernorm")
    final = {} if behind else affine("decoder.final_layernorm", "model.decoder.final_layer_norm")
    return NameTable(
        before=_OPT_EMBEDDINGS | ({mapping.PROJECTION: rule("model.decoder.project_in.weight")} if projected else {}),
        layer=affine(norms[0], "self_attn_layer_norm")
        | _OPT_QKV
        | affine("self_attention.linear_proj", "self_attn.out_proj")
        | affine(norms[1], "final_layer_norm")
        | affine("mlp.linear_fc1", "fc1")
        | affine("mlp.linear_fc2", "fc2"),
        after=final
        | ({mapping.OUTPUT_PROJECTION: rule("model.decoder.project_out.weight")} if projected else {})
        | {mapping.OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)},
        layer_prefix="model.decoder.layers.{layer}.",
        base_prefix="model.",
        ignored=r"(?!)",
    )


_OPT_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu}
_OPT_EPS = 1e-5  # LayerNorm's default: no file has the key
# Dropout is not computed, but every file of OPT has 0.1.
_OPT_FIXED = {
    "_remove_final_layer_norm": (False,),
    "enable_bias": (True,),
    "layer_norm_elementwise_affine": (True,),
    "attention_dropout": (0.0,),
    "layerdrop": (0.0,),
    "dropout": (0.1, 0.0),
}


def _opt_from_hf(hf: HFConfig) -> Architecture:
    common, before = _common_from_hf(hf, tied=True), hf.flag("do_layer_norm_before", True)
    width = hf.optional_size("word_embed_proj_dim", absent=None) or common["hidden_size"]
    return Architecture(
        **common,
        ffn_hidden_size=hf.size("ffn_dim"),
        position_embedding=PositionEmbedding.learned,
        position_offset=2,
        norm_eps=_OPT_EPS,
        initializer_range=hf.number("init_std", 0.02),
        activation=hf.choice("activation_function", _OPT_ACTIVATIONS, "relu"),
        pre_norms=before,
        residual_norms=not before,
        embedding_size=width if width != common["hidden_size"] else 0,
    )


def _opt_to_hf(a: Architecture) -> dict[str, Any]:
    return _common_to_hf(a) | {
        "do_layer_norm_before": a.pre_norms,
        "word_embed_proj_dim": a.vocabulary_width,
        "ffn_dim": a.ffn_hidden_size,
        "init_std": a.initializer_range,
        "activation_function": next(name for name, activation in _OPT_ACTIVATIONS.items() if activation == a.activation),
        "dropout": 0.0,
    }


# GPT-NeoX (2204.06745) and Pythia: attention and feed-forward layer side by side, LayerNorm, biases everywhere, heads rotated in part.
_NEOX_NAMES = NameTable(
    before={mapping.EMBEDDING: rule("gpt_neox.embed_in.weight", layout=Layout.vocabulary)},
    layer=affine("input_layernorm", "input_layernorm")
    | affine("pre_mlp_layernorm", "post_attention_layernorm")
    | affine("self_attention.linear_qkv", "attention.query_key_value", layout=Layout.fused_qkv)
    | affine("self_attention.linear_proj", "attention.dense")
    | affine("mlp.linear_fc1", "mlp.dense_h_to_4h")
    | affine("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    after=affine("decoder.final_layernorm", "gpt_neox.final_layer_norm")
    | {mapping.OUTPUT_LAYER: rule("embed_out.weight", layout=Layout.vocabulary)},
    layer_prefix="gpt_neox.layers.{layer}.",
    base_prefix="gpt_neox.",
    ignored=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
_NEOX_ACTIVATIONS = {
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
    "relu": Activation.relu,
    "silu": Activation.silu,
}
_NEOX_FIXED = {"attention_bias": (True,), "attention_dropout": (0.0,), "hidden_dropout": (0.0,)}


def _neox_from_hf(hf: HFConfig) -> Architecture:
    common, parallel = _common_from_hf(hf, tied=False), hf.flag("use_parallel_residual", True)
    hf.only({"head_dim": (None, common["hidden_size"] // common["num_attention_heads"])})
    return Architecture(
        **common,
        ffn_hidden_size=hf.size("intermediate_size"),
        norm_eps=hf.number("layer_norm_eps", 1e-5),
        initializer_range=hf.number("initializer_range", 0.02),
        activation=hf.choice("hidden_act", _NEOX_ACTIVATIONS, "gelu"),
        parallel_residual=ParallelResidual.own_norm if parallel else ParallelResidual.none,
        **hf.rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct")),
    )


def _neox_to_hf(a: Architecture) -> dict[str, Any]:
    rope = rope_to_hf(a)
    return _common_to_hf(a) | {
        "intermediate_size": a.ffn_hidden_size,
        "rotary_pct": a.rotary_fraction,
        "rotary_emb_base": a.rope_theta,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": a.rotary_fraction},
        "rope_scaling": rope["rope_scaling"],
        "layer_norm_eps": a.norm_eps,
        "initializer_range": a.initializer_range,
        "hidden_act": next(name for name, activation in _NEOX_ACTIVATIONS.items() if activation == a.activation),
        "use_parallel_residual": a.parallel_residual != ParallelResidual.none,
    }


# gpt-oss (2508.10925): attention sinks, windows in every other layer, and experts with biases and cut activations, all of a layer in one
# tensor of its files. Published ones are in MXFP4, which is read; exports are not quantised.
_OSS_EXPERT = "mlp.experts.local_experts.{expert}."
_OSS_EXPERTS = affine("mlp.router", "mlp.router") | {
    f"{_OSS_EXPERT}linear_fc1.weight": rule("mlp.experts.gate_up_proj", layout=Layout.alternating_gate_up, transposed=True),
    f"{_OSS_EXPERT}linear_fc1.bias": rule("mlp.experts.gate_up_proj_bias", layout=Layout.alternating_gate_up),
    f"{_OSS_EXPERT}linear_fc2.weight": rule("mlp.experts.down_proj", transposed=True),
    f"{_OSS_EXPERT}linear_fc2.bias": rule("mlp.experts.down_proj_bias"),
}
# Files have "silu"; the model computes another one whatever they have.
_OSS_ACTIVATION = "hidden_act", MappingProxyType({"silu": Activation.quick_gelu})
_OSS_FIXED = llama.DROPOUT | {"swiglu_alpha": (1.702,)}
_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _oss_from_hf(hf: HFConfig) -> Architecture:
    if not (limit := hf.number("swiglu_limit", 7.0)):
        raise hf.refusal("swiglu_limit", limit, "a number > 0")
    seen = hf.windows(hf.optional_size("sliding_window", absent=128), lambda number: number % 2 == 0)
    scaled = hf if hf.value("rope_scaling") or hf.value("rope_parameters") is not None else hf.part(rope_parameters=_OSS_ROPE)
    common = llama.common_from_hf(
        hf, key_value_heads=8, head_dim=64, norm_eps=1e-5, activation=_OSS_ACTIVATION, rope=scaled.rope(theta=150000.0)
    )
    return replace(
        common,
        **seen,
        **dict.fromkeys(("qkv_bias", "attention_out_bias"), hf.flag("attention_bias", True)),
        attention_sinks=True,
        glu_limit=limit,
        glu_offset=1.0,
        expert_biases=True,
        num_experts=hf.size("num_local_experts", "num_experts", absent=128),
        experts_per_token=hf.size("num_experts_per_tok", absent=4),
        expert_ffn_hidden_size=common.ffn_hidden_size,
    )


def _oss_to_hf(a: Architecture) -> dict[str, Any]:
    return llama.common_to_hf(a) | {
        "attention_bias": a.attention_out_bias,
        "swiglu_limit": a.glu_limit,
        "num_local_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "sliding_window": a.sliding_window or 128,
        "layer_types": layer_types(a),
    }


FAMILIES = {
    Family.gpt2: HFFamily("GPT2LMHeadModel", _GPT2_NAMES, _gpt2_from_hf, _gpt2_to_hf, _GPT2_FIXED),
    Family.opt: HFFamily("OPTForCausalLM", _opt_names, _opt_from_hf, _opt_to_hf, _OPT_FIXED),
    Family.gpt_neox: HFFamily("GPTNeoXForCausalLM", _NEOX_NAMES, _neox_from_hf, _neox_to_hf, _NEOX_FIXED),
    Family.gpt_oss: HFFamily("GptOssForCausalLM", lambda a: llama_like(a, mlp=_OSS_EXPERTS), _oss_from_hf, _oss_to_hf, _OSS_FIXED),
}
