"""Another project's YAML as plain values: its references to other keys (`${model.tp}`) filled in, as far as they can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RESOLVERS = {  # NeMo's and verl's
    "multiply": lambda a, b: a * b,
    "subtract": lambda a, b: a - b,
    "add": lambda *terms: sum(terms),
    "int_div": lambda a, b: a // b,
    "not": lambda a: not a,
}


def resolved(text: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The mapping that a YAML text is, with `overrides` by dotted keys. A reference that leads nowhere stays as it is written; raises
    ValueError for what is no mapping.
    """
    try:
        written = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ValueError(f"a {type(written).__name__}, expected a mapping")
    for dotted, value in (overrides or {}).items():
        *sections, leaf = dotted.split(".")
        place = written
        for section in sections:
            place[section] = place = place[section] if isinstance(place.get(section), dict) else {}
        place[leaf] = value
    before = {name: OmegaConf.has_resolver(name) for name in RESOLVERS}
    for name, function in RESOLVERS.items():
        if not before[name]:
            OmegaConf.register_new_resolver(name, function)
    try:
        found: dict[str, Any] = _plain(OmegaConf.create(written))
        return found
    finally:
        for name, had in before.items():
            if not had:
                OmegaConf.clear_resolver(name)


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig):
        return {str(key): _item(value, key) for key in value}
    return [_item(value, place) for place in range(len(value))] if isinstance(value, ListConfig) else value


def _item(node: Any, key: Any) -> Any:
    """A reference that leads nowhere stays as it is written."""
    try:
        return _plain(node[key]) if not OmegaConf.is_missing(node, key) else "???"
    except OmegaConfBaseException:
        return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
