"""A GRPO run whose reward is a sum of two functions and an HTTP endpoint, one of which fails for some samples."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from training_jobs import grpo_settings, run_job, series, train, write_task

pytestmark = pytest.mark.timeout(300)

FUNCTIONS = """
import asyncio


def sevens(prompts, responses, answers):
    return [response.count("7") / 8 for response in responses]


async def picky(prompts, responses, answers):
    await asyncio.sleep(0)
    return [float(len({"no": "nines"}["no" if "9" not in response else response])) for response in responses]
"""


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


def test_two_functions_and_an_endpoint(tmp_path, judge):
    url, seen = judge
    write_task(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    settings = [
        *grpo_settings(tmp_path),
        f"reward.functions.sevens.path={tmp_path}/mine.py:sevens",
        f"reward.functions.picky={{path:'{tmp_path}/mine.py:picky',weight:0.5,on_error:invalid}}",
        f"reward.functions.ones={{url:'{url}',weight:-0.25}}",
        *("loop.max_steps=2", "algorithm.kl_coef=0", "run.seed=5"),
    ]
    output = run_job(train("grpo"), tmp_path / "run", settings)

    rows = 16 * 8
    responses = [response for request in seen for response in request]
    assert len(responses) == 2 * rows
    steps = [responses[:rows], responses[rows:]]
    run = tmp_path / "run"
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
