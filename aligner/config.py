"""From dataclasses, conf/*.yaml and the command line to one plain config object. The only importer of Hydra and OmegaConf.

A schema is a tree of `@dataclass(kw_only=True, slots=True)`; its defaults are the only ones. `conf/<name>.yaml` and the groups beside it
(conf/algorithm/grpo.yaml, chosen by a `defaults` list or `algorithm=grpo`) hold deviations; `key=value` arguments come last. A key or value
that the schema does not know raises ConfigError, wherever it was written (all unknown keys at once); so does a preset of another recipe: a
comment in it says whose it is (`# Recipes: dpo, online_dpo`; without one, of all that have its settings).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from aligner import help as program_help
from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode, exit_code_of
from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.files import conf_directory
from aligner.former_names import present_value, translated
from aligner.hints import as_typed, hint, refuse_unknown, unknown_keys
from aligner.presets import belongs_to, check_preset, find_file, groups_of, unknown_in_file
from aligner.schema import SchemaKey, is_entry, is_known, schema_keys

T = TypeVar("T")

_ENTRY, _SCHEMA = "aligner_entry", "aligner_schema"
_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def compose(schema: type[T], name: str, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> T:
    """The config `conf/<name>.yaml` with `overrides` (Hydra's grammar) applied, as a plain `schema` object.

    Raises ConfigError naming the key and value at fault: unknown keys (all of them, with the known ones that are meant), a value of a wrong
    type, a required value that is missing, a group option or file that does not exist, or what the dataclasses' own checks say.
    """
    node = _compose_node(schema, name, overrides, config_dir or conf_directory())
    return _to_object(schema, node)


def to_yaml(config: object) -> str:
    """The resolved config as YAML; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(schema: type[T], text: str, overrides: Sequence[str] = ()) -> T:
    """A config that `to_yaml` wrote (former names of settings are translated), with plain `key=value` overrides. Raises as `compose`."""
    keys = list(schema_keys(schema))
    try:
        written = translated(yaml.safe_load(text) or {}, keys)
        saved = OmegaConf.merge(OmegaConf.create(written), OmegaConf.from_dotlist(list(overrides)))
        refuse_unknown([(key, "") for key in unknown_keys(OmegaConf.to_container(saved), keys)], keys)
        node = OmegaConf.merge(_structured(schema), saved)
    except _ERRORS as error:
        raise _explain(error) from error
    return _to_object(schema, node)


def schema_of(schemas: Sequence[type[T]], text: str) -> type[T]:
    """Which of the schemas a config that `to_yaml` wrote is of: the smallest one that knows all of its keys. Raises ConfigError."""
    written = yaml.safe_load(text) or {}
    known = [(schema, list(schema_keys(schema))) for schema in schemas]
    fitting = [(len(keys), schema) for schema, keys in known if not any(unknown_keys(translated(written, keys), keys))]
    if not fitting:
        raise ConfigError(f"the saved config is of none of {', '.join(schema.__name__ for schema in schemas)}")
    return min(fitting, key=lambda entry: entry[0])[1]


def fingerprint(config: object) -> str:
    """A short hash of the resolved config, by which ranks check that they run the same."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


def entrypoint(schema: type[T], name: str) -> Callable[[Callable[[T], int | None]], Callable[..., None]]:
    """Decorator that turns `main(config)` into a program: `main()` reads sys.argv, composes `conf/<name>.yaml` and calls it.

    `config=<name>_70b` among the arguments chooses that file instead, which builds on `<name>`'s.
    `--help` prints the settings that matter most with value and meaning, `--help SECTION` and `--help all` others (`aligner.help`); `--cfg`
    prints the resolved YAML (??? for what is required and not given).

    The program ends with the exit code that `main` returns (None: 0), and with 0 in no other way. An AlignerError ends it with one line on
    stderr (ALIGNER_TRACEBACK=1 adds where it came from) and the code of `aligner.cluster.exit_codes`: 2 for ConfigError and DataError, 78
    for RunHalted, 1 for the others. Anything else is a bug and keeps its traceback and exit code 1.
    """

    def decorate(main: Callable[[T], int | None]) -> Callable[..., None]:
        def run(argv: Sequence[str] | None = None) -> None:
            arguments = list(sys.argv[1:] if argv is None else argv)
            try:
                file, arguments = choose_file(name, arguments)
                with outcomes.unless_ended_early(os.environ):
                    code = _dispatch(main, schema, file, arguments)
            except AlignerError as error:
                if os.environ.get("ALIGNER_TRACEBACK") == "1":
                    traceback.print_exc()
                print(f"error: {error}", file=sys.stderr, flush=True)
                outcomes.record(os.environ, exit_code_of(error), str(error))
                raise SystemExit(int(exit_code_of(error))) from error
            except Exception as error:
                if isinstance(error, OSError) and is_storage_error(error):  # no bug, and it says all: a full disk, one that is read-only
                    message = f"rank {outcomes.rank_of(os.environ)}: {describe_os_error(error, 'a file of the run')}"
                    print(f"error: {message}", file=sys.stderr, flush=True)
                    outcomes.record(os.environ, ExitCode.failed, message)
                    raise SystemExit(int(ExitCode.failed)) from error
                outcomes.record(os.environ, ExitCode.failed, f"{type(error).__name__}: {error}")
                raise
            outcomes.record(os.environ, code)
            if code:
                raise SystemExit(code)

        return run

    return decorate


def choose_file(name: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """(the file of conf/ that `config=` names, else `name`; the other arguments). Raises ConfigError for a file of another kind of run."""
    chosen = [argument.removeprefix("config=") for argument in arguments if argument.startswith("config=")]
    others = [argument for argument in arguments if not argument.startswith("config=")]
    if chosen and not belongs_to(chosen[-1], name):
        own = ", ".join(sorted(file.stem for file in conf_directory().glob("*.yaml") if belongs_to(file.stem, name)))
        raise ConfigError(f"config={chosen[-1]}: this program is of {name}; allowed: {own}, or another whose name begins with {name}_")
    return (chosen[-1] if chosen else name), others


def _dispatch(main: Callable[[T], int | None], schema: type[T], name: str, arguments: list[str]) -> int:
    """Do what the arguments ask for; the exit code."""
    topic, overrides, flags = _split_options(arguments)
    keys = list(schema_keys(schema))
    if unknown := sorted(flags - {"--help", "-h", "--cfg"}):
        meant = [hint(option.lstrip("-").partition("=")[0].replace("-", "_"), keys) for option in unknown]
        lines = [f"unknown option {option}; settings are written key=value; {text}" for option, text in zip(unknown, meant, strict=True)]
        raise ConfigError("\n  ".join(lines))
    if flags & {"--help", "-h"}:
        node = _compose_node(schema, name, overrides, conf_directory())
        groups, values = groups_of(name, keys, conf_directory()), dict(_shown_values(node, keys))
        print(program_help.render(keys, values, program=sys.argv[0], file=name, groups=groups, topic=topic), flush=True)
    elif "--cfg" in flags:
        node = _compose_node(schema, name, overrides, conf_directory())
        incomplete = OmegaConf.missing_keys(node)
        print(OmegaConf.to_yaml(node, resolve=True) if incomplete else to_yaml(_to_object(schema, node)), end="", flush=True)
    else:
        return int(main(compose(schema, name, overrides)) or 0)
    return 0


def _split_options(arguments: Sequence[str]) -> tuple[str, list[str], set[str]]:
    """(what --help is asked about: `--help rollout`; the overrides; the options)."""
    topic, overrides, flags = "", [], set()
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument.startswith("--help="):
            topic = argument.removeprefix("--help=")
            flags.add("--help")
        elif argument.startswith("-"):
            flags.add(argument)
        elif before in ("--help", "-h") and "=" not in argument:
            topic = argument
        else:
            overrides.append(argument)
    return topic, overrides, flags


def _compose_node(schema: type, name: str, overrides: Sequence[str], config_dir: Path) -> DictConfig:
    keys = list(schema_keys(schema))
    if not (config_dir / f"{name}.yaml").is_file():
        raise ConfigError(f"there is no {config_dir / name}.yaml")
    try:
        unknown = _check_overrides(overrides, keys, config_dir)
        named, others = _split([text for text in overrides if text not in {text for _, text in unknown}], keys)
        in_files = _check_files(name, others, config_dir, keys)
        refuse_unknown([*((key, f"in {text!r}") for key, text in unknown), *in_files], keys)
        with hydra.initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
            store = ConfigStore.instance()  # Hydra's own registry; it is filled anew for every composition
            store.store(name=_SCHEMA, node=_structured(schema))
            # The schema comes first in the defaults list, so no YAML file has to name it and every later one is checked against it.
            store.store(name=_ENTRY, node={"defaults": [_SCHEMA, name, "_self_"]})
            node = hydra.compose(_ENTRY, others)
            for override in named:
                _apply(node, override)
            return node
    except _ERRORS as error:
        raise _explain(error) from error


def _split(overrides: Sequence[str], keys: list[SchemaKey]) -> tuple[list[Override], list[str]]:
    """(the overrides of dicts of sections, or of what is below them; the others, as they were written).

    Hydra assigns a key that a dict does not have yet, which OmegaConf refuses where its values are dataclasses; merging works.
    """
    dicts = [key.key.removesuffix(".*") for key in keys if key.key.endswith(".*")]
    named, others = [], []
    for override, text in zip(OverridesParser.create().parse_overrides(list(overrides)), overrides, strict=True):
        if any(override.key_or_group == key or override.key_or_group.startswith(f"{key}.") for key in dicts):
            named.append(override)
        else:
            others.append(text)
    return named, others


def _apply(node: DictConfig, override: Override) -> None:
    """Set what the override gives, or remove the entry that it names."""
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


def _structured(schema: type) -> DictConfig:
    """The schema as a typed node that holds the *written* defaults of every nested dataclass.

    OmegaConf alone takes nested defaults from an instance. A `__post_init__` that fills in a derived field would then freeze what it
    derived from the defaults, whatever the user overrides later.
    """
    node = OmegaConf.structured(schema)
    for field in fields(schema):  # type: ignore[arg-type]
        factory = field.default_factory
        if isinstance(factory, type) and is_dataclass(factory):
            node[field.name] = _structured(factory)
    return node


def _to_object(schema: type[T], node: Any) -> T:
    try:
        _check_numbers(OmegaConf.to_container(node, resolve=True), list(schema_keys(schema)))
        config = _build(node)
    except OmegaConfBaseException as error:
        raise _explain(error) from error
    if not isinstance(config, schema):
        raise ConfigError(f"the composed config is a {type(config).__name__}, expected {schema.__name__}")
    return config


def _build(node: Any, path: str = "") -> Any:
    """A node as plain objects. A section's own check names its settings as it knows them; what was typed is known here."""
    if not OmegaConf.is_dict(node):
        return OmegaConf.to_object(node) if OmegaConf.is_config(node) else node
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


def _check_numbers(value: Any, keys: list[SchemaKey], key: str = "") -> None:
    """Raise ConfigError for NaN, infinity or an integer that no 64 bits hold, in a setting that is a number.

    What is below a `dict[str, Any]` is the user's own code's business.
    """
    if isinstance(value, (dict, list)):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in entries:
            _check_numbers(entry, keys, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (int, float)) and not (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)):
        known = max((one for one in keys if is_known(key, [one])), key=lambda one: len(one.key))
        if "Any" not in known.type:
            allowed = "a number of 64 bits" if isinstance(value, int) else "a finite number"
            raise ConfigError(f"{key}={value}: must be {allowed}")


