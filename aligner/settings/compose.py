"""From dataclasses, the files of conf/ and `key=value` texts to one plain config object.

A schema is a tree of `@dataclass(kw_only=True, slots=True)`; its defaults are the only ones. A recipe's config (`conf/grpo/grpo.yaml`) and
the presets of its groups (`conf/grpo/algorithm/dapo.yaml`, chosen by a `defaults` list or `algorithm=dapo`) hold deviations; `key=value`
texts come last. A key or value that the schema does not know raises ConfigError, wherever it was written (all unknown keys at once);
so does a preset of another recipe.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from aligner.errors import ConfigError
from aligner.files import recipe_folders, with_shipped_paths
from aligner.settings.command_line import in_grammar, quoted
from aligner.settings.explain import (
    as_typed,
    check_preset,
    example,
    find_file,
    folders_of,
    groups_in,
    meant_value,
    no_setting,
    refuse_unknown,
    several_values,
    shown_path,
    unknown_in_file,
    unknown_keys,
)
from aligner.settings.schema import SchemaKey, is_entry, is_known, schema_keys

T = TypeVar("T")

ENTRY, SCHEMA = "aligner_entry", "aligner_schema"
_KINDS = {"integer": "a whole number", "float": "a number", "bool": "true or false"}
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
FOREIGN_RESOLVERS = {  # NeMo's and verl's
    "multiply": lambda a, b: a * b,
    "subtract": lambda a, b: a - b,
    "add": lambda *terms: sum(terms),
    "int_div": lambda a, b: a // b,
    "not": lambda a: not a,
}


def compose(schema: type[T], name: str, overrides: Sequence[str] = (), folders: Sequence[Path] | None = None) -> T:
    """The config `<name>.yaml` with `overrides` (Hydra's grammar) applied, as a plain `schema` object.

    `folders` are searched for it and its presets, the recipe's own first (default: conf/), then those of `hydra.searchpath=[file:///dir]`.
    A recipe whose own folder does not exist has the schema's defaults. Raises ConfigError naming the key and value at fault: unknown keys
    (all of them, with hints), a wrong type, a missing required value, group option or file, or a failed check of a dataclass.
    """
    node = compose_node(schema, name, overrides, folders or folders_of(name))
    try:
        missing = sorted(OmegaConf.missing_keys(node))
    except OmegaConfBaseException as error:
        raise explain(error, ()) from error
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} required: give {missing[0]}=... on the command line or in a YAML "
            f"file, as in: aligner train {name} {example(name)} (aligner train {name} --help lists the settings)"
        )
    return to_object(schema, node)


def to_yaml(config: object) -> str:
    """The resolved config as YAML; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(schema: type[T], text: str, overrides: Sequence[str] = ()) -> T:
    """A config that `to_yaml` wrote, with `key=value` overrides. Raises as `compose`."""
    keys = schema_keys(schema)
    try:
        saved = OmegaConf.create(yaml.safe_load(text) or {})
        for override in parsed(overrides):
            if override.is_sweep_override():
                raise several_values(override.input_line)
            _apply(saved, override)
        refuse_unknown([(key, "") for key in unknown_keys(OmegaConf.to_container(saved), keys)], keys)
        node = OmegaConf.merge(_structured(schema), saved)
    except ERRORS as error:
        raise explain(error, ()) from error
    return to_object(schema, node)


def schema_of(schemas: Sequence[type[T]], text: str) -> type[T]:
    """The schema of a config that `to_yaml` wrote: the smallest one that knows all of its keys. Raises ConfigError."""
    written = yaml.safe_load(text) or {}
    known = [(schema, schema_keys(schema)) for schema in schemas]
    fitting = [(len(keys), schema) for schema, keys in known if not any(unknown_keys(written, keys))]
    if not fitting:
        raise ConfigError(f"the saved config fits none of {', '.join(schema.__name__ for schema in schemas)}")
    return min(fitting, key=lambda entry: entry[0])[1]


def fingerprint(written: str) -> str:
    """A short hash of a config that `to_yaml` wrote, with which ranks check that their configs are equal."""
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def compose_node(schema: type, name: str, overrides: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """OmegaConf's typed tree, from which `compose` makes its object, with ??? for required values that are missing."""
    try:
        with composing(schema, name, overrides, folders) as settings:
            try:
                node, _ = _adding_groups(settings.plain, lambda plain: hydra.compose(ENTRY, [*plain, settings.searchpath]))
            except ERRORS as error:
                settings.refuse(error)
                raise
            for override in settings.named:
                _apply(node, override)
            return node
    except ERRORS as error:
        raise explain(error, [*folders, *own_folders(overrides)]) from error


def own_folders(overrides: Sequence[str]) -> list[Path]:
    """The user's directories of configs and presets. Raises ConfigError as `search_path`."""
    return [place for place in search_path(overrides)[0] if isinstance(place, Path)]


@dataclass(kw_only=True, slots=True)
class Settings:
    """Checked overrides of a recipe, and where its configs and presets are."""

    recipe: str
    keys: Sequence[SchemaKey]
    folders: Sequence[Path]
    plain: list[str]
    named: list[Override]  # of dicts of sections, or of what is below them: Hydra cannot assign these
    searchpath: str  # one of hydra.searchpath: all folders but the first
    unknown: list[tuple[str, str]]  # (key, where it was given)

    def refuse(self, error: Exception | None = None) -> None:
        """Raise ConfigError for all unknown keys of overrides and files, or for a preset that is not the recipe's."""
        try:
            self._check_files()
        except ConfigCompositionException as other:
            self._check_presets()
            if file := re.search(r"Could not find '([^']+)'", str(other)):
                check_preset(self.recipe, file[1], self.folders)
            if error is None:
                raise

    def _check_files(self) -> None:
        loader = GlobalHydra.instance().config_loader()
        plain = [text for text, one in zip(self.plain, parsed(self.plain), strict=True) if not one.is_sweep_override()]
        found, plain = _adding_groups(plain, lambda plain: loader.compute_defaults_list(ENTRY, [*plain, self.searchpath], RunMode.RUN))
        self.plain = [text if f"+{text}" not in plain else f"+{text}" for text in self.plain]
        self._check_presets()
        unknown = [(key, f"in {text!r}") for key, text in self.unknown]
        for default in found.defaults:
            file = default.config_path or ""
            check_preset(self.recipe, file, self.folders)
            if (path := find_file(file, self.folders)) is not None:
                unknown += [(key, f"in {shown_path(path)}") for key in unknown_in_file(path, default.package or "", self.keys)]
        refuse_unknown(unknown, self.keys)

    def _check_presets(self) -> None:
        for override in parsed(self.plain):
            if not override.is_sweep_override() and isinstance(value := override.value(), str):
                check_preset(self.recipe, f"{override.key_or_group}/{value}", self.folders)  # Hydra adds a group that the recipe has not


@contextmanager
def composing(schema: type, name: str, overrides: Sequence[str], folders: Sequence[Path], *, sweeps: bool = False) -> Iterator[Settings]:
    """Hydra, ready to compose `ENTRY`: the schema, then `<name>.yaml`. Raises ConfigError for impossible overrides.

    Files are checked only if something is wrong, or before a sweep: composing them takes as long as checking them.
    """
    keys = schema_keys(schema)
    places, overrides = search_path(overrides)
    users = [place for place in places if isinstance(place, Path)]
    has_file = find_file(name, [folders[0], *users]) is not None
    if not has_file and (folders[0].is_dir() or folders[0].name != name):
        raise ConfigError(f"there is no {folders[0] / name}.yaml")
    unknown = _check_overrides(overrides, keys, [*folders, *users], sweeps=sweeps)
    named, plain = _split([text for text in overrides if text not in {text for _, text in unknown}], keys)
    first, *others = [folder for folder in folders if folder.is_dir()]
    more = [f"file://{place.resolve()}" if isinstance(place, Path) else place for place in (*others, *places)]
    settings = Settings(
        recipe=folders[0].name,
        keys=keys,
        folders=[*folders, *users],
        plain=plain,
        named=named,
        searchpath=f"hydra.searchpath=[{','.join(quoted(place) for place in more)}]",
        unknown=unknown,
    )
    with hydra.initialize_config_dir(config_dir=str(first.resolve()), version_base="1.3"):
        # The schema comes first in the defaults list, so no YAML file has to name it and every later one is checked against it.
        # Hydra copies its whole registry for every composition: one schema at a time.
        store = ConfigStore.instance()
        store.repo[f"{SCHEMA}.yaml"] = ConfigNode(name=f"{SCHEMA}.yaml", node=_structured(schema), group=None, package=None, provider=None)
        store.store(name=ENTRY, node={"defaults": [SCHEMA, *([name] if has_file else []), "_self_"]})
        if unknown or sweeps:
            settings.refuse()
        yield settings


def _adding_groups(overrides: list[str], act: Callable[[list[str]], T]) -> tuple[T, list[str]]:
    """(the result of `act`; the overrides, which add a group such as `cluster=dgx_h100` if the config has none of its presets yet)."""
    while True:
        try:
            return act(overrides), overrides
        except ConfigCompositionException as error:
            missing = re.match(r"Could not override '([\w/]+)'\.\s+No match in the defaults list", str(error))
            added = [f"+{text}" if missing and text.startswith(f"{missing[1]}=") else text for text in overrides]
            if added == overrides:
                raise
            overrides = added


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides, in Hydra's grammar or with JSON as values. Raises HydraException for other texts."""
    return _parsed(tuple(map(in_grammar, overrides)))


_parsed = lru_cache(maxsize=64)(lambda texts: OverridesParser.create().parse_overrides(list(texts)))


def search_path(overrides: Sequence[str]) -> tuple[list[Path | str], list[str]]:
    """(places of hydra.searchpath, some for Hydra alone; the other overrides in Hydra's grammar). Raises ConfigError."""
    try:
        found = parsed(overrides)
    except HydraException as error:
        raise no_setting(overrides) or explain(error, ()) from error
    named = [str(place) for one in found if one.key_or_group == "hydra.searchpath" for place in one.value() or []]
    places = [Path(place.removeprefix("file://")) if "://" not in place or place.startswith("file://") else place for place in named]
    for place in places:
        if isinstance(place, Path) and not place.is_dir():
            raise ConfigError(f"--config-dir {place} (hydra.searchpath): there is no such directory")
    return places, [in_grammar(text) for one, text in zip(found, overrides, strict=True) if one.key_or_group != "hydra.searchpath"]


def _split(overrides: Sequence[str], keys: Sequence[SchemaKey]) -> tuple[list[Override], list[str]]:
    """(overrides of dicts or of keys below them, which Hydra assigns and OmegaConf refuses if the key is new; the other texts).

    To a dict of plain values Hydra itself adds with `+`.
    """
    dicts = [key.key.removesuffix(".*") for key in keys if key.key.endswith(".*")]
    plain = [re.compile(re.escape(key.key).replace(r"\*", r"[^.]+") + r"(\..+)?") for key in keys if key.type.startswith("dict[")]
    named, others = [], []
    for override, text in zip(parsed(overrides), overrides, strict=True):
        assigns = not (override.is_add() or override.is_delete() or override.is_sweep_override())
        if any(override.key_or_group == key or override.key_or_group.startswith(f"{key}.") for key in dicts) or (
            assigns and any(key.fullmatch(override.key_or_group) for key in plain)
        ):
            named.append(override)
        else:
            others.append(text)
    return named, others


def _apply(node: DictConfig, override: Override) -> None:
    """Set the value, or remove the entry, of an override."""
    parent, _, leaf = override.key_or_group.rpartition(".")
    if override.is_delete():
        holder = OmegaConf.select(node, parent)
        if holder is None or leaf not in holder:
            raise ConfigError(f"{override.input_line!r}: there is no {override.key_or_group} to remove")
        with flag_override(holder, "struct", False):
            del holder[leaf]
        return
    value = override.value()
    for part in reversed(override.key_or_group.split(".")):
        value = {part: value}
    with flag_override(node, "struct", False):
        node.merge_with(value)


@cache
def _structured(schema: type) -> DictConfig:
    """The schema as a typed node with the *written* defaults of every nested dataclass; Hydra and OmegaConf copy it.

    OmegaConf alone reads nested defaults from an instance, which would freeze a field that `__post_init__` derives from others.
    """
    node = OmegaConf.structured(schema)
    for field in fields(schema):  # type: ignore[arg-type]
        if is_dataclass(field.default_factory):
            _write_defaults(node, field.name, field.default_factory, field.default_factory())
    return node


def _write_defaults(parent: DictConfig, name: str, schema: type, made: Any) -> None:
    """Undo what `__post_init__` of a section, or of the one around it, has made of the defaults of `schema`."""
    if type(made) is not schema:
        parent[name] = _structured(schema)
        return
    for field in fields(schema):
        value = getattr(made, field.name)
        if is_dataclass(field.default_factory):
            _write_defaults(parent[name], field.name, field.default_factory, value)
        elif value != (written := field.default if field.default is not MISSING else field.default_factory()):
            parent[name][field.name] = written


def to_object(schema: type[T], node: Any) -> T:
    """The plain object of a typed tree. Raises as `compose`."""
    try:
        _check_numbers(OmegaConf.to_container(node, resolve=True), schema_keys(schema))
        config: T = _build(node)
    except OmegaConfBaseException as error:
        raise explain(error, ()) from error
    return config


def _build(node: Any, path: str = "") -> Any:
    """A node as plain objects. Errors of a section's own check name its settings as typed."""
    if not OmegaConf.is_dict(node):
        return with_shipped_paths(OmegaConf.to_object(node) if OmegaConf.is_config(node) else node)
    values = {}
    for name in node:
        place = f"{path}.{name}" if path else str(name)
        if OmegaConf.is_missing(node, name):
            raise ConfigError(f"{place} is required: give {place}=... on the command line or in a YAML file")
        values[name] = _build(node[name], place)
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return values
    try:
        return kind(**values)
    except ConfigError as error:
        raise as_typed(error, [field.name for field in fields(kind)], path) from error


def _check_numbers(value: Any, keys: Sequence[SchemaKey], key: str = "") -> None:
    """Raise ConfigError for NaN, infinity or an integer of more than 64 bits, except below a `dict[str, Any]`: those are the user's own."""
    if isinstance(value, (dict, list)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in entries:
            _check_numbers(entry, keys, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (int, float)) and not (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)):
        known = max((one for one in keys if is_known(key, [one])), key=lambda one: len(one.key))
        if "Any" not in known.type:
            allowed = "a number of 64 bits" if isinstance(value, int) else "a finite number"
            raise ConfigError(f"{key}={value}: must be {allowed}")


def _check_overrides(
    overrides: Sequence[str], keys: Sequence[SchemaKey], folders: Sequence[Path], *, sweeps: bool
) -> list[tuple[str, str]]:
    """Keys that the schema does not know, with the overrides that give them. Raises ConfigError for other errors."""
    unknown, groups = [], groups_in([*folders, *recipe_folders()])
    for override in parsed(overrides):
        key, text = override.key_or_group, override.input_line
        is_group = key in groups
        if key.startswith(("hydra.", "hydra/")):
            continue
        if not key:
            raise ConfigError(f"{text!r} names no setting; settings are written key=value")
        value = None if override.is_sweep_override() else override.value()
        if not is_group and (below := list(unknown_keys({key: value}, keys))):
            unknown += [(name, text) for name in below]
            continue
        if override.is_sweep_override():
            if not sweeps:
                raise several_values(text)
            continue
        if override.is_delete() and not is_group and not is_entry(key, keys):
            raise ConfigError(f"{text!r} would remove a setting that the schema has; give it a value")
        if is_group and not isinstance(value, (str, list, dict, type(None))):
            raise ConfigError(f"{text!r}: {key} accepts the name of one of its presets")
    return unknown


def explain(error: BaseException, folders: Sequence[Path]) -> ConfigError:
    """The error of Hydra, OmegaConf or the YAML parser in one line that names the key."""
    file = re.search(r"In '([^']+)'", str(error))
    path = find_file(file[1], folders) if file else None
    where = f"in {shown_path(path)}" if path else ""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        text = re.split(r"\nConfig search path|\nSee https", str(error).replace(f"In '{ENTRY}': ", ""))[0]
        if override := getattr(error, "override", ""):
            text = f"{override}: a value with spaces or signs needs quotes of its own: {text}"
        return ConfigError(" ".join(text.split()))
    key, message = str(cause.full_key or ""), str(cause.msg or cause).splitlines()[0].replace("is not Optional", "may not be null")
    if of_type := re.fullmatch(r"Value '(.*?)'(?: of type '\w+')? (?:could not be converted to|is not a valid) (\w+).*", message):
        message = f"{of_type[1]!r} is not {_KINDS.get(of_type[2].lower(), of_type[2])}"
    elif (of_enum := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", message)) and (near := meant_value(*of_enum.groups())):
        message = f"{message}; did you mean {near}?"
    return ConfigError(": ".join(part for part in (key, message) if part) + (f" ({where})" if where else ""))


def shown_values(node: DictConfig, keys: Sequence[SchemaKey]) -> Iterator[tuple[str, str]]:
    """Every setting with its value in command line syntax."""
    for key in keys:
        if key.section or "*" in key.key:
            continue
        parent, _, leaf = key.key.rpartition(".")
        missing = OmegaConf.is_missing(OmegaConf.select(node, parent) if parent else node, leaf)
        yield key.key, "(required)" if missing else _shown(OmegaConf.select(node, key.key))


def _shown(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return yaml.safe_dump(OmegaConf.to_container(OmegaConf.create({"v": plain}), enum_to_str=True), default_flow_style=True).strip()[4:-1]


def as_file(base: str, overrides: Sequence[str], more: Mapping[str, str], folders: Sequence[Path], *, comment: str) -> str:
    """YAML that builds on the config `base`, with `overrides`, then `more`. Raises ConfigError for one that removes a setting."""
    groups, chosen = groups_in(folders), dict(_presets(base, folders))
    added: list[Any] = []
    replaced: list[Any] = []
    tree: dict[str, Any] = {}
    for one in parsed([*overrides, *(f"{key}={value}" for key, value in more.items())]):
        if one.is_delete():
            raise ConfigError(f"{one.input_line!r}: a config file cannot remove a setting of {base}; leave this out to write one")
        if one.key_or_group in groups and isinstance(value := one.value(), str):
            entry = f"{one.key_or_group}@{one.package}" if one.package else one.key_or_group
            if entry in chosen:
                replaced.append({f"override {entry}": value})
            else:
                added.append({entry: value})
        else:
            _put(tree, one.key_or_group.split("."), one.value())
    text = yaml.safe_dump({"defaults": [base, *added, *replaced, "_self_"], **tree}, sort_keys=False, allow_unicode=True, width=140)
    return f"# {comment}\n{text}"


def _presets(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The groups from which a config, and the configs that it builds on, choose a preset."""
    path = find_file(name, folders)
    for entry in (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path is not None else []:
        if isinstance(entry, dict):
            yield from ((key.removeprefix("override ").strip(), value) for key, value in entry.items())
        elif entry != "_self_":
            yield from _presets(entry, folders)


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, leaf = path
    for name in sections:
        tree = tree.setdefault(name, {})
    tree[leaf] = value.value if isinstance(value, Enum) else value


def resolved(text: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Another project's YAML as plain values, with `overrides`, references resolved if they can be. Raises ValueError."""
    try:
        written = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ValueError(f"a {type(written).__name__}, expected a mapping")
    for dotted, value in (overrides or {}).items():
        *sections, leaf = dotted.split(".")
        place = written
        for section in sections:
            place[section] = place = place[section] if isinstance(place.get(section), dict) else {}
        place[leaf] = value
    own = {name: function for name, function in FOREIGN_RESOLVERS.items() if not OmegaConf.has_resolver(name)}
    for name, function in own.items():
        OmegaConf.register_new_resolver(name, function)
    try:
        found: dict[str, Any] = _plain(OmegaConf.create(written))
        return found
    finally:
        for name in own:
            OmegaConf.clear_resolver(name)


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig):
        return {str(key): _item(value, key) for key in value}
    return [_item(value, place) for place in range(len(value))] if isinstance(value, ListConfig) else value


def _item(node: Any, key: Any) -> Any:
    try:
        return _plain(node[key]) if not OmegaConf.is_missing(node, key) else "???"
    except OmegaConfBaseException:
        return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index,call-overload]
