"""`aligner plan --calibrate FILE`: the parameters of a cluster from jobs whose times somebody measured.

The file is YAML. Under `calibration` (and `held_out`, which nothing is fitted to) it lists jobs, each with its `name` and either

* `config` and `settings` (as typed after `aligner plan`), and `published`: seconds of the `step`, or of phases; or
* `run`: the directory of a run of one's own, whose config and `metrics.jsonl` say both; of an asynchronous one only the step counts.

`sources` may name settings that several jobs share (benchmarks/published_steps.yaml is such a file, where `synchronous` of an asynchronous
job names the one that it is compared with).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from aligner.commands.against import lengths, phases, timed_steps
from aligner.commands.plan import command as plan
from aligner.errors import ConfigError
from aligner.planner.calibration import STEP, MeasuredJob, calibrate, median_and_worst
from aligner.planner.estimate import Scales
from aligner.planner.report import console, table
from aligner.planner.workload import Phase

SMALLEST = 0.05  # part of a step, below which a phase of a run says nothing
KINDS = ("calibration", "held_out")
KEYS = {"name", "source", "config", "settings", "published", "planned", "written_gb", "run", "synchronous"}


def read(path: Path, kind: str) -> list[MeasuredJob]:
    """The jobs of one kind, built on fake tensors. Raises ConfigError naming the file and the job for what it cannot use."""
    try:
        written = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise ConfigError(f"--calibrate {path}: {problem}") from problem
    if not isinstance(written, Mapping) or not any(written.get(kind) for kind in KINDS):
        raise ConfigError(f"--calibrate {path}: needs a list of jobs under {' or '.join(KINDS)}")
    found = []
    for entry in written.get(kind) or []:
        if not isinstance(entry, Mapping) or not entry.get("name"):
            raise ConfigError(f"{path}: {kind}: a job is a mapping with a name; found {entry!r}")
        try:
            found.append(_job(path, entry, written.get("sources") or {}))
        except ConfigError as problem:
            raise ConfigError(f"{path}: {entry['name']}: {problem}") from problem
    return found


def fit(path: Path) -> int:
    """Fit, and print the parameters and the errors; returns the exit code. Raises ConfigError for a file that it cannot use."""
    out = console()
    jobs, held_out = read(path, KINDS[0]), read(path, KINDS[1])
    if not jobs:
        raise ConfigError(f"--calibrate {path}: needs jobs under {KINDS[0]}")
    found = calibrate(jobs, lambda number, left: out.print(f"round {number}: sum of squares {left:.2f}"))
    shown = table("planned / measured", ("job", "before", "after"), left=("job",))
    for job in jobs:
        shown.add_row(job.name, f"{found.before[job.name]:.2f}", f"{found.after[job.name]:.2f}")
    after = {job.name: job.factor(replace(job.cluster, **found.values.get(job.cluster_name, {}))) for job in held_out}
    for job in held_out:
        shown.add_row(f"{job.name} (held out)", f"{job.factor(job.cluster):.2f}", f"{after[job.name]:.2f}")
    out.print(shown)
    for title, factors in (("fitted to", found.after), ("held out", after)):
        if factors:
            middle, worst = median_and_worst(factors)
            out.print(f"error of what was {title}: median {middle:.0%}, worst {worst:.0%}", highlight=False)
    for cluster, values in found.values.items():
        out.print(f"\n# conf/cluster/{cluster or 'of the run'}.yaml", highlight=False)
        for name, value in values.items():
            out.print(f"{name}: {value:.3g}", highlight=False)
    return 0


def _job(path: Path, entry: Mapping[str, Any], sources: Mapping[str, Any]) -> MeasuredJob:
    if unknown := sorted(set(entry) - KEYS):
        raise ConfigError(f"unknown {', '.join(unknown)}; allowed: {', '.join(sorted(KEYS))}")
    if "source" in entry and entry["source"] not in sources:
        raise ConfigError(f"source: {entry['source']}: not under sources; allowed: {', '.join(sources) or 'none'}")
    known = (STEP, *(phase.value for phase in Phase))
    shared = sources[entry["source"]].get("settings", []) if "source" in entry else []
    config, settings, measured = entry.get("config", ""), [*shared, *entry.get("settings", [])], entry.get("published")
    if "run" in entry:
        config = str(run := path.parent / entry["run"])
        found = phases(timed_steps(run))
        measured = {name: found[name] for name in known if found.get(name, 0.0) >= SMALLEST * found[STEP]}
        settings = [*lengths(run), *settings]
    if not config or not measured or any(not isinstance(seconds, (int, float)) or seconds <= 0 for seconds in measured.values()):
        raise ConfigError("needs a config with settings and published (seconds above 0 by phase, or of the step), or a run")
    if wrong := sorted(set(measured) - set(known)):
        raise ConfigError(f"published.{wrong[0]}: allowed: {', '.join(known)}")
    loaded = plan.load(config, settings)
    plans, habits = plan.planned(loaded, Scales(loaded.cluster.device)), plan.habits(loaded)
    if "run" in entry and habits.max_staleness:
        measured = {STEP: measured[STEP]}  # its phases were slower than they are alone
    named = next((one.partition("=")[2] for one in reversed(settings) if one.startswith("cluster=")), "")
    return MeasuredJob(
        name=entry["name"],
        cluster_name=named,
        cluster=loaded.cluster,
        components=[(one.component, one.sizes) for one in plans],
        assumed=loaded.plan,
        habits=habits,
        take_turns=any(one.component.turns for one in plans),
        measured=measured,
        written_gb=entry.get("written_gb", 0.0),
    )
