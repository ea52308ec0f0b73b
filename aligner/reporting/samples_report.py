"""What a run did to its model, as one HTML file without anything beside it: curves, and responses to the same prompts before and after.

Everything that models and data wrote is escaped: a response that is HTML is shown, not run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from aligner.reporting.diagnosis import Diagnosis, diagnose
from aligner.reporting.diagnosis_rules import RULES
from aligner.reporting.formats import number, seconds
from aligner.reporting.jsonl import StepMetrics, read_metrics
from aligner.reporting.rollout_table import cell, read_rows
from aligner.types import SampleRow

MAX_POINTS = 400  # of a curve; longer ones are drawn as means of equal stretches
_WIDTH, _HEIGHT, _LEFT, _TOP = 520, 170, 62, 12  # of a chart, pixels; the rest of the margins equals _TOP, 22 below

# Title, and the metrics that may hold it, of which the first that the run has is drawn.
_CHARTS = (
    ("reward of the rollouts", ("rollout/reward",), ".3f"),
    ("reward on validation prompts", ("validation/reward",), ".3f"),
    ("accuracy on validation prompts", ("validation/accuracy",), ".3f"),
    ("KL to the start, nats per token", ("policy/ref_kl", "policy/kl", "pairs/ref_kl"), ".4f"),
    ("response length, tokens", ("rollout/response_length",), ".1f"),
    ("mean |log-prob of the sampler - of the trainer|", ("rollout/logprob_gap",), ".1e"),
)

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem; color: #1d2129; background: #fff }
figure { display: inline-block; margin: 0 1rem 1rem 0 } figcaption { font-weight: 600 } figcaption span { font-weight: 400; color: #667 }
svg { background: #f7f8fa } svg text { font-size: 11px; fill: #667 } polyline { fill: none; stroke: #2458c5; stroke-width: 1.6 }
table { border-collapse: collapse; width: 100%; table-layout: fixed } th { text-align: left }
th, td { border-top: 1px solid #d9dde4; padding: .45rem .6rem; vertical-align: top; overflow-wrap: anywhere; white-space: pre-wrap }
.reward { color: #667; display: block }
@media (prefers-color-scheme: dark) {
  body { color: #dde1e8; background: #15181d } svg { background: #1d2128 } polyline { stroke: #79a3ff } th, td { border-color: #343a44 }
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The responses of one step to the validation prompts."""

    step: int
    rows: list[SampleRow]


def write_report(run: Path, output: Path) -> None:
    """Write the report of the run directory `run`. Raises DataError where its metrics or samples are damaged."""
    before, after = before_and_after(run / "validation")
    output.write_text(render(run.absolute().name, read_metrics(run / "metrics.jsonl"), before, after), encoding="utf-8")


def before_and_after(directory: Path) -> tuple[Samples | None, Samples | None]:
    """The first and the last validation's samples of a run (`directory`: its `validation`); None where it has none. Raises DataError."""
    paths = sorted(directory.glob("step_*.jsonl"))
    return (_read(paths[0]), _read(paths[-1])) if paths else (None, None)


def _read(path: Path) -> Samples:
    return Samples(step=int(path.stem.removeprefix("step_")), rows=read_rows(path))


def text_of(before: Samples | None, after: Samples | None, max_chars: int = 240) -> str:
    """The samples side by side as text; empty where there are none."""
    if before is None or after is None:
        return ""
    lines = [f"greedy responses to validation prompts, before (step {before.step}) and after (step {after.step})"]
    for prompt, old, new in _pairs(before, after):
        lines += [f"  {cell(prompt, max_chars)}"]
        lines += [f"    {row.reward:+.2f}  {cell(row.response, max_chars)}" if row else "    -" for row in (old, new)]
    return "\n".join(lines)


def render(name: str, records: Sequence[StepMetrics], before: Samples | None, after: Samples | None) -> str:
    """The page. `records` are those of metrics.jsonl."""
    charts = "".join(_figure(title, names, form, records) for title, names, form in _CHARTS)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_shown(name)}</title><style>{_STYLE}</style></head>\n'
        f"<body><h1>{_shown(name)}</h1>\n<p>{_heading(records)}</p>\n{charts}\n{_findings(diagnose(records, RULES))}"
        f"{_table(before, after)}</body></html>\n"
    )


