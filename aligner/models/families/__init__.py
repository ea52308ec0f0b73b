"""One module per lineage of model families, with a `llama.HFFamily` for each: Hugging Face config <-> `Architecture`, the names of its
weights, and which of `UNCHANGED`'s keys it computes.
"""

from __future__ import annotations

from typing import Any

from aligner.errors import ConfigError
from aligner.models.config import Architecture, Family, HFArchitecture, SeeingArchitecture
from aligner.models.families import deepseek, dense, gpt, llama, qwen
from aligner.models.families.hf_config import UNCHANGED, HFConfig
from aligner.models.families.mapping import NameTable
from aligner.models.families.own_modules import OWN_NAMES
from aligner.models.families.wrappers import seeing_names, text_part, wrapped_config, wrapper_of

_LINEAGES = (llama, qwen, dense, deepseek, gpt)
FAMILIES: dict[Family, llama.HFFamily] = {family: found for lineage in _LINEAGES for family, found in lineage.FAMILIES.items()}


def architecture_from_hf(hf: dict[str, Any], *, where: str = "config.json") -> Architecture:
    """Read a Hugging Face `config.json`, which messages call `where`; of a model of images and text its text part.

    Raises ConfigError for a family that is not supported, and for a key whose value changes the numbers and is not computed here.
    """
    wrapper = wrapper_of(hf)
    try:
        hf = text_part(hf)
        model_type = hf.get("model_type")
        if not isinstance(model_type, str) or model_type not in Family.__members__:
            code = HFConfig(hf).own_code()
            raise ConfigError(f"model_type={model_type!r} is not supported{code}; allowed: {', '.join(Family.__members__)}")
        config = HFConfig(hf)
        config.check_classes()
        config.check_quantization()
        family = FAMILIES[Family[model_type]]
        config.only({key: values for key, values in UNCHANGED.items() if key not in family.computed} | family.fixed)
        return family.from_hf(config)
    except ConfigError as error:
        other = "" if wrapper is None else "; or model.implementation=transformers"
        raise ConfigError(f"{where}: {error}{other}") from error


def has_layers(hf: dict[str, Any]) -> bool:
    """Whether the model of a `config.json`, or its text part, is of a family with layers here."""
    model_type = hf.get("model_type")
    return isinstance(model_type, str) and (model_type in Family.__members__ or wrapper_of(hf) is not None)


def architecture_to_hf(architecture: Architecture) -> dict[str, Any]:
    """The Hugging Face `config.json` of an architecture."""
    if isinstance(architecture, HFArchitecture):
        return dict(architecture.hf)
    if isinstance(architecture, SeeingArchitecture):
        return wrapped_config(architecture.hf, architecture)
    family = FAMILIES[architecture.family]
    fixed = {key: value for key, (value, *_) in family.fixed.items()}
    return fixed | family.to_hf(architecture) | {"model_type": architecture.family.value, "architectures": [family.hf_class]}


def weight_names(architecture: Architecture) -> NameTable:
    """The names of an architecture's weights, Megatron's and Hugging Face's."""
    if isinstance(architecture, HFArchitecture):
        return OWN_NAMES
    names = FAMILIES[architecture.family].names
    table = names if isinstance(names, NameTable) else names(architecture)
    return seeing_names(table, architecture) if isinstance(architecture, SeeingArchitecture) else table
