"""What `aligner plan` writes and shows besides its tables: `--html`, `--trace`, `--against`, `--explain`.

The page shows memory by phase and stage, the timeline of one step, and the figures of both as a table; its template is
aligner/reporting/templates/plan.html. All coordinates are pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console

from aligner.commands import against as comparison
from aligner.commands.parts import PlanOptions
from aligner.errors import ConfigError
from aligner.models.config import Recompute
from aligner.planner import report
from aligner.planner.estimate import ComponentPlan
from aligner.planner.report import COLUMNS, JobPlan, describe, fullest, listed, seconds
from aligner.planner.workload import GIB, Phase
from aligner.reporting.pages import publish_text, render_page
from aligner.telemetry.spans import Row, Span, chrome_trace, rows

LENGTHS = ("plan.response_length=", "plan.prompt_length=", "plan.example_length=", "plan.lengths_of=")
MOST_ROWS = 40  # rows of a component in the timeline
MOST_SPANS = 6000  # drawn spans, the longest ones
NUM_COLOURS = 8  # colours of the page's style; further kinds are grey
WIDTH, LEFT, RIGHT = 1080, 190, 1000  # width of a chart, and bounds of its bars
SHOWN = 6  # causes, and changes, of --explain
NOTICEABLE = 0.99  # of a step: a change that shortens it less is not shown
BAR, GAP = 14, 4  # height of a row, and the space between two


def write_outputs(job: report.JobPlan, options: PlanOptions) -> None:
    """Write and print what the options ask for. Raises AlignerError if a file cannot be written, DataError for a run without two steps."""
    if options.html is not None:
        publish_text(options.html, report_html(job, job.run.spans), "the plan")
    if options.trace is not None:
        publish_text(options.trace, chrome_trace(job.run.spans), "the plan")
    if options.against is not None:
        comparison.show(comparison.compare(job, options.against), report.console())


def config_and_overrides(config: str, overrides: Sequence[str], against: Path | None) -> tuple[str, tuple[str, ...]]:
    """The config to plan and its overrides: without a config, the config of the run to compare with. Responses are as long as the run's
    unless the overrides have lengths. Raises ConfigError without either."""
    if "=" in config and not Path(config).exists():  # the first setting: no config was named
        config, overrides = "", (config, *overrides)
    if not config and against is None:
        raise ConfigError("aligner plan: name a config, such as ppo_70b, or the directory of a run, or one with --against")
    if against is not None and not any(one.startswith(LENGTHS) for one in overrides):
        overrides = (*comparison.lengths(against), *overrides)
    return config or str(against), tuple(overrides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle with a title for the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A text beside a row; a heading is above the rows of a component."""

    y: float
    text: str
    end: str = ""  # shown behind the row
    is_heading: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """`marks` are lines from top to bottom, (x, label)."""

    caption: str
    note: str
    height: float
    boxes: Sequence[Box]
    labels: Sequence[Label]
    marks: Sequence[tuple[float, str]]


def report_html(job: JobPlan, spans: Sequence[Span]) -> str:
    """The page of a plan. `spans` are those of one step, on any clock; they are drawn from the first one's start."""
    names = list(dict.fromkeys(span.name for span in sorted(spans, key=lambda span: span.start)))
    return render_page(
        "plan.html",
        width=WIDTH,
        left=LEFT,
        right=RIGHT,
        name=job.name,
        heading=f"{job.num_ranks} ranks, {job.cluster.gpus_per_node} to a node of {job.cluster.gpu_memory_gib:g} GiB each",
        step=seconds(job.step_seconds),
        problems=job.problems,
        memory=[memory_chart(plan) for plan in job.components],
        kinds=[(name, colour_of(number)) for number, name in enumerate(COLUMNS)],
        timeline=timeline(spans, names),
        names=[(name, colour_of(number)) for number, name in enumerate(names)],
        table=list(_table(job)),
    )


def colour_of(number: int) -> int:
    """Of the page's colours."""
    return min(number, NUM_COLOURS)


def memory_chart(plan: ComponentPlan) -> Chart:
    """A bar for every phase and pipeline stage: a rank's memory at the fullest moment, and its limit."""
    most = max(plan.limit, max(moment.total for moment in plan.memory))
    boxes, labels = [], []
    for number, moment in enumerate(plan.memory):
        y, x = number * (BAR + GAP), float(LEFT)
        for colour, (kind, parts) in enumerate(COLUMNS.items()):
            size = sum(moment.parts.get(part, 0) for part in parts)
            width = size / most * (RIGHT - LEFT)
            if width:
                title = f"{kind}: {size / GIB:.2f} GiB in {moment.phase.value} on stage {moment.stage}"
                boxes.append(Box(x=x, y=y, width=width, height=BAR, colour=colour_of(colour), title=title))
            x += width
        labels.append(Label(y=y, text=f"{moment.phase.value}, stage {moment.stage}", end=f"{moment.total / GIB:.1f} GiB"))
    return Chart(
        caption=plan.component.name,
        note=describe(plan.component),
        height=len(plan.memory) * (BAR + GAP),
        boxes=boxes,
        labels=labels,
        marks=[(LEFT + plan.limit / most * (RIGHT - LEFT), f"{plan.limit / GIB:.1f} GiB")],
    )


