"""The files of conf/: which recipe one belongs to, and which recipes may take a preset of a group. No Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from aligner.errors import ConfigError
from aligner.hints import unknown_keys
from aligner.schema import SchemaKey, is_known

_SHORT = {"reward_model": "rm"}  # how the names of job files may begin instead


def belongs_to(file: str, name: str) -> bool:
    """Whether a file of conf/ is `<name>` itself or one of its job files: `ppo_70b` of ppo, `rm_70b` of reward_model."""
    prefixes = (f"{name}_", f"{_SHORT[name]}_") if name in _SHORT else (f"{name}_",)
    return file == name or file.startswith(prefixes)


def find_file(file: str, folders: Sequence[Path]) -> Path | None:
    """`<folder>/<file>.yaml` of the first folder that has it."""
    return next((path for folder in folders if (path := folder / f"{file}.yaml").is_file()), None)


def check_preset(name: str, file: str, folders: Sequence[Path]) -> None:
    """Raise ConfigError where `<group>/<preset>` is of other recipes than `conf/<name>.yaml`."""
    path = find_file(file, folders)
    if path is None or _takes(name, path):
        return
    group = file.rpartition("/")[0]
    own = sorted({other.stem for folder in folders for other in (folder / group).glob("*.yaml") if _takes(name, other)})
    recipes, allowed = ", ".join(_recipes_of(path)), ", ".join(own) or "none"
    raise ConfigError(f"{group}={path.stem}: a preset of {recipes}, given to {name}; allowed: {allowed}")


def groups_of(name: str, keys: Sequence[SchemaKey], directory: Path) -> list[str]:
    """`group=preset|preset` of the presets in `directory` that `conf/<name>.yaml` takes, of settings that there are."""
    found = {
        folder.name: [
            preset.stem
            for preset in sorted(folder.glob("*.yaml"))
            if _takes(name, preset) and (is_known(folder.name, keys) or _recipes_of(preset))
        ]
        for folder in sorted(directory.iterdir())
        if folder.is_dir()
    }
    return [f"{group}={'|'.join(presets)}" for group, presets in found.items() if presets]


def unknown_in_file(path: Path, package: str, keys: Sequence[SchemaKey]) -> Iterator[str]:
    """The keys of a YAML file, whose settings stand under `package`, that the schema does not know."""
    written = yaml.safe_load(path.read_text()) or {}
    if isinstance(written, dict):
        settings = {name: value for name, value in written.items() if name not in ("defaults", "hydra")}
        yield from unknown_keys(settings, keys, f"{package}." if package else "")


def _takes(name: str, preset: Path) -> bool:
    """Whether a preset may be given to `conf/<name>.yaml`."""
    recipes = _recipes_of(preset)
    return not recipes or any(belongs_to(name, recipe) for recipe in recipes)


def _recipes_of(preset: Path) -> list[str]:
    """The recipes that a preset says it is for; empty: all that have its settings."""
    found = re.search(r"^# Recipes: (.+)$", preset.read_text(), re.MULTILINE)
    return re.split(r"[,\s]+", found[1].strip()) if found else []
