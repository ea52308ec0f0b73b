"""Runs untrusted Python programs, such as code written by a policy.

`auto` is this isolation, never a weaker one:

- `bubblewrap`: the program sees a read-only copy of /usr and of the interpreter, an empty directory of its own in memory, no network and no
  other process. Requires `bwrap` and the right to make user namespaces, which many containers lack.

Weaker isolations must be named:

- `landlock`: the program may only open files of the system, of the interpreter and in its own temporary directory, and may not change
  modes, times or attributes of files. Requires Linux 6.2 with Landlock, which containers usually have.
- `limits`: the program may use files like the run's user. Requires nothing.

All of them have limits on time, memory, processes, file size and output, a clean environment, a list of allowed system calls, no sockets,
no signals to other processes and no new privileges, and no process outlives the program. Root becomes another user first. docs/rewards.md
lists what this does not protect against.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.rewards.jail import NOBODY, allowed_calls
from aligner.rewards.surroundings import (
    JAIL,
    bubblewrap_command,
    control_group,
    delegated_place,
    file_with,
    has_nobody,
    outermost,
    own_directory,
    readable_paths,
)

START = "import sys; sys.path.append({folder!r}); from jail import main; main()"  # alone: it needs nothing else of this package
ENDING_SECONDS = 10.0  # for the processes of a program to end
START_SECONDS = 30.0  # to build the surroundings on a loaded machine; the program's own time starts then
READ_BYTES = 65536


class SandboxError(AlignerError):
    """A program could not be started, which is not the program's fault."""


class Isolation(str, Enum):
    """How a program is isolated."""

    auto = "auto"  # bubblewrap; never a weaker one
    bubblewrap = "bubblewrap"
    landlock = "landlock"
    limits = "limits"


WAYS_OUT = (
    "install bubblewrap, and let this user make namespaces (sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 on "
    "Debian, kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container a seccomp profile that allows unshare), or name a "
    "weaker isolation: isolation=landlock, or isolation=limits, which protects no files (docs/rewards.md)"
)
GUARANTEES = {
    Isolation.bubblewrap: "files, processes and network of its own",
    Isolation.landlock: "weak: it only opens files of the system, the interpreter and its own; other processes are visible to it",
    Isolation.limits: "WEAK: it can read and write what this user can",
}


