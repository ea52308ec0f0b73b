"""Llama 2 and 3 (and models that copied their layout): RMSNorm, SwiGLU, rotary embeddings, grouped-query attention."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family
from aligner.models.families.hf_config import LLAMA3_ROPE, HFConfig
from aligner.models.families.mapping import llama_like

NAMES = llama_like(attention={})
SILU = {"silu": Activation.silu, "swish": Activation.silu}
# What else changes the numbers of Llama and of its descendants, and the only values of it that are computed here.
DROPOUT = {"attention_dropout": (0.0, None)}
BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for variants that Megatron-Core's layers do not compute."""
    hf.only(BIASES)
    return common_from_hf(hf, Family.llama)


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    return common_to_hf(architecture) | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}


def common_from_hf(
    hf: HFConfig, family: Family, *, key_value_heads: int = 0, head_dim: int = 0, theta: float = 10000.0, norm_eps: float = 1e-6
) -> Architecture:
    """The fields that Llama and its descendants (Qwen2, Qwen3, Mixtral) share.

    The keyword arguments are the defaults of absent keys. 0: as many key-value heads as heads; hidden size / heads.
    """
    hf.only(DROPOUT)
    heads = hf.size("num_attention_heads")
    base, llama3_factor, fraction = hf.rope(theta=theta)
    if fraction != 1:
        raise hf.refusal("partial_rotary_factor", fraction, "1.0")
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
        rope_theta=base,
        rope_llama3_factor=llama3_factor,
        norm_eps=hf.number("rms_norm_eps", norm_eps),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.number("initializer_range", 0.02),
        activation=hf.choice("hidden_act", SILU, "silu"),
    )


def common_to_hf(a: Architecture) -> dict[str, Any]:
    """The inverse of `common_from_hf`; `rope_theta` is written in the old and the new place, so that transformers 4 and 5 both read it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
    if a.rope_llama3_factor:
        rope |= {"rope_type": "llama3", "factor": a.rope_llama3_factor} | LLAMA3_ROPE
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
        "rope_parameters": rope,
        "rope_theta": a.rope_theta,
        "rope_scaling": rope if a.rope_llama3_factor else None,
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": a.initializer_range,
        "attention_dropout": 0.0,
    }
