"""Reading a tree of config dataclasses: its dotted keys, their types and the comments beside them. Plain introspection, no Hydra."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaKey:
    """One dotted key. `section` holds more keys below it; `open` takes any. A part `*` is a name of the user's own."""

    key: str
    type: str
    comment: str
    section: bool = False
    open: bool = False


@functools.cache
def schema_keys(schema: type, prefix: str = "", *, described: bool = False) -> tuple[SchemaKey, ...]:
    """Every key of the schema, depth first, in the order of the fields; `described` with comments, for which the sources are parsed."""
    hints, comments = typing.get_type_hints(schema), _comments(schema) if described else {}
    found: list[SchemaKey] = []
    for field in fields(schema):
        key, kind = prefix + field.name, without_none(hints[field.name])
        comment = comments.get(field.name, "")
        if inspect.isclass(kind) and is_dataclass(kind):
            found.append(SchemaKey(key=key, type=kind.__name__, comment=comment or _first_sentence(kind), section=True))
            found += schema_keys(kind, key + ".", described=described)
        elif (named := _named_sections(kind)) is not None:
            found.append(SchemaKey(key=key, type=f"dict[str, {named.__name__}]", comment=comment))
            found.append(SchemaKey(key=f"{key}.*", type=named.__name__, comment=_first_sentence(named), section=True))
            found += schema_keys(named, f"{key}.*.", described=described)
        else:
            open_ended = typing.get_origin(kind) in (dict, list, tuple) or kind in (dict, list, tuple, typing.Any)
            found.append(SchemaKey(key=key, type=type_name(hints[field.name]), comment=comment, open=open_ended))
    return tuple(found)


def is_known(key: str, keys: Iterable[SchemaKey]) -> bool:
    """True where `key` is in the schema, or below one of its open keys."""
    for known in keys:
        own = named_as(known.key, key) if "*" in known.key else known.key
        if own == key or (known.open and key.startswith(own + ".")):
            return True
    return False


def is_entry(key: str, keys: Iterable[SchemaKey]) -> bool:
    """True where `key` is an entry of a dict of sections, with a name of the user's own."""
    return any(named_as(known.key, key) == key for known in keys if known.key.endswith(".*"))


def named_as(known: str, key: str) -> str:
    """A schema's key with the user's own names in place of `*`, as `key` has them; NAME where it has none there."""
    known_parts, parts = known.split("."), key.split(".")
    own: list[str] = []
    for i, part in enumerate(known_parts):
        own.append(part if part != "*" else parts[i] if parts[:i] == own and i < len(parts) else "NAME")
    return ".".join(own)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings by dotted key; an empty mapping is a leaf."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def type_name(kind: object) -> str:
    """A type as a user reads it: `int`, `list[str]`, `float | null`, `a|b` for an enum."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " | ".join(type_name(part) for part in typing.get_args(kind))
    if kind is type(None):
        return "null"
    if (origin := typing.get_origin(kind)) is not None:
        return f"{origin.__name__}[{', '.join(type_name(part) for part in typing.get_args(kind))}]"
    if inspect.isclass(kind):
        return "|".join(kind.__members__) if issubclass(kind, Enum) else kind.__name__
    return str(kind).replace("typing.", "")


def _named_sections(kind: object) -> type | None:
    """The dataclass of a `dict[str, dataclass]`."""
    if typing.get_origin(kind) is not dict:
        return None
    section = typing.get_args(kind)[1]
    return section if inspect.isclass(section) and is_dataclass(section) else None


def without_none(kind: object) -> object:
    """`T | None` -> T; anything else as it is."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    optional = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return parts[0] if optional and len(parts) == 1 else kind


def _first_sentence(schema: type) -> str:
    """The first sentence of the docstring; empty if the class has none, or only the signature that `dataclass` gives it."""
    text = " ".join((inspect.getdoc(schema) or "").split()) if "__doc__" in vars(schema) else ""
    return "" if text.startswith(f"{schema.__name__}(") else re.split(r"(?<=[.;:])\s", text)[0].rstrip(".;:")


@functools.cache  # a source is parsed once
def _comments(schema: type) -> dict[str, str]:
    """The comment on each field's line (its last line, where it has several); inherited fields have theirs."""
    found: dict[str, str] = {}
    for owner in reversed([parent for parent in schema.__mro__ if is_dataclass(parent)]):
        found |= _own_comments(owner)
    return found


def _own_comments(schema: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(schema))
    on_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    annotated = [node for node in definition.body if isinstance(node, ast.AnnAssign)] if isinstance(definition, ast.ClassDef) else []
    return {
        node.target.id: on_line[node.end_lineno] for node in annotated if isinstance(node.target, ast.Name) and node.end_lineno in on_line
    }
