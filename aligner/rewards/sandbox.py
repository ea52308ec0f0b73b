"""Running Python programs that nobody has read, as code written by a policy is (level 2).

Four ways, in the order in which `auto` tries them:

- `bubblewrap`: the program sees a read-only copy of /usr and of the interpreter, an empty directory of its own in memory, no network, no
  other process. Needs `bwrap`.
- `namespaces`: the same, built by this package. Needs Linux 5.12 and the right to make user namespaces, which many containers lack.
- `landlock`: the program may use no files but the system's, the interpreter's and those in its own temporary directory. Needs Linux 5.13
  with Landlock, which containers usually have.
- `limits`: files as the run's user may use them. Needs nothing.

In all of them: limits on time, memory, processes, file size and output, a clean environment, no sockets, no signals to processes of others,
no new privileges, and nothing of it runs on afterwards. Root becomes another user first. docs/rewards.md has what this does not protect
against.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from aligner.errors import AlignerError, ConfigError
from aligner.rewards.jail.namespaces import WORK

NOBODY = 65534
START = "import sys; sys.path.insert(0, {package!r}); from aligner.rewards.jail.sandbox_child import main; main()"
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
ENDING_SECONDS = 10.0  # for the processes of a program that was told to end
START_SECONDS = 30.0  # until the surroundings stand, on a machine under load; the program's own time counts from then on
READ_BYTES = 65536


class SandboxError(AlignerError):
    """A program could not be started: this says nothing about the program."""


class Isolation(str, Enum):
    """How a program is isolated."""

    auto = "auto"  # the first of these that works here
    bubblewrap = "bubblewrap"
    namespaces = "namespaces"
    landlock = "landlock"
    limits = "limits"


class Ending(str, Enum):
    """Why a program ended."""

    exited = "exited"  # by itself, with an exit code
    timeout = "timeout"  # killed after `wall_seconds`
    cpu = "cpu"  # killed after `cpu_seconds` of computing
    memory = "memory"  # MemoryError
    output = "output"  # killed after `output_bytes`
    signal = "signal"  # by another signal


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Resource limits of one program. Time counts from its start; memory and computing are per process."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 * 2**20
    disk_bytes: int = 16 * 2**20  # the directory's; with isolation=landlock or limits a single file's
    output_bytes: int = 256 * 2**10  # standard output and standard error, each
    processes: int = 16
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "cpu_seconds", "memory_bytes", "disk_bytes", "output_bytes", "processes", "open_files"):
            value = getattr(self, name)
            if not 0 < value < 2**62:
                raise ConfigError(f"sandbox {name}={value}: must be above 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program ended: its exit code, or the signal's number if one ended it; what it wrote, as far as it was read."""

    ending: Ending
    code: int
    stdout: str
    stderr: str
    seconds: float


