"""Discovery through a directory that all components share: one `<name>.json` for each, written atomically, touched as a heartbeat.

It exists from the start of the process. A service is dead when its registration is gone, belongs to another incarnation, has not been
touched for `heartbeat_timeout_seconds`, or names a process of this machine that no longer exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aligner.errors import ServerError, ServerUnreachable, describe_os_error
from aligner.servers.processes import node_identity, start_ticks

ATTEMPT = "ALIGNER_ATTEMPT"
POLL_SECONDS = 0.25
STALE_HEARTBEATS = 5  # a registration that another machine's process has not touched for this many heartbeats is stale


class ServiceState(str, Enum):
    """How far a component is."""

    waiting = "waiting"  # for its turn to load on shared GPUs, however long that takes
    loading = "loading"
    ready = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A component `name` (the actor too, without `url`): its place, start (`started_at`: Unix time) and state.

    `incarnation` is new for every start of its process, `attempt` for every start of the whole run ("" if nobody counts them).
    """

    name: str
    role: str
    state: ServiceState
    url: str
    host: str
    port: int
    pid: int
    process_start_ticks: int
    node: str
    incarnation: str
    attempt: str
    started_at: float
    num_ranks: int
    layout: str
    checkpoint: str

    def describe(self) -> str:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_at))
        place = f" at {self.url}" if self.url else ""
        return f"{self.name}{place} (pid {self.pid} on {self.host}, started {started}, incarnation {self.incarnation[:8]})"


def registration_path(services_dir: Path, name: str) -> Path:
    return services_dir / f"{name}.json"


def gone_path(services_dir: Path, name: str) -> Path:
    """A text file in which a launcher records why nobody will start `name` again; then clients stop waiting."""
    return services_dir / f"{name}.gone"


def current_attempt() -> str:
    """Which start of the run this process belongs to, by its launcher's variable; "" without one."""
    return os.environ.get(ATTEMPT, "")


def make_registration(*, name: str, role: str, num_ranks: int, layout: str = "") -> Registration:
    """The registration of this process while it loads; `Publication.ready` adds the address."""
    return Registration(
        name=name,
        role=role,
        state=ServiceState.loading,
        url="",
        host=socket.gethostname(),
        port=0,
        pid=os.getpid(),
        process_start_ticks=start_ticks(os.getpid()) or 0,
        node=node_identity(),
        incarnation=uuid.uuid4().hex,
        attempt=current_attempt(),
        started_at=time.time(),
        num_ranks=num_ranks,
        layout=layout,
        checkpoint="",
    )


def read_registration(path: Path) -> tuple[Registration, int] | None:
    """The registration and its heartbeat (mtime in ns), or None. Opens the file: network file systems then refresh attributes."""
    try:
        with path.open() as file:
            fields = json.load(file)
            return Registration(**{**fields, "state": ServiceState(fields["state"])}), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, ValueError) as error:
        raise ServerError(f"{path} is not a registration of this version: {error}; remove it") from error


def process_is_dead(registration: Registration) -> bool:
    """True if the process is known to be gone; False if it lives or is on another machine."""
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

    def problem(self, *, pause_seconds: float = POLL_SECONDS) -> str | None:
        """Why the service is dead; None while it lives. Reads the file at most every `pause_seconds`."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at >= pause_seconds:
                self._checked_at = now
                self._problem = self._check(now)
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
            return f"{self._path} has not been touched for {silent:.0f} s (allowed: {self._timeout_seconds:.0f} s)"
        return None


def claim(services_dir: Path, mine: Registration, heartbeat_seconds: float) -> str:
    """Make sure that nobody else holds the name; returns what is replaced, "" for nothing.

    A registration of an earlier attempt is replaced, alive or not: that server ends itself when it sees this. So is one of a dead process;
    if it ran on another machine, the heartbeat is watched for a while. Raises ServerError if a process of the same attempt lives.
    """
    path = registration_path(services_dir, mine.name)
    found = read_registration(path)
    if found is None:
        return ""
    other, heartbeat_ns = found
    if mine.attempt and other.attempt != mine.attempt:
        return f"{other.describe()} belongs to attempt {other.attempt or '(none)'} and is replaced: this is attempt {mine.attempt}"
    if process_is_dead(other):
        return f"{other.describe()} is dead and is replaced"
    age = time.time() - heartbeat_ns / 1e9
    patience = STALE_HEARTBEATS * heartbeat_seconds if age < STALE_HEARTBEATS * heartbeat_seconds else 2 * heartbeat_seconds
    if other.node == node_identity() or _beats(path, heartbeat_ns, patience):
        raise ServerError(f"{other.describe()} already serves under that name ({path}); stop it first")
    return f"{other.describe()} has been silent for {age + patience:.0f} s and is replaced"


def _beats(path: Path, heartbeat_ns: int, seconds: float) -> bool:
    """Whether the heartbeat of a registration changes within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, seconds / 4))
        found = read_registration(path)
        if found is None or found[1] != heartbeat_ns:
            return found is not None
    return False


