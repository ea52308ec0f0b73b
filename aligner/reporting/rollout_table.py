"""Sample rollouts: all of them as `rollouts/step_000012.jsonl`, some of them as a table for people."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.errors import DataError
from aligner.files import publish
from aligner.reporting.jsonl import json_number
from aligner.types import FinishReason, SampleRow, SampleTurn, TokenTable

_VISIBLE = {"\n": "⏎", "\t": "⇥"}


def write_rows(directory: Path, step: int, rows: Sequence[SampleRow]) -> Path:
    """Write the rows of a step (atomically: a reader sees all or nothing; a repeated step replaces its file) and return the path."""
    path = directory / f"step_{step:06d}.jsonl"
    lines = [json.dumps(_record(row), ensure_ascii=False) + "\n" for row in rows]
    publish(path, lambda new: new.write_text("".join(lines), encoding="utf-8"))
    return path


def _record(row: SampleRow) -> dict[str, Any]:
    """What a row does not have, its record does not have either."""
    record = {"prompt": row.prompt, "response": row.response, "reward": json_number(row.reward), "finish_reason": row.finish_reason.value}
    more = {"images": row.images, "group": row.group, "parts": {name: json_number(part) for name, part in row.parts.items()}}
    more |= {"episode": row.episode, "turns": tuple(asdict(turn) | {"reward": json_number(turn.reward)} for turn in row.turns)}
    if row.tokens is not None:
        numbers = {name: list(map(json_number, own)) for name, own in row.tokens.numbers.items()}
        more["tokens"] = {"texts": row.tokens.texts, "numbers": numbers}
    return record | {name: value for name, value in more.items() if value not in (None, (), {})}


def _row(record: Mapping[str, Any]) -> SampleRow:
    tokens = record.get("tokens")
    if tokens is not None:
        numbers = {name: tuple(map(float, own)) for name, own in tokens["numbers"].items()}
        tokens = TokenTable(texts=tuple(map(str, tokens["texts"])), numbers=numbers)
    return SampleRow(
        prompt=record["prompt"],
        response=record["response"],
        reward=float(record["reward"]),
        finish_reason=FinishReason(record["finish_reason"]),
        images=tuple(map(str, record.get("images", ()))),
        group=int(record["group"]) if "group" in record else None,
        parts={name: float(part) for name, part in record.get("parts", {}).items()},
        tokens=tokens,
        episode=int(record["episode"]) if "episode" in record else None,
        turns=tuple(SampleTurn(**turn | {"reward": float(turn["reward"])}) for turn in record.get("turns", ())),
    )


def read_rows(path: Path) -> list[SampleRow]:
    """Read the rows of `write_rows`. Raises DataError naming file and line for other content."""
    rows = []
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]  # splitlines would cut at U+2028 too, which JSON leaves in strings
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}:{number}: not a sample rollout ({error}): {line[:80]!r}") from error
    return rows


def cell(text: str, max_chars: int) -> str:
    """One line of at most `max_chars`: control characters made visible (output must not steer the terminal), the middle left out."""
    shown = "".join(_VISIBLE.get(c, c if c.isprintable() else "�") for c in text)
    if len(shown) <= max_chars:
        return shown
    head = (max_chars - 1) * 2 // 3
    return shown[:head] + "…" + shown[len(shown) - (max_chars - 1 - head) :]


def rich_table(step: int, rows: Sequence[SampleRow], max_cell_chars: int) -> Table:
    """The rows as a table that fits itself into the terminal."""
    table = Table(box=SIMPLE_HEAD, title=f"samples of step {step}", title_justify="left", title_style="bold", expand=True, pad_edge=False)
    table.add_column("reward", justify="right", no_wrap=True, min_width=6)
    table.add_column("end", no_wrap=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    for row in rows:
        colour = "green" if row.reward > 0 else "red" if row.reward < 0 else ""
        table.add_row(
            Text(f"{row.reward:.2f}", style=colour),
            Text(row.finish_reason.value, style="yellow" if row.finish_reason is FinishReason.length else ""),
            Text(cell(row.prompt, max_cell_chars), style="dim"),
            Text(cell(row.response, max_cell_chars)),
        )
    return table


def plain_table(step: int, rows: Sequence[SampleRow], max_cell_chars: int, width: int = 120) -> str:
    """The same table as text without colours, at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(rich_table(step, rows, max_cell_chars))
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def markdown_table(rows: Sequence[SampleRow], max_cell_chars: int) -> str:
    """The rows for loggers that render Markdown; every cell is inert code."""

    def inert(text: str) -> str:
        return "`" + cell(text, max_cell_chars).replace("`", "'").replace("|", "¦") + "`"

    lines = ["| reward | end | prompt | response |", "|---|---|---|---|"]
    lines += [f"| {row.reward:.3f} | {row.finish_reason.value} | {inert(row.prompt)} | {inert(row.response)} |" for row in rows]
    return "\n".join(lines)
