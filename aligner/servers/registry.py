"""Discovery through a directory that server and client share: one `<name>.json` per service, written atomically, touched as a heartbeat.

A service is dead when its registration is gone, belongs to another incarnation, has not been touched for `heartbeat_timeout_seconds`, or
names a process of this machine that no longer exists.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.errors import ServerError, ServerUnreachable
from aligner.servers.processes import node_identity, start_ticks

POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """Who serves `name`, where, since when (`started_at`: Unix time). `incarnation` is new for every start of a server."""

    name: str
    url: str
    host: str
    port: int
    pid: int
    process_start_ticks: int
    node: str
    incarnation: str
    started_at: float
    num_ranks: int
    checkpoint: str
    ready: bool

    def describe(self) -> str:
        """For error messages."""
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at))
        return f"{self.name} at {self.url} (pid {self.pid} on {self.host}, started {started}, incarnation {self.incarnation[:8]})"


def registration_path(services_dir: Path, name: str) -> Path:
    """Where the registration of `name` lies."""
    return services_dir / f"{name}.json"


def make_registration(*, name: str, incarnation: str, connect_host: str, port: int, num_ranks: int, checkpoint: str) -> Registration:
    """The registration of this process, to be published once it answers."""
    return Registration(
        name=name,
        url=f"http://{connect_host}:{port}",
        host=socket.gethostname(),
        port=port,
        pid=os.getpid(),
        process_start_ticks=start_ticks(os.getpid()) or 0,
        node=node_identity(),
        incarnation=incarnation,
        started_at=time.time(),
        num_ranks=num_ranks,
        checkpoint=checkpoint,
        ready=True,
    )


def read_registration(path: Path) -> tuple[Registration, int] | None:
    """The registration and its heartbeat (the file's mtime in ns); None where there is no file.

    Opens the file although `stat` would do for the heartbeat: network file systems refresh attributes when a file is opened.
    """
    try:
        with path.open() as file:
            return Registration(**json.load(file)), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    except (TypeError, json.JSONDecodeError) as error:
        raise ServerError(f"{path} is not a registration of this version: {error}; remove it") from error


def process_is_dead(registration: Registration) -> bool:
    """True where the process is known to be gone; False where it lives or is on another machine."""
    return registration.node == node_identity() and start_ticks(registration.pid) != registration.process_start_ticks


class Liveness:
    """Watches one incarnation of a service. The heartbeat's age is measured with this machine's own clock, from change to change."""

    def __init__(self, path: Path, registration: Registration, heartbeat_timeout_seconds: float) -> None:
        self._path = path
        self._registration = registration
        self._timeout_seconds = heartbeat_timeout_seconds
        self._lock = threading.Lock()
        self._heartbeat_ns = 0
        self._changed_at = time.monotonic()
        self._checked_at = float("-inf")
        self._problem: str | None = None

    def problem(self) -> str | None:
        """What says that the service is dead; None while it lives. Reads the file at most every `POLL_SECONDS`."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at >= POLL_SECONDS:
                self._checked_at = now
                self._problem = self._check(now)
            return self._problem

    def check_now(self) -> str | None:
        """The same, without the pause."""
        with self._lock:
            self._checked_at = time.monotonic()
            self._problem = self._check(self._checked_at)
            return self._problem

    def _check(self, now: float) -> str | None:
        mine = self._registration
        if process_is_dead(mine):
            return f"its process {mine.pid} no longer exists"
        found = read_registration(self._path)
        if found is None:
            return f"it withdrew its registration {self._path}"
        registration, heartbeat_ns = found
        if registration.incarnation != mine.incarnation:
            return f"it was replaced by {registration.describe()}, whose weights may be others"
        if heartbeat_ns != self._heartbeat_ns:
            self._heartbeat_ns, self._changed_at = heartbeat_ns, now
        silent = now - self._changed_at
        if silent > self._timeout_seconds:
            return f"{self._path} has not been touched for {silent:.0f} s (allowed are {self._timeout_seconds:.0f} s)"
        return None


def refuse_second_server(services_dir: Path, name: str, heartbeat_seconds: float) -> None:
    """Raise ServerError where a live process of this machine, or a fresh heartbeat of another one, holds the name."""
    path = registration_path(services_dir, name)
    found = read_registration(path)
    if found is None or process_is_dead(found[0]):
        return
    other, heartbeat_ns = found
    age = time.time() - heartbeat_ns / 1e9
    if other.node == node_identity() or age < 5 * heartbeat_seconds:
        raise ServerError(f"{other.describe()} already serves under that name (heartbeat {age:.0f} s ago, {path}); stop it first")


class Publication:
    """A published registration, kept alive by a thread of its own until `withdraw`."""

    def __init__(self, services_dir: Path, registration: Registration, heartbeat_seconds: float) -> None:
        self._path = registration_path(services_dir, registration.name)
        self._registration = registration
        self._heartbeat_seconds = heartbeat_seconds
        self._stop = threading.Event()
        self._failure: str | None = None
        refuse_second_server(services_dir, registration.name, heartbeat_seconds)
        self._write(registration)
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{registration.name}", daemon=True)
        self._thread.start()

    def failure(self) -> str | None:
        """Why the registration is no longer ours or no longer writable; None while all is well."""
        return self._failure

    def withdraw(self) -> None:
        """Remove the registration unless another server has taken the name. Callable more than once."""
        self._stop.set()
        self._thread.join(timeout=self._heartbeat_seconds + 5.0)
        found = read_registration(self._path)
        if found is not None and found[0].incarnation == self._registration.incarnation:
            self._path.unlink(missing_ok=True)

    def _write(self, registration: Registration) -> None:
        temporary = self._path.with_suffix(f".{registration.incarnation}.tmp")
        temporary.write_text(json.dumps(asdict(registration), indent=1) + "\n")
        os.replace(temporary, self._path)

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            try:
                found = read_registration(self._path)
                if found is None or found[0].incarnation != self._registration.incarnation:
                    self._failure = f"registration {self._path} was removed or taken by another server"
                    return
                os.utime(self._path)
            except (OSError, ServerError) as error:
                self._failure = f"registration {self._path} cannot be kept alive: {error}"
                return


def wait_for_service(
    services_dir: Path,
    name: str,
    *,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float = 20.0,
    abandoned: threading.Event | None = None,
) -> Registration:
    """Wait until `name` is registered, ready and alive; another thread may set `abandoned` to end the wait.

    Raises:
        ServerUnreachable: says what was waited for, where, how long, and what was found instead (nothing, one that loads, a dead one).
    """
    abandoned = abandoned or threading.Event()
    path = registration_path(services_dir, name)
    started = time.monotonic()
    since = time.strftime("%H:%M:%S")
    liveness: Liveness | None = None
    watched: Registration | None = None
    state = "no server has registered there"
    while True:
        found = read_registration(path)
        if found is None:
            watched, state = None, "no server has registered there"
        else:
            registration, heartbeat_ns = found
            if watched is None or watched.incarnation != registration.incarnation:
                watched, liveness = registration, Liveness(path, registration, heartbeat_timeout_seconds)
                first_heartbeat_ns = heartbeat_ns
            age = time.time() - heartbeat_ns / 1e9
            # An old heartbeat by this clock may be a fresh one by the server's: then it changes while we look.
            beating = age < heartbeat_timeout_seconds or heartbeat_ns != first_heartbeat_ns
            problem = liveness.problem() or (None if beating else f"its last heartbeat was {age:.0f} s ago")
            if problem is None and registration.ready:
                return registration
            state = f"stale: {registration.describe()}: {problem}" if problem else f"{registration.describe()} is alive but not ready"
        waited = time.monotonic() - started
        if waited >= timeout_seconds or abandoned.is_set():
            raise ServerUnreachable(
                f"{name}: waited {waited:.0f} s (since {since}) for a ready server to appear as {path}; last seen: {state}. "
                f"Is the {name} server running with the same run directory? See its log."
            )
        abandoned.wait(min(POLL_SECONDS, timeout_seconds - waited))
