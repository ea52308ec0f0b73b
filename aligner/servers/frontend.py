"""PyTriton on rank 0: one Triton model per endpoint, its processes watched. The only module that imports pytriton, and only when started.

It listens on a Unix socket that only this user can reach, for the gateway; gRPC and metrics listeners stay off.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np

from aligner.errors import ServerError, TritonDied
from aligner.servers import processes
from aligner.servers.config import ServerConfig
from aligner.servers.intake import Submit
from aligner.servers.kserve import TensorSpec
from aligner.servers.processes import parent, processes_with_variable, start_ticks, zombie_children
from aligner.servers.wire import Endpoint

MARKER = "ALIGNER_SERVER_INCARNATION"
TRITON = "tritonserver --id"  # in the command line of Triton itself, not of its stubs

CAUSE_SECONDS = 0.5  # between the death of a helper and the question whether tritonserver died too
BROKEN_SECONDS = 2.0  # to shut down a Triton that has lost a process
ALWAYS_PRINTED = "NODELAY NOT SUPPORTED"  # by Triton's HTTP library for every Unix socket


def _bound_function(endpoint: Endpoint, submit: Submit) -> Callable:
    """What PyTriton calls, in an event loop of its own thread; answers are awaited, not polled."""

    async def infer(requests: list) -> list[dict[str, np.ndarray]]:
        futures = [submit(endpoint, request.data) for request in requests]
        return [await asyncio.wrap_future(future) for future in futures]

    return infer


class Frontend:
    """The Triton processes of one server, forked by a thread of its own: the kernel ties tritonserver's life to that thread."""

    def __init__(self, config: ServerConfig, incarnation: str, log: Path, endpoints: Sequence[Endpoint], submit: Submit) -> None:
        self._config = config
        self._incarnation, self._marker = incarnation, f"{MARKER}={incarnation}"
        self._log = log
        self._endpoints = endpoints
        self._submit = submit
        for left in processes.sweep(Path(tempfile.gettempdir())):
            print(f"server: removed {left}, which a server that was killed had left", flush=True)
        self._workspace = Path(tempfile.mkdtemp(prefix=processes.PREFIX))  # mode 0700
        self._owned = processes.own(self._workspace)
        self.socket = self._workspace / "http"
        command = [sys.executable, "-S", "-E", processes.__file__, str(os.getpid()), self._marker, str(self._workspace)]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._processes: dict[int, tuple[int, str]] = {}
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._ends_well, self._begun = False, ""  # the part of a line printed so far
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pytriton", daemon=True)

    def start(self, stop_requested: Callable[[], bool]) -> None:
        """Return when every endpoint answers. Raises TritonDied (output in `log`), or ServerError if late or not wanted any more."""
        started = time.monotonic()
        self._thread.start()
        while not self._ready.wait(0.1):
            waited = time.monotonic() - started
            if isinstance(self._error, TritonDied):
                raise TritonDied(f"{self._error}; see {self._log}")
            if self._error is not None:
                raise ServerError(f"PyTriton did not start: {self._error}; server.transport=http does not need it") from self._error
            if self._lost_stub():
                raise TritonDied(f"a Python stub of tritonserver died while starting; see {self._log}")
            if stop_requested():
                raise ServerError("a signal ended it while it was starting")
            if waited > self._config.ready_timeout_seconds:
                raise ServerError(f"PyTriton was not ready after {waited:.0f} s (server.ready_timeout_seconds); see {self._log}")
        for segment in Path("/dev/shm").glob(f"pytrtion{os.getpid()}-*"):  # PyTriton's own spelling
            segment.chmod(0o600)  # requests go through it, and Triton's Python backend makes it readable for everybody, whatever the umask
        found = processes_with_variable(self._marker)
        self._processes = {pid: (start_ticks(pid) or 0, command) for pid, command in found.items() if "resource_tracker" not in command}

    def failure(self) -> str | None:
        """Which process of Triton is gone, or None. Health endpoints do not show it: they answer 200 with a dead Python stub."""
        if dead := self._dead():
            if not any(TRITON in command for command in dead.values()):
                time.sleep(CAUSE_SECONDS)  # a dying tritonserver closes its pipes, which ends its helpers, before it counts as dead
                dead = self._dead()
            pid = min(dead, key=lambda pid: (self._processes[pid][0], pid))  # the oldest: it started the others, which ended with it
            return f"process {pid} of Triton died ({dead[pid][:80].strip()}); see {self._log}"
        if self._watchdog.poll() is not None:
            return f"the watchdog process {self._watchdog.pid} died"
        return None

    def _dead(self) -> dict[int, str]:
        return {pid: command for pid, (ticks, command) in self._processes.items() if start_ticks(pid) != ticks}

    def stop(self) -> None:
        """Let Triton unload its models, end its processes and remove everything it made. Callable more than once."""
        has_failed = self.failure() is not None or not self._ready.is_set()
        self._processes, self._ends_well = {}, not has_failed
        self._stop.set()
        # Wait for the thread even if Triton is gone: it restores the environment.
        if self._thread.is_alive() and self._error is None:
            self._thread.join(timeout=BROKEN_SECONDS if has_failed else self._config.shutdown_timeout_seconds)
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            self._watchdog.stdin.close()  # the watchdog takes this for our end and removes what is left
        try:
            self._watchdog.wait(timeout=processes.KILL_SECONDS + 5.0)
        except subprocess.TimeoutExpired:
            print(f"server: the watchdog {self._watchdog.pid} did not end; left: {processes_with_variable(self._marker)}", file=sys.stderr)
        shutil.rmtree(self._workspace, ignore_errors=True)
        if self._owned >= 0:
            os.close(self._owned)
            self._owned = -1
        self._ends_well = True  # later output of PyTriton's threads is not shown: whoever ended it has reported the reason

    def _note(self, text: str) -> None:
        """Write output of Triton or its stubs to the log, and print it unless Triton ends in order."""
        with self._log.open("a") as log:
            log.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if not self._ends_well and ALWAYS_PRINTED not in line:
                print(line, flush=True)

    def _lost_stub(self) -> bool:
        """Whether one of Triton's children is dead. A starting Triton does not notice, and waits forever for its stub's answer."""
        found = processes_with_variable(self._marker)
        servers = [pid for pid, command in found.items() if TRITON in command and parent(pid) == os.getpid()]
        return any(zombie_children(pid) for pid in servers)

    def _run(self) -> None:
        try:
            triton = self._make_triton()
            self._start_marked(triton)
            self._ready.set()
            self._stop.wait()
            triton.stop()
        except Exception as error:
            self._error = error

    def _start_marked(self, triton) -> None:
        """Run Triton with an environment (PyTriton copies ours) that marks its processes and has the interpreter's library."""
        os.environ.setdefault("PATH", os.defpath)  # PyTriton requires one
        libraries = (sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH"))
        # Trackers of shared memory (ours and the stubs') would warn about what a killed Triton has already removed.
        warnings = (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning")
        resource_tracker.ensure_running()
        own = {"LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PYTHONWARNINGS": ",".join(filter(None, warnings))}
        own[MARKER] = self._incarnation
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            triton.run()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _make_triton(self):
        from pytriton.model_config import ModelConfig
        from pytriton.triton import TritonConfig

        from aligner.servers.socket_triton import SocketTriton

        # It warns with a traceback for every error answer; rejections and failures are printed at their source.
        logging.getLogger("pytriton.proxy.inference").setLevel(logging.ERROR)
        # It reports that Triton is gone, some time after `start` or `failure` have reported it with the reason.
        logging.getLogger("pytriton.server.triton_server").setLevel(logging.ERROR)
        config = TritonConfig(
            id=self._incarnation,
            log_file=self._log.resolve(),
            http_address="127.0.0.1",  # nobody listens there; PyTriton checks once, at the end, that Triton is gone
            http_port=1,
            allow_grpc=False,
            allow_metrics=False,
            exit_timeout_secs=max(1, int(self._config.shutdown_timeout_seconds)),
        )
        triton = SocketTriton(config, self._workspace / "workspace", self.socket, lambda: not self._stop.is_set(), self._note)
        atexit.unregister(triton.stop)  # `stop` here ends it; after a start that failed, PyTriton's own would wait for its dead server
        for endpoint in self._endpoints:
            triton.bind(
                model_name=endpoint.name,
                infer_func=_bound_function(endpoint, self._submit),
                inputs=[_tensor(spec) for spec in endpoint.inputs],
                outputs=[_tensor(spec) for spec in endpoint.outputs],
                config=ModelConfig(batching=False),
                strict=True,
            )
        return triton


def _tensor(spec: TensorSpec):
    from pytriton.model_config import Tensor

    dtype = bytes if spec.dtype == "bytes" else np.dtype(spec.dtype).type
    shape = tuple(size if isinstance(size, int) else -1 for size in spec.shape)
    return Tensor(name=spec.name, dtype=dtype, shape=shape, optional=spec.optional)
