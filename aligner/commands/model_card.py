"""The card of an exported model: what it was made of, with which settings, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from aligner.algorithms.registry import recipes
from aligner.commands.report import all_columns
from aligner.errors import ConfigError
from aligner.hub.names import HubName, Kind, name_of, parse, parse_data
from aligner.models.checkpoint.hf_files import CONFIG_FILE, read_json
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.run_view import RunView
from aligner.reporting.summary import table
from aligner.run.recipe import Recipe
from aligner.settings.compose import schema_of, to_yaml
from aligner.version import __version__

# Where a run was, not what it was: these sections tell a reader nothing about the model, and may name hosts and accounts.
_LEFT_OUT = ("run.", "cluster.", "slurm.", "container.", "logging.", "local_launcher.", "server_client.", "checkpoint.")
_PATHS = ("path", "tokenizer", "train", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What is known of where an export comes from."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[StepMetrics] = ()
    recipe: str = ""


def origin_of(source: Path) -> Origin:
    """Of a checkpoint, or of the directory `export` of a run; empty for a directory of which nothing is known."""
    is_checkpoint = (source / "config.yaml").is_file()
    run = RunView(source.parents[2] if is_checkpoint and len(source.parents) > 2 else source.parent)
    path = source / "config.yaml" if is_checkpoint else run.files.config
    if not path.is_file():
        return Origin()
    text = path.read_text()
    settings = yaml.safe_load(text) or {}
    if not isinstance(settings, dict) or "model" not in settings:
        return Origin()  # a checkpoint that was converted, or another program's file
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
    parts = [f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---", f"# {title}", _made(origin, is_scalar=is_scalar)]
    parts += [f"## Base model\n\n{_linked(base)}"] if base else []
    parts += ["## Data\n\n" + "\n".join(f"- {use}: {_linked(one)}" for use, one in data.items())] if data else []
    parts += _settings(origin)
    parts += _measured(origin.metrics)
    return "\n\n".join(parts) + "\n"


def _made(origin: Origin, *, is_scalar: bool) -> str:
    what = "A reward model" if is_scalar else "A language model"
    trained = f", trained with the recipe `{origin.recipe}`" if origin.recipe else ""
    steps = f" for {origin.metrics[-1].step:,} steps" if origin.metrics and trained else ""
    return f"{what}{trained}{steps}, written by aligner {__version__}."


def _recipe(text: str) -> str:
    """The recipe whose settings these are, of several with the same ones that which defines them; empty if there is none."""
    try:
        schema = schema_of([recipe.config for recipe in recipes().values()], text)
    except ConfigError:
        return ""
    names = [recipe.name for recipe in recipes().values() if recipe.config is schema]
    return min(names, key=lambda name: not schema.__module__.endswith(f".{name}"))


def _base(settings: Mapping[str, Any]) -> HubName | str:
    """A name of the Hub, or the last part of a path; empty: random weights, or nothing known."""
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


def _settings(origin: Origin) -> list[str]:
    """What differs from the recipe's defaults; of an unknown recipe, nothing."""
    if not origin.recipe:
        return []
    recipe: Recipe[Any] = recipes()[origin.recipe]
    defaults = dict(_flat(yaml.safe_load(to_yaml(recipe.config()))))
    changed = {
        key: value
        for key, value in _flat(dict(origin.settings))
        if defaults.get(key) != value and not key.startswith(_LEFT_OUT) and ".server." not in key and not _is_path(key, value)
    }
    lines = "\n".join(f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in changed.items())
    return [f"## Settings\n\nThose that are not the defaults of `{origin.recipe}`:\n\n```\n{lines}\n```"] if changed else []


def _is_path(key: str, value: Any) -> bool:
    """Whether it names a file, which may say more of a machine than of the model."""
    return key.rpartition(".")[2] in _PATHS or (isinstance(value, str) and Path(value).is_absolute())


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _measured(metrics: Sequence[StepMetrics]) -> list[str]:
    """The course of the training, and the last validation."""
    parts = [f"## Metrics\n\n```\n{table(metrics, all_columns())}\n```"] if metrics else []
    validated = [one for one in metrics if any(name.startswith("validation/") for name in one.values)]
    if validated:
        last = validated[-1]
        rows = [
            f"| {name.removeprefix('validation/')} | {value:.6g} |" for name, value in last.values.items() if name.startswith("validation/")
        ]
        text = "\n".join(["| metric | value |", "|---|---|", *rows])
        parts.append(f"## Evaluation\n\nOn the validation data, after step {last.step:,}:\n\n{text}")
    return parts
