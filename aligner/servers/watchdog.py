"""Removes a server's leftovers, however it ends. Run as a script in a separate session; standard library only.

Its standard input is a pipe that only the server holds. When the server closes it or dies, SIGKILL included, every process that carries the
server's environment marker is killed, and its shared memory and its workspace are removed. `kill -9` of a PyTriton process otherwise leaves
tritonserver, a Python stub for each endpoint and its shared memory behind.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import processes_with_variable  # noqa: E402  (beside this script: importing the package would cost a second interpreter start)

TRACKER_SECONDS = 3.0  # multiprocessing's resource trackers unlink shared memory and exit by themselves
KILL_SECONDS = 10.0


def wait_for_end_of(parent: int) -> None:
    """Return when standard input ends or the parent is another one (somebody else may have inherited the pipe)."""
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.5)[0] and not os.read(sys.stdin.fileno(), 4096):
            return


def kill_marked(assignment: str) -> None:
    """Kill until none is left; the resource trackers last."""
    started = time.monotonic()
    while found := processes_with_variable(assignment):
        waited = time.monotonic() - started
        if waited > KILL_SECONDS:
            print(f"watchdog: could not kill {found} in {KILL_SECONDS:.0f} s", file=sys.stderr, flush=True)
            return
        for pid, command in found.items():
            if "resource_tracker" not in command or waited > TRACKER_SECONDS:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it ended by itself between the listing and the signal
        time.sleep(0.05)


def main() -> None:
    """argv: the server's pid, NAME=value that marks its processes, its workspace."""
    parent, assignment, workspace = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are for the server; its end is what counts here
    wait_for_end_of(parent)
    kill_marked(assignment)
    shutil.rmtree(workspace, ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"pytrtion{parent}-*"):  # PyTriton's own spelling
        segment.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