def _check_overrides(overrides: Sequence[str], keys: list[SchemaKey], config_dir: Path) -> list[tuple[str, str]]:
    """The keys that the schema does not know, with the overrides that give them. Raises ConfigError for what is wrong with others."""
    unknown = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, text = override.key_or_group, override.input_line
        is_group = bool(key) and (config_dir / key).is_dir()
        if key.startswith("hydra."):
            continue
        if not key:
            raise ConfigError(f"{text!r} names no setting; settings are written key=value")
        if not is_group and (below := _unknown_below(key, override, keys)):
            unknown += [(name, text) for name in below]
            continue
        if override.is_sweep_override():
            raise ConfigError(f"{text!r} lists several values; one run takes one (a list is written [a,b])")
        if override.is_delete() and not is_group and not is_entry(key, keys):
            raise ConfigError(f"{text!r} would remove a setting that the schema has; give it a value")
        if is_group and not isinstance(override.value(), (str, list, dict, type(None))):
            raise ConfigError(f"{text!r}: {key} takes the name of a file in {config_dir / key}")
    return unknown


def _unknown_below(key: str, override: Override, keys: list[SchemaKey]) -> list[str]:
    value = None if override.is_sweep_override() else override.value()
    return list(unknown_keys({key: value}, keys))


def _check_files(name: str, overrides: Sequence[str], config_dir: Path, keys: list[SchemaKey]) -> list[tuple[str, str]]:
    """The unknown keys of the YAML files that `conf/<name>.yaml`, its `defaults` and the overrides bring together, with the file of each.

    Raises ConfigError for a file of a group, given here or in a `defaults` list, that is of other recipes than `conf/<name>.yaml`.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    searched = next((override.value() for override in reversed(parsed) if override.key_or_group == "hydra.searchpath"), None) or []
    folders = [config_dir, *(Path(str(place).removeprefix("file://")) for place in searched)]
    for override in parsed:  # first: Hydra knows nothing better for a group that the recipe does not have than to add it
        check_preset(name, f"{override.key_or_group}/{override.value()}", folders)
    unknown: list[tuple[str, str]] = []
    with hydra.initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
        ConfigStore.instance().store(name=_ENTRY, node={"defaults": [name, "_self_"]})
        loader = GlobalHydra.instance().config_loader()
        for default in loader.compute_defaults_list(_ENTRY, list(overrides), RunMode.RUN).defaults:
            file = default.config_path or ""
            check_preset(name, file, folders)
            if (path := find_file(file, folders)) is not None:
                where = f"in conf/{file}.yaml" if path.is_relative_to(config_dir) else f"in {path}"
                unknown += [(key, where) for key in unknown_in_file(path, default.package or "", keys)]
    return unknown


def _explain(error: BaseException) -> ConfigError:
    """What Hydra, OmegaConf or the YAML parser found, in one line that names the key."""
    file = re.search(r"In '([^']+)'", str(error))
    where = f"in conf/{file[1]}.yaml" if file and file[1] != _ENTRY else ""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        text = re.split(r"\nConfig search path|\nSee https", str(error).replace(f"In '{_ENTRY}': ", ""))[0]
        return ConfigError(" ".join(text.split()))
    key, message = str(cause.full_key or ""), str(cause.msg or cause).splitlines()[0].replace("is not Optional", "may not be null")
    if (value := present_value(key, getattr(cause, "value", None))) != getattr(cause, "value", None):
        message = f"{cause.value} is called {value} now"
    return ConfigError(": ".join(part for part in (key, message) if part) + (f" ({where})" if where else ""))


def _shown_values(node: DictConfig, keys: list[SchemaKey]) -> Iterator[tuple[str, str]]:
    """Every setting with its value as it is written on a command line."""
    for key in keys:
        if key.section or "*" in key.key:
            continue
        parent, _, leaf = key.key.rpartition(".")
        missing = OmegaConf.is_missing(OmegaConf.select(node, parent) if parent else node, leaf)
        yield key.key, "(required)" if missing else _shown(OmegaConf.select(node, key.key))


def _shown(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return yaml.safe_dump(OmegaConf.to_container(OmegaConf.create({"v": plain}), enum_to_str=True), default_flow_style=True).strip()[4:-1]
