"""From Megatron-LM's arguments or NeMo's `model_config.yaml` to an `Architecture`, of a family whose Hugging Face models compute it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Activation, Architecture, Family, Normalization, PositionEmbedding
from aligner.models.families import architecture_from_hf, architecture_to_hf
from aligner.models.families.hf_config import HFConfig
from aligner.models.modules.scalar_head import VALUES, Pooling, ScalarHead

_OFF = (False, None, 0)
_ONE = (None, 1)
# Of the transformer, under the same names in both: what else changes the numbers, and the only values that are computed here.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("multi_latent_attention", "rotary_interleaved", "qk_l2_norm", "attention_output_gate", "hetereogenous_dist_checkpoint"), _OFF
    ),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "window_attn_skip_freq", "linear_attention_freq", "no_rope_freq"), _OFF),
    **dict.fromkeys(("softmax_scale", "activation_func_clamp_value", "glu_linear_offset", "experimental_attention_variant"), _OFF),
    **dict.fromkeys(("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "mtp_num_layers", "use_mup"), _OFF),
    **dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_shared_expert_intermediate_size"), _OFF),
    **dict.fromkeys(("moe_expert_capacity_factor", "moe_token_dropping", "moe_input_jitter_eps", "moe_apply_probs_on_input"), _OFF),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_layer_freq"), _ONE),
    "softmax_type": ("vanilla", None),
    "moe_router_score_function": ("softmax", None),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", None),
}
_MEGATRON_LM: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    **dict.fromkeys(("use_legacy_models", "openai_gelu", "quick_geglu", "is_hybrid_model", "spec"), _OFF),
    "rotary_seq_len_interpolation_factor": _ONE,  # which some releases compute with and others ignore
}
_NEMO: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    **dict.fromkeys(
        ("headscale", "apply_embedding_scaling", "megatron_legacy", "use_emha", "mcore_customization_config", "hyena"), (*_OFF, {})
    ),
    "mcore_gpt": (True,),
    "transformer_block_type": ("pre_ln",),
    "normalize_attention_scores": (True,),
    "attention_type": ("multihead", None),
    "name": ("te_gpt", "", None, "megatron_gpt_full_te_layer_autocast", "modelopt"),
}
_NEMO_ACTIVATIONS = {
    "gelu": (False, Activation.gelu),
    **dict.fromkeys(("geglu", "fast-geglu"), (True, Activation.gelu)),
    **dict.fromkeys(("reglu", "fast-reglu"), (True, Activation.relu)),
    **dict.fromkeys(("swiglu", "fast-swiglu"), (True, Activation.silu)),
    "squared-relu": (False, Activation.squared_relu),
}
_POSITIONS = {"rope": PositionEmbedding.rope, "learned_absolute": PositionEmbedding.learned}


class _Keys(HFConfig):
    """The keys of one file."""

    def refusal(self, key: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"{key}={value!r} is not read; allowed: {allowed}")

    def checked(self, key: str, value: Any) -> float:
        """`value` of `key` as a finite number >= 0; PyYAML takes 1e-5, which OmegaConf writes, for a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            pass  # refused as what it is
        return super().checked(key, value)


