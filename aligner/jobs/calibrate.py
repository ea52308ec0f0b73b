"""`aligner plan --calibrate FILE`: the parameters of a cluster from jobs whose times somebody measured.

The file is YAML. Under `calibration` (and `held_out`, which nothing is fitted to) it lists jobs, each with its `name` and either

* `config` and `settings` (as typed after `aligner plan`), and `published`: seconds of the `step`, or of phases; or
* `run`: the directory of a run of one's own, whose config and `metrics.jsonl` say both.

`sources` may name settings that several jobs share (benchmarks/published_steps.yaml is such a file).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from aligner.errors import ConfigError
from aligner.jobs import plan
from aligner.planner.calibration import STEP, MeasuredJob
from aligner.planner.estimate import Scales
from aligner.planner.workload import Phase

KINDS = ("calibration", "held_out")
KEYS = {"name", "source", "config", "settings", "published", "planned", "written_gb", "run"}


def read(path: Path, kind: str) -> list[MeasuredJob]:
    """The jobs of one kind, built on fake tensors. Raises ConfigError naming the file and the job for what it cannot use."""
    written = _written(path)
    found = []
    for entry in written.get(kind) or []:
        if not isinstance(entry, Mapping) or not entry.get("name"):
            raise ConfigError(f"{path}: {kind}: a job is a mapping with a name; found {entry!r}")
        try:
            found.append(_job(path, entry, written.get("sources") or {}))
        except ConfigError as problem:
            raise ConfigError(f"{path}: {entry['name']}: {problem}") from problem
    return found


def _written(path: Path) -> Mapping[str, Any]:
    try:
        written = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise ConfigError(f"--calibrate {path}: {problem}") from problem
    if not isinstance(written, Mapping) or not any(written.get(kind) for kind in KINDS):
        raise ConfigError(f"--calibrate {path}: needs a list of jobs under {' or '.join(KINDS)}")
    return written


def _job(path: Path, entry: Mapping[str, Any], sources: Mapping[str, Any]) -> MeasuredJob:
    if unknown := sorted(set(entry) - KEYS):
        raise ConfigError(f"unknown {', '.join(unknown)}; allowed: {', '.join(sorted(KEYS))}")
    shared = sources.get(entry["source"], {}).get("settings", []) if "source" in entry else []
    config, settings, measured = entry.get("config", ""), [*shared, *entry.get("settings", [])], entry.get("published")
    if "run" in entry:
        from aligner.jobs.measured_run import read_run

        config, own, measured = read_run((path.parent / entry["run"]).resolve())
        settings = [*own, *settings]
    if not config or not measured or any(not isinstance(seconds, (int, float)) or seconds <= 0 for seconds in measured.values()):
        raise ConfigError("needs a config with settings and published (seconds above 0 by phase, or of the step), or a run")
    if wrong := sorted(set(measured) - {STEP, *(phase.value for phase in Phase)}):
        raise ConfigError(f"published.{wrong[0]}: allowed: {STEP}, {', '.join(phase.value for phase in Phase)}")
    loaded = plan.load(config, settings)
    found, cluster = plan.with_lengths(plan.components(loaded), loaded.plan), loaded.cluster
    scales = Scales(cluster.device)
    plans = [plan.plan_component(component, cluster, scales) for component in found]
    named = next((one.partition("=")[2] for one in reversed(settings) if one.startswith("cluster=")), "")
    return MeasuredJob(
        name=entry["name"],
        cluster_name=named,
        cluster=cluster,
        components=[(one.component, one.sizes) for one in plans],
        assumed=loaded.plan,
        habits=plan.habits(loaded),
        take_turns=any(component.turns for component in found),
        measured=measured,
        written_gb=entry.get("written_gb", 0.0),
    )
