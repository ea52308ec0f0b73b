"""Agents of verifiers: its protocol, over a package of that name that does what a task says."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.agents import AgentOutcome, SessionAccess
from aligner.agents.verifiers import ServerGone, Verifiers, apply, env_of, outcome_of, verifiers_tasks
from aligner.commands.validate_data import tasks
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.errors import ConfigError
from aligner.types import Prompt, SamplingConfig

SERVE = """
import os

import msgpack
import zmq


def serve_env(*, config, address, address_queue, log_setup, max_workers, elastic):
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    address_queue.put(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        client, name, method, data = socket.recv_multipart()
        body = msgpack.unpackb(data)

        def say(kind, value, name=name):
            socket.send_multipart([client, name, kind, msgpack.packb(value)])

        def trace(key, **values):
            say(b"delta", {"trace": key, "open": {"id": key}, "set": values})

        reply = {"success": True, "error": None}
        if method == b"run":
            do = body["task_data"]["do"]
            right = {"right": {"score": 0.5, "weight": 2.0}, "form": {"score": 1.0, "weight": 0.25}}
            reply |= {"head": {"ok": True, "errors": []}, "traces": [{"id": "b", "nodes": 0, "calls": 0}]}
            if do == "die":
                os._exit(9)
            if do == "hang":
                continue
            if do == "refuse":
                reply = {"success": False, "error": "ValueError: no"}
            elif do == "no trace":
                reply |= {"head": {"ok": False, "errors": [{"message": "it broke"}]}, "traces": []}
            elif do == "key":
                key = os.environ.get(body["client"]["api_key_var"])
                rewards = {"key": {"score": float(key), "weight": 1.0}}
                trace("b", ok=True, rewards=rewards, metrics={"tokens": body["sampling"]["max_tokens"]})
            elif do == "provider":
                trace("b", ok=False, rewards={}, stop_condition="provider_error")
            else:
                trace("a", ok=False, rewards={})
                say(b"delta", {"trace": "a", "discard": True})
                trace("b", rewards={"right": None})
                trace("b", ok=True, rewards=right, metrics={"words": 3.0})
        elif method == b"cancel":
            say(b"reply", {"success": False, "error": "Cancelled"}, name=body["request_id"].encode())
        say(b"reply", reply)
"""
LOADERS = """
class Bare:
    def __init__(self, **values):
        self.__dict__.update(values)


def resolve_env_config(data):
    if data["taskset"]["id"] == "unknown":
        raise ModuleNotFoundError("taskset 'unknown' not found")
    return Bare(taskset=data["taskset"], data=data)


def load_taskset(taskset):
    for number in range(taskset["size"]):
        task = {"do": "win", "prompt": f"say {number}" if number else None, "name": f"task {number}"}
        yield Bare(data=Bare(model_dump=lambda mode, task=task: task))
"""


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("package")
    inside = folder / "verifiers" / "v1"
    (inside / "utils").mkdir(parents=True)
    (inside / "serve.py").write_text(SERVE)
    (inside / "utils" / "loaders.py").write_text(LOADERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def config_of(**settings) -> EnvironmentConfig:
    given = {"name": "games", "python": sys.executable, "arguments": {"taskset": {"size": 5}}}
    return EnvironmentConfig(kind=EnvironmentKind.verifiers, **given | settings)


@pytest.fixture(scope="module")
def agents(package) -> Verifiers:
    made = Verifiers(config_of())
    yield made
    made.close()


def play(agents: Verifiers, do: str, number: int = 1) -> AgentOutcome:
    at = {"root_url": "http://127.0.0.1:1", "model": "policy", "seed": 0, "sampling": SamplingConfig(max_response_length=7)}
    access = SessionAccess(session=f"s{number}", key=str(number), tokenizer_path="t", **at)
    return agents.play(Prompt(id=0, tokens=(1,), source="", columns={"task": {"do": do}}), access)


def test_the_reward_is_the_weighted_sum_of_the_last_attempt(agents: Verifiers) -> None:
    assert play(agents, "win") == AgentOutcome(reward=1.25, counts={"words": 3.0})


def test_each_session_has_its_own_key(agents: Verifiers) -> None:
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(lambda number: play(agents, "key", number), range(50)))
    assert [one.reward for one in outcomes] == list(range(50)) and outcomes[0].counts == {"tokens": 7.0}


@pytest.mark.parametrize(("do", "why"), [("no trace", "it broke"), ("refuse", "ValueError: no"), ("provider", "provider_error")])
def test_a_failure_is_no_reward(agents: Verifiers, do: str, why: str) -> None:
    assert play(agents, do) == AgentOutcome(failed=why)


def test_a_session_that_is_stopped(agents: Verifiers) -> None:
    threading.Timer(1.0, lambda: agents.stop("s3")).start()
    assert play(agents, "hang", 3).failed in ("it was stopped", "Cancelled")
    agents.stop("nobody")


def test_a_server_that_ends_or_is_killed_is_replaced(agents: Verifiers, capsys) -> None:
    with pytest.raises(ServerGone, match=r"environment\.name=games: the environment server ended"):
        play(agents, "die")
    assert play(agents, "win").reward == 1.25
    keeper = agents._server._keeper.pid
    (pid,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    threading.Timer(1.0, lambda: os.kill(int(pid), signal.SIGKILL)).start()
    with ThreadPoolExecutor(4) as threads:
        playing = [threads.submit(play, agents, "hang", number) for number in range(4)]
        assert all(isinstance(one.exception(60), ServerGone) for one in playing)
    assert play(agents, "win").reward == 1.25
    assert capsys.readouterr().out.count("another takes its place") == 2  # one for all four


def test_a_record_without_a_task(agents: Verifiers) -> None:
    access = SessionAccess(root_url="", session="s", key="k", model="m", seed=0, sampling=SamplingConfig(), tokenizer_path="")
    assert "has no field 'task'" in agents.play(Prompt(id=0, tokens=(1,), source=""), access).failed


def test_tasks_are_written(tmp_path: Path) -> None:
    rows = list(verifiers_tasks(config_of(), 3, 0))
    assert [row["prompt"] for row in rows] == ["task 0", "say 1", "say 2"] and rows[1]["task"]["do"] == "win"
    given = [f"environment.{name}={value}" for name, value in (("kind", "verifiers"), ("name", "games"), ("python", sys.executable))]
    tasks(tmp_path / "t.jsonl", [*given, "environment.arguments.taskset.size=4"], 9, 2, "")
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"environment\.name=unknown: the environment server ended before it was ready"):
        Verifiers(config_of(name="unknown"))
    with pytest.raises(ConfigError, match=r"environment\.name=unknown: its tasks cannot be read \(exit code 1"):
        list(verifiers_tasks(config_of(name="unknown"), 1, 0))
    with pytest.raises(ConfigError, match=r"environment\.python=/no/such: no interpreter at /no/such"):
        Verifiers(config_of(python="/no/such"))


def test_its_server_ends_with_it(package) -> None:
    made = Verifiers(config_of())
    keeper = made._server._keeper
    made.close()
    assert keeper.poll() is not None
    with pytest.raises(ServerGone, match="the run is over"):
        play(made, "win")


def test_what_vf_eval_would_be_given() -> None:
    """A harness and a runtime that need no cloud, unless others are named; not the settings of the client."""
    local = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    assert env_of(config_of()) == {"taskset": {"id": "games", "size": 5}, "agent": local}
    player = {"player": {"harness": {"id": "codex"}}, "client": {"type": "train"}}
    assert env_of(config_of(arguments=player)) == {"taskset": {"id": "games"}, "player": local | player["player"]}


def test_several_traces_and_rewards_that_are_missing() -> None:
    traces: dict[str, dict] = {}
    for name, score in (("a", 1.0), ("b", 0.0)):
        apply(traces, {"trace": name, "set": {"ok": True, "rewards": {"r": {"score": score, "weight": 1.0}}}})
    good = {"success": True, "head": {"ok": True}}
    assert outcome_of(good, list(traces.values())).reward == 0.5
    assert outcome_of(good, []).failed == "verifiers sent no trace"
    for rewards in ({}, {"r": None}):
        assert outcome_of(good, [{"errors": [], "ok": True, "rewards": rewards}]).failed == "verifiers gave no reward"
    apply(traces, {"trace": "a", "errors": [{"message": "late"}]})
    assert outcome_of(good, list(traces.values())).failed == "late"