def from_megatron_lm(args: Mapping[str, Any], *, rows: int) -> Architecture:
    """The architecture that Megatron-LM's arguments describe. `rows`: of the embedding, with padding.

    Raises ConfigError naming an argument whose value changes the numbers and is not computed here.
    """
    keys = _Keys(args)
    keys.only(_MEGATRON_LM)
    activation = Activation.gelu_tanh if keys.flag("bias_gelu_fusion", True) else Activation.gelu
    gated, squared = keys.flag("swiglu", False), keys.flag("squared_relu", False)
    if gated or squared:
        activation = Activation.silu if gated else Activation.squared_relu
    heads = keys.size("num_attention_heads")
    fields = _sizes(keys, heads, keys.size("num_query_groups", null=heads) if keys.flag("group_query_attention", False) else heads) | {
        "vocab_size": keys.size("vocab_size", absent=rows, null=rows),
        "max_position_embeddings": keys.size("max_position_embeddings"),
        "norm_eps": keys.number("norm_epsilon", 1e-5),
        "tied_embeddings": not keys.flag("untie_embeddings_and_output_weights", False),
        "normalization": _normalization(keys, "LayerNorm", keys.flag("apply_layernorm_1p", False)),
    }
    llama3 = {"rope_llama3_factor": keys.number("rope_scaling_factor", 8.0)} if keys.flag("use_rope_scaling", False) else {}
    fields |= _positions(keys, "rotary_percent", lambda _: llama3) | _window(keys)
    fields |= _experts(keys, "num_experts", fields["ffn_hidden_size"])
    own = {"gated_mlp": gated, "activation": activation}
    return _of_a_family(fields | own, everywhere=keys.flag("add_bias_linear", True), qkv=keys.flag("add_qkv_bias", False))


def from_nemo(config: Mapping[str, Any], *, rows: int) -> Architecture:
    """The architecture that NeMo's config describes, as `from_megatron_lm`."""
    keys = _Keys(config)
    keys.only(_NEMO)
    gated, activation = keys.choice("activation", _NEMO_ACTIVATIONS, "gelu")
    if activation is Activation.gelu and (keys.flag("bias_activation_fusion", True) or keys.flag("openai_gelu", False)):
        activation = Activation.gelu_tanh  # what the fused kernel computes
    heads = keys.size("num_attention_heads")
    fields = _sizes(keys, heads, keys.size("num_query_groups", absent=heads, null=heads)) | {
        "vocab_size": keys.size("override_vocab_size", absent=rows, null=rows),
        "max_position_embeddings": keys.size("encoder_seq_length"),
        "norm_eps": keys.number("layernorm_epsilon", 1e-5),
        "tied_embeddings": keys.flag("share_embeddings_and_output_weights", True),
        "normalization": _normalization(keys, "layernorm", keys.flag("layernorm_zero_centered_gamma", False)),
    }
    fields |= _positions(keys, "rotary_percentage", _nemo_scaling) | _window(keys)
    fields |= _experts(keys, "num_moe_experts", fields["ffn_hidden_size"]) | {"gated_mlp": gated, "activation": activation}
    return _of_a_family(fields, everywhere=keys.flag("bias", True), qkv=keys.flag("qkv_bias", False))


def _positions(keys: _Keys, fraction: str, scaling: Callable[[_Keys], dict[str, float]]) -> dict[str, Any]:
    """The fields of learned positions, or of rotary ones, of which `fraction` is the key of the rotated part."""
    if keys.choice("position_embedding_type", _POSITIONS, "learned_absolute") is PositionEmbedding.learned:
        return {"position_embedding": PositionEmbedding.learned}
    return {"rope_theta": keys.number("rotary_base", 10000.0), "rotary_fraction": keys.number(fraction, 1.0)} | scaling(keys)


def nemo_head(config: Mapping[str, Any], outputs: int) -> ScalarHead:
    """The head of NeMo-Aligner's reward models and critics. Raises ConfigError where scores are scaled or summed behind it."""
    keys = _Keys(config)
    standard = config.get("reward_standardization") or {}
    if standard.get("enable"):
        raise keys.refusal("reward_standardization.enable", True, "False: scores are the head's own here")
    if keys.flag("output_sequence", False):
        if outputs > 1:
            raise keys.refusal("regression.num_attributes", outputs, "1 with output_sequence=True")
        return VALUES
    names = ("reward",) if outputs == 1 else tuple(f"attribute_{number}" for number in range(outputs))
    return ScalarHead(outputs=names, pooling=Pooling.mean if keys.flag("use_avg_pool", False) else Pooling.last)


