"""A form's values as the overrides of a command line, and the process that a form starts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from aligner.errors import ConfigError
from aligner.files import configs
from aligner.models.checkpoint.files import LATEST
from aligner.settings.command_line import quoted
from aligner.settings.explain import MATTER
from aligner.settings.schema import SchemaKey
from aligner.studio.runs import LAUNCH_LOG, Runs, is_run

DIRECTORY = "run.directory"  # made from the run's name
IMPORTANT = "most important"
_TEXT = ("str", "Any")  # types whose values need no quotes in the form
# Text that needs no quotes in Hydra's grammar.
PLAIN = re.compile(r"(?!(null|true|false|none|nan|inf)$)[\w./@+-][\w./@:+-]*", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


def recipes() -> list[str]:
    """The names of all configs, those of other packages' recipes too; nothing is imported."""
    return sorted({*configs(), *(entry.name for entry in entry_points(group="aligner.recipes"))})


def choices(key: SchemaKey) -> list[str]:
    """The values that a setting allows; empty if they cannot be listed."""
    listed = "true|false" if key.type == "bool" else key.type
    return listed.split("|") if re.fullmatch(r"\w+(\|\w+)+", listed) else []


def as_shown(key: SchemaKey, value: str) -> str:
    """A value of the command line as a field shows it: texts without quotes, a required one that is missing as nothing."""
    if value == "(required)":
        return ""
    is_quoted = key.type in _TEXT and len(value) >= 2 and value[0] == value[-1] == "'"
    return value[1:-1].replace("''", "'") if is_quoted else value


def override_of(key: SchemaKey, text: str) -> str:
    """`key=value` of what a field says. Lists and dicts are typed as on the command line."""
    is_plain = key.type not in _TEXT or PLAIN.fullmatch(text) or (key.type == "Any" and text[:1] in "[{'\"")
    return f"{key.key}={text if is_plain else quoted(text)}"


def overrides_of(
    keys: Sequence[SchemaKey], values: Mapping[str, str], presets: Mapping[str, str], typed: Mapping[str, str], directory: Path
) -> list[str]:
    """The settings of a form: presets, then what was `typed` and differs from `values`, then the run's directory."""
    found = [f"{group}={preset}" for group, preset in presets.items() if preset]
    for key in keys:
        text = typed.get(key.key)
        if text is not None and text != as_shown(key, values.get(key.key, "")) and (text or key.type in _TEXT):
            found.append(override_of(key, text))
    return [*found, override_of(SchemaKey(key=DIRECTORY, type="str", comment=""), str(directory))]


def command_of(place: str, config: str, overrides: Sequence[str]) -> list[str]:
    return ["aligner", "launch", place, config, *overrides]


def named_in(text: str, keys: Sequence[SchemaKey]) -> str:
    """The first setting that an error names; empty if it names none."""
    known = {key.key for key in keys}
    return next((word for word in re.findall(r"\w+(?:\.\w+)*", text) if word in known), "")


def shown(keys: Sequence[SchemaKey], section: str, words: str) -> list[SchemaKey]:
    """The settings of a section, or in any section those whose name or help has all of the `words`. Parts `*` stand for names of the
    user's own, for which there is no field."""
    fields = {key.key: key for key in keys if not key.section and "*" not in key.key and key.key != DIRECTORY}
    if words.strip():
        return [key for key in fields.values() if all(word in f"{key.key} {key.comment}".lower() for word in words.lower().split())]
    if section == IMPORTANT:
        return [fields[name] for name in MATTER if name in fields]
    return [key for key in fields.values() if f"{key.key}.".startswith(f"{section}.")]


def directory_of(folder: Path, name: str) -> Path:
    """The directory of a new run, or of one to resume. Raises ConfigError for one outside the folder, or inside another run."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r}: allowed: letters, digits, '.', '_', '-', and '/' for folders below {folder}")
    path = (folder / name).resolve()
    if path == folder or not path.is_relative_to(folder):
        raise ConfigError(f"name={name!r}: leads out of {folder}; a run lies below the studio's folder")
    if outer := next((above for above in path.parents if above.is_relative_to(folder) and is_run(above)), None):
        raise ConfigError(f"name={name!r}: lies inside the run {outer}; give it a folder of its own")
    return path


def free_name(folder: Path, config: str) -> str:
    """`sft`, or `sft_2` if there is one."""
    numbered = (config if number == 1 else f"{config}_{number}" for number in range(1, 10_000))
    return next(name for name in numbered if not (folder / name).exists())


def models_of(runs: Runs) -> list[str]:
    """The exports, adapters and checkpoints of the folder's runs."""
    found: list[Path] = []
    for files in (run.files for run in runs.all()):
        found += [path for path in (files.export, files.adapter) if path.is_dir()]
        found += [marker.parent for marker in sorted(files.checkpoints.glob(f"*/{LATEST}"))]
    return [str(path) for path in found]


def start(place: str, config: str, overrides: Sequence[str], directory: Path, *, read_only: bool) -> subprocess.Popen[bytes]:
    """`aligner launch` in a session of its own, which outlives the studio; its output goes into the run's logs. Raises ConfigError in a
    read-only studio, OSError."""
    if read_only:
        raise ConfigError("--read-only: this studio starts nothing")
    log = directory / LAUNCH_LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "aligner.cli", *command_of(place, config, overrides)[1:]]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
