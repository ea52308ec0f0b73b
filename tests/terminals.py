"""A pseudo-terminal for commands, and what text from outside must never bring there."""

from __future__ import annotations

import os
import pty
import re
import select
from collections.abc import Sequence
from pathlib import Path

from preloaded import preloaded

ROOT = Path(__file__).resolve().parents[1]

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DRAWN = re.compile(r"\x1b\[(?:[0-9;]*m|2K|\d*A|\?25[hl])|\r")  # what a live view is drawn with
LIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# As JSON writes them: each a name of a field that does something to a terminal which is shown it.
HOSTILE_NAMES = (r"\u001b[2J\u001b]0;T\u0007", r"\u001b[\u00002J", r"\u009b2J", r"\u202e", r"\u0008\r", r"\ud800", r"\u001b[8m", r"\n[run]")


def on_a_terminal(arguments: Sequence[str], cwd: Path) -> tuple[int, str]:
    """The exit code of `aligner ARGUMENTS`, by a fork of the preloaded process, and what a terminal is sent by it."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = preloaded().start(["-m", "aligner.cli", *arguments], environment, Path(os.ttyname(writer)), cwd)
    seen, ended = b"", False
    while True:
        readable = select.select([reader], [], [], 0.0 if ended else 0.05)[0]
        if readable:
            seen += os.read(reader, 65536)
        elif ended:
            break
        else:
            ended = process.poll() is not None
    for end in (reader, writer):
        os.close(end)
    return process.wait(timeout=60), seen.decode(errors="replace").replace("\r\n", "\n")
