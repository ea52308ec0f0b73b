"""What `aligner plan` writes and shows besides its tables: `--html`, `--trace`, `--against`, `--explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from aligner.commands import against as comparison
from aligner.commands.parts import PlanOptions
from aligner.errors import ConfigError
from aligner.models.config import Recompute
from aligner.planner import report
from aligner.planner.estimate import ComponentPlan
from aligner.planner.memory import PhaseMemory
from aligner.planner.report import COLUMNS, JobPlan, describe, fullest, gib, listed, ranks, seconds
from aligner.planner.workload import GIB, Phase
from aligner.reporting.charts import Panel, bars, trace
from aligner.reporting.pages import drawing, publish_text, render_page
from aligner.telemetry.spans import Span, chrome_trace

LENGTHS = ("plan.response_length=", "plan.prompt_length=", "plan.example_length=", "plan.lengths_of=")
SHOWN = 6  # causes, and changes, of --explain
NOTICEABLE = 0.99  # of a step: a change that shortens it less is not shown


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


def report_html(job: JobPlan, spans: Sequence[Span]) -> str:
    """The page of a plan: memory by phase and stage, the timeline of one step, and the figures of both as a table. `spans` are those of the
    step, on any clock."""
    timeline = trace(spans, "what runs when, seconds")
    charts = [timeline, *(memory_chart(plan, plan.memory) for plan in job.components)]
    return render_page(
        "plan.html",
        name=job.name,
        heading=f"{ranks(job.num_ranks)}, {job.cluster.gpus_per_node} to a node of {job.cluster.gpu_memory_gib:g} GiB each",
        step=seconds(job.step_seconds),
        problems=job.problems,
        charts=list(enumerate(charts)),
        table=list(_table(job)),
        **drawing(charts),
    )


def memory_chart(plan: ComponentPlan, moments: Sequence[PhaseMemory]) -> Panel:
    """What holds the memory of a component's ranks in these moments, against the limit."""
    held = {name: [round(sum(one.parts.get(part, 0) for part in parts) / GIB, 4) for one in moments] for name, parts in COLUMNS.items()}
    name, limit = f"{plan.component.name} on {ranks(plan.component.num_ranks)} ({describe(plan.component)})", plan.limit / GIB
    title = f"memory of {name}: {gib(plan.peak.total)} of {gib(plan.limit)} GiB at its peak"
    shown = {kind: sizes for kind, sizes in held.items() if any(sizes)}
    found = bars(title, [f"{one.phase.value}, stage {one.stage}" for one in moments], shown, "GiB", stack="memory")
    line = {"symbol": "none", "lineStyle": {"color": "#dc2626"}, "label": {"formatter": "limit", "position": "start", "color": "#dc2626"}}
    found.option["series"].append({"type": "bar", "stack": "memory", "data": [], "markLine": line | {"data": [{"xAxis": limit}]}})
    found.option["xAxis"]["max"] = round(max(limit, plan.peak.total / GIB) * 1.02, 1)
    return found


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
        where = f", on {ranks(change.num_ranks)} instead of {job.num_ranks}" if change.num_ranks != job.num_ranks else ""
        saved = 1 - change.step_seconds / job.step_seconds
        out.print(f"  {' '.join(change.settings)}: {seconds(change.step_seconds)}, {saved:.0%} less{where}", soft_wrap=True)
