"""Llama 2 and 3, and models that copied their layout: RMSNorm, SwiGLU, rotary embeddings, grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from aligner.models.config import Activation, Architecture, Family, Normalization
from aligner.models.families import mapping
from aligner.models.families.hf_config import FULL, LONGROPE, UNFACTORED, HFConfig, layer_types, rope_to_hf
from aligner.models.families.mapping import Layout, NameTable, llama_like, rule

DROPOUT = {"attention_dropout": (0.0, None)}
UNBIASED = DROPOUT | {"attention_bias": (False,)}


class HFFamily(NamedTuple):
    """How Hugging Face's files describe the models of a family."""

    hf_class: str  # of its language models
    names: NameTable | Callable[[Architecture], NameTable]  # a function if the architecture decides which weights there are
    from_hf: Callable[[HFConfig], Architecture]  # raises ConfigError for variants that are not computed here
    to_hf: Callable[[Architecture], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]] = MappingProxyType(DROPOUT)  # the values that are computed: the default, which is written, first
    computed: tuple[str, ...] = ()  # keys of `UNCHANGED` that it computes


SILU = {"silu": Activation.silu, "swish": Activation.silu}


def _llama_from_hf(hf: HFConfig) -> Architecture:
    attention, mlp = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    return replace(common_from_hf(hf), qkv_bias=attention, attention_out_bias=attention, mlp_bias=mlp)


