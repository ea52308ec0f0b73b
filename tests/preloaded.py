"""Starts Python programs as forks of one process that has imported torch, Megatron-Core and PyTriton: that takes 5 s and more otherwise.

What is started looks like the program from outside: a direct child in a session of its own, with its own environment and command line in
/proc, that dies by the signals that would kill it. Python programs of this project that *it* starts are forks as well (the ranks of a
launcher, for example). Not for tests of imports or of what an interpreter needs to start. The other side is preloaded_server.py.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SERVER = Path(__file__).with_name("preloaded_server.py")
# Room in the server's own command line and environment: forks write theirs there, where /proc shows them.
_ROOM = 32768


class Preloaded:
    """The warm process, from the side of the tests. It ends, with what it started, when this process ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER), " " * _ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PRELOADED_ROOM": " " * _ROOM},
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> ForkedProcess:
        """Run `python ARGUMENTS` (a script, or -m and a module); stdout and stderr go to `log`."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log), "cwd": str(cwd)}
        return ForkedProcess(self, self.ask(request))

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, *, timeout: float) -> tuple[int, str]:
        """Run `python ARGUMENTS` to its end: exit code and output (stdout and stderr together). Raises subprocess.TimeoutExpired."""
        with tempfile.NamedTemporaryFile() as log:
            process = self.start(arguments, environment, Path(log.name), cwd)
            try:
                return process.wait(timeout), Path(log.name).read_text(errors="replace")
            finally:
                process.kill()

    def ask(self, request: dict) -> int | None:
        """The answer to a request."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks programs has ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


@functools.cache
def preloaded() -> Preloaded:
    """The one of this test process; started when it is first asked for."""
    root = str(_SERVER.parents[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_", "ALIGNER_"))}
    # torch 2.6's compiler starts threads when it is imported, which Megatron-Core 0.19 does; a process with threads cannot be forked.
    return Preloaded({**environment, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})


class ForkedProcess:
    """As much of `subprocess.Popen` as is needed."""

    def __init__(self, origin: Preloaded, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._origin = origin

    def poll(self) -> int | None:
        """The exit code (negative for a signal), None while it runs."""
        if self.returncode is None:
            self.returncode = self._origin.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
