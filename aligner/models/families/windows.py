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
    """The fields of a model whose layers are all alike; `absent` is the window of a file that does not say."""
    window = hf.optional_size("sliding_window", absent=absent)
    return {} if window is None else {"sliding_window": window}


def layer_types(architecture: Architecture) -> list[str]:
    """The inverse of `from_hf`."""
    return [WINDOWED if architecture.window_of(number) else FULL for number in range(architecture.num_layers)]
