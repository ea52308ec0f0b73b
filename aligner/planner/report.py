"""A plan, and what a search has found, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aligner.models.config import HFArchitecture
from aligner.planner.config import ClusterConfig
from aligner.planner.engine_memory import cache_tokens, decode_batch, seats
from aligner.planner.estimate import ComponentPlan
from aligner.planner.memory import PhaseMemory, train_micro_batches
from aligner.planner.simulation import Simulated
from aligner.planner.times import model_flops
from aligner.planner.workload import GIB, Component, Phase

COLUMNS = {  # columns of the memory table, and the parts that each sums
    "weights": ("weights", "weights in 8 bits", "reference"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "engine": ("engine weights", "refit buckets", "KV cache", "prefill and sampling", "graph buffers"),
    "activations": ("activations", "backward workspace", "vision tower"),
    "logits": ("logits",),
    "other": ("host copies", "gather buffer", "exchange buffers", "lost between blocks", "context and communicators", "other components"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    name: str
    cluster: ClusterConfig
    components: tuple[ComponentPlan, ...]
    problems: tuple[str, ...]  # why it does not fit; empty if it does
    run: Simulated
    take_turns: bool = False  # whether all components are on the first one's GPUs

    @property
    def step_seconds(self) -> float:
        return self.run.step_seconds

    @property
    def num_ranks(self) -> int:
        """The job's GPUs, one per rank."""
        counts = [plan.component.num_ranks for plan in self.components if not plan.component.within]
        own = sum(plan.component.engine.own_ranks for plan in self.components if plan.component.engine is not None)
        return own + (max(counts) if self.take_turns else sum(counts))


def console(width: int = 140) -> Console:
    """A terminal at its own width, anything else at one that holds the tables."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=width)


def show(job: JobPlan, out: Console) -> None:
    cluster = job.cluster
    counted = "GPUs, on which the components take turns" if job.take_turns else "ranks"
    out.print(
        f"[bold]{job.name}[/]: {job.num_ranks} {counted}, {cluster.gpus_per_node} to a node, {cluster.gpu_memory_gib:g} GiB each; "
        "sequences at their longest"
    )
    for plan in job.components:
        _show_component(plan, out)
        if isinstance(plan.component.architecture, HFArchitecture):
            kind = plan.component.architecture.model_type
            out.print(f"{kind}: weights are those of transformers' modules; activations and times those of a dense model of the same sizes")
    run = job.run
    out.print(
        f"\nstep of the whole job: [bold]{seconds(job.step_seconds)}[/] ({listed(run.phases, seconds)}); times are a model, "
        "whose errors are in docs/planning.md"
    )
    if run.useful < 1:
        whole = seconds(run.run_seconds) if math.isfinite(run.run_seconds) else "never done"
        out.print(f"the whole run with failures: {whole}, {run.useful:.0%} of it useful")
    for problem in job.problems:
        out.print(f"[bold red]does not fit[/] {escape(problem)}")
    if not job.problems:
        out.print("[bold green]fits[/]")


def describe(component: Component) -> str:
    """Layout and micro-batches in one line."""
    p, model = component.parallel, component.model
    parts = [
        f"tp {p.tp}" + (" with sequence parallelism" if p.sequence_parallel else ""),
        f"pp {p.pp}" + (f" x {p.vpp}" if p.vpp > 1 else ""),
    ]
    parts += [f"{name} {size}" for name, size in (("cp", p.cp), ("ep", p.ep), ("etp", p.etp)) if size > 1]
    parts += [f"dp {component.dp}", model.dtype.value]
    if component.optimizer is not None:
        passes = train_micro_batches(component)
        parts += [f"recompute {model.recompute.value}", f"{passes.count} micro-batches of {passes.rows} x {passes.length} tokens"]
    return ", ".join(parts)


def seconds(value: float) -> str:
    """`0.12 s`, `34 s`, `5 min 10 s`, `2 h 05 min`."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 20 else "-"


