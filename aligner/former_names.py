"""Settings that had another name once: an error says what one is called now, and a run that was written with old names can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aligner.schema import SchemaKey, is_known

# The former name: the present one. Settings below a section move with it; `*` is a name of the user's own. The longest fitting name counts.
NAMES = {
    "accuracy": "validation.scorer",
    "accuracy.function": "validation.scorer.path",
    "algorithm.estimator": "algorithm.advantage_estimator",
    "algorithm.gate_negative": "algorithm.tau_neg",
    "algorithm.gate_positive": "algorithm.tau_pos",
    "client": "server_client",
    "environment.function": "environment.path",
    "critic.model.transformer_engine": "critic.model.layers",
    "launcher": "local_launcher",
    "model.transformer_engine": "model.layers",
    "reward.function.function": "reward.function.path",
    "reward.functions.*.function": "reward.functions.*.path",
    "reward.model.transformer_engine": "reward.model.layers",
    "validation.correct_from": "validation.pass_threshold",
}
_LAYERS = {True: "transformer_engine", False: "torch"}
VALUES: dict[str, dict[Any, str]] = {  # of settings, by their present names
    "algorithm.correction.kind": {"truncate": "tis", "band": "icepop", "mask": "mis"},
    **dict.fromkeys(("model.layers", "critic.model.layers", "reward.model.layers"), _LAYERS),
}


def present_name(key: str, keys: Sequence[SchemaKey]) -> str:
    """What a former name is called in this schema; the key itself if it is none."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        for former, present in NAMES.items():
            own = former.split(".")
            if len(own) == length and all(part in ("*", given) for part, given in zip(own, parts, strict=False)):
                free = iter([given for part, given in zip(own, parts, strict=False) if part == "*"])
                moved = [next(free) if part == "*" else part for part in present.split(".")]
                now = ".".join([*moved, *parts[length:]])
                return now if is_known(now, keys) and not is_known(key, keys) else key
    return key


def present_value(key: str, value: Any) -> Any:
    """What a former value of a setting is called now; the value itself if it is none."""
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str | bool) else value


def translated(saved: Mapping[str, Any], keys: Sequence[SchemaKey]) -> dict[str, Any]:
    """A saved config with the names of now. What the schema knows as it is stays so, and what it does not know at all too."""
    made: dict[str, Any] = {}
    for path, value in _leaves(saved):
        name = present_name(".".join(path), keys) if all("." not in part for part in path) else ""
        *sections, leaf = name.split(".") if name else path
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = present_value(name, value)
    return made


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, str(name)))
        else:
            yield (*above, str(name)), value
