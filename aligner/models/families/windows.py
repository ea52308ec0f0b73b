"""Which layers see a window only: `sliding_window` and `layer_types` of a Hugging Face config <-> fields of an `Architecture`."""

from __future__ import annotations

from typing import Any

from aligner.models.config import Architecture
from aligner.models.families.hf_config import HFConfig

WINDOWED, FULL = "sliding_attention", "full_attention"


def from_hf(hf: HFConfig, window: int | None, default: list[str]) -> dict[str, Any]:
    """The fields of a model whose windowed layers see `window` tokens; `default`: its layers, where the file has no `layer_types`."""
    types = hf.value("layer_types")
    if types is None:
        types = default
    elif not isinstance(types, list) or len(types) != len(default) or set(types) - {WINDOWED, FULL}:
        raise hf.refusal("layer_types", types, f'{len(default)} of "{FULL}" and "{WINDOWED}", one for each layer')
    if WINDOWED not in types:
        return {}
    if window is None:
        raise hf.refusal("layer_types", types, f'"{FULL}" alone where no sliding_window is on')
    return {"sliding_window": window, "full_attention_layers": [number for number, kind in enumerate(types) if kind == FULL]}


def everywhere(hf: HFConfig, *, absent: int | None) -> dict[str, Any]:
    """The fields of a model whose layers are all alike; `absent` is the window of a file that does not say.

    A window that holds the longest sequence is none: Phi-3's files of 128k tokens say 262144.
    """
    window = hf.optional_size("sliding_window", absent=absent)
    return {} if window is None or window >= hf.size("max_position_embeddings") else {"sliding_window": window}


def layer_types(architecture: Architecture) -> list[str]:
    """The inverse of `from_hf`."""
    return [WINDOWED if architecture.window_of(number) else FULL for number in range(architecture.num_layers)]


def two_ropes(hf: HFConfig, *, theta: float, local_theta: float, local_name: str) -> tuple[dict[str, Any], float]:
    """(the rotary fields of the layers without a window, the base of those with one), which nothing scales. The numbers are those of a file
    that does not say; `local_name`: what the latter is called at its top level."""
    kinds = hf.value("rope_parameters") or {}
    if not isinstance(kinds, dict) or set(kinds) - {FULL, WINDOWED}:
        raise hf.refusal("rope_parameters", kinds, f'one object each for "{FULL}" and "{WINDOWED}"')
    scaling = hf.value("rope_scaling") or {}
    if not isinstance(scaling, dict) or (scaling and "rope_type" not in scaling):
        raise hf.refusal("rope_scaling", scaling, "an object with a rope_type")
    full, local = ((kinds.get(kind) or {}) for kind in (FULL, WINDOWED))
    if local.get("rope_type", "default") != "default":
        raise hf.refusal(f"rope_parameters.{WINDOWED}.rope_type", local["rope_type"], '"default"')
    fields = hf.part(rope_parameters=dict(full) | scaling, rope_scaling=None).rope(theta=theta)
    of_windows = hf.part(rope_parameters=local, rope_scaling=None).rope(theta=local_theta, names=(local_name, "none"))
    return fields, of_windows["rope_theta"]


def two_ropes_to_hf(hf: dict[str, Any], local_theta: float) -> dict[str, Any]:
    """The config with the rotary keys of `two_ropes` instead of one set for all layers."""
    return hf | {"rope_parameters": {FULL: hf["rope_parameters"], WINDOWED: {"rope_type": "default", "rope_theta": local_theta}}}
