"""Tools of a real MCP server, started as a command and asked by URL, in a toolbox."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from aligner.commands.validate_data import tasks
from aligner.environments import keeper
from aligner.environments.adapters.mcp import McpServers, ToolUse
from aligner.environments.environment import Turn
from aligner.environments.tools import Toolbox
from aligner.errors import ConfigError
from aligner.types import Prompt

SERVER = """
import os, sys, time

from mcp.server import MCPServer

server = MCPServer("sums", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    "The sum."
    return a + b


@server.tool()
def shout(text: str) -> str:
    return text.upper()


@server.tool()
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@server.tool()
def fails(why: str) -> str:
    raise ValueError(why)


@server.tool()
def pid() -> int:
    return os.getpid()


@server.tool()
def die() -> str:
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return f"{sys.executable} {file}"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_calls_their_errors_and_a_server_that_dies(command: str) -> None:
    servers = McpServers([command], timeout_seconds=1.0)
    box = Toolbox({"own": lambda text: f"own {text}"} | servers.tools)

    def said(text: str) -> tuple[str, int]:
        answers = box.answer(text)
        return answers.text, answers.num_errors

    assert said(call("add", a=2, b=3) + "<tool>shout: hello</tool><tool>own: x</tool>") == ("5\nHELLO\nown x", 0)
    text, errors = said(call("add", a="x", b=3))
    assert errors == 1 and text.startswith("error: add: ") and "valid integer" in text
    assert said("<tool>add: 3</tool>") == ("error: add: expected arguments by name: a, b", 1)
    assert said(call("slow", seconds=30))[1] == 1 and "timed out" in said(call("slow", seconds=30))[0]
    assert said(call("fails", why="x"))[1] == 1
    first, errors = said(call("pid"))
    assert errors == 0 and int(first) != os.getpid()
    assert said(call("die")) == ("error: die: Connection closed", 1)
    again, errors = said(call("pid"))
    assert errors == 0 and again != first
    servers.close()
    assert not Path(f"/proc/{again}").exists()


def test_a_server_at_a_url(command: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = keeper.keep([*command.split(), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        servers = McpServers([f"http://127.0.0.1:{port}/mcp"])
        assert servers.tools["add"](a=4, b=5) == "9"
        servers.close()
    finally:
        keeper.end(server)
    assert server.returncode is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port))


def test_an_environment_of_tools_and_their_schemas_in_prompts(command: str, tmp_path: Path) -> None:
    use = ToolUse([command])
    prompt = Prompt(id=0, tokens=(1,), source="")
    asked = use.step(use.reset(prompt), Turn(text=call("add", a=1, b=1), tokens=(1,), number=1))
    assert (asked.text, asked.done, asked.counts) == ("2", False, {"tool_calls": 1.0, "tool_errors": 0.0})
    assert use.step(None, Turn(text="two", tokens=(1,), number=2)).done
    use.close()
    rows = [{"prompt": "1+1?", "answer": "2"}, {"messages": [{"role": "user", "content": "2+2?"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = "environment.path=aligner.environments.adapters.mcp:ToolUse"
    tasks(tmp_path / "with.jsonl", [path, f"environment.arguments={{servers: ['{command}']}}"], 1, 0, str(tmp_path / "p.jsonl"))
    first, second = map(json.loads, (tmp_path / "with.jsonl").read_text().splitlines())
    assert first["prompt"] == [{"role": "user", "content": "1+1?"}] and first["answer"] == "2" and second["messages"] == rows[1]["messages"]
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert names == ["add", "shout", "slow", "fails", "pid", "die"] and first["tools"] == second["tools"]
    assert first["tools"][0]["function"]["description"] == "The sum."


def test_servers_that_do_not_answer(command: str, tmp_path: Path) -> None:
    for servers, complaint in (
        (["/no/such/program"], "the MCP server '/no/such/program' does not say what tools it has: FileNotFoundError"),
        ([f"{sys.executable} -c pass"], "does not say what tools it has"),
        (["http://127.0.0.1:9/mcp"], "does not say what tools it has"),
        ([command, command], "has a tool 'add', as another one has"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            McpServers(servers)


def test_a_kept_server_ends_with_its_exit_code_or_with_who_started_it(tmp_path: Path) -> None:
    assert keeper.keep([sys.executable, "-c", "raise SystemExit(7)"]).wait(60) == 7
    assert keeper.keep(["/no/such/program"]).wait(60) == 127
    script = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    kept = keeper.keep([sys.executable, "-c", script], stdout=-1)
    pid = int(kept.stdout.readline())
    keeper.end(kept)  # it does not listen to SIGTERM
    assert not Path(f"/proc/{pid}").exists()
