"""The one filter for text that reaches a terminal or a log: keys of data files, what a policy wrote, errors, other processes' output.

What passes is text, newlines, tabs and colours (`COLOURS`). Complete control sequences are removed whole, and all other ESC, C0, C1 and
bidirectional controls. A carriage return becomes a newline. Standard library only.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO, cast

# Reset, bold, faint, italic, underlined, reversed, what ends these, and foregrounds; never 8, which conceals, nor backgrounds, which can.
_CODE = r"(?:[0-47]|2[2-47]|3[0-79]|9[0-7])"
_MANY = rf"(?:{_CODE}|[34]8;(?:5;\d{{1,3}}|2;\d{{1,3}};\d{{1,3}};\d{{1,3}}))"
COLOURS = rf"\x1b\[(?:{_CODE}(?:;{_CODE})*)?m"
# What Rich draws a live view with: more colours, a line erased, the cursor shown, hidden, a line up, at the line's start.
_DRAWING = rf"{COLOURS}|\x1b\[{_MANY}(?:;{_MANY})*m|\x1b\[(?:2K|\?25[hl]|\d{{0,3}}A)|\r"
_STRING = r"\x1b[\]PX^_][^\x00-\x1f\x7f-\x9f]{0,256}"  # OSC, DCS and others, without their end
_REST = (
    rf"\x1b\[[0-?]{{0,64}}[ -/]{{0,8}}[@-~]|{_STRING}(?:\x07|\x1b\\|\x9c)|(?P<line>\r+\n?)|(?P<half>[\ud800-\udfff])"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_PATTERNS = [re.compile(rf"(?P<kept>{kept})|{_REST}") for kept in (COLOURS, _DRAWING)]
_BEGUN = re.compile(rf"(?:\x1b(?:\[[0-?]{{0,64}}[ -/]{{0,8}})?|{_STRING}\x1b?|\r+)\Z")  # what may become a sequence
_INSTEAD = {"line": "\n", "half": "\N{REPLACEMENT CHARACTER}"}  # half a character: a lone surrogate, which no stream can encode


def clean(text: str, *, drawn: bool = False) -> str:
    """The text as it may reach a terminal; `drawn`: with what moves a live view's cursor. Cleaning twice changes nothing."""
    return _PATTERNS[drawn].sub(lambda found: found[0] if found.lastgroup == "kept" else _INSTEAD.get(str(found.lastgroup), ""), text)


def plain(text: str) -> str:
    """The same without colours."""
    return re.sub(COLOURS, "", clean(text))


class Guarded:
    """A stream of text whose `write` cleans; all else is the stream's own. Wherever the text is cut into writes, the same comes out: the
    beginning of a sequence waits for its end. `unguarded` is the stream itself, for callers that clean their own output."""

    def __init__(self, stream: TextIO, *, drawn: bool = False) -> None:
        self.unguarded = unguarded(stream)
        self._drawn, self._begun = drawn, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)

    def write(self, text: str) -> int:
        whole = self._begun + text
        found = _BEGUN.search(whole)
        self._begun = found[0] if found else ""
        self.unguarded.write(clean(whole.removesuffix(self._begun), drawn=self._drawn))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))


def unguarded(stream: TextIO) -> TextIO:
    return stream.unguarded if isinstance(stream, Guarded) else stream


def guard() -> None:
    """Clean what this process prints from now on, tracebacks included."""
    sys.stdout, sys.stderr = (cast(TextIO, one if isinstance(one, Guarded) else Guarded(one)) for one in (sys.stdout, sys.stderr))
