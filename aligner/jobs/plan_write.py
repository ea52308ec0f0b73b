"""The job that a search has found, as a config and a Slurm script that run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.algorithms.registry import composed, recipe_of
from aligner.config import as_file, override, search_path
from aligner.errors import ConfigError
from aligner.jobs.slurm import LaunchOptions, launch_slurm
from aligner.planner.report import seconds
from aligner.planner.search_report import Row


def check_writable(folder: Path, name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError, before a search, for what `write` could not write."""
    if composed(name, ["data.train=given-later", *overrides]).slurm.separate:
        raise ConfigError(
            f"--write {folder}: with slurm.separate=true a run is several jobs, which no single script submits; leave one out"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--write {folder}: is no directory")


def write(folder: Path, name: str, overrides: Sequence[str], best: Row, *, steps: int) -> str:
    """Write `<name>_<gpus>_gpus.yaml` and the script of `aligner launch slurm` for it, `.sub`, to `folder`; returns the config's name.

    The config builds on `name`, with `overrides` and the settings that were found. `steps` become its loop.max_steps where it has one.
    """
    places, typed = search_path(overrides)
    chosen = f"{name}_{best.gpus}_gpus"
    keys = {text.partition("=")[0] for text in typed}
    more = dict(best.settings)
    if "run.directory" not in keys:
        more["run.directory"] = f"runs/{chosen}"
    if steps and "loop.max_steps" not in keys and best.job.components[0].component.optimizer is not None:
        more["loop.max_steps"] = str(steps)
    folders = [*recipe_of(name, overrides).folders(), *(place for place in places if isinstance(place, Path))]
    comment = f"{name} on {best.gpus} GPUs, as found by `aligner plan {name} --search`: {seconds(best.seconds)} a step."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chosen}.yaml"
    path.write_text(as_file(name, typed, more, folders, comment=comment))
    print(f"written to {path}; look at it with: aligner plan {chosen} --config-dir {folder}", flush=True)
    others = [f"file://{place.resolve()}" if isinstance(place, Path) else place for place in places]
    launch_slurm(
        chosen, [override("hydra.searchpath", [*others, f"file://{folder.resolve()}"])], LaunchOptions(output=folder / f"{chosen}.sub")
    )
    return chosen
