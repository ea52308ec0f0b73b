"""Task sets of verifiers (https://github.com/PrimeIntellect-ai/verifiers) as agents: its own server plays the episodes, unchanged.

`environment.name` is the task set, `environment.arguments` the rest of what vf-eval takes as [env], and `environment.python` an interpreter
with verifiers, in an environment of its own; a command may precede it (`srun -N1 ... /path/python`). `environment.server` is the address
to serve at, or, without `python`, that of a server that runs. One `run` plays one session; a prompt's field `task` is its task
(`aligner data tasks`). Harness and runtime are `null` and `subprocess` where the arguments name none: those of verifiers are a shell and a
paid cloud.

The protocol is ZeroMQ's, in the clear and without a key: let it listen at addresses of other machines only in a network of your own. A
server that ends or does not answer is replaced, and the sessions that it played are played again.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aligner.agents import AgentOutcome, ServerGone, SessionAccess
from aligner.agents.verifiers_server import KEY_PREFIX
from aligner.environments import keeper
from aligner.environments.config import EnvironmentConfig
from aligner.errors import ConfigError
from aligner.types import Prompt

SCRIPT = str(Path(__file__).with_name("verifiers_server.py"))
START_SECONDS = 300.0  # its imports take tens of seconds on a machine under load
BEAT_SECONDS = 1.0  # between looks at the server and at what is stopped, while an answer is awaited
HEALTH_SECONDS = 30.0  # between questions whether it lives, and for a busy one to say so
_SCALARS = ("rewards", "metrics", "ok", "stop_condition")


class Verifiers:
    """`aligner.agents.Agents`. Raises ConfigError if the server does not start."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._stopped: set[str] = set()
        self._is_over = False
        self._server: _Server | None = None
        try:
            self._current(None)
        except ModuleNotFoundError as error:
            needs = f"environment.kind=verifiers: needs {error.name}, which is not installed"
            raise ConfigError(f"{needs}: pip install 'aligner[environments]'") from error
        except ServerGone as error:
            raise ConfigError(str(error)) from error

    def play(self, prompt: Prompt, access: SessionAccess) -> AgentOutcome:
        """One episode. Raises ServerGone if the server ends meanwhile."""
        task = prompt.columns.get("task")
        if not isinstance(task, Mapping):
            return AgentOutcome(failed="the prompt's record has no field 'task'; write prompts with `aligner data tasks`")
        server = self._current(None)
        try:
            return server.run(_request(self._config, task, access), lambda: access.session in self._stopped)
        except ServerGone:
            self._current(server)
            raise
        finally:
            self._stopped.discard(access.session)

    def stop(self, session: str) -> None:
        """Its `play` ends within a beat."""
        self._stopped.add(session)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            if self._server is not None:
                self._server.end()

    def _current(self, gone: _Server | None) -> _Server:
        """The server, or the successor of the one that has gone."""
        with self._lock:
            if self._is_over:
                raise ServerGone(f"{self._config.title}: the run is over")
            if self._server is None or self._server is gone:
                if gone is not None:
                    print(f"warning: {self._config.title}: the environment server has gone; another takes its place", flush=True)
                    gone.end()
                self._server = _Server(self._config)
            return self._server


