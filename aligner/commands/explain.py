"""`aligner plan --explain`: what takes the time of a step, and which single settings would shorten it by how much, each planned in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from aligner.errors import ConfigError
from aligner.models.config import Recompute
from aligner.planner.report import JobPlan, seconds
from aligner.planner.workload import Phase

SHOWN = 6  # causes, and changes
NOTICEABLE = 0.99  # of a step: what shortens it less is no help


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


def show(job: JobPlan, found: Sequence[Change], out: Console) -> None:
    """Print both lists."""
    largest: Mapping[str, float] = dict(list(causes(job).items())[:SHOWN])
    out.print(
        "\n[bold]what a step is made of[/]: " + ", ".join(f"{name} {value / job.step_seconds:.0%}" for name, value in largest.items())
    )
    if not found:
        out.print("no single setting that was tried shortens it by a hundredth")
    for change in found[:SHOWN]:
        ranks = f", on {change.num_ranks} ranks instead of {job.num_ranks}" if change.num_ranks != job.num_ranks else ""
        saved = 1 - change.step_seconds / job.step_seconds
        out.print(f"  {' '.join(change.settings)}: {seconds(change.step_seconds)}, {saved:.0%} less{ranks}", soft_wrap=True)
