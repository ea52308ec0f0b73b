"""Environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv), over its WebSocket: one connection per episode.

`environment.server` is a URL, or the command of a server that is started here, listens on `{port}` and ends with this process. Each reset
gets `environment.arguments` and a seed: the prompt's field `seed`, else the prompt's place in the data. The policy's text is a field of the
action. An observation of one text is that text, any other one is JSON. An action that the server finds invalid is answered with its reason,
and counted (`invalid_actions`). The episodes of a server that dies are played again on its successor (`aligner.environments.elsewhere`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import shlex
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp

from aligner.environments import keeper
from aligner.environments.config import EnvironmentConfig
from aligner.environments.elsewhere import Died, Elsewhere, FailedElsewhere, Held, Place, Slot, late
from aligner.environments.environment import Observation, Turn
from aligner.environments.workers import Awaiting
from aligner.errors import ConfigError
from aligner.types import Prompt

START_SECONDS = 120.0  # for a server to be ready
CAPACITY_SECONDS = 5.0  # for a server to have room for another session
_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 5.0
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)  # three classes before Python 3.11
_MOST_BYTES = 64 * 2**20  # of a message


class OpenEnv(Elsewhere):
    """`aligner.environments.environment.Environment`."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config, self._awaiting = config, Awaiting(config.title)
        self._slot = Slot(self._succeed)
        super().__init__([self._slot], config.timeout_seconds)
        try:
            server = self._slot.now()
        except FailedElsewhere as error:
            raise ConfigError(f"{config.title}: {error.text}") from error
        self._config = replace(config, action_field=server.only_field())
        server.config = self._config

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        for one in range(seed, seed + count):
            held = self.reset(Prompt(id=one, tokens=(), source="", columns={"seed": one}))
            assert held.first is not None
            yield {"prompt": held.first.text, "seed": one}
            self.drop(held)

    def close(self) -> None:
        """End the server, if it was started here."""
        with self._slot.lock:
            if self._slot.place is not None:
                self._slot.place.end()

    def _succeed(self, last: _Server | None) -> _Server:
        if last is not None:
            if not last.suspected or last.is_healthy():
                last.suspected = False
                return last
            print(f"warning: {self._config.title}: the server has gone ({last.ending()}); waiting for another", flush=True)
            last.end()
        server = _Server(self._config, self._awaiting)
        server.wait(START_SECONDS)
        return server


