"""GPT-NeoX (2204.06745) and Pythia: attention and feed-forward layer side by side, LayerNorm, biases everywhere, heads rotated in part."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, ParallelResidual
from aligner.models.families import rope_scaling
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, Layout, NameTable, affine, rule

NAMES = NameTable(
    before={EMBEDDING: rule("gpt_neox.embed_in.weight", layout=Layout.vocabulary)},
    layer=affine("input_layernorm", "input_layernorm")
    | affine("pre_mlp_layernorm", "post_attention_layernorm")
    | affine("self_attention.linear_qkv", "attention.query_key_value", layout=Layout.fused_qkv)
    | affine("self_attention.linear_proj", "attention.dense")
    | affine("mlp.linear_fc1", "mlp.dense_h_to_4h")
    | affine("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    after=affine("decoder.final_layernorm", "gpt_neox.final_layer_norm")
    | {OUTPUT_LAYER: rule("embed_out.weight", layout=Layout.vocabulary)},
    layer_prefix="gpt_neox.layers.{layer}.",
    base_prefix="gpt_neox.",
    ignored=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
_ACTIVATIONS = {
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
    "relu": Activation.relu,
    "silu": Activation.silu,
}
_FIXED = {"attention_bias": (True,), "attention_dropout": (0.0,), "hidden_dropout": (0.0,)}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for dropout and attention without biases."""
    hidden_size, heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    hf.only(_FIXED | {"head_dim": (None, hidden_size // heads)})
    parallel = hf.flag("use_parallel_residual", True)
    return Architecture(
        family=Family.gpt_neox,
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        ffn_hidden_size=hf.size("intermediate_size"),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        norm_eps=hf.number("layer_norm_eps", 1e-5),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
        initializer_range=hf.number("initializer_range", 0.02),
        gated_mlp=False,
        activation=hf.choice("hidden_act", _ACTIVATIONS, "gelu"),
        normalization=Normalization.layer_norm,
        linear_bias=True,
        parallel_residual=ParallelResidual.own_norm if parallel else ParallelResidual.none,
        **hf.rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct")),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    rope = rope_scaling.to_hf(a)
    return {key: value for key, (value, *_) in _FIXED.items()} | {
        "model_type": a.family.value,
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "intermediate_size": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "rotary_pct": a.rotary_fraction,
        "rotary_emb_base": a.rope_theta,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": a.rotary_fraction},
        "rope_scaling": rope["rope_scaling"],
        "layer_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": a.initializer_range,
        "hidden_act": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "use_parallel_residual": a.parallel_residual != ParallelResidual.none,
    }
