from __future__ import annotations

import io

from aligner.cluster.console import Echo, LineAssembler, plain


def test_lines_are_cut_at_line_ends_only() -> None:
    lines = LineAssembler()
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\r\nthree") == ["two"]
    assert lines.flush() == ["three"]
    assert lines.flush() == []


def test_the_last_state_of_a_redrawn_line_counts() -> None:
    lines = LineAssembler()
    assert lines.feed(b"10%\r20%\r") == []
    assert lines.feed(b"30%\r\n") == ["30%"]


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    lines = LineAssembler()
    assert [len(line) for line in lines.feed(b"x" * 70_000)] == [70_000]
    assert lines.feed(b"y\n") == ["y"]


def test_bytes_that_are_no_text_do_not_stop_the_run() -> None:
    assert LineAssembler().feed(b"a\xffb\n") == ["a\ufffdb"]


def test_control_characters_are_removed() -> None:
    assert plain("\x1b[31mred\x1b[0m \x1b[2Jclear \x1b]0;title\x07bell\x07") == "red clear bell"


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
