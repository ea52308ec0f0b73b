"""Episodes of several turns, by a policy of random weights that now and then asks a calculator; and rewards of several sources at once."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from training_jobs import grpo_settings, metrics_of, run_job, series, train

from aligner.telemetry.recording import read_spans

pytestmark = pytest.mark.timeout(600)
CALCULATOR = [  # `=` ends a turn and calls the calculator with what was written since the last one
    *("environment.path=aligner.environments.calculator:Calculator", '+environment.arguments={open: "", close: "="}'),
    *("environment.max_turns=3", "environment.form=plain", 'environment.suffix=" "'),
    *('rollout.sampling.stop_strings=["="]', "rollout.sampling.max_response_length=20"),
]
FUNCTIONS = """
import asyncio


def sevens(prompts, responses, answers):
    return [response.count("7") / 8 for response in responses]


async def picky(prompts, responses, answers):
    await asyncio.sleep(0)
    return [float(len({"no": "nines"}["no" if "9" not in response else response])) for response in responses]
"""


def test_grpo_with_a_calculator(task: Path) -> None:
    """No reward function is named."""
    settings = [
        *(*grpo_settings(task), *CALCULATOR, "rollout.max_batch_size=48"),
        *(f"data.validation={task / 'prompts.jsonl'}", "data.num_validation_prompts=4", "loop.validate_every=2"),
        *("loop.max_steps=2", "loop.table_every=1", "run.export_hf=false"),
    ]
    run = task / "grpo"
    output = run_job(train("grpo"), run, settings)
    assert "samples of step 2" in output
    assert all(1.1 < turns < 3 for turns in series(run, "rollout/turns"))
    for name in ("observation_tokens", "tool_calls", "tool_errors"):
        assert min(series(run, f"rollout/{name}")) > 0.2, name
    assert series(run, "reward/environment") == series(run, "rollout/reward")
    assert all(errors < calls for errors, calls in zip(series(run, "rollout/tool_errors"), series(run, "rollout/tool_calls"), strict=True))
    assert max(series(run, "rollout/logprob_gap")) < 1e-4  # of what the policy wrote
    assert "validation/reward" in metrics_of(run)[-1].values
    spans, _ = read_spans(run / "trace")
    turns = [span for span in spans if span.lane == "rank 0 environment" and span.name == "step"]
    assert len(turns) == sum(span.name == "response" for span in spans) > 2 * 128  # every turn of the policy is one of the environment
    assert {span.arguments["turn"] for span in turns} == {1, 2, 3}
    assert sum(span.name == "validate" for span in spans) == 1 and sum(span.name == "report" for span in spans) == 2


@pytest.fixture
def judge():
    """(url, the responses of every request) of an endpoint that gives 1 for each `1` in a response."""
    seen: list[list[str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(request["responses"])
            body = json.dumps({"rewards": [response.count("1") for response in request["responses"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", seen
    server.shutdown()
    server.server_close()


def test_a_reward_of_two_functions_and_an_endpoint(task: Path, judge) -> None:
    """One of the functions fails for some samples."""
    url, seen = judge
    (task / "mine.py").write_text(FUNCTIONS)
    settings = [
        *grpo_settings(task),
        f"reward.functions.sevens.path={task}/mine.py:sevens",
        f"reward.functions.picky={{path:'{task}/mine.py:picky',weight:0.5,on_error:invalid}}",
        f"reward.functions.ones={{url:'{url}',weight:-0.25}}",
        *("loop.max_steps=2", "algorithm.kl_coef=0", "run.seed=5"),
    ]
    run = task / "sum"
    output = run_job(train("grpo"), run, settings)
    rows = 16 * 8
    responses = [response for request in seen for response in request]
    assert len(responses) == 2 * rows
    steps = [responses[:rows], responses[rows:]]
    invalid = series(run, "rollout/rewards_invalid")
    assert invalid == [sum("9" in response for response in step) for step in steps] and min(invalid) > 0
    good = [[response for response in step if "9" not in response] for step in steps]
    for name, value in (("ones", lambda r: r.count("1")), ("sevens", lambda r: r.count("7") / 8), ("picky", lambda r: 5.0)):
        assert series(run, f"reward/{name}") == pytest.approx([sum(map(value, step)) / len(step) for step in good]), name
    parts = zip(series(run, "reward/sevens"), series(run, "reward/picky"), series(run, "reward/ones"), strict=True)
    assert series(run, "rollout/reward") == pytest.approx([sevens + 0.5 * picky - 0.25 * ones for sevens, picky, ones in parts])
    complaints = [line for line in output.splitlines() if line.startswith("warning: reward function")]
    assert len(complaints) == 2, complaints  # one a step
    assert "mine.py:picky" in complaints[0] and "KeyError" in complaints[0] and "prompts.jsonl:" in complaints[0]
