"""Starts a server that must not outlive this process. Standard library only; also a script: `python -I -S keeper.py COMMAND...`.

The script starts the command in a session of its own, and ends that session's processes when its standard input closes: when whoever holds
the other end is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

END_SECONDS = 5.0  # for a server to end by itself


def keep(command: Sequence[str], *, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """Start a command. What is returned ends when it does, with its exit code; close its `stdin` (or die) to end the command."""
    keeper = [sys.executable, "-I", "-S", os.path.abspath(__file__), *command]
    return subprocess.Popen(keeper, stdin=subprocess.PIPE, stdout=stdout, start_new_session=True)


def end(keeper: subprocess.Popen[bytes]) -> None:
    """End the command and wait for it."""
    assert keeper.stdin is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    keeper.wait(3 * END_SECONDS)


def main(command: list[str]) -> None:
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)

    def follow() -> None:
        code = child.wait()
        os._exit(code if code >= 0 else 128 - code)

    threading.Thread(target=follow, daemon=True).start()
    while sys.stdin.buffer.read(1):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):  # all have ended
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