class _Server:
    """A server that is ready, from this side: each question has a connection of its own."""

    def __init__(self, config: EnvironmentConfig) -> None:
        import msgpack
        import zmq

        self._zmq, self._msgpack, self._title = zmq, msgpack, config.title
        self._context = zmq.Context()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._address, deadline = config.server, time.monotonic() + START_SECONDS
        if config.python:
            workers = str(max(1, config.num_processes))
            command = [*_interpreter(config), SCRIPT, "serve", json.dumps(env_of(config)), config.server or "tcp://127.0.0.1:*", workers]
            self._keeper = keeper.keep(command, stdout=subprocess.PIPE)
            self._address = self._first_line()
        while not self._is_healthy(5 * BEAT_SECONDS):
            if self._has_ended() or time.monotonic() > deadline:
                self.end()
                raise ServerGone(f"{self._title}: no environment server answered at {self._address} within {START_SECONDS:g} s")

    def run(self, body: dict[str, Any], is_stopped: Any) -> AgentOutcome:
        """What came of one episode."""
        name, traces, checked = uuid.uuid4().hex.encode(), dict[str, dict[str, Any]](), time.monotonic()
        with self._connection() as socket:
            socket.send_multipart([name, b"run", self._msgpack.packb(body)])
            while True:
                if socket.poll(1000 * BEAT_SECONDS):
                    _, kind, data = socket.recv_multipart()
                    said = self._msgpack.unpackb(data, raw=False, strict_map_key=False)
                    if kind == b"reply":
                        return outcome_of(said, [traces[one["id"]] for one in said.get("traces", []) if one["id"] in traces])
                    apply(traces, said)
                elif is_stopped():
                    socket.setsockopt(self._zmq.LINGER, int(1000 * BEAT_SECONDS))
                    socket.send_multipart([b"c" + name, b"cancel", self._msgpack.packb({"request_id": name.decode()})])
                    return AgentOutcome(failed="it was stopped")
                elif self._has_ended() or (time.monotonic() - checked > HEALTH_SECONDS and not self._is_healthy(HEALTH_SECONDS)):
                    raise ServerGone(f"{self._title}: the environment server ended, or did not answer, during the episode")
                elif time.monotonic() - checked > HEALTH_SECONDS:
                    checked = time.monotonic()

    def end(self) -> None:
        """End it, if it was started here."""
        if self._keeper is not None:
            keeper.end(self._keeper)

    def _connection(self) -> Any:
        socket = self._context.socket(self._zmq.DEALER)
        for option in (self._zmq.LINGER, self._zmq.SNDHWM, self._zmq.RCVHWM):
            socket.setsockopt(option, 0)
        socket.connect(self._address)
        return socket

    def _has_ended(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is not None

    def _is_healthy(self, seconds: float) -> bool:
        with self._connection() as socket:
            socket.send_multipart([b"h", b"health", self._msgpack.packb({})])
            return not self._has_ended() and bool(socket.poll(1000 * seconds))

    def _first_line(self) -> str:
        """The address that it prints; whatever follows goes to this process's output."""
        assert self._keeper is not None and self._keeper.stdout is not None
        out, late = self._keeper.stdout, threading.Timer(START_SECONDS, self.end)
        late.start()
        line = out.readline()
        late.cancel()
        if not line:
            self.end()
            raise ServerGone(f"{self._title}: the environment server ended before it was ready (its output says why)")
        threading.Thread(target=lambda: [print(one.decode(errors="replace"), end="") for one in out], daemon=True).start()
        return str(json.loads(line)["address"])


def apply(traces: dict[str, dict[str, Any]], delta: Mapping[str, Any]) -> None:
    """Follow a trace as far as its reward needs."""
    if delta.get("discard"):  # an attempt that verifiers makes again
        traces.pop(delta["trace"], None)
        return
    trace = traces.setdefault(delta["trace"], {"errors": []})
    trace["errors"] += [one.get("message", "") for one in delta.get("errors", [])]
    trace |= {name: value for name, value in (delta.get("set") or {}).items() if name in _SCALARS}


def outcome_of(reply: Mapping[str, Any], traces: list[dict[str, Any]]) -> AgentOutcome:
    """The reward is the mean over the traces of an episode (one, unless several agents play). Without a trace, or with a failed one, the
    episode has failed, even where the reply says `success`."""
    head = reply.get("head") or {}
    errors = [one.get("message", "") for one in head.get("errors", [])] + [one for trace in traces for one in trace["errors"]]
    if not reply.get("success") or head.get("ok") is False or errors or any(trace.get("ok") is False for trace in traces):
        stops = [str(trace["stop_condition"]) for trace in traces if trace.get("stop_condition")]
        return AgentOutcome(failed="; ".join(filter(None, [reply.get("error"), *errors, *stops])) or "verifiers says that it is not ok")
    rewards = [trace.get("rewards") or {} for trace in traces]
    if not rewards or any(not one or None in one.values() for one in rewards):
        return AgentOutcome(failed="verifiers sent no trace" if not rewards else "verifiers gave no reward")
    totals = [sum(one["score"] * one["weight"] for one in named.values()) for named in rewards]
    metrics = {name: value for trace in traces for name, value in (trace.get("metrics") or {}).items() if value is not None}
    return AgentOutcome(reward=sum(totals) / len(totals), counts={name: float(value) for name, value in metrics.items()})


def env_of(config: EnvironmentConfig) -> dict[str, Any]:
    """What vf-eval takes as [env]. The seats are those that the arguments name; of a task set with one seat it is `agent`."""
    given: dict[str, Any] = json.loads(json.dumps(config.arguments))
    env: dict[str, Any] = given | {"taskset": {"id": config.name} | given.get("taskset", {})}
    seats = [name for name, one in env.items() if isinstance(one, dict) and ("harness" in one or "runtime" in one)] or ["agent"]
    for seat in seats:
        env[seat] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}} | env.get(seat, {})
    env.pop("client", None)
    return env


def verifiers_tasks(config: EnvironmentConfig, count: int, first: int) -> Iterator[dict[str, Any]]:
    """Records of prompts: each task in the field `task`, and its prompt, or its name where a program opens the conversation."""
    command = [*_interpreter(config), SCRIPT, "tasks", json.dumps(env_of(config)), str(count), str(first)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"{config.title}: its tasks cannot be read (exit code {done.returncode}; the lines above say why)")
    for number, line in enumerate(one for one in done.stdout.splitlines() if one.startswith("{")):
        task = json.loads(line)
        yield {"prompt": task.get("prompt") or task.get("name") or f"{config.name} {first + number}", "task": task}


def _request(config: EnvironmentConfig, task: Mapping[str, Any], access: SessionAccess) -> dict[str, Any]:
    client = {"type": "eval", "base_url": access.base_url, "api_key_var": KEY_PREFIX + access.key, **config.arguments.get("client", {})}
    if client["type"] == "train":
        client.setdefault("renderer_model_name", access.tokenizer_path)
    sampling: dict[str, Any] = {"temperature": access.sampling.temperature, "top_p": access.sampling.top_p}
    if access.sampling.max_response_length:
        sampling["max_tokens"] = access.sampling.max_response_length
    return {"task_data": dict(task), "client": client, "model": access.model, "sampling": sampling}


def _interpreter(config: EnvironmentConfig) -> list[str]:
    """The command of `environment.python`. Raises ConfigError if it names nothing."""
    *before, last = shlex.split(config.python) or [""]
    path = Path(last).expanduser()
    path = path / "bin" / "python" if path.is_dir() else path
    if not before and not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"environment.python={config.python}: no interpreter at {path.absolute()}; allowed: an interpreter that has verifiers, or the "
            "folder of its virtual environment, which a command may precede"
        )
    return [*before, str(path)]
