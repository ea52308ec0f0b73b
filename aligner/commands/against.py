"""`aligner plan --against RUN`: the planned seconds of each phase beside those that a run measured.

Phases of the training component are the `time/*` metrics of the run; those of its servers, and refits, are read from its trace. Each is the
median over steps, without the first step, which loads kernels and fills caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median

from rich.console import Console

from aligner.errors import DataError
from aligner.parallel.platform import PEAK_MEMORY
from aligner.planner.report import JobPlan, table
from aligner.planner.workload import GIB, Phase
from aligner.reporting.charts import Panel, bars
from aligner.reporting.formats import seconds
from aligner.reporting.jsonl import StepMetrics
from aligner.reporting.run_view import RunView
from aligner.servers import wire
from aligner.telemetry.spans import Span, step_of

RESPONSE_LENGTH = "rollout/response_length"
REFIT = "refit"
WIDEST = 5.0  # standard deviation of the logarithm of lengths
STEP, REST, HOST = "step", "everything else", "host work"
_TIME = "time/"
# Phases of the plan that a run counts under another name: its sampling ends when the last response is scored.
_IN_A_RUN = {
    "waiting for scores": Phase.generate.value,
    "waiting for rollouts": Phase.generate.value,
    "waiting for the critic's training": "critic_wait",
}
_BESIDE_STEPS = ("validation", "checkpoints")  # in the plan a mean over all steps; in a run not in `time/step`
_OPERATIONS = {Phase.values: wire.CRITIC_INFER.name, Phase.train: wire.CRITIC_TRAIN.name, Phase.scores: wire.REWARD_MODEL.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One phase: seconds a step; None where only the other side knows it."""

    component: str
    phase: str
    planned: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        return self.planned / self.measured if self.planned is not None and self.measured else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Plan and run side by side. Memory is in bytes, of the training component's fullest rank; None: the run has not recorded it."""

    rows: tuple[Row, ...]
    num_steps: int  # measured ones
    planned_peak: int
    measured_peak: int | None
    has_trace: bool

    def chart(self) -> Panel:
        names = [row.phase if row.component in (self.rows[0].component, "job") else f"{row.component}: {row.phase}" for row in self.rows]
        values = {"planned": [row.planned for row in self.rows], "measured": [row.measured for row in self.rows]}
        return bars(f"plan against run, seconds of a step (medians of {self.num_steps})", names, values, "seconds")


def lengths(directory: Path) -> list[str]:
    """The settings `plan.*` for the lengths of a run's sequences, from its metrics and its trace. Raises DataError without a run."""
    steps = timed_steps(directory)

    def typical(name: str) -> float | None:
        return _median([step.values.get(name) for step in steps])

    if (response := typical(RESPONSE_LENGTH)) is not None:
        longest, count = typical("rollout/response_length_max"), typical("learnt/samples_seen")
        spread = _spread(response, longest, count, typical("rollout/truncated_fraction"))
        spans, _ = RunView(directory).spans()
        prompts = [prompt for span in spans if isinstance(prompt := span.arguments.get("prompt"), int)]
        found = [f"plan.response_length={response:g}", *spread]
        return found + ([f"plan.prompt_length={sum(prompts) / len(prompts):g}"] if prompts else [])
    last = steps[-1].values
    seconds = sum(last.get(_TIME + phase.value, 0.0) for phase in (Phase.ref_logprobs, Phase.logprobs, Phase.train))
    tokens, rows = last.get("data/tokens_per_second", 0.0) * seconds, last.get("learnt/samples_seen", 0.0)
    spread = _spread(typical("data/length"), typical("data/length_max"), rows)
    return [f"plan.example_length={tokens / rows:g}", *spread] if tokens and rows else []


def _spread(mean: float | None, longest: float | None, count: float | None, cut: float | None = 0.0) -> list[str]:
    """`plan.response_spread` of log-normal lengths that are cut at `longest` and then have this `mean`; the longest of `count`, or the
    part `cut` of all, reaches `longest`."""
    if not mean or not longest or not count or count < 2:
        return []
    normal, share = NormalDist(), max(cut or 0.0, 0.5 / count)
    low, high = 0.0, WIDEST if mean < longest and share < 1 else 0.0
    for _ in range(40):  # the cut mean falls with the spread
        spread = (low + high) / 2
        z = normal.inv_cdf(1 - share) if high else 0.0
        cut_mean = longest * (share + normal.pdf(z) * normal.cdf(z - spread) / normal.pdf(z - spread))
        low, high = (spread, high) if cut_mean > mean else (low, spread)
    return [f"plan.response_spread={high:.3g}"]


