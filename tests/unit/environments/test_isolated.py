"""Environments in processes of their own: what their code does costs one episode, and they say what they say in threads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aligner.environments.config import EnvironmentConfig, OnEnvironmentError
from aligner.environments.environment import Turn
from aligner.environments.exchange import Converting, EnvironmentFollowUp, EpisodeError
from aligner.environments.isolated import Isolated
from aligner.environments.kinds import build_environment
from aligner.errors import ConfigError
from aligner.protocols import Reply
from aligner.types import Prompt

MINE = """
import asyncio, os, sys, time
from pathlib import Path

from aligner.environments.environment import Observation


class Obeys:
    def __init__(self, folder="", fails=False):
        self.folder = folder
        if fails:
            raise ValueError("not today")

    def reset(self, prompt):
        return {"heard": [prompt.text], "pid": os.getpid()}

    def once(self, name):
        done = Path(self.folder) / name
        seen = done.exists()
        done.touch()
        return not seen

    def step(self, state, turn):
        word, _, rest = turn.text.partition(" ")
        if word == "crash" or word == "crash_once" and self.once(rest):
            os.kill(os.getpid(), 9)
        if word == "leave":
            sys.exit(0)
        if word == "hang":
            while True:
                time.sleep(1)
        if word == "nap":
            time.sleep(float(rest))
        if word == "raise":
            raise KeyError(rest)
        if word == "connect":
            raise ConnectionError("no route")
        if word == "fill":
            state["much"] = bytearray(2**31)
        if word == "odd":
            return 7
        if word == "chance":
            return Observation(text=str(os.getpid()))
        state["heard"].append(turn.text)
        return Observation(text="|".join(state["heard"]), reward=len(state["heard"]), counts={"pid": state["pid"]}, done=word == "end")


class Waits(Obeys):
    async def step(self, state, turn):
        if turn.text == "wait":
            await asyncio.sleep(600)
        return Observation(text=str(state["heard"]))
