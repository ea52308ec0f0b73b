"""What `aligner eval` measured: numbers with their intervals, as a record and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.errors import DataError
from aligner.reporting.formats import number


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number, its 95 % interval and how that was found (empty: there is none), and how many prompts or pairs it is of."""

    name: str
    value: float
    low: float
    high: float
    count: int
    interval: str
    note: str = ""

    @classmethod
    def of(cls, name: str, values: Sequence[float], bounds: tuple[float, float], interval: str, *, note: str = "") -> Measure:
        """The mean of one value for each prompt."""
        mean = math.fsum(values) / len(values)
        return cls(name=name, value=mean, low=bounds[0], high=bounds[1], count=len(values), interval=interval, note=note)


COLUMNS = ("measure", "value", "95 % interval", "of", "interval by", "note")


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of each measure of a record."""
    found = []
    for one in (Measure(**measure) for measure in record["measures"]):
        bounds = f"{number(one.low, '.4g')} to {number(one.high, '.4g')}" if one.interval else ""
        found.append((one.name, number(one.value, ".4g"), bounds, str(one.count), one.interval, one.note))
    return found


def markdown(record: Mapping[str, Any]) -> str:
    lines = [COLUMNS, ("---", "---:", "---", "---:", "---", "---"), *rows(record)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |" for cells in lines)
    return f"# {record['model']}\n\n{record['time']}, aligner {record['aligner']}\n\n{table}\n"


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The records in a run's folder of them, oldest first. Raises DataError for a damaged one."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found.append({**record, "rows": rows(record)})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not the results of aligner eval: {error!r}") from error
    return found