class Ending(str, Enum):
    """Why a program ended."""

    exited = "exited"  # by itself, with an exit code
    timeout = "timeout"  # killed after `wall_seconds`
    cpu = "cpu"  # killed after `cpu_seconds` of computing
    memory = "memory"  # MemoryError, or killed because all its processes together passed `memory_bytes`
    disk = "disk"  # killed after too many files
    output = "output"  # killed after `output_bytes`
    signal = "signal"  # by another signal


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Resource limits of one program, from its start. CPU time is per process, and with landlock and limits so is memory."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 16 * 2**20  # of the directory, with a file per 4096 bytes; with isolation=landlock or limits, of a single file
    output_bytes: int = 256 * 2**10  # standard output and standard error, each
    processes: int = 16
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 2**62:
                raise ConfigError(f"sandbox {name}={value}: must be above 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program ended: its exit code or signal number, and its output as far as it was read."""

    ending: Ending
    code: int
    stdout: str
    stderr: str
    seconds: float


TRIAL = SandboxLimits(wall_seconds=60.0)  # generous: whether an isolation works must not depend on the requested limits or on load


class Sandbox:
    """Runs programs, from any thread, each in its own surroundings. See the module's docstring."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        isolation: Isolation = Isolation.auto,
        *,
        interpreter: str = "",
        bubblewrap: str = "bwrap",
    ) -> None:
        """`interpreter` is the Python that programs run with (empty: this one); `bubblewrap` the command's name or path.

        Raises ConfigError if the isolation asked for does not work here, saying why.
        """
        self.limits = limits or SandboxLimits()
        self._interpreter = os.path.abspath(interpreter or sys.executable)
        self._bubblewrap = shutil.which(bubblewrap) or ""
        self._readable = readable_paths(self._interpreter)
        # inside bubblewrap this Python runs first, before the program
        self._readable_to_start = outermost([*self._readable, *readable_paths(sys.executable)])
        self._groups: Path | None = None
        self.isolation = Isolation.bubblewrap if isolation is Isolation.auto else isolation
        strong = self.isolation is Isolation.bubblewrap
        if refusal := "bwrap was not found" if strong and not self._bubblewrap else self._refusal():
            why = f"does not work here with {self._interpreter} ({self.isolation.value}: {refusal})"
            raise ConfigError(f"sandbox isolation={isolation.value}: {why}" + (f"; {WAYS_OUT}" if strong else ""))
        self._groups = delegated_place()  # where control groups for programs can be made, if anywhere
        if self._groups and self._refusal():
            self._groups = None

    def run(self, source: str, stdin: str = "") -> Outcome:
        """Run a program, which reads `stdin`. Raises SandboxError if it could not be started; no program can cause that."""
        return self._run(source, stdin, self.limits)

    def describe(self) -> str:
        """The isolation in one line."""
        alone = self.isolation is Isolation.bubblewrap
        calls = len(allowed_calls(os.uname().machine, alone=alone))
        if self._groups:
            memory = "of all its processes together, by cgroup v2"
        else:
            memory = "of all its processes together, by a watch" if alone else "of each process"
        return f"sandbox isolation={self.isolation.value}: {GUARANTEES[self.isolation]}; {calls} system calls; memory limit {memory}"

    def _refusal(self) -> str:
        """Why a trial program does not run; empty if it does."""
        try:
            outcome = self._run("print(6 * 7)", "", TRIAL)
        except SandboxError as error:
            return str(error)
        if (outcome.ending, outcome.stdout) == (Ending.exited, "42\n"):
            return ""
        return f"a trial program ended with {outcome.ending.value} {outcome.code}: {outcome.stderr[-500:]}"

    def _run(self, source: str, stdin: str, limits: SandboxLimits) -> Outcome:
        try:
            with contextlib.ExitStack() as stack:
                uid = NOBODY if os.geteuid() == 0 and has_nobody() else None
                directory = stack.enter_context(own_directory(uid))
                program, standard_input = (stack.enter_context(file_with(text)) for text in (source, stdin))
                memory = limits.memory_bytes + limits.disk_bytes
                limiting = control_group(self._groups, memory_bytes=memory, processes=limits.processes) if self._groups else None
                group = stack.enter_context(limiting) if limiting else None
                order = self._order(limits, directory, uid) | {"program": program, "control_group": group and group.procs}
                outcome = self._started(order, standard_input, limits)
                killed = outcome.ending is Ending.signal and outcome.code == signal.SIGKILL
                return replace(outcome, ending=Ending.memory) if killed and group and group.out_of_memory() else outcome
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"a program's surroundings cannot be built or removed: {error}") from error

    def _started(self, order: dict[str, object], standard_input: int, limits: SandboxLimits) -> Outcome:
        """Start the process for `order`, and follow it to its end."""
        status, tell = os.pipe()
        order |= {"status": tell}
        command = [sys.executable, "-I", "-S", "-c", START.format(folder=os.path.dirname(JAIL)), json.dumps(order)]
        passed = [descriptor for name in ("program", "status", "control_group") if isinstance(descriptor := order[name], int)]
        try:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=standard_input,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=passed,
                    start_new_session=True,
                    cwd="/",
                    env={},
                )
            finally:
                os.close(tell)
            return _Watch(process, status, limits, gently=order["isolation"] != Isolation.bubblewrap.value).outcome()
        finally:
            os.close(status)

    def _order(self, limits: SandboxLimits, directory: str, uid: int | None) -> dict[str, object]:
        """The order for aligner.rewards.jail, without the descriptors."""
        command: list[str] = []
        if self.isolation is Isolation.bubblewrap:
            command = bubblewrap_command(self._bubblewrap, self._readable_to_start, limits.disk_bytes, then_nobody=uid is not None)
        return {
            "isolation": self.isolation.value,
            "directory": directory,
            "interpreter": self._interpreter,
            "readable": self._readable,
            "bubblewrap": command,
            "uid": uid,
            **asdict(limits),
        }


class _Watch:
    """Reads a started program's output until it ends, or ends it."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, limits: SandboxLimits, *, gently: bool) -> None:
        self._process = process
        self._limits = limits
        self._gently = gently  # it gets a chance to end its own processes first
        self._read: dict[int, bytearray] = {}
        self._status, self._out, self._err = status, process.stdout.fileno(), process.stderr.fileno()
        self._started_at: float | None = None

    def outcome(self) -> Outcome:
        """Wait for the end; nothing is left, whatever happens. Raises SandboxError if the program was never started."""
        ending: Ending | None = None
        try:
            ending = self._follow(time.monotonic() + START_SECONDS)
        finally:
            self._end(at_once=ending is None)
            self._process.stdout.close()
            self._process.stderr.close()
        said: dict[str, object] = {}  # the process's own report
        for line in bytes(self._read[self._status]).splitlines():
            said |= json.loads(line)
        if "error" in said or self._started_at is None:
            text = self._text(self._err).strip()[-500:]
            raise SandboxError(str(said.get("error") or text or f"nothing was started; exit code {self._process.returncode}"))
        return self._judged(ending, said)

    def _follow(self, deadline: float) -> Ending | None:
        """Read until everything is closed; returns an ending if the program must be ended."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._status, self._out, self._err):
                self._read[descriptor] = bytearray()
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return Ending.timeout
                for key, _ in selector.select(left):
                    data = os.read(key.fd, READ_BYTES)
                    self._read[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd != self._status and len(self._read[key.fd]) > self._limits.output_bytes:
                        return Ending.output
                if self._started_at is None and b"\n" in self._read[self._status]:
                    self._started_at = time.monotonic()
                    deadline = self._started_at + self._limits.wall_seconds
        return None

    def _end(self, *, at_once: bool) -> None:
        """Reap the process, which ends the program's processes."""
        if not at_once:
            self._process.send_signal(signal.SIGTERM if self._gently else signal.SIGKILL)
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(ENDING_SECONDS)

    def _judged(self, ending: Ending | None, said: dict[str, object]) -> Outcome:
        code = os.waitstatus_to_exitcode(int(said["status"])) if "status" in said else -signal.SIGKILL
        stderr = self._text(self._err)
        if ending is None and "limit" in said:
            ending = Ending(said["limit"])
        elif ending is None and code == -signal.SIGXCPU:
            ending = Ending.cpu
        elif ending is None and code > 0 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            ending = Ending.memory
        elif ending is None:
            ending = Ending.signal if code < 0 else Ending.exited
        seconds = time.monotonic() - self._started_at
        return Outcome(ending=ending, code=abs(code), stdout=self._text(self._out), stderr=stderr, seconds=seconds)

    def _text(self, descriptor: int) -> str:
        return bytes(self._read[descriptor][: self._limits.output_bytes]).decode(errors="replace")
