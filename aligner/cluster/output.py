"""The output of many processes on one terminal: whole lines, a prefix each, no carriage returns, no cursor movements."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

_MAX_LINE_BYTES = 64 * 1024
_COLOURS = ("36", "35", "33", "32", "34", "96", "95", "93")  # ANSI foreground colours, one per component in turn
_NOTE_COLOUR = "1"
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;:]*m")
_OTHER_CONTROL = re.compile(
    r"\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b(?!\[)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)


def plain(text: str) -> str:
    """The text without colours, cursor movements and other control characters (tabs stay)."""
    return _COLOUR_CODE.sub("", _OTHER_CONTROL.sub("", text))


class LineAssembler:
    """Cuts a byte stream into lines; of a line that was redrawn with carriage returns (progress bars) the last state counts."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completed. A line without an end is passed on after 64 KiB, so that memory stays bounded."""
        *complete, pending = (self._pending + data).split(b"\n")
        pending = pending[pending.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(pending) > _MAX_LINE_BYTES:
            complete.append(pending)
            pending = b""
        self._pending = pending
        return [self._text(line) for line in complete]

    def flush(self) -> list[str]:
        """What was left without a line end when the stream ended."""
        rest, self._pending = self._pending, b""
        return [self._text(rest)] if rest else []

    @staticmethod
    def _text(line: bytes) -> str:
        return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class Echo:
    """Writes prefixed lines to one stream; colours only where it is a terminal and NO_COLOR is unset.

    When the stream's reader goes away (`aligner launch | head`) the run goes on: its output is in the log files anyway.
    """

    def __init__(self, stream: TextIO, prefixes: Sequence[str], groups: Sequence[int]) -> None:
        """`prefixes[i]` is shown in the colour of `groups[i]` (the component's number)."""
        self._stream = stream
        self._colour = stream.isatty() and not os.environ.get("NO_COLOR")
        width = max(len(prefix) for prefix in (*prefixes, "run"))
        self._width = width + 2
        self._colours = {prefix: _COLOURS[group % len(_COLOURS)] for prefix, group in zip(prefixes, groups, strict=True)}
        self.closed = False

    def line(self, prefix: str, text: str) -> None:
        """One line of the process called `prefix`."""
        label = f"[{prefix}]".ljust(self._width)
        text = _OTHER_CONTROL.sub("", text)
        if self._colour:
            reset = "\x1b[0m" if "\x1b" in text else ""
            self._write(f"\x1b[{self._colours.get(prefix, _NOTE_COLOUR)}m{label}\x1b[0m {text}{reset}\n")
        else:
            self._write(f"{label} {_COLOUR_CODE.sub('', text)}\n")

    def raw(self, data: bytes) -> None:
        """Pass the bytes of a process that draws the whole terminal itself."""
        self._write(data.decode(errors="replace"))

    def _write(self, text: str) -> None:
        if self.closed:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            self.closed = True
