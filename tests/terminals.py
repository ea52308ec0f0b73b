"""A pseudo-terminal for commands, and what text from outside must never bring there."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DRAWN = re.compile(r"\x1b\[(?:[0-9;]*m|2K|\d*A|\?25[hl])|\r")  # what a live view is drawn with
LIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# As JSON writes them: each a name of a field that does something to a terminal which is shown it.
HOSTILE_NAMES = (r"\u001b[2J\u001b]0;T\u0007", r"\u001b[\u00002J", r"\u009b2J", r"\u202e", r"\u0008\r", r"\ud800", r"\u001b[8m", r"\n[run]")


def on_a_terminal(command: Sequence[str], cwd: Path, environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The command's exit code, and what a terminal is sent by it."""
    reader, writer = pty.openpty()
    environment = {**environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment, cwd=cwd)
    os.close(writer)
    seen = b""
    try:
        while data := os.read(reader, 65536):
            seen += data
    except OSError:  # EIO: the last writer is gone
        pass
    os.close(reader)
    return process.wait(timeout=60), seen.decode(errors="replace").replace("\r\n", "\n")
