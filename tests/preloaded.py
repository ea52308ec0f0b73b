"""A process that has imported torch and Megatron-Core and forks the ranks of test jobs: the imports take seconds of every rank otherwise.

`Preloaded` is the side of the tests. Run as a program this file is the other one: it reads one JSON request per line and answers each with
a line. It ends, with all ranks that still run, when its input does.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path


class Preloaded:
    """Starts scripts as forks of one warm process. Not for tests of how processes start or end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> ForkedRank:
        """Run a script with its arguments; stdout and stderr go to `log`."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log), "cwd": str(cwd)}
        return ForkedRank(self, self.ask(request))

    def ask(self, request: dict) -> int | None:
        """The answer to a request."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks test ranks has ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


class ForkedRank:
    """As much of `subprocess.Popen` as is needed."""

    def __init__(self, origin: Preloaded, pid: int) -> None:
        self.pid = pid
        self._origin = origin
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative for a signal), None while it runs."""
        if self._code is None:
            self._code = self._origin.ask({"poll": self.pid, "block": False})
        return self._code

    def wait(self) -> int:
        if self._code is None:
            self._code = self._origin.ask({"poll": self.pid, "block": True})
        return self._code


def _serve() -> None:
    import aligner.models.create  # noqa: F401  torch and Megatron-Core with it

    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], 0 if request["block"] else os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become(request)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def _become(request: dict) -> None:
    """Turn this fork into the program that was asked for; does not return."""
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["arguments"]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
