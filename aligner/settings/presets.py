"""Where configs lie: `conf/<recipe>/` has a recipe's configs, and its presets by group (`conf/dpo/algorithm/simpo.yaml`); `conf/` has the
groups of all recipes (`conf/model/llama3_8b.yaml`). No Hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from aligner.errors import ConfigError
from aligner.files import conf_directory, recipe_folders
from aligner.settings.hints import unknown_keys
from aligner.settings.schema import SchemaKey, is_known


def folders_of(config: str) -> list[Path]:
    """Where a config of conf/ and its presets are looked for: the folder that has it, and conf/."""
    own = next((folder for folder in recipe_folders() if (folder / f"{config}.yaml").is_file()), None)
    return [own, conf_directory()] if own else [conf_directory()]


def find_file(file: str, folders: Sequence[Path]) -> Path | None:
    """`<folder>/<file>.yaml` of the first folder that has it."""
    return next((path for folder in folders if (path := folder / f"{file}.yaml").is_file()), None)


def built_on(path: Path) -> str:
    """The config that a config's `defaults` begin with; empty if there is none."""
    written = yaml.safe_load(path.read_text())
    defaults = written.get("defaults") or [] if isinstance(written, dict) else []
    return next((entry for entry in defaults if isinstance(entry, str) and entry != "_self_"), "")


def groups_in(folders: Sequence[Path]) -> list[str]:
    """The names of the groups of presets in these folders."""
    recipes = recipe_folders()
    found = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir() and path not in recipes}
    return sorted(name for name in found if not name.startswith((".", "__")))


def check_preset(recipe: str, file: str, folders: Sequence[Path]) -> None:
    """Raise ConfigError if `<group>/<preset>` is of a group that there is, here or for another recipe, and none of these folders has it."""
    group, _, preset = file.rpartition("/")
    if not group or find_file(file, folders) is not None:
        return
    others = [folder.name for folder in recipe_folders() if (folder / f"{file}.yaml").is_file()]
    if not others and group not in groups_in(folders):
        return
    own = sorted({other.stem for folder in folders for other in (folder / group).glob("*.yaml")})
    what = f"a preset of {', '.join(others)}, given to {recipe}" if others else f"{recipe} has no such preset"
    raise ConfigError(f"{group}={preset}: {what}; allowed: {', '.join(own) or 'none'}")


def groups_of(keys: Sequence[SchemaKey], folders: Sequence[Path]) -> list[str]:
    """`group=preset|preset` of the presets that a recipe with these settings and folders takes."""
    found = []
    for group in groups_in(folders):
        own = any((folder / group).is_dir() and folder != conf_directory() for folder in folders)
        if own or is_known(group, keys):
            presets = dict.fromkeys(preset.stem for folder in folders for preset in sorted((folder / group).glob("*.yaml")))
            found.append(f"{group}={'|'.join(presets)}")
    return found


def unknown_in_file(path: Path, package: str, keys: Sequence[SchemaKey]) -> Iterator[str]:
    """The keys of a YAML file, whose settings stand under `package`, that the schema does not know."""
    written = yaml.safe_load(path.read_text()) or {}
    if isinstance(written, dict):
        settings = {name: value for name, value in written.items() if name not in ("defaults", "hydra")}
        yield from unknown_keys(settings, keys, f"{package}." if package else "")
