"""Llama 2 and 3 (and models that copied their layout): RMSNorm, SwiGLU, rotary embeddings, grouped-query attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from aligner.models.config import Activation, Architecture, Family
from aligner.models.families import rope_scaling
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import ATTENTION_OUT_BIAS, BIASED_MLP, MLP, QKV_BIAS, NameTable, llama_like

SILU = {"silu": Activation.silu, "swish": Activation.silu}
# What else changes the numbers of Llama and of its descendants, and the only values of it that are computed here.
DROPOUT = {"attention_dropout": (0.0, None)}
BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights, with those of the biases that it has."""
    return llama_like(
        attention=QKV_BIAS if architecture.qkv_bias else {},
        out=ATTENTION_OUT_BIAS if architecture.attention_out_bias else {},
        mlp=BIASED_MLP if architecture.mlp_bias else MLP,
    )


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for variants that are not computed here."""
    attention, mlp = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    return replace(common_from_hf(hf, Family.llama), qkv_bias=attention, attention_out_bias=attention, mlp_bias=mlp)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    biases = {"attention_bias": architecture.attention_out_bias, "mlp_bias": architecture.mlp_bias}
    return common_to_hf(architecture) | {"architectures": ["LlamaForCausalLM"]} | biases


def common_from_hf(
    hf: HFConfig,
    family: Family,
    *,
    key_value_heads: int = 0,
    head_dim: int = 0,
    theta: float = 10000.0,
    norm_eps: float = 1e-6,
    fraction: float = 0.0,
    tied: bool = False,
    eps_name: str = "rms_norm_eps",
    activation: tuple[str, Mapping[str, Activation]] = ("hidden_act", MappingProxyType(SILU)),
    rope: Mapping[str, Any] | None = None,
    rope_kinds: Collection[str] | None = None,
) -> Architecture:
    """The fields that Llama and its descendants (Qwen2, Qwen3, Mixtral) share.

    The keyword arguments are the defaults of absent keys. 0: as many key-value heads as heads; hidden size / heads; `fraction`:
    heads are rotated whole, and a file that says otherwise is refused. `activation`: its key, and its
    names, the first for files that do not say. `rope`: the rotary embedding's fields; None: they are read.
    """
    hf.only(DROPOUT)
    heads = hf.size("num_attention_heads")
    rope = hf.rope(theta=theta, fraction=fraction or 1.0, kinds=rope_kinds) if rope is None else rope
    if rope["rotary_fraction"] != 1 and not fraction:
        raise hf.refusal("partial_rotary_factor", rope["rotary_fraction"], "1.0")
    return Architecture(
        family=family,
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
        initializer_range=hf.number("initializer_range", 0.02),
        activation=hf.choice(*activation, next(iter(activation[1]))),
        **rope,
    )


def common_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `common_from_hf`."""
    return {
        "model_type": a.family.value,
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        **rope_scaling.to_hf(a),
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": a.initializer_range,
        "attention_dropout": 0.0,
    }
