"""What a process records of itself: complete lines, a bounded size, and nothing that fails a run."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from aligner.parallel.progress import IDLE, Progress
from aligner.telemetry import recording
from aligner.telemetry.recording import MOST_WAITING, Recorder, read_spans


@pytest.fixture
def recorded(tmp_path: Path):
    """Records this process as rank 3 of an actor while the test runs; the folder."""
    folder = tmp_path / "trace"
    recording.record_in(folder / "actor.3.jsonl", rank=3, most_bytes=1 << 20)
    yield folder
    recording.close()


def open_in(folder: Path, component: str = "actor", most_bytes: int = 1 << 20) -> Recorder:
    recorder = Recorder()
    recorder.open(folder / f"{component}.0.jsonl", rank=0, most_bytes=most_bytes)
    return recorder


def test_spans_are_on_the_clock_of_the_day(recorded: Path):
    before = time.time()
    with recording.span("refit", version=2) as said:
        said["bytes"] = 7
        time.sleep(0.02)
    with pytest.raises(RuntimeError), recording.span("call", recording.rank_lane("calls to critic")):
        raise RuntimeError
    recording.close()
    (refit, call), damaged = read_spans(recorded)
    assert (refit.name, refit.component, refit.lane, refit.arguments) == ("refit", "actor", "rank 3", {"version": 2, "bytes": 7})
    assert before - 0.001 <= refit.start and 0.02 <= refit.seconds and refit.end <= time.time() + 0.001
    assert (call.name, call.lane, call.arguments, damaged) == ("call", "rank 3 calls to critic", {}, 0)
    assert call.start >= refit.end - 0.001


def test_phases_are_spans_and_steps_write_them(recorded: Path):
    progress = Progress()
    progress.at_step(5)
    with progress.phase("step") as arguments:
        with progress.phase("generate"):
            pass
        arguments["peak_bytes"] = 12
    with progress.phase(IDLE):
        pass
    assert read_spans(recorded)[0] == []
    progress.at_step(6)
    spans = read_spans(recorded)[0]
    assert sorted((span.name, dict(span.arguments)) for span in spans) == [
        ("generate", {"step": 5}),
        ("step", {"step": 5, "peak_bytes": 12}),
    ]
    inner, outer = sorted(spans, key=lambda span: span.name)
    assert outer.start <= inner.start and inner.end <= outer.end + 2e-6


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path):
    with recording.span("a"):
        assert not recording.is_on()
    recording.flush()
    assert list(tmp_path.iterdir()) == [] and read_spans(tmp_path / "nowhere") == ([], 0)


def test_a_process_that_goes_on_appends_and_cut_lines_are_counted(tmp_path: Path):
    first = open_in(tmp_path)
    first.add("a", time.perf_counter(), "rank 0")
    first.close()
    file = tmp_path / "actor.0.jsonl"
    file.write_bytes(file.read_bytes() + b'{"start":1700000000.0,"seco')  # killed while it wrote
    second = open_in(tmp_path)
    second.add("b", time.perf_counter(), "rank 0")
    second.close()
    second.add("late", time.perf_counter(), "rank 0")
    spans, damaged = read_spans(tmp_path)
    assert [span.name for span in spans] == ["a", "b"] and damaged == 1


def test_the_newest_spans_have_a_bounded_room(tmp_path: Path):
    most = 20_000
    recorder = open_in(tmp_path, most_bytes=most)
    for number in range(1000):
        recorder.add(f"{number}", time.perf_counter(), "rank 0")
        if number % 10 == 0:
            recorder.flush()
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most
    recorder.close()
    names = sorted(int(span.name) for span in read_spans(tmp_path)[0])  # starts are rounded to microseconds
    assert names == list(range(names[0], 1000)) and len(names) > 100  # all from some point on, over both files
    assert {file.name for file in tmp_path.iterdir()} == {"actor.0.jsonl", "actor.0.older.jsonl"}


def test_memory_is_bounded_and_threads_lose_nothing(tmp_path: Path):
    recorder = open_in(tmp_path, most_bytes=1 << 30)
    count = MOST_WAITING

    def work(lane: str) -> None:
        for _ in range(count):
            recorder.add("a", time.perf_counter(), lane)

    threads = [threading.Thread(target=work, args=(f"{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "actor.0.jsonl").read_text().splitlines()) >= 2 * MOST_WAITING  # without anybody's flush
    recorder.close()
    lanes = [span.lane for span in read_spans(tmp_path)[0]]
    assert [lanes.count(f"{number}") for number in range(3)] == [count] * 3


def test_a_file_system_in_trouble_costs_spans_and_one_warning(tmp_path: Path, capsys):
    recorder = open_in(tmp_path / "trace")
    (tmp_path / "trace" / "actor.0.jsonl").unlink()
    (tmp_path / "trace").rmdir()
    for _ in range(2):
        recorder.add("a", time.perf_counter(), "rank 0")
        recorder.flush()
    assert capsys.readouterr().err.count("warning: 1 spans of the trace are lost") == 1


def test_components_are_read_by_name_and_spans_by_start(tmp_path: Path):
    for component, starts in (("critic", [3.0]), ("actor", [2.0, 1.0])):
        lines = [{"start": start, "seconds": 0.5, "name": "a", "lane": "rank 0"} for start in starts]
        (tmp_path / f"{component}.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(span.component, span.start) for span in read_spans(tmp_path)[0]] == [("actor", 1.0), ("actor", 2.0), ("critic", 3.0)]
