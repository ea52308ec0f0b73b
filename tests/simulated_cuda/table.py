"""Writes what `make test-gpu-path` measured into the tables of docs/containers.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE, ROWS = ROOT / "docs" / "containers.md", ROOT / "build" / "gpu_path"
COLUMNS = {
    "recipes": ("ranks", "waits", "pageable", "captures", "replays"),
    "memory": ("planned", "allocated"),
}


def rows(table: str) -> list[str]:
    """The lines of a table's body."""
    found = [json.loads(path.read_text()) for path in sorted((ROWS / table).glob("*.json"))]
    lines = []
    for row in found:
        cells = [str(row[column]) for column in COLUMNS[table]]
        if table == "memory":
            planned, allocated = (row[column] for column in COLUMNS[table])
            cells = [f"{planned / 2**20:.1f}", f"{allocated / 2**20:.1f}", f"{100 * (planned / allocated - 1):+.1f} %"]
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for table in COLUMNS:
        if body := rows(table):
            pattern = rf"(<!-- {table} -->\n\n(?:\|.*\n){{2}})(?:\|.*\n)*"
            text, changed = re.subn(pattern, lambda found, body=body: found[1] + "\n".join(body) + "\n", text)
            assert changed == 1, f"{PAGE}: no table {table}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
