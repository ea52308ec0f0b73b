"""The end of a run in a few lines: first, last and best value of each metric, its course, and what the run learned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aligner.models.training.guard import OVERFLOWS, SKIPPED, UPDATES
from aligner.reporting.formats import Column, seconds, sparkline
from aligner.reporting.jsonl import StepMetrics

TOKENS, TOKENS_SEEN, SAMPLES, SEEN = "learnt/tokens", "learnt/tokens_seen", "learnt/samples", "learnt/samples_seen"
LEFT_OUT = "left_out/"
REASONS = {
    "truncated": "cut at the length limit",
    "no_reward": "without a valid reward",
    "no_signal": "without a signal (an advantage of 0, for example if all rewards of a group are equal)",
    "below_min_reward": "below algorithm.min_reward",
    "not_best": "not among the best (algorithm.keep)",
    "not_paired": "in no pair",
    "identical": "the same as what they are compared with",
    "surplus": "dropped by dynamic sampling",
    "no_token": "without a token to learn",
}


def totals(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The counts of all of these steps, by name."""
    found: dict[str, float] = {}
    for metrics in steps:
        for name, value in metrics.items():
            if name in (TOKENS, TOKENS_SEEN, SAMPLES, SEEN, UPDATES, SKIPPED, OVERFLOWS) or name.startswith(LEFT_OUT):
                found[name] = found.get(name, 0.0) + value
    return found


def reasons(counts: Mapping[str, float]) -> list[str]:
    """The share of samples left out per reason, largest first; `counts` are those of `totals`."""
    seen = counts.get(SEEN, 0.0)
    left = sorted(((n, name) for name, n in counts.items() if name.startswith(LEFT_OUT) and n), reverse=True) if seen else []
    return [f"{n / seen:.1%} {REASONS[name.removeprefix(LEFT_OUT)]}" for n, name in left]


def is_empty(metrics: Mapping[str, float]) -> bool:
    """Whether a step learned nothing: no token had a weight, or no update a gradient (unless a float16 gradient overflowed)."""
    if TOKENS not in metrics or metrics.get(OVERFLOWS):
        return False
    return 0 in (metrics[TOKENS], metrics.get("optim/grad_norm"), metrics.get(UPDATES))


_TREND_WIDTH = 32
_HEADER = ("metric", "first", "last", "best", "course")


def table(records: Sequence[StepMetrics], columns: Sequence[Column]) -> str:
    """Text, one line per column that the run has (`best` only if the column has a goal: value and step). There is at least one step.

    42 steps in 2m24s (3.4 s each)
    metric   first   last   best           course
    reward   0.102  0.931  0.940 @ 39  ▁▂▂▃▅▆▇▇██
    """
    rows = cells(records, columns)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [heading(records)]
    for row in rows:
        name, *numbers, course = row
        texts = [name.ljust(widths[0])] + [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([*texts, course]).rstrip())
    return "\n".join([*lines, *filter(None, [learnt_from(records)])])


def cells(records: Sequence[StepMetrics], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """The table's rows of texts, its header first."""
    return [_HEADER] + [row for column in columns if (row := _row(column, records)) is not None]


def learnt_from(records: Sequence[StepMetrics]) -> str:
    """The share of a run's samples, tokens and updates learnt from, and the reasons for the rest; empty if not recorded.

    learnt from 120 of 640 samples (18.8%), 1,432 of 9,112 tokens (15.7%), 12 updates; left out: 81.2% not among the best (algorithm.keep)
    """
    steps = [record.values for record in records if record.step and TOKENS in record.values]
    if not steps:
        return ""
    counts = totals(steps)
    made, skipped, overflows = (counts.get(name, 0.0) for name in (UPDATES, SKIPPED, OVERFLOWS))
    empty = sum(map(is_empty, steps))
    learnt = [
        _of(counts.get(SAMPLES, 0.0), counts.get(SEEN, 0.0), "samples"),
        _of(counts[TOKENS], counts.get(TOKENS_SEEN, 0.0), "tokens"),
        _of(made, made + skipped + overflows, "updates"),
    ]
    left = reasons(counts) + ([f"{skipped:,.0f} updates by the guard"] if skipped else [])
    left += [f"{overflows:,.0f} updates whose float16 gradients overflowed"] if overflows else []
    text = f"learnt from {', '.join(filter(None, learnt))}" + (f"; left out: {', '.join(left)}" if left else "")
    return text + (f"; nothing in {empty:,} of {len(steps):,} steps" if empty else "")


def _of(part: float, whole: float, what: str) -> str:
    if part >= whole:
        return f"{part:,.0f} {what}" if part else ""
    return f"{part:,.0f} of {whole:,.0f} {what} ({part / whole:.1%})"


def heading(records: Sequence[StepMetrics]) -> str:
    """`steps 1 to 42 in 2m24s (3.4 s each)`."""
    first, last = records[0], records[-1]
    steps = last.step - first.step
    if not steps:
        return f"1 step (step {last.step})"
    took = last.time - first.time
    return f"steps {first.step} to {last.step} in {seconds(took)} ({seconds(took / steps)} each)"


def _row(column: Column, records: Sequence[StepMetrics]) -> tuple[str, ...] | None:
    points = [(record.step, record.values[column.metric]) for record in records if column.metric in record.values]
    if not points:
        return None
    values = [value for _, value in points]
    best = column.best(values)
    where = "" if best is None else f"{column.text(best)} @ {next(step for step, value in points if value == best)}"
    return column.label, column.text(values[0]), column.text(values[-1]), where, sparkline(values, _TREND_WIDTH)
