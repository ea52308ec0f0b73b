"""What a search has found, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from aligner.planner.config import ClusterConfig
from aligner.planner.memory import train_micro_batches
from aligner.planner.report import JobPlan, component_tree, plain, seconds
from aligner.planner.workload import Component


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One job that was planned in full."""

    settings: Mapping[str, str]  # as they are typed, besides those that were
    words: str  # who shares GPUs with whom
    job: JobPlan

    @property
    def gpus(self) -> int:
        return self.job.num_ranks

    @property
    def seconds(self) -> float:
        """Of a training step."""
        return self.job.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """All results of a search."""

    name: str
    cluster: ClusterConfig
    most: int  # GPUs that were allowed
    steps: int  # that hours are counted for
    deadline: float  # hours; 0: none
    rows: tuple[Row, ...]  # the fastest for the fewest GPUs, each faster than all before
    alternatives: tuple[Row, ...]  # the fastest of every arrangement on the most GPUs
    opt_in: tuple[Row, ...]  # the best one with what changes numbers: never the best
    best: Row | None  # None: nothing fits, or makes the deadline


def show(found: Found, out: Console, *, top: int, took: float) -> None:
    """Print the tables, of alternatives the first `top`. `took`: seconds that the search did."""
    cluster, limit = found.cluster, f", at most {found.deadline:g} hours" if found.deadline else ""
    out.print(
        f"[bold]{found.name}[/]: up to {found.most} GPUs, {cluster.gpus_per_node} to a node, {cluster.gpu_memory_gib:g} GiB each; "
        f"{found.steps} steps{limit}; searched in {took:.0f} s"
    )
    if not found.rows:
        out.print(f"\n[bold red]nothing fits[/] on at most {found.most} GPUs, with the settings that were given")
        return
    out.print(_table(found, found.rows, "the fastest on so many GPUs, where no fewer are as fast"))
    others = [*found.alternatives[:top], *found.opt_in]
    if len(others) > 1:
        out.print(_table(found, others, f"the fastest of every kind on up to {max(row.gpus for row in others)} GPUs"))
    if found.best is None:
        fastest = min(found.rows, key=lambda row: row.seconds)
        out.print(
            f"[bold red]too slow[/]: {found.steps} steps take {hours(found, fastest):.1f} hours on {fastest.gpus} GPUs, the fastest of at "
            f"most {found.most}; allowed: {found.deadline:g}"
        )
        return
    out.print(f"the best one, {found.best.gpus} GPUs:", typed(found.best.settings), soft_wrap=True)


def hours(found: Found, row: Row) -> float:
    """For all steps."""
    return row.seconds * found.steps / 3600


def typed(settings: Mapping[str, str]) -> str:
    """Settings as a command line takes them."""
    return shlex.join(f"{key}={value}" for key, value in settings.items())


def _table(found: Found, rows: Sequence[Row], title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("GPUs", "step", "hours", "GPU hours"):
        table.add_column(column, justify="right")
    table.add_column("layout")
    for row in rows:
        words = "\n".join(
            [*([row.words] if row.words else []), *(describe(plan.component) for plan in row.job.components if not plan.component.within)]
        )
        table.add_row(str(row.gpus), seconds(row.seconds), f"{hours(found, row):.1f}", f"{hours(found, row) * row.gpus:,.0f}", words)
    return table


def describe(component: Component) -> str:
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
        parts += ["optimizer on the host"] if component.optimizer.cpu_offload else []
    if engine is not None:
        parts += [f"rollout tp {engine.tp} x {engine.max_batch_size} rows{', weights offloaded' if engine.offload else ''}"]
    return f"{component.name} on {component.num_ranks}: {', '.join(parts)}"


def to_json(found: Found) -> str:
    """Everything; sizes in bytes, times in seconds. `components` are the best job's."""
    tree = {
        "config": found.name,
        "fits": bool(found.rows),
        "most_gpus": found.most,
        "steps": found.steps,
        "deadline_hours": found.deadline or None,
        "cluster": asdict(found.cluster),
        "best": _row_tree(found, found.best) if found.best is not None else None,
        "pareto": [_row_tree(found, row) for row in found.rows],
        "alternatives": [_row_tree(found, row) for row in found.alternatives],
        "opt_in": [_row_tree(found, row) for row in found.opt_in],
        "components": {plan.component.name: component_tree(plan) for plan in found.best.job.components} if found.best is not None else {},
    }
    return json.dumps(tree, indent=2, default=plain) + "\n"


def _row_tree(found: Found, row: Row) -> dict[str, Any]:
    return {
        "arrangement": row.words,
        "gpus": row.gpus,
        "step_seconds": row.seconds,
        "hours": hours(found, row),
        "gpu_hours": hours(found, row) * row.gpus,
        "settings": [f"{key}={value}" for key, value in row.settings.items()],
        "layouts": {plan.component.name: describe(plan.component) for plan in row.job.components},
    }
