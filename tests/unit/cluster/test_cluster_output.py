from __future__ import annotations

import io
import os
import resource
import sys
from pathlib import Path

import pytest

from aligner.cluster.component import Component
from aligner.cluster.console import Console, Echo, LineAssembler
from aligner.cluster.run_directory import RunDirectory
from aligner.errors import LaunchError


@pytest.mark.parametrize(
    ("fed", "lines"),
    [
        ([b"one\ntw", b"o\r\nthree"], [["one"], ["two"], ["three"]]),
        ([b"10%\r20%\r", b"30%\r\n"], [[], ["30%"], []]),  # a redrawn line's last state
        ([b"x" * 70_000, b"y\n"], [["x" * 70_000], ["y"], []]),  # one without an end is passed on in pieces
        ([b"a\xffb\n"], [["a\ufffdb"], []]),  # no text
    ],
    ids=["ends", "redrawn", "endless", "bytes"],
)
def test_lines_are_cut_at_line_ends_only(fed: list[bytes], lines: list[list[str]]) -> None:
    assembler = LineAssembler()
    assert [*map(assembler.feed, fed), assembler.flush()] == lines and assembler.flush() == []


def test_prefixes_are_aligned_and_colours_are_for_terminals() -> None:
    stream = io.StringIO()
    echo = Echo(stream, ["actor", "critic.0"], [0, 1])
    echo.line("actor", "\x1b[31mhello\x1b[0m")
    echo.line("critic.0", "\x1b[2Aworld")
    echo.line("run", "note")
    assert stream.getvalue() == "[actor]    hello\n[critic.0] world\n[run]      note\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_prefix_is_coloured_and_colours_are_reset(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = _Terminal()
    Echo(stream, ["actor"], [0]).line("actor", "\x1b[31mred")
    assert stream.getvalue() == "\x1b[36m[actor]\x1b[0m \x1b[31mred\x1b[0m\n"


class _ClosedPipe(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_went_away_does_not_stop_the_run() -> None:
    echo = Echo(_ClosedPipe(), ["actor"], [0])
    echo.line("actor", "x")
    assert echo.closed


def test_a_full_disk_costs_lines_of_the_logs_and_is_said_once_of_each(tmp_path: Path) -> None:
    directory, stream = RunDirectory(tmp_path).create(), io.StringIO()
    component = Component(name="actor", command=(sys.executable,), main=True)
    log = directory.logs / "actor.0.log"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Console([component], directory, stream) as console:
        channel, writer = console.open_channel(component, 0, log)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))  # the kernel lets no file grow beyond it
        try:
            for number in range(3):
                console.note(f"note {number}")
                os.write(writer, f"line {number}\n".encode())
                console.drain(channel)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(writer)
    shown = stream.getvalue().splitlines()
    assert (console.log.read_text(), log.read_text()) == ("note", "line")
    warnings = [line for line in shown if "warning" in line]
    assert [line.partition("; ")[2] for line in warnings] == ["the log lacks lines, the run continues"] * 2
    assert str(console.log) in warnings[0] and "EFBIG" in warnings[0] and str(log) in warnings[1]
    assert [line.split()[-2:] for line in shown if line not in warnings] == [
        [kind, str(number)] for number in range(3) for kind in ("note", "line")
    ]


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).create()
    (directory.logs / "launcher.log").mkdir()
    with pytest.raises(LaunchError, match="^Is a directory: .*launcher.log"):
        Console([Component(name="actor", command=("x",), main=True)], directory, io.StringIO())
