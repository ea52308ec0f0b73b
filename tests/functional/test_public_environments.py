"""Environments of others, as they are, train a model: reasoning-gym's chain_sum, and OpenEnv's own example behind its server; episodes of
verifiers are played and rewarded. In environments that ALIGNER_TEST_ENVIRONMENTS=1 makes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import web
from public_environments import FOLDER, echo_server, interpreter
from ranks import free_port
from training_jobs import ROOT, Job, grpo_settings, metrics_of, read_rows, run_aligner, run_job, series, train, without_times

from aligner.agents import SessionAccess
from aligner.agents.verifiers import ServerGone, Verifiers
from aligner.environments import keeper
from aligner.environments.config import EnvironmentConfig, EnvironmentKind
from aligner.types import Prompt, SamplingConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SUMS = ("environment.kind=reasoning_gym", "environment.name=chain_sum")
EASY = "+environment.arguments={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}"
ECHO = '''
import json

from aligner.environments.environment import Observation


class Echo:
    """What OpenEnv's example does, in this process."""

    def reset(self, prompt):
        return None

    def step(self, state, turn):
        text = json.dumps({"echoed_message": turn.text, "message_length": len(turn.text)}, ensure_ascii=False)
        return Observation(text=text, reward=min(len(turn.text) * 0.1, 1.0))