def _heading(records: Sequence[StepMetrics]) -> str:
    if not records:
        return "no steps yet"
    return f"steps {records[0].step} to {records[-1].step} in {seconds(records[-1].time - records[0].time)}"


def _figure(title: str, names: Sequence[str], form: str, records: Sequence[StepMetrics]) -> str:
    """A chart of the first of `names` that the run has; empty where it has none."""
    for name in names:
        points = [(record.step, record.values[name]) for record in records if name in record.values]
        if points:
            course = f"{number(points[0][1], form)} to {number(points[-1][1], form)}"
            return f"<figure><figcaption>{escape(title)} <span>{course}</span></figcaption>{chart(points, form)}</figure>\n"
    return ""


def chart(points: Sequence[tuple[int, float]], form: str = ".3f") -> str:
    """An SVG of (step, value) points; the line is broken where a value is not finite."""
    points = _thinned(points)
    finite = [value for _, value in points if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    first, last = points[0][0], points[-1][0]
    right, bottom = _WIDTH - _TOP, _HEIGHT - 22

    def place(step: float, value: float) -> str:
        x = _LEFT + (right - _LEFT) * ((step - first) / (last - first) if last > first else 0.5)
        y = bottom - (bottom - _TOP) * ((value - low) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    stretches: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            stretches[-1].append(place(step, value))
        else:
            stretches.append([])
    # A point alone is a line of no length, which a round end makes visible.
    lines = "".join(
        f'<polyline stroke-linecap="round" points="{" ".join(stretch * 2 if len(stretch) == 1 else stretch)}"/>'
        for stretch in stretches
        if stretch
    )
    labels = [(_LEFT - 6, _TOP + 8, "end", number(high, form)), (_LEFT - 6, bottom, "end", number(low, form))]
    labels += [(_LEFT, _HEIGHT - 6, "start", f"step {first}"), (right, _HEIGHT - 6, "end", str(last))]
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in labels)
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{lines}{texts}</svg>'


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS: the first of each of as many equal stretches, with the stretch's mean."""
    size = min(MAX_POINTS, len(points))
    cuts = [i * len(points) // size for i in range(size + 1)]
    stretches = [points[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    return [(stretch[0][0], sum(value for _, value in stretch) / len(stretch)) for stretch in stretches]


def _findings(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return f"<h2>Diagnosis</h2>\n<p>{diagnosis.text().splitlines()[0]}</p>\n"
    heads = "".join(f"<th>{text}</th>" for text in ("finding", "steps", "evidence", "likely cause", "remedy"))
    rows = [(found.rule.title, diagnosis.when(found), found.evidence, found.rule.cause, found.rule.remedy) for found in diagnosis.findings]
    cells = "\n".join("<tr>" + "".join(f"<td>{_shown(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<h2>Diagnosis</h2>\n<table><tr>{heads}</tr>\n{cells}\n</table>\n"


def _pairs(before: Samples, after: Samples) -> list[tuple[str, SampleRow | None, SampleRow | None]]:
    """Every prompt of either step with its responses, in the order of the later one."""
    old = {row.prompt: row for row in before.rows}
    new = {row.prompt: row for row in after.rows}
    return [(prompt, old[prompt] if prompt in old else None, new[prompt] if prompt in new else None) for prompt in new | old]


def _table(before: Samples | None, after: Samples | None) -> str:
    if before is None or after is None:
        return "<p>No samples of validations: data.validation, loop.validate_first and loop.validate_every give them.</p>\n"
    heads = "".join(f"<th>{text}</th>" for text in ("prompt", f"before (step {before.step})", f"after (step {after.step})"))
    rows = [f"<tr><td>{_shown(prompt)}</td>{_response(old)}{_response(new)}</tr>" for prompt, old, new in _pairs(before, after)]
    return f"<h2>Greedy responses to the same prompts</h2>\n<table><tr>{heads}</tr>\n" + "\n".join(rows) + "\n</table>\n"


def _response(row: SampleRow | None) -> str:
    if row is None:
        return "<td></td>"
    ending = "" if row.finish_reason.value == "stop" else f", ended by {escape(row.finish_reason.value)}"
    return f'<td><span class="reward">reward {number(row.reward, ".3f")}{ending}</span>{_shown(row.response)}</td>'


def _shown(text: str) -> str:
    """Text as HTML: escaped, without control characters but line ends and tabs."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))
