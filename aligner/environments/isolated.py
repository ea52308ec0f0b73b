"""Environments in processes of their own: user code that crashes, hangs or fills the memory costs an episode, not the run.

Each of the processes makes the environment once and runs many episodes at a time: plain methods in threads, coroutines in one event loop.
It ends when its connection does, so none outlives the process that samples. Where memory runs out the kernel ends such a process first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, TimeoutError as Overdue
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from aligner.environments.config import EnvironmentConfig
from aligner.environments.elsewhere import Died, Elsewhere, FailedElsewhere, Held, Place, Slot, late
from aligner.environments.environment import Environment, Observation, Turn
from aligner.environments.kinds import build_environment
from aligner.environments.workers import Awaiting
from aligner.errors import AlignerError, ConfigError
from aligner.rewards.load import may_pass, raised
from aligner.types import Prompt

START = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor})"
START_SECONDS = 300.0  # to import the user's code and to make the environment
GRACE_SECONDS = 1.0  # for a coroutine that is late, which is cancelled where it is
STACKS_SECONDS = 0.2  # to write them
_GIB = 2**30


class Isolated(Elsewhere):
    """The environment of `config` in `config.num_processes` processes. Raises ConfigError as making it here would."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._processes = [Slot(self._succeed) for _ in range(config.num_processes)]
        super().__init__(self._processes, config.timeout_seconds)
        try:
            for slot in self._processes:
                slot.place = _Process(config)
            for slot in self._processes:  # they start at the same time
                slot.now()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for slot in self._processes:
            with slot.lock:
                if slot.place is not None:
                    slot.place.kill("was ended with the run")

    def _succeed(self, last: _Process | None) -> _Process:
        if last is not None and not last.end:
            last.check()
            return last
        if last is not None:
            print(f"warning: {self._config.title}: process {last} {last.end}; another takes its place", flush=True)
        process = _Process(self._config)
        process.check()
        return process


class _Process(Place):
    """One process, from this side. `end`: how it ended."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            code = START.format(path=sys.path, module=__name__, descriptor=theirs.fileno())
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )
        self._config = config
        self._lock = threading.Lock()  # of what is sent, and of the fields below
        self._is_ready: Future[Any] = Future()
        self._answers = {0: self._is_ready}
        self._forgotten: deque[int] = deque()
        self._numbers = 0
        self._was_killed = False
        self.end = ""
        threading.Thread(target=self._listen, name=f"environment process {self._child.pid}", daemon=True).start()
        with contextlib.suppress(OSError):  # it has ended, as `check` tells
            self._connection.send(config)

    def __str__(self) -> str:
        return f"{self._child.pid}"

    def check(self) -> None:
        """Wait until it is ready. Raises ConfigError if it does not become so."""
        try:
            refusal = self._is_ready.result(START_SECONDS)
        except Overdue:
            self.kill(f"was not ready within {START_SECONDS:g} s")
            refusal = f"{self._config.title}: its process {self.end}"
        except Died as death:
            refusal = f"{self._config.title}: its process {death} while the environment was made"
        if refusal:
            raise ConfigError(refusal)

    def ask(self, episode: Held, call: Prompt | Turn, seconds: float) -> Observation | None:
        answer: Future[Any] = Future()
        with self._lock:
            if self.end:
                raise Died(self.end, is_culprit=False)
            self._numbers += 1
            number, self._answers[self._numbers] = self._numbers, answer
            forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            try:
                self._connection.send((number, episode.number, call, seconds, forgotten))
            except OSError:
                pass  # `_listen` finds the end and says so
        try:
            value: Observation | None
            value, failure, passes = answer.result(seconds + GRACE_SECONDS)
        except Overdue:
            self._child.send_signal(signal.SIGUSR1)  # `main` has its stacks written, whatever holds the interpreter
            time.sleep(STACKS_SECONDS)
            self.kill("was ended: a step was late")
            raise FailedElsewhere(late(self._config.timeout_seconds, f"where the stacks of process {self} say (above)")) from None
        if failure:
            raise FailedElsewhere(failure, passes=passes)
        return value

    def forget(self, episode: Held) -> None:
        self._forgotten.append(episode.number)

    def kill(self, why: str) -> None:
        """End it at once; whatever else runs there is not the reason."""
        with self._lock:
            if not self.end:
                self.end, self._was_killed = why, True
        self._child.kill()
        self._child.wait()

    def _listen(self) -> None:
        """In its own thread, to the process's end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer = self._connection.recv()
                with self._lock:
                    future = self._answers.pop(number, None)
                if future is not None:
                    future.set_result(answer)
        self._child.kill()
        code = self._child.wait()
        with self._lock:
            self.end = self.end or (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
            left, self._answers = self._answers, {}
        for future in left.values():
            future.set_exception(Died(self.end, is_culprit=not self._was_killed))
        self._connection.close()


def main(descriptor: int) -> None:
    """A process's life: make the environment, answer calls until the connection ends."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(descriptor)
    config: EnvironmentConfig = connection.recv()
    if config.process_memory_gib:
        limit = int(config.process_memory_gib * _GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        served = _Served(connection, build_environment(config), config)
    except AlignerError as error:
        connection.send((0, str(error)))
        return
    connection.send((0, ""))
    with contextlib.suppress(EOFError, OSError):
        while True:
            served.take(*connection.recv())
    os._exit(0)  # whatever still runs: nobody waits for it


class _Served:
    """The environment on the other side."""

    def __init__(self, connection: Connection, environment: Environment, config: EnvironmentConfig) -> None:
        self._connection, self._environment, self._config = connection, environment, config
        self._awaiting = Awaiting(config.title)
        self._lock = threading.Lock()
        self._states: dict[int, Any] = {}

    def take(self, number: int, episode: int, call: Prompt | Turn, seconds: float, forgotten: list[int]) -> None:
        for one in forgotten:
            self._states.pop(one, None)
        threading.Thread(target=self._answer, args=(number, episode, call, seconds), name=self._config.title, daemon=True).start()

    def _answer(self, number: int, episode: int, call: Prompt | Turn, seconds: float) -> None:
        value, failure, passes, started = None, "", True, time.monotonic()
        try:
            if isinstance(call, Prompt):
                self._states[episode] = self._awaiting.settle(self._environment.reset(call), seconds)
            else:
                value = self._awaiting.settle(self._environment.step(self._states[episode], call), seconds)
                if not isinstance(value, Observation):
                    failure, passes = f"returned a {type(value).__name__} from step, expected an Observation", False
        except BaseException as error:  # user code may raise anything; it is raised on the other side
            failure, passes = f"raised {raised(error)}", may_pass(error)
            if isinstance(error, Overdue) and time.monotonic() - started >= seconds:  # no TimeoutError of the user's
                failure = late(self._config.timeout_seconds, "awaiting what it returned")
        self._send(number, (None if failure else value, failure, passes))

    def _send(self, number: int, answer: tuple[Any, ...]) -> None:
        try:
            data = pickle.dumps((number, answer))
        except Exception as error:  # a subclass of Observation may hold anything
            data = pickle.dumps((number, (None, f"returned an observation that cannot be sent: {raised(error)}", False)))
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(data)