'''


def test_reasoning_gym_trains(task: Path) -> None:
    """Data and rewards in process; the score is the package's own."""
    python = interpreter("reasoning_gym")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def aligner(*arguments: object) -> str:
        done = subprocess.run(
            [python, "-m", "aligner.cli", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    aligner("data", "tasks", task / "sums.jsonl", *SUMS, EASY, "--count", 64)
    rows = read_rows(task / "sums.jsonl")
    assert [row["index"] for row in rows] == list(range(64)) and rows[0]["prompt"].startswith("State the final answer to the following")
    run = task / "sums"
    settings = [*grpo_settings(task), *SUMS, EASY, f"data.train={task / 'sums.jsonl'}", "data.max_prompt_length=100"]
    settings += ["model.architecture.max_position_embeddings=128", "loop.max_steps=6", "loop.table_every=6", "run.export_hf=false"]
    output = aligner(*train("grpo")[4:], *settings, f"run.directory={run}")
    assert "samples of step 6" in output
    rewards = series(run, "reward/environment")
    assert rewards[-1] > rewards[0] and max(series(run, "rollout/logprob_gap")) < 1e-4, rewards
    other = [*settings, f"run.directory={task / 'other'}", "+environment.arguments.seed=5"]
    done = subprocess.run([python, "-m", "aligner.cli", *train("grpo")[4:], *other], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "differ from when the prompts were written" in done.stdout + done.stderr


def test_openenv_trains_as_the_same_environment_does_in_process(task: Path) -> None:
    """Token for token; also where the server is killed in the middle."""
    command = echo_server(task)
    (task / "echo.py").write_text(ECHO)
    settings = [
        *(*grpo_settings(task), "environment.max_turns=3", "data.max_prompt_length=8", "rollout.sampling.max_response_length=200"),
        *("rollout.sampling.stop_strings=['7']", "model.architecture.max_position_embeddings=256", "environment.form=plain"),
        *("loop.max_steps=3", "run.export_hf=false", "algorithm.prompts_per_step=8", "algorithm.mini_batch_size=32"),
    ]
    run_job(train("grpo"), task / "here", [*settings, f"environment.path={task / 'echo.py'}:Echo"])
    there = [*settings, "environment.kind=openenv", f"environment.server={command!r}"]
    with Job(train("grpo"), task / "there", there) as job:
        job.reached(1)
        servers = [pid for pid, line in job.processes().items() if "/serve.py" in line and line.startswith(str(FOLDER))]
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        output = job.finish()
    assert servers and "the server has gone (" in output and "; waiting for another" in output, output
    assert without_times(task / "here") == without_times(task / "there")
    assert max(series(task / "there", "rollout/turns")) > 1.5
    code, output = run_aligner(
        "data", "tasks", task / "first.jsonl", "environment.kind=openenv", f"environment.server={command!r}", "--count", 2
    )
    assert code == 0, output
    assert read_rows(task / "first.jsonl")[0] == {
        "prompt": '{"echoed_message": "Story environment ready!", "message_length": 0}',
        "seed": 0,
    }


class Endpoint:
    """An endpoint of OpenAI's chat completions that says `hello there`, streaming too, after `delay` seconds."""

    def __init__(self, port: int) -> None:
        self.keys: Counter[str] = Counter()
        self.delay = 0.1
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        run = {"port": port, "handle_signals": False, "print": None, "host": "127.0.0.1"}
        threading.Thread(target=lambda: web.run_app(app, **run), daemon=True).start()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys[request.headers["Authorization"]] += 1
        await asyncio.sleep(self.delay)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        base = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        for delta, end in (({"role": "assistant", "content": "hello "}, None), ({"content": "there"}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            await reply.write(f"data: {json.dumps(base | {'choices': [choice]})}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply


def test_verifiers_plays_an_openenv_task_set(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns each, its rewards, each session by its own key; a server that is killed, and a session that is stopped."""
    python = interpreter("verifiers")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")  # its `null` harness runs uv
    port, own = free_port(), free_port()
    environment = keeper.keep(echo_server(task).replace("{port}", str(port)).split())
    endpoint = Endpoint(own)
    seat = {"max_turns": 3, "harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    arguments = {"taskset": {"base_url": f"http://127.0.0.1:{port}", "resets": [{"seed": 1}, {"seed": 2}]}, "player": seat}
    config = EnvironmentConfig(kind=EnvironmentKind.verifiers, name="openenv", python=str(python), arguments=arguments)
    given = [f"environment.kind=verifiers environment.name=openenv environment.python={python}".split()]
    given += [[f"environment.arguments={json.dumps(arguments)}"]]
    code, output = run_aligner("data", "tasks", task / "vf.jsonl", *given[0], *given[1], "--count", 2, PATH=os.environ["PATH"])
    assert code == 0, output
    rows = read_rows(task / "vf.jsonl")
    assert [row["task"]["reset"] for row in rows] == [{"seed": 1}, {"seed": 2}]

    def play(number: int) -> object:
        prompt = Prompt(id=number, tokens=(1,), source="vf.jsonl:1", columns=rows[number % 2])
        sampling = SamplingConfig(max_response_length=16)
        at = {"root_url": f"http://127.0.0.1:{own}", "model": "policy", "seed": number, "sampling": sampling, "tokenizer_path": ""}
        return agents.play(prompt, SessionAccess(session=f"s{number}", key=f"key{number}", **at))

    agents = Verifiers(config)
    try:
        with ThreadPoolExecutor(3) as threads:
            outcomes = list(threads.map(play, range(3)))
        assert [(one.reward, one.failed) for one in outcomes] == [(3.0, "")] * 3
        assert endpoint.keys == {f"Bearer key{number}": 3 for number in range(3)}
        endpoint.delay = 5.0
        threading.Timer(4.0, lambda: _kill(agents._server._keeper.pid)).start()
        with pytest.raises(ServerGone, match="ended, or did not answer, during the episode"):
            play(3)
        endpoint.delay = 0.1
        assert play(4).reward == 3.0
        endpoint.delay = 60.0
        threading.Timer(8.0, lambda: agents.stop("s5")).start()
        started = time.monotonic()
        assert play(5).failed == "it was stopped" and time.monotonic() - started < 40
        keeper.end(environment)
        endpoint.delay = 0.1
        outcome = play(6)  # verifiers says `success` all the same
        assert outcome.reward is None and "OpenEnvEnv.run()" in outcome.failed
    finally:
        agents.close()
        keeper.end(environment)


def test_verifiers_trains(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmodified task set plays its sessions against the policy's own endpoint; its server is killed in the middle."""
    python = interpreter("verifiers")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    port = free_port()
    environment = keeper.keep(echo_server(task).replace("{port}", str(port)).split())
    taskset = f"{{base_url: 'http://127.0.0.1:{port}', resets: [{{seed: 1}}, {{seed: 2}}]}}"
    player = "{max_turns: 2, harness: {id: 'null'}, runtime: {type: subprocess}}"
    kind = ["environment.kind=verifiers", "environment.name=openenv", f"environment.python={python}"]
    kind += [f"+environment.arguments={{taskset: {taskset}, player: {player}}}"]
    (task / "chat.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    try:
        code, output = run_aligner("data", "tasks", task / "vf.jsonl", *kind, "--count", 2, PATH=os.environ["PATH"])
        assert code == 0, output
        sizes = ["algorithm.prompts_per_step=2", "algorithm.group_size=2", "algorithm.mini_batch_size=4", "algorithm.kl_coef=0"]
        sizes += [
            "rollout.sampling.max_response_length=12",
            "data.max_prompt_length=150",
            "model.architecture.max_position_embeddings=2048",
        ]
        data = [f"data.train={task / 'vf.jsonl'}", f"data.chat_template={task / 'chat.jinja'}", "data.apply_chat_template=true"]
        more = ["loop.max_steps=3", "run.export_hf=false", "environment.num_workers=4", "environment.sessions.timeout_seconds=300"]
        with Job(train("grpo"), task / "vf", [*grpo_settings(task), *sizes, *data, *kind, *more]) as job:
            job.reached(1)
            servers = [pid for pid, line in job.processes().items() if "verifiers_server.py" in line]
            for pid in servers:
                os.kill(pid, signal.SIGKILL)
            output = job.finish()
    finally:
        keeper.end(environment)
    assert servers and "the environment server has gone" in output, output
    run = task / "vf"
    # Those of the killed server were played again; the environment refuses some of what an untrained model says, which is no reward of 0.
    assert max(series(run, "rollout/sessions_retries")) > 0 and max(series(run, "rollout/sessions_failed")) <= 0.5
    assert min(series(run, "rollout/sessions_calls")) >= 1 and min(series(run, "rollout/reward")) > 0
    gaps = [line.values["rollout/logprob_gap"] for line in metrics_of(run) if "rollout/logprob_gap" in line.values]
    assert gaps and max(gaps) < 1e-4  # a step in which no group has different rewards has none


def _kill(keeper_pid: int) -> None:
    """kill -9 of what a keeper keeps."""
    for pid in Path(f"/proc/{keeper_pid}/task/{keeper_pid}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
