"""`aligner trace RUN`: all processes of a run in one file, or its last steps, and what cannot be traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner import cli


def write(run: Path, name: str, spans: list[dict], tail: str = "") -> None:
    (run / "trace").mkdir(parents=True, exist_ok=True)
    (run / "trace" / name).write_text("".join(json.dumps({"lane": "rank 0", **span}) + "\n" for span in spans) + tail)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of 2 s, a second apart, on two ranks, and a server's request in each; older spans are in a file of their own."""
    steps = [{"name": "step", "start": 1.7e9 + 3 * step, "seconds": 2.0, "arguments": {"step": step}} for step in (1, 2, 3)]
    write(tmp_path, "actor.0.older.jsonl", steps[:1])
    write(tmp_path, "actor.0.jsonl", steps[1:], tail='{"name":"train","sta')
    write(tmp_path, "actor.1.jsonl", [{**step, "lane": "rank 1", "start": step["start"] + 0.25} for step in steps])
    write(tmp_path, "critic.0.jsonl", [{"name": "critic_infer", "start": step["start"] + 1, "seconds": 0.5} for step in steps])
    return tmp_path


def events(path: Path) -> list[tuple[str, int]]:
    return sorted((event["name"], round(event["ts"])) for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X")


def test_a_run(run: Path, capsys):
    assert cli.main(["trace", str(run)]) == 0
    said = capsys.readouterr().out
    assert "9 spans (6 of actor, 3 of critic) in 8.2 s, training steps 1 to 3; 1 lines that were cut" in said
    assert f"written to {run / 'trace.json'}" in said
    assert events(run / "trace.json") == [
        *[("critic_infer", 1e6 * second) for second in (1, 4, 7)],
        *[("step", 1e6 * second) for second in (0, 0.25, 3, 3.25, 6, 6.25)],
    ]


def test_the_last_steps(run: Path, tmp_path: Path):
    output = tmp_path / "last.json"
    assert cli.main(["trace", str(run), "--steps", "2", "--output", str(output)]) == 0
    assert [name for name, _ in events(output)] == ["critic_infer"] * 2 + ["step"] * 4
    assert cli.main(["trace", str(run), "--steps", "9", "--output", str(output)]) == 0
    assert len(events(output)) == 9


def test_nothing_to_trace(tmp_path: Path, run: Path, capsys):
    assert cli.main(["trace", str(tmp_path / "nowhere")]) == 2
    assert "has no spans in trace/; expected the directory of a run with run.trace_mib above 0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["trace", str(run), "--output", str(tmp_path / "file" / "x.json")]) == 2
    assert "error: the trace could not be written:" in capsys.readouterr().err
