"""`aligner plan --calibrate FILE`: the parameters of a cluster from jobs whose times somebody measured.

The file is YAML. Under `calibration` (and `held_out`, which nothing is fitted to) it lists jobs, each with its `name` and either

* `config` and `settings` (as typed after `aligner plan`), and `published`: seconds of the `step`, or of phases; or
* `run`: the directory of a run of one's own, whose config and `metrics.jsonl` say both; of an asynchronous one only the step counts.

`sources` may name settings that several jobs share (benchmarks/published_steps.yaml is such a file, where `synchronous` of an asynchronous
job names the one that it is compared with).

The fit is maximum a posteriori, by the method of Levenberg and Marquardt (1963). The residuals are the logarithms of planned over measured
seconds over their tolerances, and those of each parameter over its usual value over its usual spread, so that a few jobs move only what
they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from aligner.commands.against import lengths, phases, timed_steps
from aligner.commands.plan import command as plan
from aligner.errors import ConfigError
from aligner.planner.config import ClusterConfig, Device, PlanConfig
from aligner.planner.layers import GIGA
from aligner.planner.memory import Sizes
from aligner.planner.report import console, table
from aligner.planner.simulation import Habits, Part, Simulated, simulate
from aligner.planner.times import phase_seconds
from aligner.planner.workload import Component, Phase

STEP = "step"  # the name of the whole step among the times of a job

# (usual value, standard deviation of its logarithm)
USUAL_GPU: Mapping[str, tuple[float, float]] = {
    "achievable_flops": (0.7, 0.12),
    "achievable_attention": (0.55, 0.15),
    "achievable_experts": (0.6, 0.3),
    "achievable_bandwidth": (0.75, 0.12),
    "achievable_link": (0.7, 0.12),
    "storage_gb_per_second": (1.75, 0.1),
    "collective_microseconds": (15.0, 0.3),
    "network_microseconds": (20.0, 0.4),
    "launch_microseconds": (40.0, 0.4),
    "host_layer_microseconds": (400.0, 0.4),
    "host_pass_milliseconds": (5.0, 0.6),
    "engine_step_milliseconds": (2.0, 0.5),
    "engine_sequence_microseconds": (10.0, 0.6),
    "step_seconds": (5.0, 0.6),
    "sequence_milliseconds": (10.0, 0.8),
    "phase_seconds": (4.0, 0.5),
    "straggling": (0.05, 0.6),
    "expert_imbalance": (1.25, 0.12),
}
USUAL_CPU: Mapping[str, tuple[float, float]] = {
    "achievable_flops": (0.2, 0.7),
    "achievable_attention": (0.05, 0.7),
    "achievable_bandwidth": (0.3, 0.7),
    "launch_microseconds": (100.0, 0.7),
    "host_layer_microseconds": (400.0, 0.7),
    "host_pass_milliseconds": (2.0, 0.7),
    "engine_step_milliseconds": (1.0, 0.7),
    "engine_sequence_microseconds": (20.0, 0.7),
    "engine_request_microseconds": (200.0, 0.7),
    "layer_token_microseconds": (2.0, 0.7),
    "collective_microseconds": (200.0, 0.7),
    "step_seconds": (0.02, 1.0),
    "sequence_milliseconds": (0.2, 1.0),
    "straggling": (0.05, 0.7),
    "concurrency": (0.8, 0.2),
}
OF_A_MACHINE = ("achievable_flops",)  # fitted for each cluster of a file; the other parameters are shared
AT_MOST_ONE = ("achievable_flops", "achievable_attention", "achievable_experts", "achievable_bandwidth", "achievable_link", "concurrency")
TOLERANCE, TOLERANCE_OF_PHASE = 0.05, 0.25  # standard deviations of the logarithm of planned / measured, for a step and for a phase
FURTHEST = 3.0  # standard deviations that a parameter may move
ROUNDS, TRIES = 20, 8  # rounds of the fit, and steps tried in a round, each shorter than the last
DIFFERENCE = 0.15  # step of the derivatives, in standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredJob:
    """A job with measured times on the cluster of that name: seconds by phase, or of the whole step (`STEP`)."""

    name: str
    cluster_name: str
    cluster: ClusterConfig
    components: Sequence[tuple[Component, Sizes]]  # the training one first
    assumed: PlanConfig
    habits: Habits
    take_turns: bool
    measured: Mapping[str, float]
    written_gb: float = 0.0  # GB that a step writes to storage besides its phases

    def simulated(self, cluster: ClusterConfig) -> Simulated:
        parts = [Part(component=one, sizes=sizes, seconds=phase_seconds(one, sizes, cluster)) for one, sizes in self.components]
        return simulate(parts, cluster, self.assumed, self.habits, take_turns=self.take_turns)

    def planned(self, cluster: ClusterConfig) -> dict[str, float]:
        """Planned seconds of everything that was measured."""
        run = self.simulated(cluster)
        written = self.written_gb * GIGA / (cluster.storage_gb_per_second * GIGA)
        found = {name: run.step_seconds if name == STEP else run.phases.get(name, 0.0) for name in self.measured}
        return {name: seconds + (written if name in (STEP, "train") else 0.0) for name, seconds in found.items()}

    def factor(self, cluster: ClusterConfig) -> float:
        """Planned / measured of the step if it was measured, else of the first phase that was."""
        name = STEP if STEP in self.measured else next(iter(self.measured))
        return self.planned(cluster)[name] / self.measured[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """`values`: fitted parameters by cluster. `before`, `after`: planned / measured of each job."""

    values: Mapping[str, Mapping[str, float]]
    before: Mapping[str, float]
    after: Mapping[str, float]


def error(factor: float) -> float:
    """How far planned / measured is from 1, in either direction: 0.25 for 1.25 and for 0.8."""
    return math.exp(abs(math.log(factor))) - 1


def median_and_worst(factors: Mapping[str, float]) -> tuple[float, float]:
    errors = [error(factor) for factor in factors.values()]
    return median(errors), max(errors)


def calibrate(jobs: Sequence[MeasuredJob], progress: Callable[[int, float], None] = lambda number, left: None) -> Fit:
    """Fit the clusters' parameters to the jobs. `progress(round, sum of squares)` is called after each round."""
    names = list(dict.fromkeys(job.cluster_name for job in jobs))
    usual = USUAL_GPU if jobs[0].cluster.device == Device.gpu else USUAL_CPU
    keys = [("", name) for name in usual if name not in OF_A_MACHINE]
    keys += [(cluster, name) for cluster in names for name in OF_A_MACHINE if name in usual]

    def values(x: Sequence[float], cluster: str) -> dict[str, float]:
        found = {}
        for (own, name), moved in zip(keys, x, strict=True):
            if own in ("", cluster):
                value = usual[name][0] * math.exp(moved * usual[name][1])
                found[name] = min(1.0, value) if name in AT_MOST_ONE else max(1.0, value) if name == "expert_imbalance" else value
        return found

    def residuals(x: Sequence[float]) -> list[float]:
        found = list(x)
        for job in jobs:
            planned = job.planned(replace(job.cluster, **values(x, job.cluster_name)))
            for name, seconds in job.measured.items():
                tolerance = TOLERANCE if name == STEP or len(job.measured) == 1 else TOLERANCE_OF_PHASE
                found.append(math.log(max(planned[name], 1e-9) / seconds) / tolerance)
        return found

    best = _least_squares(residuals, [0.0] * len(keys), progress)
    return Fit(
        values={name: values(best, name) for name in names},
        before={job.name: job.factor(job.cluster) for job in jobs},
        after={job.name: job.factor(replace(job.cluster, **values(best, job.cluster_name))) for job in jobs},
    )


def _least_squares(
    residuals: Callable[[Sequence[float]], list[float]], start: Sequence[float], progress: Callable[[int, float], None]
) -> list[float]:
    """Where the sum of squares is least, each coordinate within `FURTHEST`; derivatives are differences."""
    x, damping = np.asarray(start), 1.0
    found = np.asarray(residuals(list(x)))
    for number in range(ROUNDS):
        moved = [np.asarray(residuals(list(x + row))) for row in DIFFERENCE * np.eye(len(x))]
        slopes = (np.stack(moved) - found) / DIFFERENCE
        least = float(found @ found)
        for _ in range(TRIES):
            step = np.linalg.solve(slopes @ slopes.T + damping * np.eye(len(x)), -slopes @ found)
            tried = np.clip(x + step, -FURTHEST, FURTHEST)
            there = np.asarray(residuals(list(tried)))
            if there @ there < least:
                x, found, damping = tried, there, damping / 3
                break
            damping *= 5
        progress(number + 1, float(found @ found))
        if least - found @ found < 1e-3 * least:
            break
    return [float(value) for value in x]


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
    plans, habits = plan.planned(loaded), plan.habits(loaded)
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