def _show_component(plan: ComponentPlan, out: Console) -> None:
    component = plan.component
    counts = sorted(set(plan.stage_parameters))
    per_rank = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    where = f"in the processes of the {component.within}" if component.within else f"on {ranks(component.num_ranks)}"
    out.print(f"\n[bold]{component.name}[/] {where}: {describe(component)}")
    out.print(f"{plan.model_parameters:,} parameters, {per_rank} on a rank")
    out.print(_memory_table(plan))
    peaks = [max(m.total for m in plan.memory if m.stage == stage) for stage in range(component.parallel.pp)]
    out.print(f"peak by stage: {'  '.join(gib(peak) for peak in peaks)}")
    if (line := cache_line(plan)) is not None:
        out.print(f"[yellow]{line}[/]")
    if component.engine is not None and component.engine.graphs_lost:
        out.print(f"[yellow]{component.engine.graphs_lost}[/]")
    out.print(f"host memory of a node: {gib(sum(plan.host.values()))} GiB ({listed(plan.host, gib)})")
    if plan.disk:
        out.print(f"disk of a node: {gib(plan.disk)} GiB (optimizer.nvme_path)")
    times = table("predicted time of a training step", ("phase", "time", "of which"), left=("phase", "of which"))
    for time in plan.times:
        times.add_row(time.phase.value, seconds(time.total), listed(time.parts, seconds))
    out.print(times)


def table(title: str, columns: Sequence[str], *, left: Sequence[str], style: str = "dim") -> Table:
    """An empty table; the columns in `left` are aligned to the left."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style=style)
    for name in columns:
        found.add_column(name, justify="left" if name in left else "right")
    return found


def cache_line(plan: ComponentPlan) -> str | None:
    """The cost of a cache that the plan made smaller, and the setting with which a run has it; None if the plan did not."""
    component, engine = plan.component, plan.component.engine
    if engine is None or not engine.wanted_cache_tokens:
        return None
    wanted = decode_batch(component, engine)
    return (
        f"fits with rollout.kv_cache_tokens={engine.kv_cache_tokens} (set it: a run does not shrink its cache by itself), in place of "
        f"{engine.wanted_cache_tokens}: {seats(component, engine)} of {wanted} sequences of full length at a time; "
        f"{seconds(plan.seconds)} a step instead of {seconds(plan.wanted_seconds)}"
    )


def _memory_table(plan: ComponentPlan) -> Table:
    columns = ("phase", "stage", *COLUMNS, "total", f"of {plan.limit / GIB:.1f}")
    found = table("GiB on the fullest stage's ranks", columns, left=("phase",))
    for phase in plan.component.work.phases:
        moment = fullest(plan, phase)
        cells = [gib(sum(moment.parts.get(part, 0) for part in parts)) for parts in COLUMNS.values()]
        share = moment.total / plan.limit
        style = "bold red" if share > 1 else "yellow" if share > 0.93 else "green"
        found.add_row(phase.value, str(moment.stage), *cells, f"[bold]{gib(moment.total)}[/]", f"[{style}]{share:.0%}[/]")
    return found


def fullest(plan: ComponentPlan, phase: Phase) -> PhaseMemory:
    return max((moment for moment in plan.memory if moment.phase == phase), key=lambda moment: moment.total)


def listed(parts: Mapping[str, float], shown: Any) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in sorted(parts.items(), key=lambda item: -item[1]))


def settings(component: Component) -> list[str]:
    """The settings that choose this layout."""
    prefix, p, model = component.prefix, component.parallel, component.model
    chosen = [f"{prefix}parallel.{name}={getattr(p, name)}" for name in ("tp", "pp", "vpp", "cp", "ep")]
    chosen.append(f"{prefix}parallel.sequence_parallel={str(p.sequence_parallel).lower()}")
    name = "micro_batch_tokens" if model.micro_batch_tokens else "micro_batch_size"
    chosen += [f"{prefix}model.{name}={getattr(model, name)}", f"{prefix}model.recompute={model.recompute.value}"]
    if component.engine is not None and component.engine.wanted_cache_tokens:
        chosen.append(f"rollout.kv_cache_tokens={component.engine.kv_cache_tokens}")
    uneven = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(p, name)]
    return chosen + [f"{prefix}parallel.{name}={getattr(p, name)}" for name in uneven]


def problems(plan: ComponentPlan, cluster: ClusterConfig, helps: Sequence[tuple[str, int]]) -> list[str]:
    """Why a component does not fit: phase, stage, excess, and settings that lower the peak."""
    name, found = plan.component.name, []
    if not plan.fits:
        peak = plan.peak
        largest = listed(dict(sorted(peak.parts.items(), key=lambda item: -item[1])[:3]), lambda size: f"{gib(size)} GiB")
        found.append(
            f"{name}: phase {peak.phase.value} on pipeline stage {peak.stage} needs {gib(peak.total)} GiB of {plan.limit / GIB:.1f}, "
            f"{_excess(peak.total - plan.limit)} too much ({largest}). {_helps(helps, plan.limit)}"
        )
    return found + host_problems(name, plan.host, cluster)


def host_problems(name: str, parts: Mapping[str, int], cluster: ClusterConfig) -> list[str]:
    """Whether a node's host memory is too small for these parts."""
    host = sum(parts.values())
    if host <= cluster.host_memory_gib * GIB:
        return []
    return [
        f"{name}: the host memory of a node needs {gib(host)} GiB of {cluster.host_memory_gib:g}, "
        f"{_excess(host - cluster.host_memory_gib * GIB)} too much ({listed(parts, gib)})"
    ]


