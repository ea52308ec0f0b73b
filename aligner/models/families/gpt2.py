"""GPT-2, and GPT-3 as far as its paper describes it: learned positions, LayerNorm, biases everywhere, tied embeddings.

Its Hugging Face linear layers are `Conv1D`, whose weights are stored as [in, out].
"""

from __future__ import annotations

from typing import Any

from aligner.models.config import Activation, Architecture, Family, Normalization, PositionEmbedding
from aligner.models.families.hf_config import HFConfig
from aligner.models.families.mapping import EMBEDDING, OUTPUT_LAYER, Layout, NameTable, rule

NAMES = NameTable(
    before={
        EMBEDDING: rule("transformer.wte.weight", layout=Layout.vocabulary),
        "embedding.position_embeddings.weight": rule("transformer.wpe.weight"),
    },
    layer={
        "input_layernorm.weight": rule("ln_1.weight"),
        "input_layernorm.bias": rule("ln_1.bias"),
        "self_attention.linear_qkv.weight": rule("attn.c_attn.weight", layout=Layout.packed_qkv, transposed=True),
        "self_attention.linear_qkv.bias": rule("attn.c_attn.bias", layout=Layout.packed_qkv),
        "self_attention.linear_proj.weight": rule("attn.c_proj.weight", transposed=True),
        "self_attention.linear_proj.bias": rule("attn.c_proj.bias"),
        "pre_mlp_layernorm.weight": rule("ln_2.weight"),
        "pre_mlp_layernorm.bias": rule("ln_2.bias"),
        "mlp.linear_fc1.weight": rule("mlp.c_fc.weight", transposed=True),
        "mlp.linear_fc1.bias": rule("mlp.c_fc.bias"),
        "mlp.linear_fc2.weight": rule("mlp.c_proj.weight", transposed=True),
        "mlp.linear_fc2.bias": rule("mlp.c_proj.bias"),
    },
    after={
        "decoder.final_layernorm.weight": rule("transformer.ln_f.weight"),
        "decoder.final_layernorm.bias": rule("transformer.ln_f.bias"),
        OUTPUT_LAYER: rule("lm_head.weight", layout=Layout.vocabulary),
    },
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",  # causal masks
)
_ACTIVATIONS = {
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu": Activation.gelu,
    "silu": Activation.silu,
    "relu2": Activation.squared_relu,
}
# What else of a GPT-2 config changes the numbers, and the only values of it that are computed here. Dropout is not, but every file of GPT-2
# itself says 0.1.
_FIXED = {
    "reorder_and_upcast_attn": (False, True),  # the order of the same sums
    "add_cross_attention": (False,),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), (0.1, 0.0)),
}


def from_hf(hf: HFConfig) -> Architecture:
    """The architecture in a Hugging Face config. Raises ConfigError for variants that Megatron-Core's layers do not compute."""
    hf.only(_FIXED)
    hidden_size, heads = hf.size("n_embd", "hidden_size"), hf.size("n_head", "num_attention_heads")
    return Architecture(
        family=Family.gpt2,
        num_layers=hf.size("n_layer", "num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        ffn_hidden_size=hf.size("n_inner", absent=4 * hidden_size, null=4 * hidden_size),
        vocab_size=hf.size("vocab_size"),
        max_position_embeddings=hf.size("n_positions", "max_position_embeddings"),
        norm_eps=hf.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        initializer_range=hf.number("initializer_range", 0.02),
        gated_mlp=False,
        activation=hf.choice("activation_function", _ACTIVATIONS, "gelu_new"),
        normalization=Normalization.layer_norm,
        linear_bias=True,
        position_embedding=PositionEmbedding.learned,
        attention_scale=0.0 if hf.flag("scale_attn_weights", True) else 1.0,
        attention_scale_by_layer=hf.flag("scale_attn_by_inverse_layer_idx", False),
    )


def to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face config of an architecture."""
    a = architecture
    return {key: value for key, (value, *_) in _FIXED.items()} | {
        "model_type": a.family.value,
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": a.num_layers,
        "scale_attn_weights": not a.attention_scale,
        "scale_attn_by_inverse_layer_idx": a.attention_scale_by_layer,
        "n_embd": a.hidden_size,
        "n_head": a.num_attention_heads,
        "n_inner": a.ffn_hidden_size,
        "vocab_size": a.vocab_size,
        "n_positions": a.max_position_embeddings,
        "n_ctx": a.max_position_embeddings,
        "layer_norm_epsilon": a.norm_eps,
        "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": a.initializer_range,
        "activation_function": next(name for name, activation in _ACTIVATIONS.items() if activation == a.activation),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
