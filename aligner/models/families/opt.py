"""OPT (2205.01068): GPT-3's layers with ReLU, and a table of positions whose first two rows no position has."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, PositionEmbedding
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, OUTPUT_PROJECTION, PROJECTION, Layout, NameTable, affine, rule

_QKV = {
    f"self_attention.linear_qkv.{kind}": rule(*(f"self_attn.{name}_proj.{kind}" for name in "qkv"), layout=Layout.qkv)
    for kind in ("weight", "bias")
}
_EMBEDDINGS = {
    EMBEDDING: rule("model.decoder.embed_tokens.weight", layout=Layout.vocabulary),
    "embedding.position_embeddings.weight": rule("model.decoder.embed_positions.weight"),
}


def NAMES(architecture: Architecture) -> NameTable:  # noqa: N802 - a constant of most families
    """The names of its weights; norms may be behind the layers, and embeddings projected."""
    behind, projected = architecture.residual_norms, bool(architecture.embedding_size)
    norms = ("post_attention_layernorm", "post_mlp_layernorm") if behind else ("input_layernorm", "pre_mlp_layernorm")
    final = {} if behind else affine("decoder.final_layernorm", "model.decoder.final_layer_norm")
    return NameTable(
        before=_EMBEDDINGS | ({PROJECTION: rule("model.decoder.project_in.weight")} if projected else {}),
        layer=affine(norms[0], "self_attn_layer_norm")
        | _QKV
        | affine("self_attention.linear_proj", "self_attn.out_proj")
        | affine(norms[1], "final_layer_norm")
        | affine("mlp.linear_fc1", "fc1")
        | affine("mlp.linear_fc2", "fc2"),
        after=final
        | ({OUTPUT_PROJECTION: rule("model.decoder.project_out.weight")} if projected else {})
        | {OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)},
        layer_prefix="model.decoder.layers.{layer}.",
        base_prefix="model.",
        ignored=r"(?!)",
    )


OFFSET = 2
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu}
_EPS = 1e-5  # LayerNorm's own: no file says it
# Dropout is not computed, but every file of OPT says 0.1.
_FIXED = {
    "_remove_final_layer_norm": (False,),
    "enable_bias": (True,),
    "layer_norm_elementwise_affine": (True,),
    "attention_dropout": (0.0,),
    "layerdrop": (0.0,),
    "dropout": (0.1, 0.0),
}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError without biases."""
    hf.only(_FIXED)
    hidden_size, heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    width, before = hf.optional_size("word_embed_proj_dim", absent=None) or hidden_size, hf.flag("do_layer_norm_before", True)
    return Architecture(
        family=Family.opt,
        num_layers=hf.size("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        ffn_hidden_size=hf.size("ffn_dim"),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("max_position_embeddings"),
        position_embedding=PositionEmbedding.learned,
        position_offset=OFFSET,
        norm_eps=_EPS,
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        initializer_range=hf.number("init_std", 0.02),
        gated_mlp=False,
        activation=hf.choice("activation_function", _ACTIVATIONS, "relu"),
        normalization=Normalization.layer_norm,
        pre_norms=before,
        residual_norms=not before,
        embedding_size=width if width != hidden_size else 0,
        linear_bias=True,
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    return {key: value for key, (value, *_) in _FIXED.items()} | {
        "model_type": a.family.value,
        "architectures": ["OPTForCausalLM"],
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "do_layer_norm_before": a.pre_norms,
        "word_embed_proj_dim": a.vocabulary_width,
        "num_attention_heads": a.num_attention_heads,
        "ffn_dim": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tied_embeddings,
        "init_std": a.initializer_range,
        "activation_function": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "dropout": 0.0,
    }
