"""Programs as agents: what they are given, what they say, and that nothing of them is left; what cannot be combined with agents."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from training_jobs import eventually

from aligner.agents import AgentOutcome, SessionAccess
from aligner.agents.command import CommandAgents, passed_on
from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.online_distill import TrainOnlineDistillation
from aligner.algorithms.online_dpo import TrainOnlineDPO
from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.rejection_sampling import TrainRejectionSampling
from aligner.environments.config import EnvironmentConfig, EnvironmentKind, SessionsConfig
from aligner.errors import ConfigError
from aligner.jobs.agents import create_agents
from aligner.models.config import ModelConfig
from aligner.rollout.config import RolloutConfig
from aligner.types import Prompt, SamplingConfig

TASK = Prompt(
    id=3, tokens=(1,), source="t.jsonl:4", text="2+2?", answer="4", columns={"level": 2}, messages=({"role": "user", "content": "2+2?"},)
)


def access(session: str = "s1") -> SessionAccess:
    own = {"session": session, "key": f"{session}.secret", "model": "policy", "seed": 11, "sampling": SamplingConfig()}
    return SessionAccess(root_url="http://127.0.0.1:9", tokenizer_path="/t", **own)


def program(folder: Path, text: str) -> list[str]:
    path = folder / "agent.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def played(folder: Path, text: str) -> AgentOutcome:
    return CommandAgents(program(folder, text)).play(TASK, access())


def test_what_a_program_is_given(tmp_path, monkeypatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SEARCH_API_KEY", "DB_PASSWORD", "RANK", "MASTER_ADDR", "ALIGNER_SECRET_THING"):
        monkeypatch.setenv(name, "x")
    for name in ("TOKENIZERS_PARALLELISM", "PLAIN", "ALIGNER_LAUNCHER_ID"):
        monkeypatch.setenv(name, "kept")
    text = f"""
import json, os, sys
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["ALIGNER_TASK_FILE"]))
json.dump([task, dict(os.environ)], open({str(tmp_path / "seen.json")!r}, "w"))
print("thinking")
print(json.dumps({{"reward": 0.5, "counts": {{"tools": 2}}}}))
"""
    agents = CommandAgents(program(tmp_path, text), pass_environment=["SEARCH_API_KEY"])
    assert agents.play(TASK, access()) == AgentOutcome(reward=0.5, counts={"tools": 2})
    task, seen = json.loads((tmp_path / "seen.json").read_text())
    messages = [{"role": "user", "content": "2+2?"}]
    assert task == {"id": 3, "source": "t.jsonl:4", "prompt": "2+2?", "messages": messages, "answer": "4", "record": {"level": 2}}
    assert (seen["OPENAI_BASE_URL"], seen["ANTHROPIC_BASE_URL"]) == ("http://127.0.0.1:9/v1", "http://127.0.0.1:9")
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "s1.secret" and seen["ALIGNER_SESSION"] == "s1"
    assert seen["OPENAI_MODEL"] == seen["ALIGNER_MODEL"] == "policy" and seen["ALIGNER_SEED"] == "11"
    assert seen["PLAIN"] == seen["TOKENIZERS_PARALLELISM"] == seen["ALIGNER_LAUNCHER_ID"] == "kept" and seen["SEARCH_API_KEY"] == "x"
    assert not seen.keys() & {"HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "RANK", "MASTER_ADDR", "ALIGNER_SECRET_THING"}
    assert not Path(seen["ALIGNER_TASK_FILE"]).exists()
    assert "PATH" in passed_on(os.environ)


NO_REWARD = "the last line of its standard output {}"


@pytest.mark.parametrize(
    "text, outcome",
    [
        ("print('no reward')", AgentOutcome(said=NO_REWARD.format("is 'no reward', not {\"reward\": NUMBER}"))),
        ("", AgentOutcome(said=NO_REWARD.format("is missing"))),
        ("print('{\"reward\": null}')", AgentOutcome()),
        ("print('{\"reward\": 1}'); print('done')", AgentOutcome(said=NO_REWARD.format("is 'done', not {\"reward\": NUMBER}"))),
        ("print('[1]')", AgentOutcome(said=NO_REWARD.format("is '[1]', not {\"reward\": NUMBER}"))),
        ("print('x' * 300_000); print('{\"reward\": -2}', end='')", AgentOutcome(reward=-2)),
    ],
)
def test_what_a_program_says(tmp_path, text: str, outcome: AgentOutcome) -> None:
    assert played(tmp_path, text) == outcome


@pytest.mark.parametrize(
    "text, why",
    [
        (
            "import sys; print('{\"reward\": 1}'); sys.exit('no such tool')",
            "it ended with exit code 1; it wrote to standard error: no such tool",
        ),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal SIGKILL"),
        ('print(\'{"reward": "1"}\')', "it printed reward='1': must be a finite number, or null for none"),
        ("print('{\"reward\": NaN}')", "it printed reward=nan: must be"),
        ("print('{\"reward\": true}')", "it printed reward=True: must be"),
        ('print(\'{"reward": 1, "counts": [2]}\')', r"it printed counts=\[2\]: must be numbers by name"),
    ],
)
def test_a_program_that_fails_has_no_reward(tmp_path, text: str, why: str) -> None:
    outcome = played(tmp_path, text)
    assert outcome.reward is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(outcome.failed)


def test_a_program_that_is_not_there(tmp_path) -> None:
    outcome = CommandAgents([str(tmp_path / "none")]).play(TASK, access())
    assert "it ended with exit code 127; it wrote to standard error: cannot run" in outcome.failed


CHILDREN = """
import os, subprocess, sys, time
for session in (False, True):  # of its process group, and of another one
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=session)
    print(child.pid, flush=True)
    open({path!r}, "a").write(f"{{child.pid}} ")
