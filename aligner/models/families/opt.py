"""OPT (2205.01068): GPT-3's layers with ReLU, and a table of positions whose first two rows no position has."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, PositionEmbedding
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, Layout, NameTable, affine, rule

_QKV = {
    f"self_attention.linear_qkv.{kind}": rule(*(f"self_attn.{name}_proj.{kind}" for name in "qkv"), layout=Layout.qkv)
    for kind in ("weight", "bias")
}
NAMES = NameTable(
    before={
        EMBEDDING: rule("model.decoder.embed_tokens.weight", layout=Layout.vocabulary),
        "embedding.position_embeddings.weight": rule("model.decoder.embed_positions.weight"),
    },
    layer=affine("input_layernorm", "self_attn_layer_norm")
    | _QKV
    | affine("self_attention.linear_proj", "self_attn.out_proj")
    | affine("pre_mlp_layernorm", "final_layer_norm")
    | affine("mlp.linear_fc1", "fc1")
    | affine("mlp.linear_fc2", "fc2"),
    after=affine("decoder.final_layernorm", "model.decoder.final_layer_norm")
    | {OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary)},
    layer_prefix="model.decoder.layers.{layer}.",
    base_prefix="model.",
    ignored=r"(?!)",
)
OFFSET = 2
_ACTIVATIONS = {"relu": Activation.relu, "gelu": Activation.gelu}
_EPS = 1e-5  # LayerNorm's own: no file says it
# The 350M model, whose norms follow its layers and whose embeddings are projected, is not computed. Dropout is not either, but every file
# of OPT says 0.1.
_FIXED = {
    "do_layer_norm_before": (True,),
    "_remove_final_layer_norm": (False,),
    "enable_bias": (True,),
    "layer_norm_elementwise_affine": (True,),
    "attention_dropout": (0.0,),
    "layerdrop": (0.0,),
    "dropout": (0.1, 0.0),
}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for the 350M model's norms and projections, and without biases."""
    hidden_size, heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    hf.only(_FIXED | {"word_embed_proj_dim": (None, hidden_size)})
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
        "word_embed_proj_dim": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "ffn_dim": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tied_embeddings,
        "init_std": a.initializer_range,
        "activation_function": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "dropout": 0.0,
    }
