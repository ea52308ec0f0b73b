"""The card of an exported model: its base model, data, settings and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aligner.algorithms.registry import recipe_recorded, recipes
from aligner.commands.report import all_columns
from aligner.errors import ConfigError
from aligner.hub.names import HubName, Kind, name_of, parse, parse_data
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.run_view import RunView
from aligner.reporting.summary import table
from aligner.run.recipe import Recipe
from aligner.settings.compose import to_yaml
from aligner.settings.schema import flat
from aligner.version import __version__

# Sections about the machine, not the model; they may name hosts and accounts.
_LEFT_OUT = ("run.", "cluster.", "slurm.", "container.", "logging.", "local_launcher.", "server_client.", "checkpoint.")
# Settings that name files, which may reveal more of the machine than of the model.
_PATHS = ("path", "tokenizer", "train", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that made an export, as far as it is known."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[StepMetrics] = ()
    recipe: str = ""


def origin_of(source: Path) -> Origin:
    """The origin of a checkpoint, or of the directory `export` of a run; empty if the directory records none."""
    is_checkpoint = (source / "config.yaml").is_file()
    run = RunView(source.parents[2] if is_checkpoint and len(source.parents) > 2 else source.parent)
    path = source / "config.yaml" if is_checkpoint else run.files.config
    if not path.is_file():
        return Origin()
    text = path.read_text()
    settings = yaml.safe_load(text) or {}
    if not isinstance(settings, dict) or "model" not in settings:
        return Origin()  # a converted checkpoint, or another program's file
    steps = run.metrics()
    if is_checkpoint and (source / "state.json").is_file():
        last = json.loads((source / "state.json").read_text()).get("step")
        steps = [one for one in steps if last is None or one.step <= last]
    return Origin(settings=settings, metrics=steps, recipe=_recipe(text))


def model_card(title: str, export: Path, origin: Origin) -> str:
    """README.md for a repository of the Hub: metadata for its search, then a page for people."""
    is_scalar = read_json(export / CONFIG_FILE).get("architectures", [""])[0].endswith("ForSequenceClassification")
    base, data = _base(origin.settings), _data(origin.settings)
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if is_scalar else "text-generation",
        "tags": ["aligner", *([origin.recipe] if origin.recipe else []), *(["reward-model"] if is_scalar else [])],
    }
    if isinstance(base, HubName):
        metadata |= {"base_model": base.repo, "base_model_relation": "finetune"}
    if named := sorted({one.repo for one in data.values() if isinstance(one, HubName)}):
        metadata["datasets"] = named
    trained = f", trained with the recipe `{origin.recipe}`" if origin.recipe else ""
    steps = f" for {origin.metrics[-1].step:,} steps" if origin.metrics and trained else ""
    made = f"A {'reward' if is_scalar else 'language'} model{trained}{steps}, written by aligner {__version__}."
    parts = [f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---", f"# {title}", made]
    parts += [f"## Base model\n\n{_linked(base)}"] if base else []
    parts += ["## Data\n\n" + "\n".join(f"- {use}: {_linked(one)}" for use, one in data.items())] if data else []
    parts += _settings(origin)
    parts += _measured(origin.metrics)
    return "\n\n".join(parts) + "\n"


def _recipe(text: str) -> str:
    """The name of the recipe with these settings. Empty if none has them."""
    try:
        return recipe_recorded(text).name
    except ConfigError:
        return ""


def _base(settings: Mapping[str, Any]) -> HubName | str:
    """A name of the Hub, or the last part of a path; empty for random weights or an unknown base."""
    path = str(settings.get("model", {}).get("path") or "")
    return name_of(path) or parse(path) or Path(path).name


def _data(settings: Mapping[str, Any]) -> dict[str, HubName | str]:
    found: dict[str, HubName | str] = {}
    for key, use in (("train", "training"), ("validation", "validation")):
        given = settings.get("data", {}).get(key) or ""
        locations = [str(one["path"]) for one in given] if isinstance(given, list) else [str(given)]
        for number, location in enumerate(one for one in locations if one and one != "???"):
            named = parse_data(location)
            found[f"{use} ({number + 1})" if len(locations) > 1 else use] = named[0] if named else Path(location).name
    return found


def _linked(thing: HubName | str) -> str:
    if not isinstance(thing, HubName):
        return f"`{thing}` (a local path)"
    place = "datasets/" if thing.kind is Kind.dataset else ""
    revision = f", revision `{thing.revision}`" if thing.revision else ""
    return f"[{thing.repo}](https://huggingface.co/{place}{thing.repo}){revision}"


def changed_settings(recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by full key, that differ from the recipe's defaults; empty for an unknown recipe."""
    if recipe not in recipes():
        return {}
    known: Recipe[Any] = recipes()[recipe]
    defaults = dict(flat(yaml.safe_load(to_yaml(known.config()))))
    return {key: value for key, value in flat(dict(settings)) if defaults.get(key) != value}


def _settings(origin: Origin) -> list[str]:
    """The settings that differ from the recipe's defaults; none if the recipe is unknown."""
    if not origin.recipe:
        return []
    changed = {
        key: value
        for key, value in changed_settings(origin.recipe, origin.settings).items()
        if not key.startswith(_LEFT_OUT)
        and ".server." not in key
        and key.rpartition(".")[2] not in _PATHS
        and not (isinstance(value, str) and Path(value).is_absolute())
    }
    lines = "\n".join(f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in changed.items())
    return [f"## Settings\n\nThe settings that differ from the defaults of `{origin.recipe}`:\n\n```\n{lines}\n```"] if changed else []


def _measured(metrics: Sequence[StepMetrics]) -> list[str]:
    """The course of the training, and the last validation."""
    parts = [f"## Metrics\n\n```\n{table(metrics, all_columns())}\n```"] if metrics else []
    for step in reversed(metrics):
        own = [(name.partition("/")[2], value) for name, value in step.values.items() if name.startswith("validation/")]
        if own:
            text = "\n".join(["| metric | value |", "|---|---|", *(f"| {name} | {value:.6g} |" for name, value in own)])
            return [*parts, f"## Evaluation\n\nOn the validation data, after step {step.step:,}:\n\n{text}"]
    return parts