TRIAL = SandboxLimits(wall_seconds=60.0)  # whether an isolation works does not depend on the limits asked for, nor on the machine's load


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
        self._readable = _readable_paths(self._interpreter)
        self.isolation = self._first_working(list(Isolation)[1:] if isolation is Isolation.auto else [isolation])

    def run(self, source: str, stdin: str = "") -> Outcome:
        """Run a program, which reads `stdin`. Raises SandboxError if it could not be started."""
        return self._run(source, stdin, self.isolation, self.limits)

    def _first_working(self, candidates: list[Isolation]) -> Isolation:
        refusals = []
        for isolation in candidates:
            if isolation is Isolation.bubblewrap and not self._bubblewrap:
                refusals.append("bubblewrap: there is no bwrap")
                continue
            try:
                outcome = self._run("print(6 * 7)", "", isolation, TRIAL)
            except SandboxError as error:
                refusals.append(f"{isolation.value}: {error}")
                continue
            if (outcome.ending, outcome.stdout) == (Ending.exited, "42\n"):
                return isolation
            refusals.append(f"{isolation.value}: a trial program ended with {outcome.ending.value} {outcome.code}: {outcome.stderr[-500:]}")
        raise ConfigError(f"no sandbox works here with {self._interpreter} ({'; '.join(refusals)})")

    def _run(self, source: str, stdin: str, isolation: Isolation, limits: SandboxLimits) -> Outcome:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="aligner-sandbox-"))
            uid = NOBODY if os.geteuid() == 0 and _has_nobody() else None
            if uid is not None:
                os.chown(directory, uid, uid)
            program, standard_input = (stack.enter_context(_file_with(text)) for text in (source, stdin))
            status, tell = os.pipe()
            stack.callback(os.close, status)
            order = self._order(isolation, limits, directory, uid) | {"program": program, "status": tell}
            command = [sys.executable, "-I", "-S", "-c", START.format(package=_package_root()), json.dumps(order)]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=standard_input,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(program, tell),
                    start_new_session=True,
                    cwd="/",
                    env={},
                )
            except OSError as error:
                raise SandboxError(f"cannot start {sys.executable}: {error}") from error
            finally:
                os.close(tell)
            return _Watch(process, status, limits, gently=isolation in (Isolation.landlock, Isolation.limits)).outcome()

    def _order(self, isolation: Isolation, limits: SandboxLimits, directory: str, uid: int | None) -> dict[str, object]:
        """What aligner.rewards.jail.sandbox_child is told, but for the descriptors."""
        return {
            "isolation": isolation.value,
            "directory": directory,
            "interpreter": self._interpreter,
            "readable": self._readable,
            "bubblewrap": self._bubblewrap_command(by_root=uid is not None) if isolation is Isolation.bubblewrap else [],
            "uid": uid,
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
            "open_files": limits.open_files,
        }

    def _bubblewrap_command(self, *, by_root: bool) -> list[str]:
        """Up to the command that it runs. Root gives up its rights only inside: nobody may not be able to reach the interpreter's files."""
        package = Path(_package_root()) / "aligner"
        own = [str(package / name) for name in ("__init__.py", "rewards/__init__.py", "rewards/jail")]
        paths = _outermost([*self._readable, *own])
        parents = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
        # bubblewrap makes them with 0700 otherwise, which shuts out the user that root becomes
        passable = [argument for path in parents for argument in ("--perms", "0755", "--dir", path)]
        shown = [argument for path in paths for argument in ("--ro-bind", path, path)]
        links = [] if "/tmp" in parents else ["--symlink", WORK, "/tmp"]
        return [
            self._bubblewrap,
            *(
                "--unshare-ipc",
                "--unshare-pid",
                "--unshare-net",
                "--unshare-uts",
                "--die-with-parent",
                "--new-session",
                "--cap-drop",
                "ALL",
            ),
            *(("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if by_root else ("--unshare-user",)),
            *passable,
            *shown,
            *("--proc", "/proc", "--dev", "/dev", *links),
            *("--perms", "0777", "--size", str(self.limits.disk_bytes), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK, "--"),
        ]


class _Watch:
    """Reads what a started program writes until it ends, or makes it end."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, limits: SandboxLimits, *, gently: bool) -> None:
        self._process = process
        self._limits = limits
        self._gently = gently  # it has to be asked to end, to end what it started first
        self._read: dict[int, bytearray] = {}
        self._status, self._out, self._err = status, process.stdout.fileno(), process.stderr.fileno()
        self._started_at: float | None = None

    def outcome(self) -> Outcome:
        """Wait for the end; whatever happens on the way, nothing is left. Raises SandboxError if the program was never started."""
        ending: Ending | None = None
        try:
            ending = self._follow(time.monotonic() + START_SECONDS)
        finally:
            self._end(at_once=ending is None)
            self._process.stdout.close()
            self._process.stderr.close()
        said = self._said()
        if "error" in said or self._started_at is None:
            text = self._text(self._err).strip()[-500:]
            raise SandboxError(str(said.get("error") or text or f"nothing was started; exit code {self._process.returncode}"))
        return self._judged(ending, said)

    def _follow(self, deadline: float) -> Ending | None:
        """Read until all ends are closed; an ending if it has to be brought about."""
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
        """Reap the process, which ends the program's if it still runs."""
        if self._gently and not at_once:
            self._process.send_signal(signal.SIGTERM)
        elif not at_once:
            self._process.kill()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(ENDING_SECONDS)

    def _said(self) -> dict[str, object]:
        """What the process told of itself."""
        said: dict[str, object] = {}
        for line in bytes(self._read[self._status]).splitlines():
            said |= json.loads(line)
        return said

    def _judged(self, ending: Ending | None, said: dict[str, object]) -> Outcome:
        code = os.waitstatus_to_exitcode(int(said["status"])) if "status" in said else -signal.SIGKILL
        stderr = self._text(self._err)
        if ending is None and code == -signal.SIGXCPU:
            ending = Ending.cpu
        elif ending is None and code > 0 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            ending = Ending.memory
        elif ending is None:
            ending = Ending.signal if code < 0 else Ending.exited
        seconds = time.monotonic() - self._started_at
        return Outcome(ending=ending, code=abs(code), stdout=self._text(self._out), stderr=stderr, seconds=seconds)

    def _text(self, descriptor: int) -> str:
        return bytes(self._read[descriptor][: self._limits.output_bytes]).decode(errors="replace")


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[int]:
    """The descriptor of a nameless file, at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogatepass"))
        file.flush()
        file.seek(0)
        yield file.fileno()


def _has_nobody() -> bool:
    """Whether this root may become NOBODY: in a user namespace (rootless containers) root stands for another user, perhaps the only one."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def _package_root() -> str:
    return str(Path(__file__).resolve().parents[2])


def _readable_paths(interpreter: str) -> list[str]:
    """What the interpreter needs: the system's libraries, and the interpreter's own installation. Raises ConfigError."""
    question = "import os, sys; print(sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), sep='\\n')"
    try:
        answer = subprocess.run(
            [interpreter, "-I", "-c", question], capture_output=True, text=True, timeout=START_SECONDS, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"sandbox interpreter={interpreter}: cannot be run: {error}") from error
    return _outermost([path for path in (*SYSTEM_PATHS, *answer.stdout.split("\n")) if path and os.path.lexists(path)])


def _outermost(paths: list[str]) -> list[str]:
    """The paths that lie in no other one, each once."""
    unique = list(dict.fromkeys(paths))
    return [path for path in unique if not any(path.startswith(other.rstrip("/") + "/") for other in unique)]
