"""Another project's YAML as plain values: its references to other keys (`${model.tp}`) filled in, as far as they can be."""

from __future__ import annotations

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


def resolved(text: str) -> dict[str, Any]:
    """The mapping that a YAML text is. A reference that leads nowhere stays as it is written; raises ValueError for what is no mapping."""
    try:
        written = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ValueError(f"a {type(written).__name__}, expected a mapping")
    before = {name: OmegaConf.has_resolver(name) for name in RESOLVERS}
    for name, function in RESOLVERS.items():
        if not before[name]:
            OmegaConf.register_new_resolver(name, function)
    try:
        return {str(key): _plain(value) for key, value in _items(OmegaConf.create(written))}
    finally:
        for name, had in before.items():
            if not had:
                OmegaConf.clear_resolver(name)


def _items(node: DictConfig) -> list[tuple[Any, Any]]:
    found = []
    for key in node:
        raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
        try:
            found.append((key, node[key] if not OmegaConf.is_missing(node, key) else "???"))
        except OmegaConfBaseException:
            found.append((key, raw))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig):
        return {str(key): _plain(one) for key, one in _items(value)}
    if isinstance(value, ListConfig):
        return [_plain(value[i]) for i in range(len(value))]
    return value
