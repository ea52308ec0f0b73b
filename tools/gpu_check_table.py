"""What came of the stages of `gpu_check.py`: whether each has passed, and the tables that say so. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_check_halves import PACKAGES, STAGES, STAGES_BY_NAME, Stage


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of a stage. `problem`: why it does not count as passed; `kind` of it: failed, late or skipped."""

    figures: dict[str, float]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""
    kind: str = ""
    allowed: bool = False  # what is missing may be


def judge(stage: Stage, outcome: Outcome, *, tiny: bool = False) -> None:
    """A stage that ended well and gave less than it was to give, or missed what must be, has not passed."""
    if outcome.problem:
        return
    missing = [figure.name for figure in stage.figures if figure.name not in outcome.figures]
    judged = [figure for figure in stage.figures if figure.must and not (figure.full and tiny)]
    missed = [figure.name for figure in judged if not figure.meets(outcome.figures.get(figure.name, 0.0))]
    if missing:
        outcome.problem, outcome.kind = f"gave no figure: {', '.join(missing)}", "failed"
    elif missed:
        outcome.problem, outcome.kind = f"missed: {', '.join(missed)}", "missed"


def advice(stage: Stage, outcome: Outcome) -> list[str]:
    """What to do: about the problem as a whole, and about each goal that was missed."""
    known = {
        "failed": stage.failed,
        "late": stage.late,
        "skipped": PACKAGES[stage.needs or stage.uses].otherwise if stage.needs or stage.uses else "",
    }
    missed = [one for one in stage.figures if one.name in outcome.figures and not one.meets(outcome.figures[one.name]) and one.otherwise]
    whole = [known[outcome.kind]] if known.get(outcome.kind) else []
    return whole + list(dict.fromkeys(f"{one.name}: {one.otherwise}" for one in missed))


def state(outcome: Outcome, missed: bool) -> str:
    """In a word or two."""
    if outcome.problem:
        return f"{outcome.kind} (allowed)" if outcome.allowed else outcome.kind
    return "passed, aims missed" if missed else "passed"


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Every figure with its predictions, its goal and, where a GPU has run it, what was measured."""
    lines = ["| stage | figure | H100 | H200 | goal | measured | because |", "|---|---|---:|---:|---:|---:|---|"]
    for stage in STAGES:
        outcome = outcomes.get(stage.name, Outcome(figures={}))
        for one in stage.figures:
            value = outcome.figures.get(one.name)
            measured = "" if value is None else f"{value:.4g}" + ("" if one.meets(value) else " (missed)")
            goal = f"**{one.goal}**" if one.must else one.goal
            lines.append(f"| {stage.name} | {one.name} | {one.h100:.4g} | {one.h200:.4g} | {goal} | {measured} | {one.because} |")
    return lines


def budget() -> list[str]:
    """A row for each stage before it has run: what it may take, what it is predicted to hold, and what it cannot run without."""
    lines = ["| half | stage | at most, s | predicted, GiB | needs |", "|---|---|---:|---:|---|"]
    for stage in STAGES:
        uses = f"shows less without {stage.uses}" if stage.uses else stage.needs
        lines.append(f"| {stage.half} | {stage.name} | {stage.seconds:.0f} | {stage.gib:.4g} | {uses} |")
    return lines


def summary(outcomes: Mapping[str, Outcome]) -> list[str]:
    """A row for each stage that was to run: how it ended, its problem, and what to do."""
    lines = ["| stage | outcome | seconds | what was found | what to do |", "|---|---|---:|---|---|"]
    for name, outcome in outcomes.items():
        stage = STAGES_BY_NAME[name]
        missed = [one for one in stage.figures if one.name in outcome.figures and not one.meets(outcome.figures[one.name])]
        values = [f"{one.name} {outcome.figures[one.name]:.4g}, goal {one.goal}" for one in missed]
        found = "; ".join([*([outcome.problem] if outcome.problem else []), *values]) or f"{len(outcome.figures)} figures"
        lines.append(f"| {name} | {state(outcome, bool(missed))} | {outcome.seconds:.0f} | {found} | {'; '.join(advice(stage, outcome))} |")
    return lines