def timeline(spans: Sequence[Span], names: Sequence[str]) -> Chart:
    """One row for every lane of every component, more where its spans overlap; `names` give the colours."""
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=begin) - begin or 1.0
    drawn = set(map(id, sorted(spans, key=lambda span: -span.seconds)[:MOST_SPANS]))
    colours = {name: colour_of(number) for number, name in enumerate(names)}
    boxes, labels, y = [], [], 0.0
    for component, own in groupby(rows(spans), key=lambda row: row.component):
        all_rows = list(own)
        hidden = len(all_rows) - MOST_ROWS
        labels.append(Label(y=y, text=component + (f" (and {hidden} rows more)" if hidden > 0 else ""), is_heading=True))
        y += BAR + GAP
        for row in all_rows[:MOST_ROWS]:
            labels.append(Label(y=y, text=row.title))
            for span, depth in _nested(row):
                if id(span) in drawn:
                    x, width = LEFT + (span.start - begin) / length * (RIGHT - LEFT), span.seconds / length * (RIGHT - LEFT)
                    inset = min(2 * depth, BAR // 2)
                    title = _title(span, begin)
                    boxes.append(Box(x=x, y=y + inset, width=width, height=BAR - inset, colour=colours[span.name], title=title))
            y += BAR + GAP
    left_out = len(spans) - len(drawn)
    return Chart(
        caption="one step",
        note=f"{left_out:,} short spans are not drawn" if left_out else "",
        height=y,
        boxes=boxes,
        labels=labels,
        marks=[(LEFT + part / 4 * (RIGHT - LEFT), seconds(part / 4 * length)) for part in range(5)],
    )


def _nested(row: Row) -> Iterator[tuple[Span, int]]:
    """The row's spans, each with the number of spans around it."""
    around: list[float] = []
    for span in row.spans:
        while around and around[-1] <= span.start:
            around.pop()
        yield span, len(around)
        around.append(span.end)


def _title(span: Span, begin: float) -> str:
    shown = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in span.arguments.items())
    arguments = ", ".join(shown)
    return f"{span.name}: {seconds(span.seconds)}, from {seconds(span.start - begin)}" + (f" ({arguments})" if arguments else "")


def _table(job: JobPlan) -> Iterator[tuple[str, ...]]:
    """Component, phase, fullest stage, its memory, the part of the limit, seconds, and their causes."""
    for plan in job.components:
        times = {time.phase: time for time in plan.times}
        for phase in plan.component.work.phases:
            moment, time = fullest(plan, phase), times.get(phase)
            where = (plan.component.name, phase.value, str(moment.stage), f"{moment.total / GIB:.1f}", f"{moment.total / plan.limit:.0%}")
            yield (*where, *((seconds(time.total), listed(time.parts, seconds)) if time else ("", "")))


@dataclass(frozen=True, slots=True)
class Change:
    """A step's seconds with these settings, on so many ranks."""

    settings: tuple[str, ...]
    step_seconds: float
    num_ranks: int


def causes(job: JobPlan) -> dict[str, float]:
    """Seconds of the trainer's step by cause, largest first: the parts of its phases, and what it waits for."""
    main = job.components[0]
    parts = {time.phase.value: time for time in main.times}
    found: dict[str, float] = {}
    for name, spent in job.run.phases.items():
        whole = parts.get(name)
        if whole is None or name == Phase.generate.value or not whole.total:
            found[name] = found.get(name, 0.0) + spent
            continue
        for cause, share in whole.parts.items():
            found[cause] = found.get(cause, 0.0) + spent * share / whole.total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def changes(job: JobPlan, planned: Callable[[Sequence[str]], JobPlan]) -> list[Change]:
    """Settings that shorten a step and fit, the best first. `planned(settings)` plans the job with them; ConfigErrors are no changes."""
    found = []
    for settings in _tried(job):
        try:
            other = planned(settings)
        except ConfigError:
            continue
        if not other.problems and other.step_seconds < NOTICEABLE * job.step_seconds:
            found.append(Change(settings, other.step_seconds, other.num_ranks))
    return sorted(found, key=lambda change: change.step_seconds)


def _tried(job: JobPlan) -> Iterator[tuple[str, ...]]:
    main = job.components[0].component
    model, parallel, engine = main.model, main.parallel, main.engine
    if main.optimizer is not None and model.recompute != Recompute.none:
        yield ("model.recompute=none",)
    if model.micro_batch_tokens:
        yield (f"model.micro_batch_tokens={2 * model.micro_batch_tokens}",)
    else:
        yield (f"model.micro_batch_size={2 * model.micro_batch_size}",)
    if parallel.pp > 1:
        yield (f"parallel.vpp={2 * parallel.vpp}",)
        yield (f"parallel.pp={parallel.pp // 2}",)
    if parallel.tp > 1:
        yield (f"parallel.tp={parallel.tp // 2}", *(() if engine is None else (f"rollout.tp={engine.tp}",)))
    if engine is not None:
        yield (f"rollout.max_batch_size={2 * engine.max_batch_size}",)
        yield from ((f"rollout.tp={tp}",) for tp in {engine.tp * 2, engine.tp // 2} - {0})
        if not engine.asynchronous:
            yield ("rollout.asynchronous.max_staleness=1", "rollout.offload=false", "placement=separate")
    for plan in job.components:
        component = plan.component
        if not component.within:
            prefix = "" if component is main else f"{component.name}."
            yield (f"{prefix}num_processes={2 * component.num_ranks}",)


def show_explained(job: JobPlan, found: Sequence[Change], out: Console) -> None:
    largest = (f"{name} {value / job.step_seconds:.0%}" for name, value in list(causes(job).items())[:SHOWN])
    out.print(f"\n[bold]what a step is made of[/]: {', '.join(largest)}")
    if not found:
        out.print("no single setting that was tried shortens it by 1%")
    for change in found[:SHOWN]:
        ranks = f", on {change.num_ranks} ranks instead of {job.num_ranks}" if change.num_ranks != job.num_ranks else ""
        saved = 1 - change.step_seconds / job.step_seconds
        out.print(f"  {' '.join(change.settings)}: {seconds(change.step_seconds)}, {saved:.0%} less{ranks}", soft_wrap=True)
