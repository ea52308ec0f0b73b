"""Tools of MCP servers (https://modelcontextprotocol.io) for a `Toolbox`, and an environment of nothing else.

    Toolbox({"search": search} | McpServers(["python server.py", "http://host:8000/mcp"]).tools)

A command is started once in each process that steps, with the few variables of its surroundings that the protocol's package passes on (`env
NAME=VALUE command` adds one), and ends with that process: its standard input closes. A URL is a server of streamable HTTP. A call that a
server refuses, or does not answer in time, is answered with an error, as any tool's; a server that has ended is started again.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters
from mcp_types import CONNECTION_CLOSED

from aligner.environments.environment import Observation, Turn
from aligner.environments.tools import CLOSE, OPEN, Toolbox, ToolError
from aligner.errors import ConfigError
from aligner.types import Prompt


class McpServers:
    """Servers that run, and their tools by name. Raises ConfigError if one does not start, or two have a tool of one name."""

    def __init__(self, servers: Sequence[str], *, timeout_seconds: float = 20.0) -> None:
        self._servers = [_Server(one, timeout_seconds) for one in servers]
        self.tools: dict[str, Callable[..., str]] = {}
        self.schemas: list[dict[str, Any]] = []  # as chat templates read them
        try:
            for server in self._servers:
                for name, description, parameters in server.tools():
                    if name in self.tools:
                        raise ConfigError(
                            f"the MCP server {server.name!r} has a tool {name!r}, as another one has; allowed: different names"
                        )
                    self.tools[name] = _tool(server, name, parameters)
                    function = {"name": name, "description": description, "parameters": parameters}
                    self.schemas.append({"type": "function", "function": function})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers that were started here, and the connections."""
        for server in self._servers:
            server.close()


class ToolUse:
    """An environment: the calls of a turn are answered by the tools of MCP servers, and the first turn without one is the last. It gives no
    reward of its own: reward functions read the whole episode."""

    def __init__(self, servers: Sequence[str], timeout_seconds: float = 20.0, *, open: str = OPEN, close: str = CLOSE) -> None:
        self._servers = McpServers([servers] if isinstance(servers, str) else servers, timeout_seconds=timeout_seconds)
        self._toolbox = Toolbox(self._servers.tools, open=open, close=close)

    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools: `aligner data tasks --prompts` adds them to prompts."""
        return self._servers.schemas

    def reset(self, prompt: Prompt) -> None:
        """No state."""

    def step(self, state: None, turn: Turn) -> Observation:
        answers = self._toolbox.answer(turn.text)
        return Observation(done=True) if answers is None else Observation(text=answers.text, counts=answers.counts)

    def close(self) -> None:
        self._servers.close()


def _tool(server: _Server, name: str, parameters: dict[str, Any]) -> Callable[..., str]:
    """The tool as a function of named arguments, or of one text if it has only one argument. The server checks them."""
    known = list(parameters.get("properties", {}))

    def call(*text: str, **arguments: Any) -> str:
        if len(text) > 1 or (text and len(known) != 1):
            raise ToolError(f"{name}: expected arguments by name: {', '.join(known) or 'none'}")
        return server.call(name, arguments | dict(zip(known, text, strict=False)))

    return call


class _Server:
    """One server. Its connection is made again if it has ended."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.name = name
        self._seconds = timeout_seconds
        self._lock = threading.Lock()
        self._connection: tuple[BlockingPortal, Client] | None = None
        self._open = contextlib.ExitStack()

    def tools(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(name, description, schema of the arguments) of each. Raises ConfigError."""
        try:
            portal, client = self._connected()
            cursor: str | None = ""
            while cursor is not None:
                page = portal.call(partial(client.list_tools, cursor=cursor or None))
                yield from ((one.name, one.description or "", one.input_schema) for one in page.tools)
                cursor = page.next_cursor
        except Exception as error:  # of whatever is at the other end
            raise ConfigError(f"the MCP server {self.name!r} does not say what tools it has: {_shown(error)}") from error

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The answer as text. Raises ToolError."""
        try:
            portal, client = self._connected()
            result = portal.call(partial(client.call_tool, tool, arguments, read_timeout_seconds=self._seconds))
        except Exception as error:  # it refuses, is late, has ended, or speaks another language
            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED:
                self.close()  # the next call connects again
            raise ToolError(f"{tool}: {error if isinstance(error, MCPError) else _shown(error)}") from error
        text = "\n".join(one.text if one.type == "text" else f"[{one.type}]" for one in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(f"{tool}: {text}")
        return text

    def close(self) -> None:
        """End the connection, and the server if it was started here."""
        with self._lock, contextlib.suppress(Exception):  # what the other end does then is nobody's concern
            self._connection = None
            self._open.close()

    def _connected(self) -> tuple[BlockingPortal, Client]:
        with self._lock:
            if self._connection is None:
                is_url = self.name.startswith(("http://", "https://"))
                command, *arguments = [self.name] if is_url else shlex.split(self.name)
                client = Client(command if is_url else StdioServerParameters(command=command, args=arguments))
                portal = self._open.enter_context(start_blocking_portal())
                self._connection = portal, self._open.enter_context(portal.wrap_async_context_manager(client))
            return self._connection


def _shown(error: BaseException) -> str:
    """The first cause in a group of errors, as the package raises them."""
    while isinstance(inner := getattr(error, "exceptions", None), (tuple, list)) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"