def compare(job: JobPlan, directory: Path) -> Comparison:
    """The plan beside the run in this directory. Raises DataError if the run has not done two steps, or its metrics are damaged."""
    steps = timed_steps(directory)
    spans, _ = RunView(directory).spans()
    main = job.components[0]
    residents = [plan for plan in job.components if plan.component.process == main.component.process]
    servers = [plan for plan in job.components if plan not in residents]
    measured: dict[str, float | None] = dict(phases(steps))
    whole = measured.pop(STEP)
    recorded = _Recorded(spans)
    if (refit := recorded.seconds(recorded.trained, REFIT)) is not None:
        measured[REFIT] = refit
    planned: dict[str, float] = defaultdict(float)  # under a run's names
    for name, value in job.run.phases.items():
        if name not in _BESIDE_STEPS:
            planned[_IN_A_RUN.get(name, name)] += value
    step = sum(planned.values())
    host = planned.pop(HOST, None)
    rows = _rows(main.component.name, planned, measured)
    rest = (whole or 0.0) - sum(value or 0.0 for value in measured.values())
    rows.append(Row(component=main.component.name, phase=REST, planned=host, measured=max(rest, 0.0)))
    for server in servers:
        own = {time.phase.value: time.total for time in server.times}
        seen = {time.phase.value: recorded.seconds(server.component.process, _OPERATIONS[time.phase]) for time in server.times}
        rows += _rows(server.component.name, own, seen)
    rows.append(Row(component="job", phase=STEP, planned=step, measured=whole))
    return Comparison(
        rows=tuple(rows),
        num_steps=len(steps),
        planned_peak=max(plan.peak.total for plan in residents),
        measured_peak=recorded.peak,
        has_trace=bool(spans),
    )


def phases(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Seconds of a step by phase, and of the whole `step`: medians."""
    names = sorted({name for step in steps for name in step.values if name.startswith(_TIME)})
    return {name.removeprefix(_TIME): median(step.values.get(name, 0.0) for step in steps) for name in names}


def show(found: Comparison, out: Console) -> None:
    title = f"plan against run: seconds of a step, medians of {found.num_steps} steps"
    shown = table(title, ("component", "phase", "planned", "measured", "planned / measured"), left=("component", "phase"))
    for row in found.rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        style = "" if row.ratio is None or 0.8 <= row.ratio <= 1.25 else "yellow" if 0.5 <= row.ratio <= 2 else "red"
        cells = ["-" if value is None else seconds(value) for value in (row.planned, row.measured)]
        shown.add_row(row.component, row.phase, *cells, f"[{style}]{ratio}[/]" if style else ratio)
    out.print()
    out.print(shown)
    if found.measured_peak is None:
        out.print("peak memory: not recorded by the run (run.trace_mib=0)")
    else:
        ratio = found.planned_peak / found.measured_peak
        out.print(
            f"peak memory of a rank: planned {found.planned_peak / GIB:.2f} GiB, measured {found.measured_peak / GIB:.2f} GiB ({ratio:.2f})"
        )
    if not found.has_trace:
        out.print("servers and refits: the run has no trace (run.trace_mib=0)")


def _rows(component: str, planned: Mapping[str, float], measured: Mapping[str, float | None]) -> list[Row]:
    """Planned phases in their order, then the phases that only the run has."""
    names = [*planned, *(name for name in measured if name not in planned)]
    return [Row(component=component, phase=name, planned=planned.get(name), measured=measured.get(name)) for name in names]


def timed_steps(directory: Path) -> list[StepMetrics]:
    """The steps whose times count: all but the first. Raises DataError if there are none."""
    run = RunView(directory).begun(f"--against {directory}")
    steps = [step for step in run.metrics() if _TIME + STEP in step.values]
    if len(steps) < 2:
        raise DataError(f"--against {directory}: has {len(steps)} timed steps; expected at least 2, since the first one is left out")
    return steps[1:]


class _Recorded:
    """The trace of a run, by steps."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.trained = next((span.component for span in spans if step_of(span)), "")
        begins = sorted({step_of(span): span.start for span in spans if step_of(span)}.values())
        self._steps = list(pairwise([*begins[1:], float("inf")]))  # all but the first, up to the next one's begin
        self._seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for span in spans:
            if span.lane == "rank 0":
                self._seconds.setdefault((span.component, span.name), []).append((span.start, span.seconds))
        peaks = [peak for span in spans if isinstance(peak := span.arguments.get(PEAK_MEMORY), int)]
        self.peak = max(peaks, default=None)

    def seconds(self, component: str, name: str) -> float | None:
        """The median time of a step that the component's first rank spends on this; None if there is no such span."""
        own = self._seconds.get((component, name), [])
        return _median([sum(seconds for start, seconds in own if begin <= start < end) for begin, end in self._steps]) if own else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