class Publication(contextlib.AbstractContextManager["Publication"]):
    """A published registration, kept alive by a thread until `withdraw` (or the end of its `with` block)."""

    def __init__(self, services_dir: Path, registration: Registration, heartbeat_seconds: float) -> None:
        self.registration = registration
        self._path = registration_path(services_dir, registration.name)
        self._heartbeat_seconds = heartbeat_seconds
        self._stop = threading.Event()
        self._failure: str | None = None
        services_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        replaced = claim(services_dir, registration, heartbeat_seconds)
        if replaced:
            print(f"registry: {replaced}", flush=True)
        gone_path(services_dir, registration.name).unlink(missing_ok=True)
        self._update()
        self._thread = threading.Thread(target=self._heartbeat, name=f"heartbeat-{registration.name}", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.withdraw()

    def ready(self, url: str = "") -> Registration:
        """The component has loaded, and answers at `url` if it is a server. Raises ServerError if another process took the name."""
        if self._failure is not None:
            raise ServerError(self._failure)
        return self._update(state=ServiceState.ready, url=url, port=urlsplit(url).port or 0)

    def waits(self, waits: bool) -> None:
        """Record whether the component waits for its turn to load on shared GPUs."""
        self._update(state=ServiceState.waiting if waits else ServiceState.loading)

    def describe_checkpoint(self, checkpoint: str) -> None:
        self._update(checkpoint=checkpoint)

    def failure(self) -> str | None:
        """Why the registration is no longer ours or no longer writable; None while all is well."""
        return self._failure

    def withdraw(self) -> None:
        """Remove the registration unless another server has the name. A failure is printed: a more important error may be under way."""
        self._stop.set()
        self._thread.join(timeout=self._heartbeat_seconds + 5.0)
        try:
            found = read_registration(self._path)
            if found is not None and found[0].incarnation == self.registration.incarnation:
                self._path.unlink(missing_ok=True)
        except (OSError, ServerError) as error:
            reason = describe_os_error(error, self._path) if isinstance(error, OSError) else error
            print(f"warning: {self.registration.name} leaves its registration behind: {reason}", flush=True)

    def _update(self, **changes: Any) -> Registration:
        self.registration = replace(self.registration, **changes)
        temporary = self._path.with_suffix(f".{self.registration.incarnation}.tmp")
        temporary.write_text(json.dumps(asdict(self.registration), indent=1) + "\n")
        os.replace(temporary, self._path)
        return self.registration

    def _heartbeat(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            try:
                found = read_registration(self._path)
                if found is None or found[0].incarnation != self.registration.incarnation:
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
    attempt: str = "",
    abandoned: threading.Event | None = None,
    tell: Callable[[str], None] | None = None,
) -> Registration:
    """Wait until `name` is ready, alive and of this attempt ("": of any), or `abandoned` is set; `tell` gets a line for each change.

    Raises ServerUnreachable with the place, the time waited, and what was found instead; at once if nobody will start the service again.
    """
    abandoned = abandoned or threading.Event()
    path = registration_path(services_dir, name)
    started = time.monotonic()
    since = time.strftime("%H:%M:%S")
    liveness: Liveness | None = None
    watched: Registration | None = None
    told: object = None
    while True:
        found, news = read_registration(path), None
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
            if attempt and registration.attempt != attempt:
                problem = f"it belongs to attempt {registration.attempt or '(none)'}, this is attempt {attempt}"
            if problem is None and registration.state == ServiceState.ready:
                return registration
            does = "waits for its turn on the GPUs" if registration.state == ServiceState.waiting else "is loading"
            since_start = time.strftime("%H:%M:%S", time.localtime(registration.started_at))
            state = f"{registration.name} {does} on {registration.host} since {since_start} (pid {registration.pid})"
            state = f"stale: {registration.describe()}: {problem}" if problem else state
            news = (registration.incarnation, problem is None)
            if problem is None and registration.state == ServiceState.waiting:
                started = time.monotonic()
        if news != told:
            told = news
            if tell:
                tell(f"waiting for {name}: {state}")
        waited = time.monotonic() - started
        with contextlib.suppress(FileNotFoundError):
            if reason := gone_path(services_dir, name).read_text().strip():
                raise ServerUnreachable(f"{name}: nobody will start it again: {reason}")
        if waited >= timeout_seconds or abandoned.is_set():
            raise ServerUnreachable(
                f"{name}: waited {waited:.0f} s (since {since}) for a ready server to appear as {path}; last seen: {state}. "
                f"Is the {name} server running with the same run directory? See its log."
            )
        abandoned.wait(min(POLL_SECONDS, timeout_seconds - waited))
