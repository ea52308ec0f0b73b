"""One module per model family: Hugging Face config <-> `Architecture` (`from_hf`, `to_hf`) and the names of its weights (`NAMES`)."""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family
from aligner.models.families import gpt2, llama, mixtral, nemotron, qwen2, qwen3, qwen3_moe
from aligner.models.families.mapping import NameTable

FAMILIES = {
    Family.llama: llama,
    Family.qwen2: qwen2,
    Family.qwen3: qwen3,
    Family.mixtral: mixtral,
    Family.qwen3_moe: qwen3_moe,
    Family.nemotron: nemotron,
    Family.gpt2: gpt2,
}


def architecture_from_hf(hf: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `config.json`. Raises ConfigError for a family or a variant that is not supported."""
    model_type = hf.get("model_type")
    if model_type not in Family.__members__:
        raise ConfigError(f"config.json: model_type={model_type!r} is not supported; allowed: {', '.join(Family.__members__)}")
    return FAMILIES[Family[model_type]].from_hf(hf)


def architecture_to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face `config.json` of an architecture."""
    return FAMILIES[architecture.family].to_hf(architecture)


def weight_names(architecture: Architecture) -> NameTable:
    """The names of an architecture's weights, Megatron's and Hugging Face's."""
    return FAMILIES[architecture.family].NAMES
