"""What an `Architecture` must satisfy beside its sizes: how experts are chosen, and layers that treat positions differently."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.models.architecture.architecture import Architecture


def check_router(a: Architecture) -> None:
    """Raise ConfigError for ways of choosing experts that are not computed here."""
    groups, kept, best = a.router_groups, a.router_groups_per_token, a.router_group_best
    if a.router_bias and not a.router_sigmoid:
        raise ConfigError("architecture.router_bias=True: is computed for sigmoid scores; allowed with router_sigmoid=True")
    if a.router_sigmoid and a.normalize_expert_weights != (a.experts_per_token > 1):
        raise ConfigError(
            f"architecture.normalize_expert_weights={a.normalize_expert_weights}: sigmoid scores of several experts are normalised, "
            f"those of one are not; allowed with experts_per_token={a.experts_per_token}: {a.experts_per_token > 1}"
        )
    if a.router_scale != 1 and a.normalize_expert_weights and not a.router_sigmoid:
        raise ConfigError(f"architecture.router_scale={a.router_scale}: allowed with router_sigmoid=True or normalize_expert_weights=False")
    if not 0 < a.router_scale < math.inf:
        raise ConfigError(f"architecture.router_scale={a.router_scale}: must be finite and above 0")
    if groups and (groups < 0 or a.num_experts % groups):
        raise ConfigError(f"architecture.router_groups={groups}: must divide num_experts={a.num_experts} (0 is none)")
    if not (1 <= kept <= groups if groups else kept == 0):
        raise ConfigError(f"architecture.router_groups_per_token={kept}: must be from 1 to router_groups={groups}, and 0 without groups")
    size = a.num_experts // groups if groups else 1
    if not 1 <= best <= size:
        raise ConfigError(f"architecture.router_group_best={best}: must be from 1 to the {size} experts of a group")
    if groups and kept * size < a.experts_per_token:
        raise ConfigError(
            f"architecture.router_groups_per_token={kept}: {kept} groups of {size} experts have fewer than "
            f"experts_per_token={a.experts_per_token}"
        )
    if a.weighted_expert_inputs and a.experts_per_token != 1:
        raise ConfigError(
            f"architecture.weighted_expert_inputs=True: is computed for one expert per token; allowed with experts_per_token="
            f"{a.experts_per_token}: False"
        )


def check_positions_by_layer(a: Architecture) -> None:
    """Raise ConfigError for chunks, layers without rotary positions, and norms of rotated queries that do not go together."""
    a.no_rope_layers = list(a.no_rope_layers)
    a.check_numbers("no_rope_layers")
    if a.attention_chunk < 0 or a.attention_chunk and a.sliding_window:
        raise ConfigError(f"architecture.attention_chunk={a.attention_chunk}: must not be negative, and be 0 with sliding_window > 0")
    if not 0 <= a.attention_temperature < math.inf:
        raise ConfigError(f"architecture.attention_temperature={a.attention_temperature}: must be finite and not negative")
    if a.attention_temperature_length < 1:
        raise ConfigError(f"architecture.attention_temperature_length={a.attention_temperature_length}: must be at least 1")
    if a.qk_l2_norm and (a.qk_norm or a.latent_size):
        raise ConfigError("architecture.qk_l2_norm=True: allowed with qk_norm=False and latent_size=0")
    for name in ("no_rope_layers", "qk_l2_norm"):
        if getattr(a, name) and (a.position_embedding != "rope" or a.latent_size or a.rope_attention_factor != 1):
            raise ConfigError(
                f"architecture.{name}={getattr(a, name)}: allowed with position_embedding=rope, latent_size=0 and rope_attention_factor=1.0"
            )