"""
QUICK = 2.0


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("isolated") / "mine.py"
    file.write_text(MINE)
    return file


def config_of(mine: Path, name: str = "Obeys", **settings) -> EnvironmentConfig:
    given = {"path": f"{mine}:{name}", "num_processes": 1, "timeout_seconds": 30.0, "arguments": {"folder": str(mine.parent)}}
    return EnvironmentConfig(**given | settings)


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=number, tokens=(1,), source=f"data.jsonl:{number}", text=f"p{number}")


def turn(text: str, number: int = 1, **more: bool) -> Turn:
    return Turn(text=text, tokens=(1,), number=number, **more)


class Talks:
    """Conversations through the exchange, as an engine has them."""

    def __init__(self, config: EnvironmentConfig) -> None:
        environment = Isolated(config) if config.num_processes else build_environment(config)
        converting = Converting(decode=lambda tokens: "", observe=lambda text, last: tuple(text.encode()))
        limits = {"max_turns": 9, "timeout_seconds": config.timeout_seconds, "num_workers": config.num_workers}
        self.follow_up = EnvironmentFollowUp(environment, converting, on_error=config.on_error, name=config.title, **limits)
        self.exchange = self.follow_up.open()
        self.words: dict[int, str] = {}
        self.follow_up.converting = Converting(decode=lambda tokens: self.words[tokens[0]], observe=lambda text, last: tuple(text.encode()))

    def say(self, words: dict[int, str], number: int) -> None:
        self.words = words
        for episode in words:
            self.exchange.say(episode, prompt(episode), [episode], number=number, is_cut=False, is_last=False)

    def hear(self, count: int) -> dict[int, Reply]:
        heard: dict[int, Reply] = {}
        deadline = time.monotonic() + 120
        while len(heard) < count and time.monotonic() < deadline:
            heard |= dict(self.exchange.hear(1.0))
        return heard

    def turn(self, words: dict[int, str], number: int) -> dict[int, Reply]:
        self.say(words, number)
        return self.hear(len(words))


def without_pid(reply: Reply) -> tuple:
    return reply.tokens, reply.done, reply.reward, reply.failed


def test_processes_say_what_threads_say_token_for_token(mine: Path) -> None:
    talks = [Talks(config_of(mine, num_processes=number)) for number in (0, 2)]
    script = [{i: f"hello {i}" for i in range(6)}, {i: f"again {i}" for i in range(6)}, {i: "end" for i in range(6)}]
    here, there = ([one.turn(words, number) for number, words in enumerate(script, start=1)] for one in talks)
    for mine_, theirs in zip(here, there, strict=True):
        assert {i: without_pid(reply) for i, reply in mine_.items()} == {i: without_pid(reply) for i, reply in theirs.items()}
    pids = [{reply.counts["pid"] for reply in turns.values()} for turns in there]
    assert all(len(one) == 2 for one in pids) and os.getpid() not in pids[0] and len(set().union(*pids)) == 2  # states stay where they are
    talks[1].follow_up.close()


CULPRITS = {  # at the same time, in one process
    "raise x": r"raised KeyError: 'x' \(at .*mine\.py:\d+, in step\)",
    "connect": "raised ConnectionError: no route",
    "odd": "returned a int from step, expected an Observation",
    "leave": "SystemExit: it ended the program",
    "fill": "raised MemoryError",
}
DEADLY = {
    "crash": "ended its process in this step, 2 times: was killed by signal 9",
    "hang": r"returned nothing within environment.timeout_seconds=2: it was where the stacks of process \d+ say",
}


def test_what_goes_wrong_costs_one_episode(mine: Path, capsys) -> None:
    """The others were in the same process; one of them was in the middle of a step."""
    config = config_of(mine, on_error=OnEnvironmentError.invalid, process_memory_gib=1.5)
    talks = Talks(config)
    talks.turn({i: f"first {i}" for i in range(8)}, 1)
    second = talks.turn(dict(enumerate([*CULPRITS, "nap 0.5", "second", "second"])), 2)
    assert [second[i].failed for i in range(8)] == [True] * 5 + [False] * 3
    said = capsys.readouterr().out
    assert all(re.search(complaint, said) for complaint in CULPRITS.values()), said
    assert talks.turn({i: "end" for i in (5, 6, 7)}, 3)[6].reward == 4.0
    talks.follow_up.close()


@pytest.mark.parametrize("words", DEADLY)
def test_the_end_of_a_process_costs_one_episode(mine: Path, capfd, words: str) -> None:
    seconds = QUICK if words == "hang" else 30.0
    talks = Talks(config_of(mine, timeout_seconds=seconds, on_error=OnEnvironmentError.invalid))
    talks.turn({i: f"first {i}" for i in range(4)}, 1)
    second = talks.turn({0: words, 1: "nap 0.5", 2: "second", 3: "second"}, 2)
    assert [second[i].failed for i in range(4)] == [True, False, False, False]
    assert bytes(second[1].tokens).decode() == "p1|first 1|nap 0.5"
    out, err = capfd.readouterr()
    assert re.search(DEADLY[words], out) and (words != "hang" or re.search(r'File ".*mine\.py", line \d+ in step', err))
    third = talks.turn({i: "end" for i in (1, 2, 3)}, 3)
    assert [(third[i].reward, third[i].done) for i in (1, 2, 3)] == [(4.0, True)] * 3
    assert talks.turn({7: "end"}, 1)[7].reward == 2.0  # a new episode
    talks.follow_up.close()


def test_a_failure_ends_the_run_by_default(mine: Path) -> None:
    talks = Talks(config_of(mine))
    talks.say({0: "raise x"}, 1)
    with pytest.raises(EpisodeError, match=r"environment\.path=.*Obeys raised KeyError.*data\.jsonl:0"):
        talks.hear(1)
    talks.follow_up.close()


def test_a_killed_process_loses_nothing(mine: Path, capsys) -> None:
    """Somebody else kills it between two turns, and in the middle of a step: nothing is lost and nothing is said twice. Only an episode
    whose environment does not repeat itself cannot go on."""
    talks = Talks(config_of(mine, on_error=OnEnvironmentError.invalid))
    first = talks.turn({i: "first" for i in range(4)} | {4: "chance"}, 1)
    os.kill(int(first[0].counts["pid"]), signal.SIGKILL)
    second = talks.turn({i: "second" for i in range(5)}, 2)
    assert [bytes(second[i].tokens).decode() for i in range(4)] == [f"p{i}|first|second" for i in range(4)]
    assert second[4].failed
    assert "did not say again, after its process had died, what it had said in turn 1" in capsys.readouterr().out
    third = talks.turn({0: "crash_once a", 1: "third", 2: "third", 3: "nap 1"}, 3)
    assert [reply.failed for reply in third.values()] == [False] * 4
    assert bytes(third[0].tokens).decode() == "p0|first|second|crash_once a"
    talks.follow_up.close()


def test_coroutines_and_one_that_is_late(mine: Path, capsys) -> None:
    """It is cancelled, and its process lives."""
    talks = Talks(config_of(mine, "Waits", timeout_seconds=QUICK, on_error=OnEnvironmentError.invalid))
    process = talks.follow_up.environment._processes[0].place
    replies = talks.turn({0: "wait", 1: "hello"}, 1)
    assert replies[0].failed and not replies[1].failed and not process.end
    assert "within environment.timeout_seconds=2: it was awaiting what it returned" in capsys.readouterr().out
    talks.follow_up.close()


def test_many_episodes_at_once_and_their_states_go(mine: Path) -> None:
    environment = Isolated(config_of(mine, num_processes=2))
    with ThreadPoolExecutor(32) as threads:
        held = list(threads.map(environment.reset, map(prompt, range(200))))
        said = list(threads.map(lambda one: environment.step(one, turn("hello")), held))
    assert [one.text for one in said] == [f"p{i}|hello" for i in range(200)]
    assert sorted(len(slot.episodes) for slot in environment.slots) == [100, 100]
    del held
    assert [len(slot.episodes) for slot in environment.slots] == [0, 0]
    environment.close()
    assert all(slot.place._child.poll() is not None for slot in environment._processes)


STARTS = """
import sys
from aligner.environments.config import EnvironmentConfig
from aligner.environments.isolated import Isolated
environment = Isolated(EnvironmentConfig(path=sys.argv[1], num_processes=1))
print(environment.slots[0].place, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_process_that_started_it(mine: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS, f"{mine}:Obeys"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.communicate()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_environment_that_cannot_be_made(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.path=.*cannot be made from .*ValueError: not today"):
        Isolated(config_of(mine, arguments={"fails": True}, num_processes=2))
    (tmp_path / "dies.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(ConfigError, match="its process ended with exit code 5 while the environment was made"):
        Isolated(config_of(tmp_path / "dies.py", "Any"))


@pytest.mark.parametrize("given", [{"num_processes": -1}, {"process_memory_gib": 1.0, "num_processes": 0}, {"process_memory_gib": -1.0}])
def test_bad_settings(mine: Path, given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.(num_processes|process_memory_gib)="):
        config_of(mine, **given)


def test_an_observation_that_cannot_be_sent(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "from aligner.environments.environment import Observation\n\n\nclass Odd:\n    def reset(self, prompt):\n        return None\n\n"
        "    def step(self, state, turn):\n        return Observation(counts=type('Counts', (dict,), {})(a=1.0))\n"
    )
    environment = Isolated(config_of(tmp_path / "odd.py", "Odd", arguments={}))
    with pytest.raises(Exception, match="cannot be sent"):
        environment.step(environment.reset(prompt()), turn("x"))
    environment.close()
