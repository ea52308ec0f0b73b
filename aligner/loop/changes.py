"""What was changed in a run's settings since its newest checkpoint was made, and whether that makes it another experiment.

A checkpoint holds the settings that made it. Settings of memory, speed, layout, length, logging and whatever watches the run may differ
when it goes on; of the others (data, model, batches, losses, rewards, seed) the numbers before and after would not be of one experiment.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from aligner.cluster.run_directory import POLICY, REWARD_MODEL, RunDirectory
from aligner.errors import ConfigError
from aligner.former_names import translated
from aligner.models import checkpoint_files as files
from aligner.schema import SchemaKey, schema_keys

_NOT_SET = "(not set)"
_SHOWN = 12  # changes that a message lists
_HARMLESS = (
    *("run.[!s]*", "loop.*", "guard.*", "checkpoint.*", "logging.*", "cluster.*", "slurm.*", "local_launcher.*", "server_client.*"),
    *("parallel.*", "*.parallel.*", "num_processes", "*.num_processes", "*.server.*", "critic.accept_gap"),
    *("*timeout_seconds", "*num_threads", "environment.num_workers", "validation.*"),
    *("data.validation", "data.num_validation_prompts", "algorithm.validation_batch_size"),
    *("*optimizer.offload", "*optimizer.distributed"),
    *(
        f"*model.{name}"
        for name in (
            *("micro_batch_size", "micro_batch_tokens", "packing", "share_prompts", "recompute", "transformer_engine", "batch_invariant"),
            *("logits_chunk_size", "make_vocab_divisible_by"),
        )
    ),
    *("rollout.[!sa]*", "rollout.share_work"),  # all but the sampling and how far the sampler may be ahead
)


def check_changes(directory: RunDirectory, schema: type, config_yaml: str, *, allowed: bool) -> str:
    """What to tell the person who watches of the settings that differ from the newest checkpoint's; empty where none does.

    `config_yaml`: the settings of now, of `schema`. A directory without a checkpoint has nothing to protect. Raises ConfigError for changes
    that make it another experiment, where they are not `allowed`.
    """
    newest = _newest(directory)
    if newest is None:
        return ""
    changes = _changes(_read(newest / "config.yaml"), yaml.safe_load(config_yaml), list(schema_keys(schema)))
    other = {name: change for name, change in changes.items() if not any(fnmatchcase(name, pattern) for pattern in _HARMLESS)}
    if other and not allowed:
        raise ConfigError(
            f"run.directory={directory.path}: its checkpoint {newest.name} was made with other settings: {_listed(other)}. That would be "
            "another experiment: name another directory, or give run.allow_changes=true to go on with these"
        )
    if not changes:
        return ""
    return f"{'warning: ' if other else ''}settings changed since {newest.name}: {_listed(changes)}"


def _newest(directory: RunDirectory) -> Path | None:
    steps: dict[int, Path] = {}
    for folder in (POLICY, REWARD_MODEL):
        steps |= files.complete_steps(directory.checkpoints / folder)
    return steps[max(steps)] if steps else None


def _read(path: Path) -> Any:
    """The settings in a checkpoint; None where it has none, or they are damaged: who loads it will say so."""
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _changes(before: Any, now: Any, keys: list[SchemaKey]) -> dict[str, tuple[Any, Any]]:
    """(before, now) by setting. One that the schema has gained since is no change; one that it has lost, or never had, is."""
    if not isinstance(before, dict):
        return {}
    old, new = dict(_flat(translated(before, keys))), dict(_flat(now))
    gained = {key.key for key in keys if key.key not in old and not key.open}
    return {
        name: (old.get(name, _NOT_SET), new.get(name, _NOT_SET))
        for name in (*new, *(name for name in old if name not in new))
        if old.get(name, _NOT_SET) != new.get(name, _NOT_SET) and name not in gained
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _listed(changes: dict[str, tuple[Any, Any]]) -> str:
    shown = [f"{name}: {before} -> {now}" for name, (before, now) in list(changes.items())[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else "")