def _sizes(keys: _Keys, heads: int, groups: int) -> dict[str, Any]:
    return {
        "num_layers": keys.size("num_layers"),
        "hidden_size": keys.size("hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": keys.size("kv_channels", absent=0, null=0),
        "ffn_hidden_size": keys.size("ffn_hidden_size"),
        "initializer_range": keys.number("init_method_std", 0.02),
        "qk_norm": keys.flag("qk_layernorm", False),
    }


def _normalization(keys: _Keys, absent: str, zero_centred: bool) -> Normalization:
    norms = {"layernorm": Normalization.layer_norm, "rmsnorm": Normalization.rms_norm, "layernorm1p": Normalization.layer_norm_1p}
    name = keys.value("normalization") or absent
    if not isinstance(name, str) or name.lower() not in norms:
        raise keys.refusal("normalization", name, ", ".join(norms))
    found = norms[name.lower()]
    centred = {Normalization.layer_norm: Normalization.layer_norm_1p, Normalization.rms_norm: Normalization.rms_norm_1p}
    return centred.get(found, found) if zero_centred else found


def _nemo_scaling(keys: _Keys) -> dict[str, float]:
    linear = keys.number("seq_len_interpolation_factor", 1.0) if keys.value("seq_len_interpolation_factor") else 1.0
    if not keys.flag("scale_positional_embedding", False):
        return {} if linear == 1 else {"rope_linear_factor": linear}
    if linear != 1:  # as NeMo's converter of Llama 3.1 wrote it
        raise ConfigError(
            f"seq_len_interpolation_factor={linear} beside scale_positional_embedding=True: NeMo computes both, Hugging Face's Llama 3.1 "
            "the second alone; allowed: one (unpack the archive, write what is meant into its model_config.yaml, and name the directory)"
        )
    return {"rope_llama3_factor": 8.0}


def _window(keys: _Keys) -> dict[str, int]:
    """Megatron's window (W, 0) is of a token and the W before it."""
    window = keys.value("window_size")
    if window is None:
        return {}
    pair = isinstance(window, (list, tuple)) and len(window) == 2 and all(isinstance(size, int) for size in window)
    if not pair or window[0] < 0 or window[1]:
        raise keys.refusal("window_size", window, "null or [tokens before, 0]")
    return {"sliding_window": window[0] + 1}


def _experts(keys: _Keys, name: str, ffn_hidden_size: int) -> dict[str, Any]:
    if not keys.value(name):
        return {}
    width = keys.size("moe_ffn_hidden_size", absent=ffn_hidden_size, null=ffn_hidden_size)
    return {
        "num_experts": keys.size(name),
        "experts_per_token": keys.size("moe_router_topk", absent=2),
        "expert_ffn_hidden_size": width,
        "ffn_hidden_size": width,
        "normalize_expert_weights": not keys.flag("moe_router_pre_softmax", False),
    }


def _of_a_family(fields: Mapping[str, Any], *, everywhere: bool, qkv: bool) -> Architecture:
    """The first family whose Hugging Face config has exactly these fields. Raises ConfigError naming the differences of the closest."""
    closest: tuple[Family, dict[str, Any]] | None = None
    # Biases on all linear layers are one field in some families and three in others.
    three = dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), True)
    kinds = ({"linear_bias": True}, three) if everywhere else ({"qkv_bias": qkv},)
    for family, biases in itertools.product(Family, kinds):
        architecture = Architecture(family=family, **fields, **biases)
        try:
            described = asdict(architecture_from_hf(architecture_to_hf(architecture)))
        except (ConfigError, StopIteration, KeyError):  # it has no word for a value
            continue
        differing = {name: value for name, value in asdict(architecture).items() if described[name] != value}
        if not differing:
            return architecture
        if closest is None or len(differing) < len(closest[1]):
            closest = family, differing
    if closest is None:
        raise ConfigError("no family of models here has these settings")
    what = ", ".join(f"{name}={getattr(value, 'value', value)}" for name, value in closest[1].items())
    raise ConfigError(f"no family of models here is computed so; the closest, {closest[0].value}, has no {what}")