print("asleep", file=sys.stderr, flush=True)
{rest}
"""


def alive(pids: list[int]) -> list[int]:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return [pid for pid in pids if runs(pid)]


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_stopped_program_takes_all_that_it_started_with_it(tmp_path, how: str) -> None:
    path = tmp_path / "pids"
    agents = CommandAgents(program(tmp_path, CHILDREN.format(path=str(path), rest="time.sleep(100)")))
    outcomes: list[AgentOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(agents.play(TASK, access())))
    thread.start()
    assert eventually(lambda: path.exists() and len(path.read_text().split()) == 2)
    pids = [int(word) for word in path.read_text().split()]
    assert alive(pids) == pids
    agents.stop("another")
    agents.stop("s1") if how == "stop" else agents.close()
    thread.join(20)
    assert outcomes[0].reward is None and outcomes[0].failed.startswith("it was stopped")
    assert eventually(lambda: not alive(pids))
    if how == "close":
        assert agents.play(TASK, access()).failed == "it was not started: the run ends"


def test_what_a_program_leaves_running_holds_nobody_up(tmp_path) -> None:
    path = tmp_path / "pids"
    text = CHILDREN.format(path=str(path), rest="print('{\"reward\": 3}')").replace("(False, True)", "(False, False)")
    assert played(tmp_path, text).reward == 3
    assert eventually(lambda: not alive([int(word) for word in path.read_text().split()]))


def test_settings() -> None:
    config = EnvironmentConfig(kind=EnvironmentKind.command, command=["sh", "agent.sh"])
    assert isinstance(create_agents(config), CommandAgents) and config.title == "environment.command=['sh', 'agent.sh']"
    with pytest.raises(ConfigError, match=r"environment.command=\['pyhton', 'agent.py'\]: there is no program 'pyhton' on this machine"):
        create_agents(EnvironmentConfig(kind=EnvironmentKind.command, command=["pyhton", "agent.py"]))
    with pytest.raises(ConfigError, match="environment.command='': kind=command needs it; allowed: a program and its arguments"):
        EnvironmentConfig(kind=EnvironmentKind.command)
    with pytest.raises(ConfigError, match=r"environment.command=\['x'\]: .* allowed: with kind=command"):
        EnvironmentConfig(command=["x"])
    with pytest.raises(ConfigError, match="environment.sessions.timeout_seconds=inf: must be finite"):
        SessionsConfig(timeout_seconds=float("inf"))
    with pytest.raises(ConfigError, match="environment.sessions.max_calls=0: must be at least 1"):
        SessionsConfig(max_calls=0)


PLAYED = {"environment": EnvironmentConfig(kind=EnvironmentKind.command, command=["agent"])}


@pytest.mark.parametrize("recipe", [TrainGRPO, TrainPPO, TrainRejectionSampling])
def test_who_learns_from_sessions(recipe: type) -> None:
    assert recipe(model=ModelConfig(images=True), **PLAYED).environment.asks_endpoint


@pytest.mark.parametrize("recipe", [TrainOnlineDPO, TrainOnlineDistillation])
def test_who_does_not(recipe: type) -> None:
    said = "environment.kind=command: a session may be several rows, .* allowed: with grpo, ppo, rejection_sampling"
    with pytest.raises(ConfigError, match=said):
        recipe(**PLAYED)


def test_an_engine_that_answers_nobody() -> None:
    said = "rollout.engine=tensorrt_llm: answers no requests from outside, as environment.kind=command .* allowed: megatron, vllm, auto"
    with pytest.raises(ConfigError, match=said):
        TrainGRPO(rollout=RolloutConfig(engine="tensorrt_llm"), **PLAYED)
