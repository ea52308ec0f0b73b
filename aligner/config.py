"""From dataclasses, conf/*.yaml and the command line to one plain config object. The only importer of Hydra and OmegaConf.

A schema is a tree of `@dataclass(kw_only=True, slots=True)`; its defaults are the only ones. `conf/<name>.yaml` and the groups beside it
(conf/algorithm/grpo.yaml, chosen by a `defaults` list or `algorithm=grpo`) hold deviations; `key=value` arguments come last. A key or value
that the schema does not know raises ConfigError, wherever it was written; so does a preset of another recipe: a comment in it says whose it
is (`# Recipes: dpo, online_dpo`; without one, of all that have its settings).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
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
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode, exit_code_of
from aligner.errors import AlignerError, ConfigError, describe_os_error, is_storage_error
from aligner.schema import SchemaKey, is_entry, is_known, named_as, nearest, schema_keys

T = TypeVar("T")

_ENTRY, _SCHEMA = "aligner_entry", "aligner_schema"
_SHORT = {"reward_model": "rm"}  # how the names of job files may begin instead
_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def conf_directory() -> Path:
    """conf/ of the checkout, or the copy that a built package holds."""
    package = Path(__file__).resolve().parent
    return next((path for path in (package.parent / "conf", package / "conf") if path.is_dir()), package.parent / "conf")


def compose(schema: type[T], name: str, overrides: Sequence[str] = (), *, config_dir: Path | None = None) -> T:
    """The config `conf/<name>.yaml` with `overrides` (Hydra's grammar) applied, as a plain `schema` object.

    Raises ConfigError naming the key and value at fault: an unknown key (with the nearest known one), a value of a wrong type, a required
    value that is missing, a group option or file that does not exist, or what the dataclasses' own checks say.
    """
    node = _compose_node(schema, name, overrides, config_dir or conf_directory())
    return _to_object(schema, node)


def to_yaml(config: object) -> str:
    """The resolved config as YAML; `from_yaml` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(schema: type[T], text: str, overrides: Sequence[str] = ()) -> T:
    """A config that `to_yaml` wrote, with plain `key=value` overrides. Raises ConfigError as `compose` does."""
    try:
        saved = OmegaConf.create(yaml.safe_load(text) or {})
        node = OmegaConf.merge(_structured(schema), saved, OmegaConf.from_dotlist(list(overrides)))
    except _ERRORS as error:
        raise _explain(error, list(schema_keys(schema))) from error
    return _to_object(schema, node)


def schema_of(schemas: Sequence[type[T]], text: str) -> type[T]:
    """Which of the schemas a config that `to_yaml` wrote is of: the smallest one that knows all of its keys. Raises ConfigError."""
    written = OmegaConf.to_container(OmegaConf.create(yaml.safe_load(text) or {}))
    fitting = [(len(keys), schema) for schema in schemas if _fits(written, keys := list(schema_keys(schema)))]
    if not fitting:
        raise ConfigError(f"the saved config is of none of {', '.join(schema.__name__ for schema in schemas)}")
    return min(fitting, key=lambda entry: entry[0])[1]


def _fits(written: Any, keys: list[SchemaKey], prefix: str = "") -> bool:
    """Whether all keys of a tree are known."""
    sections = {key.key for key in keys if key.section}
    return all(
        _fits(value, keys, f"{prefix}{name}.") if prefix + name in sections else is_known(prefix + name, keys)
        for name, value in written.items()
    )


def fingerprint(config: object) -> str:
    """A short hash of the resolved config, by which ranks check that they run the same."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


def entrypoint(schema: type[T], name: str) -> Callable[[Callable[[T], int | None]], Callable[..., None]]:
    """Decorator that turns `main(config)` into a program: `main()` reads sys.argv, composes `conf/<name>.yaml` and calls it.

    `config=<name>_70b` among the arguments chooses that file instead, which builds on `<name>`'s.
    `--help` prints every setting with its value and meaning, `--cfg` the resolved YAML (??? for what is required and not given). The
    program ends with the exit code that `main` returns (None: 0), and with 0 in no other way. An AlignerError ends it with one line on
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


def belongs_to(file: str, name: str) -> bool:
    """Whether a file of conf/ is `<name>` itself or one of its job files: `ppo_70b` of ppo, `rm_70b` of reward_model."""
    prefixes = (f"{name}_", f"{_SHORT[name]}_") if name in _SHORT else (f"{name}_",)
    return file == name or file.startswith(prefixes)


def _dispatch(main: Callable[[T], int | None], schema: type[T], name: str, arguments: list[str]) -> int:
    """Do what the arguments ask for; the exit code."""
    flags = {argument for argument in arguments if argument.startswith("-")}
    overrides = [argument for argument in arguments if argument not in flags]
    unknown = flags - {"--help", "-h", "--cfg"}
    if unknown:
        raise ConfigError(f"unknown option {sorted(unknown)[0]}; settings are written key=value, see --help")
    if flags & {"--help", "-h"}:
        print(_help(schema, name, overrides), flush=True)
    elif "--cfg" in flags:
        node = _compose_node(schema, name, overrides, conf_directory())
        incomplete = OmegaConf.missing_keys(node)
        print(OmegaConf.to_yaml(node, resolve=True) if incomplete else to_yaml(_to_object(schema, node)), end="", flush=True)
    else:
        return int(main(compose(schema, name, overrides)) or 0)
    return 0


def _compose_node(schema: type, name: str, overrides: Sequence[str], config_dir: Path) -> DictConfig:
    keys = list(schema_keys(schema))
    if not (config_dir / f"{name}.yaml").is_file():
        raise ConfigError(f"there is no {config_dir / name}.yaml")
    try:
        _check_overrides(overrides, keys, config_dir)
        named, others = _split(overrides, keys)
        _check_presets(name, others, config_dir)
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
        raise _explain(error, keys) from error


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
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise _explain(error, list(schema_keys(schema))) from error
    except ConfigError as error:
        raise _as_typed(error, node) from error
    if not isinstance(config, schema):
        raise ConfigError(f"the composed config is a {type(config).__name__}, expected {schema.__name__}")
    return config


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


def _as_typed(error: ConfigError, node: Any, key: str = "") -> ConfigError:
    """The error of a section's own check, with its setting as it is written here: a section may be in several places, or below others."""
    for name in node if OmegaConf.is_dict(node) else ():
        if OmegaConf.is_missing(node, name) or not OmegaConf.is_dict(section := node[name]):
            continue
        try:
            OmegaConf.to_object(section)
        except ConfigError as found:
            if str(found) == str(error):
                return _as_typed(error, section, f"{key}.{name}" if key else str(name))
        except OmegaConfBaseException:  # something is missing there; this is not the error that is looked for
            continue
    parts, kind = key.split("."), OmegaConf.get_type(node).__name__
    for written in (*(".".join(parts[start:]) for start in range(len(parts))), kind):
        if key and str(error).startswith(f"{written}."):
            return ConfigError(key + str(error).removeprefix(written))
    return ConfigError(f"{key}.{error}") if key and re.split(r"[= ]", str(error))[0] in node else error


def _check_overrides(overrides: Sequence[str], keys: list[SchemaKey], config_dir: Path) -> None:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, text = override.key_or_group, override.input_line
        is_group = bool(key) and (config_dir / key).is_dir()
        if key.startswith("hydra."):
            continue
        if not key:
            raise ConfigError(f"{text!r} names no setting; settings are written key=value")
        if not is_group and not is_known(key, keys):
            raise _unknown(key, keys, f"in {text!r}")
        if override.is_sweep_override():
            raise ConfigError(f"{text!r} lists several values; one run takes one (a list is written [a,b])")
        if override.is_delete() and not is_group and not is_entry(key, keys):
            raise ConfigError(f"{text!r} would remove a setting that the schema has; give it a value")
        if is_group and not isinstance(override.value(), (str, list, dict, type(None))):
            raise ConfigError(f"{text!r}: {key} takes the name of a file in {config_dir / key}")


def _check_presets(name: str, overrides: Sequence[str], config_dir: Path) -> None:
    """Raise ConfigError for a file of a group, given here or in a `defaults` list, that is of other recipes than `conf/<name>.yaml`."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    searched = next((override.value() for override in reversed(parsed) if override.key_or_group == "hydra.searchpath"), None) or []
    folders = [config_dir, *(Path(str(place).removeprefix("file://")) for place in searched)]
    for override in parsed:  # first: Hydra knows nothing better for a group that the recipe does not have than to add it
        _check_preset(name, f"{override.key_or_group}/{override.value()}", folders)
    with hydra.initialize_config_dir(config_dir=str(config_dir.resolve()), version_base="1.3"):
        ConfigStore.instance().store(name=_ENTRY, node={"defaults": [name, "_self_"]})
        loader = GlobalHydra.instance().config_loader()
        for default in loader.compute_defaults_list(_ENTRY, list(overrides), RunMode.RUN).defaults:
            _check_preset(name, default.config_path or "", folders)


def _check_preset(name: str, file: str, folders: Sequence[Path]) -> None:
    path = next((found for folder in folders if (found := folder / f"{file}.yaml").is_file()), None)
    if path is None or _takes(name, path):
        return
    group = file.rpartition("/")[0]
    own = sorted({other.stem for folder in folders for other in (folder / group).glob("*.yaml") if _takes(name, other)})
    recipes, allowed = ", ".join(_recipes_of(path)), ", ".join(own) or "none"
    raise ConfigError(f"{group}={path.stem}: a preset of {recipes}, given to {name}; allowed: {allowed}")


def _takes(name: str, preset: Path) -> bool:
    """Whether a preset may be given to `conf/<name>.yaml`."""
    recipes = _recipes_of(preset)
    return not recipes or any(belongs_to(name, recipe) for recipe in recipes)


def _recipes_of(preset: Path) -> list[str]:
    """The recipes that a preset says it is for; empty: all that have its settings."""
    found = re.search(r"^# Recipes: (.+)$", preset.read_text(), re.MULTILINE)
    return re.split(r"[,\s]+", found[1].strip()) if found else []


def _unknown(key: str, keys: list[SchemaKey], where: str) -> ConfigError:
    near = nearest(key, keys)
    hint = f"did you mean {near}?" if near else "see --help for all keys"
    return ConfigError(" ".join(f"unknown setting {key} {where}".split()) + f": {hint}")


def _explain(error: BaseException, keys: list[SchemaKey]) -> ConfigError:
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
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and key and not is_known(key, keys):
        return _unknown(key, keys, where)
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(f"{key} is required: give {key}=... on the command line or in a YAML file")
    return ConfigError(": ".join(part for part in (key, message) if part) + (f" ({where})" if where else ""))


def _help(schema: type, name: str, overrides: Sequence[str]) -> str:
    node, directory = _compose_node(schema, name, overrides, conf_directory()), conf_directory()
    keys = list(schema_keys(schema))
    groups = {
        path.name: [
            option.stem
            for option in sorted(path.glob("*.yaml"))
            if _takes(name, option) and (is_known(path.name, keys) or _recipes_of(option))  # of settings that there are
        ]
        for path in sorted(directory.iterdir())
        if path.is_dir()
    }
    lines = [
        f"usage: {Path(sys.argv[0]).name} [config=NAME] [key=value ...] [group=option ...] [--help] [--cfg]",
        f"\nComposes {name}.yaml and the given settings; --cfg prints the result as YAML. YAML of your own: 'hydra.searchpath=[file:///dir]'.",
        "\nGroups:",
        *(f"  {group}={'|'.join(options)}" for group, options in groups.items() if options),
        "\nSettings:",
    ]
    for key in keys:
        if key.section:
            continue
        if "*" in key.key:
            lines.append(f"  {named_as(key.key, ''):<46} {key.type}" + (f"  {key.comment}" if key.comment else ""))
            continue
        missing = OmegaConf.is_missing(OmegaConf.select(node, key.key.rpartition(".")[0]) or node, key.key.rpartition(".")[2])
        value = "(required)" if missing else _shown(OmegaConf.select(node, key.key))
        lines.append(f"  {f'{key.key}={value}':<46} {key.type}" + (f"  {key.comment}" if key.comment else ""))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A value as it is written on a command line."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return yaml.safe_dump(OmegaConf.to_container(OmegaConf.create({"v": plain}), enum_to_str=True), default_flow_style=True).strip()[4:-1]