def _excess(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _helps(helps: Sequence[tuple[str, int]], limit: int) -> str:
    fitting = [f"{setting} ({gib(peak)} GiB)" for setting, peak in helps if peak <= limit]
    if fitting:
        return f"Any one of these is enough: {', '.join(fitting[:4])}"
    if helps:
        return f"No single setting is enough; these lower it most: {', '.join(f'{s} ({gib(p)} GiB)' for s, p in helps[:4])}"
    return "Give it more ranks"


def to_json(job: JobPlan) -> str:
    """The whole plan; keys keep their names and meaning from version to version. Sizes in bytes, times in seconds."""
    tree = {
        "config": job.name,
        "fits": not job.problems,
        "problems": list(job.problems),
        "step_seconds": job.step_seconds,
        "step_phases": dict(job.run.phases),
        "run_seconds": job.run.run_seconds if math.isfinite(job.run.run_seconds) else None,
        "useful": job.run.useful,
        "preemptions": job.run.preemptions,
        "cluster": asdict(job.cluster),
        "components": {plan.component.name: component_tree(plan) for plan in job.components},
    }
    return json.dumps(tree, indent=2) + "\n"


def component_tree(plan: ComponentPlan) -> dict[str, Any]:
    component, cache = plan.component, None
    if (engine := component.engine) is not None:
        tokens = cache_tokens(component, engine)
        cache = {"tokens": tokens, "wanted_tokens": engine.wanted_cache_tokens or tokens, "sequences": seats(component, engine)}
    passes = train_micro_batches(component) if component.optimizer is not None else None
    train = sum(time.total for time in plan.times if time.phase == Phase.train)
    work, length = component.work, component.work.mean_length()
    useful = model_flops(component, work.update_rows * work.num_updates * length, length)
    return {
        "ranks": component.num_ranks,
        "dp": component.dp,
        "parallel": asdict(component.parallel),
        "recompute": component.model.recompute,
        "dtype": component.model.dtype,
        "settings": settings(component),
        "micro_batches": asdict(passes) if passes else None,
        "parameters": plan.model_parameters,
        "parameters_per_rank": list(plan.stage_parameters),
        "state_bytes": [asdict(state) for state in plan.sizes.stages],
        "engine_weight_bytes": plan.sizes.engine_weights,
        "layer_activation_bytes": plan.sizes.train.layer,
        "cache": cache,
        "memory": [{"phase": m.phase, "stage": m.stage, "bytes": m.total, "parts": dict(m.parts)} for m in plan.memory],
        "peak_bytes": plan.peak.total,
        "limit_bytes": plan.limit,
        "fits": plan.fits,
        "host_bytes": plan.host,
        "disk_bytes": plan.disk,
        "seconds": {t.phase.value: {"total": t.total, "parts": dict(t.parts)} for t in plan.times},
        "train_flops_per_second_per_rank": useful / train / component.num_ranks if train else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One job that was planned in full."""

    settings: Mapping[str, str]  # found settings as they are typed
    words: str  # who shares GPUs with whom
    job: JobPlan

    @property
    def gpus(self) -> int:
        return self.job.num_ranks

    @property
    def seconds(self) -> float:
        return self.job.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    name: str
    cluster: ClusterConfig
    most: int  # GPUs that were allowed
    steps: int  # training steps whose hours are shown
    deadline: float  # hours; 0: none
    rows: tuple[Row, ...]  # the fastest job for each number of GPUs, each faster than all before
    alternatives: tuple[Row, ...]  # the fastest job of every arrangement on the most GPUs
    opt_in: tuple[Row, ...]  # the best job with settings that change numbers: never chosen
    best: Row | None  # None: nothing fits, or meets the deadline

    def hours(self, row: Row) -> float:
        return row.seconds * self.steps / 3600


def show_search(found: Found, out: Console, *, top: int, took: float) -> None:
    """Print the tables, with the first `top` alternatives. `took`: seconds of the search."""
    cluster, limit = found.cluster, f", at most {found.deadline:g} hours" if found.deadline else ""
    out.print(
        f"[bold]{found.name}[/]: up to {found.most} GPUs, {cluster.gpus_per_node} to a node, {cluster.gpu_memory_gib:g} GiB each; "
        f"{found.steps} steps{limit}; searched in {took:.0f} s"
    )
    if not found.rows:
        out.print(f"\n[bold red]nothing fits[/] on at most {found.most} GPUs, with the settings that were given")
        return
    out.print(_job_table(found, found.rows, "the fastest job for each number of GPUs at which more GPUs help"))
    others = [*found.alternatives[:top], *found.opt_in]
    if len(others) > 1:
        out.print(_job_table(found, others, f"the fastest job of every kind on up to {max(row.gpus for row in others)} GPUs"))
    if found.best is None:
        fastest = min(found.rows, key=lambda row: row.seconds)
        out.print(
            f"[bold red]too slow[/]: {found.steps} steps take {found.hours(fastest):.1f} hours on {fastest.gpus} GPUs, the fastest of at "
            f"most {found.most}; allowed: {found.deadline:g}"
        )
        return
    settings = shlex.join(f"{key}={value}" for key, value in found.best.settings.items())
    out.print(f"the best one, {found.best.gpus} GPUs:", settings, soft_wrap=True)


def _job_table(found: Found, rows: Sequence[Row], title: str) -> Table:
    jobs = table(title, ("GPUs", "step", "hours", "GPU hours", "layout"), left=("layout",), style="bold")
    for row in rows:
        layouts = [in_one_line(plan.component) for plan in row.job.components if not plan.component.within]
        hours, words = found.hours(row), "\n".join([*([row.words] if row.words else []), *layouts])
        jobs.add_row(str(row.gpus), seconds(row.seconds), f"{hours:.1f}", f"{hours * row.gpus:,.0f}", words)
    return jobs


def in_one_line(component: Component) -> str:
    """Ranks, layout, micro-batches and engine in one line."""
    p, model, engine = component.parallel, component.model, component.engine
    stages = f" (layers {p.first_stage_layers}, ..., {p.last_stage_layers})" if p.first_stage_layers or p.last_stage_layers else ""
    parts = [f"tp {p.tp}", f"pp {p.pp}{f' x {p.vpp}' if p.vpp > 1 else ''}{stages}"]
    parts += [f"{name} {size}" for name, size in (("cp", p.cp), ("ep", p.ep)) if size > 1]
    parts += [f"dp {component.dp}"]
    if component.optimizer is not None:
        passes = train_micro_batches(component)
        parts += [f"{passes.count} x {passes.rows} rows"]
        parts += [f"recompute {model.recompute.value}"] if model.recompute.value != "none" else []
        parts += ["optimizer offloaded"] if component.optimizer.offload else []
        where = "disk" if component.optimizer.nvme_path else "host"
        parts += [f"optimizer on the {where}"] if component.optimizer.cpu_offload else []
    if engine is not None:
        parts += [f"rollout tp {engine.tp} x {engine.max_batch_size} rows{', weights offloaded' if engine.offload else ''}"]
    return f"{component.name} on {component.num_ranks}: {', '.join(parts)}"


def search_to_json(found: Found) -> str:
    """Everything; sizes in bytes, times in seconds. `components` are the best job's."""
    best = found.best
    tree = {
        "config": found.name,
        "fits": bool(found.rows),
        "most_gpus": found.most,
        "steps": found.steps,
        "deadline_hours": found.deadline or None,
        "cluster": asdict(found.cluster),
        "best": _row_tree(found, best) if best is not None else None,
        "pareto": [_row_tree(found, row) for row in found.rows],
        "alternatives": [_row_tree(found, row) for row in found.alternatives],
        "opt_in": [_row_tree(found, row) for row in found.opt_in],
        "components": {plan.component.name: component_tree(plan) for plan in best.job.components} if best is not None else {},
    }
    return json.dumps(tree, indent=2) + "\n"


def _row_tree(found: Found, row: Row) -> dict[str, Any]:
    return {
        "arrangement": row.words,
        "gpus": row.gpus,
        "step_seconds": row.seconds,
        "hours": found.hours(row),
        "gpu_hours": found.hours(row) * row.gpus,
        "settings": [f"{key}={value}" for key, value in row.settings.items()],
        "layouts": {plan.component.name: in_one_line(plan.component) for plan in row.job.components},
    }