def common_from_hf(
    hf: HFConfig,
    *,
    key_value_heads: int = 0,
    head_dim: int = 0,
    theta: float = 10000.0,
    norm_eps: float = 1e-6,
    initializer_range: float = 0.02,
    fraction: float = 0.0,
    tied: bool = False,
    eps_name: str = "rms_norm_eps",
    activation: tuple[str, Mapping[str, Activation]] = ("hidden_act", MappingProxyType(SILU)),
    rope: Mapping[str, Any] | None = None,
    rope_kinds: Collection[str] | None = None,
) -> Architecture:
    """The fields that Llama and its descendants (Mixtral, Qwen, Gemma) share.

    The keyword arguments are the defaults of absent keys. 0: as many key-value heads as heads; hidden size / heads; `fraction`:
    heads are rotated whole, and other values are refused. `activation`: its key, and its names, the
    first is the default. `rope`: the rotary embedding's fields; None: they are read.
    """
    heads = hf.size("num_attention_heads")
    rope = hf.rope(theta=theta, fraction=fraction or 1.0, kinds=rope_kinds) if rope is None else rope
    if rope["rotary_fraction"] != 1 and not fraction:
        raise hf.refusal("partial_rotary_factor", rope["rotary_fraction"], "1.0")
    return Architecture(
        family=Family[hf.model_type],
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hf.size("hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=hf.size("num_key_value_heads", absent=key_value_heads or heads, null=heads),
        head_dim=hf.size("head_dim", absent=head_dim, null=0),
        ffn_hidden_size=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        norm_eps=hf.number(eps_name, norm_eps),
        tied_embeddings=hf.flag("tie_word_embeddings", tied),
        initializer_range=hf.number("initializer_range", initializer_range),
        activation=hf.choice(*activation, next(iter(activation[1]))),
        **rope,
    )


def common_to_hf(a: Architecture, *, always_fraction: bool = False) -> dict[str, Any]:
    """The inverse of `common_from_hf`; `always_fraction` as for `rope_to_hf`."""
    return {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        **rope_to_hf(a, always_fraction=always_fraction),
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": a.initializer_range,
    }


# Mistral 7B (2310.06825) and its successors: layers that may all see a window only. Layers that differ are `ministral`'s (Ministral 8B).
def _mistral_from_hf(hf: HFConfig) -> Architecture:
    hf.only({"layer_types": (None,)})
    return replace(common_from_hf(hf, key_value_heads=8), **hf.window_everywhere(absent=4096))


def _ministral_from_hf(hf: HFConfig) -> Architecture:
    window = hf.optional_size("sliding_window", absent=4096)
    return replace(common_from_hf(hf, key_value_heads=8), **hf.windows(window, lambda _: window is not None))


# Mixtral: a mixture of experts in every layer; the chosen experts' weights sum to 1 (2401.04088, section 2.1). No noise in the router.
_MIXTRAL_EXPERTS = mapping.experts("block_sparse_moe", gate="w1", up="w3", down="w2")


def _mixtral_from_hf(hf: HFConfig) -> Architecture:
    return replace(
        common_from_hf(hf, key_value_heads=8, theta=1e6, norm_eps=1e-5),
        num_experts=hf.size("num_local_experts", "num_experts", absent=8),
        experts_per_token=hf.size("num_experts_per_tok", absent=2),
        expert_ffn_hidden_size=hf.size("intermediate_size"),
        **hf.window_everywhere(absent=None),
    )


def _mixtral_to_hf(a: Architecture) -> dict[str, Any]:
    return common_to_hf(a) | {
        "intermediate_size": a.expert_ffn_hidden_size,
        "num_local_experts": a.num_experts,
        "num_experts_per_tok": a.experts_per_token,
        "sliding_window": a.sliding_window or None,
    }


# Phi-3 (2404.14219) and Phi-4: query, key and value are one matrix, as are gate and up. LongRoPE (2402.13753), the only scaled rotary
# embedding, stretches the context of some.
_PHI3_NAMES = NameTable(layer=mapping.INPUT_NORM | mapping.PACKED_QKV | mapping.ATTENTION_OUT | mapping.MLP_NORM | mapping.PACKED_MLP)
_ORIGINAL_LENGTH = 4096  # default of absent keys
_PHI3_FIXED = DROPOUT | {"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)}


def _phi3_from_hf(hf: HFConfig) -> Architecture:
    original = hf.size("original_max_position_embeddings", absent=_ORIGINAL_LENGTH)
    hf = hf.part(original_max_position_embeddings=original)
    common = common_from_hf(hf, norm_eps=1e-5, fraction=1.0, rope_kinds=LONGROPE)
    return replace(common, **hf.window_everywhere(absent=None))


def _phi3_to_hf(a: Architecture) -> dict[str, Any]:
    return common_to_hf(a) | {
        "sliding_window": a.sliding_window or None,
        "original_max_position_embeddings": a.rope_original_length if a.rope_long_factors else _ORIGINAL_LENGTH,
        "pad_token_id": None,
    }


# Nemotron-4 15B and 340B (2402.16819, 2406.11704): LayerNorm times 1 + weight, squared ReLU without a gate, half-rotated heads.
_NEMOTRON_NAMES = NameTable(
    layer=mapping.INPUT_NORM
    | {"input_layernorm.bias": rule("input_layernorm.bias")}
    | mapping.ATTENTION
    | mapping.affine("pre_mlp_layernorm", "post_attention_layernorm")
    | {"mlp.linear_fc1.weight": rule("mlp.up_proj.weight"), "mlp.linear_fc2.weight": rule("mlp.down_proj.weight")},
    after=mapping.FINAL_NORM | {"decoder.final_layernorm.bias": rule("model.norm.bias")} | mapping.OUTPUT,
)


def _nemotron_from_hf(hf: HFConfig) -> Architecture:
    rope, activation = hf.rope(fraction=0.5, kinds=()), ("hidden_act", {"relu2": Activation.squared_relu})
    # Nemotron-4's own files have `rope_percent` too, which transformers does not read.
    hf.only({"rope_percent": (rope["rotary_fraction"],)})
    own = {"eps_name": "norm_eps", "norm_eps": 1e-5, "initializer_range": 0.0134, "activation": activation, "rope": rope}
    common = common_from_hf(hf, fraction=0.5, **own)
    return replace(common, gated_mlp=False, normalization=Normalization.layer_norm_1p)


def _nemotron_to_hf(a: Architecture) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": a.rope_theta, "partial_rotary_factor": a.rotary_fraction}
    own = {"norm_eps": a.norm_eps, "hidden_act": "relu2", "rope_parameters": rope}
    own |= {"partial_rotary_factor": a.rotary_fraction}
    return {key: value for key, value in common_to_hf(a).items() if key not in ("rms_norm_eps", "rope_scaling")} | own


# Llama 4, its text part: chunked attention with rotary positions in most layers, attention to everything without positions in the others; a
# mixture of experts of which each token gets one, beside one that all tokens pass.
_LLAMA4_BLOCK = "feed_forward"
_LLAMA4_EXPERT = "mlp.experts.local_experts.{expert}."
_LLAMA4_MIXTURE = {
    "mlp.router.weight": rule(f"{_LLAMA4_BLOCK}.router.weight"),
    **mapping.feed_forward("mlp.shared_experts", f"{_LLAMA4_BLOCK}.shared_expert"),
    _LLAMA4_EXPERT + "linear_fc1.weight": rule(f"{_LLAMA4_BLOCK}.experts.gate_up_proj", layout=Layout.packed_gate_up, transposed=True),
    _LLAMA4_EXPERT + "linear_fc2.weight": rule(f"{_LLAMA4_BLOCK}.experts.down_proj", transposed=True),
}
_LLAMA4_DENSE = mapping.feed_forward("mlp", _LLAMA4_BLOCK)
_CHUNKED = "chunked_attention"


def _llama4_from_hf(hf: HFConfig) -> Architecture:
    layers = range(hf.size("num_hidden_layers"))
    common = common_from_hf(hf, key_value_heads=8, head_dim=128, theta=5e5, norm_eps=1e-5, rope_kinds=UNFACTORED)
    biases, step, listed = hf.flag("attention_bias", False), hf.size("interleave_moe_layer_step", absent=1), hf.value("moe_layers")
    experts = list(layers[step - 1 :: step]) if listed is None else listed
    if listed is None and not experts:
        raise hf.refusal("interleave_moe_layer_step", step, f"at most num_hidden_layers={len(layers)}")
    if not isinstance(experts, list) or not experts or any(type(one) is not int or one not in layers for one in experts):
        raise hf.refusal("moe_layers", listed, f"a list of layers' numbers, from 0 to {len(layers) - 1}, at least one")
    by_interval = (int((layer + 1) % hf.size("no_rope_layer_interval", absent=4) != 0) for layer in layers)
    rotates = hf.value("no_rope_layers") or list(by_interval)
    if not isinstance(rotates, list) or len(rotates) != len(layers) or any(one not in (0, 1) for one in rotates):
        raise hf.refusal("no_rope_layers", rotates, f"{len(layers)} times 1 (rotary positions) or 0 (none), one for each layer")
    types = hf.layer_types(_CHUNKED, lambda layer: rotates[layer])
    tuned = hf.value("attn_temperature_tuning")
    if not (tuned is None or type(tuned) in (bool, int)):  # 4 in early files means true
        raise hf.refusal("attn_temperature_tuning", tuned, "true or false")
    chunks = _CHUNKED in types
    return replace(
        common,
        ffn_hidden_size=hf.size("intermediate_size_mlp", absent=16384),
        qkv_bias=biases,
        attention_out_bias=biases,
        rotary_interleaved=True,
        qk_l2_norm=hf.flag("use_qk_norm", True),
        attention_chunk=hf.size("attention_chunk_size", absent=8192) if chunks else 0,
        full_attention_layers=[layer for layer in layers if types[layer] == FULL] if chunks else [],
        no_rope_layers=[layer for layer in layers if not rotates[layer]],
        attention_temperature=0.0 if tuned in (False, 0) else hf.number("attn_scale", 0.1),
        attention_temperature_length=hf.size("floor_scale", absent=8192),
        num_experts=hf.size("num_local_experts", absent=16),
        experts_per_token=1,
        expert_ffn_hidden_size=common.ffn_hidden_size,
        normalize_expert_weights=False,
        dense_layers=[layer for layer in layers if layer not in experts],
        shared_ffn_hidden_size=common.ffn_hidden_size,
        router_sigmoid=True,
        weighted_expert_inputs=True,
    )


def _llama4_to_hf(a: Architecture) -> dict[str, Any]:
    layers = range(a.num_layers)
    return common_to_hf(a) | {
        "attention_bias": a.attention_out_bias,
        "intermediate_size": a.expert_ffn_hidden_size,
        "intermediate_size_mlp": a.ffn_hidden_size,
        "use_qk_norm": a.qk_l2_norm,
        "attention_chunk_size": a.attention_chunk or 8192,
        "layer_types": [_CHUNKED if a.chunk_of(layer) else FULL for layer in layers],
        "no_rope_layers": [int(a.rotates(layer)) for layer in layers],
        "attn_temperature_tuning": a.attention_temperature > 0,
        "attn_scale": a.attention_temperature or 0.1,
        "floor_scale": a.attention_temperature_length,
        "num_local_experts": a.num_experts,
        "moe_layers": [layer for layer in layers if a.has_experts(layer)],
    }


FAMILIES = {
    Family.llama: HFFamily(
        "LlamaForCausalLM",
        llama_like,
        _llama_from_hf,
        lambda a: common_to_hf(a) | {"attention_bias": a.attention_out_bias, "mlp_bias": a.mlp_bias},
    ),
    Family.mistral: HFFamily(
        "MistralForCausalLM", llama_like, _mistral_from_hf, lambda a: common_to_hf(a) | {"sliding_window": a.sliding_window or None}
    ),
    Family.ministral: HFFamily(
        "MinistralForCausalLM",
        llama_like,
        _ministral_from_hf,
        lambda a: common_to_hf(a) | {"sliding_window": a.sliding_window or None, "layer_types": layer_types(a)},
    ),
    Family.mixtral: HFFamily(
        "MixtralForCausalLM",
        lambda a: llama_like(a, mlp=_MIXTRAL_EXPERTS),
        _mixtral_from_hf,
        _mixtral_to_hf,
        fixed=DROPOUT | {"router_jitter_noise": (0.0,)},
    ),
    Family.phi3: HFFamily("Phi3ForCausalLM", _PHI3_NAMES, _phi3_from_hf, _phi3_to_hf, _PHI3_FIXED),
    Family.nemotron: HFFamily(
        "NemotronForCausalLM", _NEMOTRON_NAMES, _nemotron_from_hf, _nemotron_to_hf, UNBIASED | {"mlp_bias": (False,)}
    ),
    Family.llama4_text: HFFamily(
        "Llama4ForCausalLM",
        lambda a: llama_like(a, mlp=_LLAMA4_MIXTURE, dense=_LLAMA4_DENSE),
        _llama4_from_hf,
        _llama4_to_hf,
        DROPOUT | {"num_experts_per_tok": (1,)},
    ),
}
