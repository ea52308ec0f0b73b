"""What an architecture must satisfy for attention other than heads of queries, keys and values: latent attention, gates, delta nets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.models.architecture.architecture import Architecture

# Sizes of gated delta nets: 0 in models without.
OF_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_size")


def check_latent(a: Architecture) -> None:
    """Raise ConfigError for sizes that latent attention cannot have, or that are there without it."""
    if not a.latent_size:
        for name in ("query_latent_size", "value_head_dim"):
            if getattr(a, name):
                raise ConfigError(f"architecture.{name}={getattr(a, name)}: needs latent_size > 0; allowed without: 0")
        return
    for name, least in (("latent_size", 1), ("query_latent_size", 0)):
        if getattr(a, name) < least:
            raise ConfigError(f"architecture.{name}={getattr(a, name)}: must not be negative (0 is none)")
    if not 1 <= a.value_head_dim <= a.head_dim:
        raise ConfigError(f"architecture.value_head_dim={a.value_head_dim}: must be from 1 to head_dim={a.head_dim}")
    fixed = {
        "num_key_value_heads": a.num_attention_heads,
        "position_embedding": "rope",
        "normalization": "rms_norm",
        **dict.fromkeys(("qkv_bias", "qk_norm", "linear_bias", "attention_gate"), False),
    }
    for name, needed in fixed.items():
        if (value := getattr(a, name)) != needed:
            raise ConfigError(f"architecture.{name}={getattr(value, 'value', value)}: allowed with latent_size={a.latent_size}: {needed}")


def check_linear(a: Architecture) -> None:
    """Raise ConfigError for a gate, or layers and sizes of gated delta nets, that are not computed."""
    a.linear_attention_layers = list(a.linear_attention_layers)
    if a.attention_gate and a.rotary_interleaved:
        raise ConfigError("architecture.attention_gate=True: allowed with rotary_interleaved=False")
    if not a.linear_attention_layers:
        for name in OF_LINEAR:
            if getattr(a, name):
                raise ConfigError(f"architecture.{name}={getattr(a, name)}: needs linear_attention_layers; allowed without: 0")
        return
    a.check_numbers("linear_attention_layers")
    for name in OF_LINEAR:
        if getattr(a, name) < 1:
            raise ConfigError(f"architecture.{name}={getattr(a, name)}: must be at least 1 with linear_attention_layers")
    if a.linear_value_heads % a.linear_key_heads:
        raise ConfigError(f"architecture.linear_key_heads={a.linear_key_heads}: must divide linear_value_heads={a.linear_value_heads}")
    for name in ("latent_size", "linear_bias", "sliding_window", "post_norms"):
        if value := getattr(a, name):
            raise ConfigError(f"architecture.{name}={value}: allowed with linear_attention_layers: {type(value)()}")