class _Server(Place):
    """A server. `suspected`: a connection was lost."""

    def __init__(self, config: EnvironmentConfig, awaiting: Awaiting) -> None:
        self.config, self._awaiting = config, awaiting
        self._connections: dict[int, Any] = {}
        self._http: aiohttp.ClientSession | None = None
        self.suspected = False
        self._keeper = None
        self._url = config.server.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        if not self._url.startswith(("http://", "https://")):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self._keeper = keeper.keep([part.replace("{port}", str(port)) for part in shlex.split(config.server)])
            self._url = f"http://127.0.0.1:{port}"

    def wait(self, seconds: float) -> None:
        """Until it is ready. Raises FailedElsewhere."""
        deadline = time.monotonic() + seconds
        print(f"{self.config.title}: waiting up to {seconds:g} s for the server at {self._url}", flush=True)
        while not self.is_healthy():
            if self._keeper is not None and self._keeper.poll() is not None:
                raise FailedElsewhere(f"the server ended with exit code {self._keeper.returncode} before it was ready")
            if time.monotonic() > deadline:
                self.end()
                raise FailedElsewhere(f"no server answered at {self._url}/health within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def is_healthy(self) -> bool:
        try:
            return self._get("/health") is not None
        except (aiohttp.ClientError, OSError, *_TIMEOUTS):
            return False

    def ending(self) -> str:
        """What is known of its end."""
        code = self._keeper.poll() if self._keeper is not None else None
        return f"exit code {code}" if code is not None else f"nothing answers at {self._url}"

    def end(self) -> None:
        """Close all connections, and end it if it was started here."""
        if self._http is not None:
            self._awaiting.settle(self._http.close(), _HEALTH_SECONDS)
        if self._keeper is not None:
            keeper.end(self._keeper)

    def only_field(self) -> str:
        """The field that gets the policy's text: the one that is set, else the only one that an action needs. Raises ConfigError."""
        if self.config.action_field:
            return self.config.action_field
        action = self._get("/schema")["action"]
        needed = action.get("required", [])
        if len(needed) != 1:
            raise ConfigError(
                f"environment.action_field='': actions have the fields {', '.join(action.get('properties', {})) or 'none'}, of which "
                f"{len(needed)} are needed; name the one that gets the policy's text"
            )
        return str(needed[0])

    def ask(self, episode: Held, call: Prompt | Turn, seconds: float) -> Observation:
        try:
            observation: Observation = self._awaiting.settle(self._asked(episode, call), seconds)
            return observation
        except _TIMEOUTS as error:
            raise FailedElsewhere(late(self.config.timeout_seconds, "waiting for its server")) from error
        except (aiohttp.ClientError, OSError, EOFError) as error:
            self.suspected = True
            raise Died(f"the connection ended ({type(error).__name__})") from error
        except RuntimeError as error:  # the session of connections was closed meanwhile
            raise Died(str(error), is_culprit=False) from error

    def forget(self, episode: Held) -> None:
        if (connection := self._connections.pop(episode.number, None)) is not None:
            self._awaiting.begin(_left(connection))

    def _get(self, path: str) -> Any:
        async def get() -> Any:
            async with self._session().get(self._url + path, timeout=aiohttp.ClientTimeout(_HEALTH_SECONDS)) as response:
                return await response.json()

        return self._awaiting.settle(get(), 2 * _HEALTH_SECONDS)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        return self._http

    async def _asked(self, episode: Held, call: Prompt | Turn) -> Observation:
        deadline = time.monotonic() + CAPACITY_SECONDS
        while True:
            try:
                return await self._once(episode, call)
            except _Full:  # connections that were closed may count for a while
                if time.monotonic() > deadline:
                    raise FailedElsewhere(
                        "takes no more sessions at a time: raise its max_concurrent_envs above the number of episodes at a time, or lower "
                        "rollout.max_batch_size"
                    ) from None
                await asyncio.sleep(_POLL_SECONDS)

    async def _once(self, episode: Held, call: Prompt | Turn) -> Observation:
        if isinstance(call, Prompt):
            self._connections[episode.number] = await self._session().ws_connect(f"{self._url}/ws", max_msg_size=_MOST_BYTES)
            message = {"type": "reset", "data": {"seed": int(call.columns.get("seed", call.id)), **self.config.arguments}}
        else:
            message = {"type": "step", "data": {self.config.action_field: call.text}}
        connection = self._connections[episode.number]
        await connection.send_json(message)
        frame = await connection.receive()
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise EOFError(frame.type.name)
        reply = json.loads(frame.data)
        data = reply["data"]
        if reply["type"] == "error":
            if data.get("code") == "VALIDATION_ERROR" and isinstance(call, Turn):
                return Observation(text=f"Not an action: {data.get('message')}", counts={"invalid_actions": 1.0})
            if data.get("code") == "CAPACITY_REACHED":
                await connection.close()
                raise _Full
            raise FailedElsewhere(f"answered {message['type']} with {data.get('code')}: {data.get('message')}")
        return Observation(text=_text(data["observation"]), done=bool(data.get("done")), reward=float(data.get("reward") or 0.0))


class _Full(Exception):
    """The server has as many sessions as it takes."""


async def _left(connection: Any) -> None:
    """End a session as the protocol has it: a connection that only closes is an error in the server's log."""
    with contextlib.suppress(aiohttp.ClientError, OSError, *_TIMEOUTS):
        await connection.send_json({"type": "close"})
        await asyncio.wait_for(connection.receive(), _HEALTH_SECONDS)
        await connection.close()


def _text(observation: dict[str, Any]) -> str:
    given = {name: value for name, value in observation.items() if value is not None}
    shown = {name: value for name, value in given.items() if name not in ("done", "reward", "metadata")}
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return json.dumps(shown, ensure_ascii=False)
