"""The weighted sum of rewards, and rewards from HTTP endpoints."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from aligner.errors import ConfigError, ServerTimeout
from aligner.rewards.chat_client import EndpointRefused
from aligner.rewards.compose import Part, WeightedReward, composed_reward, endpoint_function, formula
from aligner.rewards.config import NamedRewardConfig, OnError, check_parts
from aligner.rewards.local import RewardError
from aligner.types import FinishReason, Prompt, Rollout, Scores


def decode(tokens):
    return "".join(map(chr, tokens))


def rollout(i, response):
    tokens = tuple(map(ord, response))
    prompt = Prompt(id=i, tokens=(65,), source=f"train.jsonl:{i + 1}", answer=str(i))
    return Rollout(prompt=prompt, response=tokens, logprobs=(0.0,) * len(tokens), finish_reason=FinishReason.stop, policy_version=0, seed=i)


ROLLOUTS = [rollout(0, "one"), rollout(1, "two"), rollout(2, "three")]


class Fixed:
    """A reward model that has its answer ready."""

    def __init__(self, *rewards, valid=None, error=None):
        self.closed = False
        self._scores: Future = Future()
        if error is not None:
            self._scores.set_exception(error)
        else:
            mask = torch.tensor(valid) if valid else torch.ones(len(rewards), dtype=torch.bool)
            self._scores.set_result(Scores(rewards=torch.tensor(rewards), valid=mask))

    def score(self, rollouts):
        return self._scores

    def close(self):
        self.closed = True


def total(**parts):
    reward = WeightedReward(parts)
    scores = reward.score(ROLLOUTS).result(30)
    reward.close()
    assert all(part.model.closed for part in parts.values())
    return scores


def test_the_sum_and_its_parts():
    scores = total(
        a=Part(model=Fixed(1.0, 2.0, 3.0)),
        b=Part(model=Fixed(1.0, 0.0, -1.0), weight=0.5),
        c=Part(model=Fixed(9.0, 9.0, math.nan), weight=0),
    )
    assert scores.rewards.tolist() == [1.5, 2.0, 2.5]
    assert scores.valid.all()
    assert scores.parts["b"].tolist() == [1.0, 0.0, -1.0] and list(scores.parts) == ["a", "b", "c"]


def test_a_row_that_is_invalid_in_a_part():
    scores = total(a=Part(model=Fixed(1.0, 2.0, 3.0)), b=Part(model=Fixed(1.0, 5.0, 1.0, valid=[True, False, True])))
    assert scores.valid.tolist() == [True, False, True]
    assert str(scores.rewards.tolist()) == "[2.0, nan, 4.0]"
    assert str(scores.parts["b"].tolist()) == "[1.0, nan, 1.0]" and scores.parts["a"].tolist() == [1.0, 2.0, 3.0]


def test_what_is_not_finite_is_the_guards_business_or_invalid(capsys):
    scores = total(a=Part(model=Fixed(1.0, math.nan, 3.0)))
    assert scores.valid.all() and str(scores.rewards.tolist()) == "[1.0, nan, 3.0]"
    assert capsys.readouterr().out == ""
    scores = total(a=Part(model=Fixed(1.0, math.inf, 3.0), on_error=OnError.invalid))
    assert scores.valid.tolist() == [True, False, True]
    assert "warning: reward a: 1 of 3 rewards are not finite" in capsys.readouterr().out


def test_a_model_that_fails(capsys):
    parts = {"good": Part(model=Fixed(1.0, 2.0, 3.0)), "judge": Part(model=Fixed(error=ServerTimeout("no answer")))}
    reward = WeightedReward(parts)
    with pytest.raises(RewardError, match="reward judge: no answer"):
        reward.score(ROLLOUTS).result(30)
    reward.close()
    scores = total(judge=Part(model=Fixed(error=ServerTimeout("no answer")), on_error=OnError.invalid))
    assert not scores.valid.any()
    assert "warning: reward judge: all of 3 samples have no reward: no answer" in capsys.readouterr().out


def test_a_part_with_too_few_rewards():
    with pytest.raises(RewardError, match="reward few: 2 rewards for 3 responses"):
        total(few=Part(model=Fixed(1.0, 2.0)))


def test_no_rollouts():
    reward = WeightedReward({"a": Part(model=Fixed(1.0))})
    scores = reward.score([]).result(30)
    assert scores.rewards.shape == (0,) and scores.parts["a"].shape == (0,)
    reward.close()


def test_parts_are_scored_at_the_same_time(tmp_path):
    """Each of the two functions waits for the other."""
    file = tmp_path / "pair.py"
    file.write_text(
        "import threading\nboth = threading.Barrier(2, timeout=30)\n\n"
        "def one(p, r, a):\n    both.wait()\n    return [1.0] * len(r)\n\n"
        "async def two(p, r, a):\n    both.wait()\n    return [float(len(x)) for x in r]\n"
    )
    configs = {"one": NamedRewardConfig(path=f"{file}:one"), "two": NamedRewardConfig(path=f"{file}:two", weight=0.1)}
    assert formula(configs) == "one + 0.1 two"
    reward = composed_reward(configs, decode)
    assert reward.score(ROLLOUTS).result(60).rewards.tolist() == pytest.approx([1.3, 1.3, 1.5])
    reward.close()


def test_an_error_names_part_function_and_sample(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def reward(p, r, a):\n    return [{'one': 1, 'three': 2}[x] for x in r]\n")
    reward = composed_reward({"form": NamedRewardConfig(path=f"{file}:reward")}, decode)
    with pytest.raises(RewardError, match=r"reward form: reward function .*bad.py:reward raised KeyError: 'two'.* \(prompt train.jsonl:2"):
        reward.score(ROLLOUTS).result(60)
    reward.close()


def test_a_served_part():
    reward = composed_reward({"judge": NamedRewardConfig(served=True, weight=2.0)}, decode, Fixed(1.0, 2.0, 3.0))
    assert reward.score(ROLLOUTS).result(60).rewards.tolist() == [2.0, 4.0, 6.0]
    reward.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "no source: a reward requires exactly one of path, url and served=true"),
        ({"path": "a:b", "url": "http://c"}, "path=a:b and url=http://c: a reward requires exactly one"),
        ({"url": "ftp://c"}, "url=ftp://c: must begin with http:// or https://"),
        ({"path": "a:b", "token_variable": "KEY"}, "token_variable=KEY: only applies when url is set"),
        ({"path": "a:b", "weight": math.inf}, "weight=inf: must be finite"),
        ({"path": "a:b", "num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"path": "a:b", "timeout_seconds": 0.0}, "timeout_seconds=0.0: must be finite and above 0"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(ConfigError) as caught:
        NamedRewardConfig(**settings)
    assert text in str(caught.value)


def test_bad_sets_of_parts():
    part = NamedRewardConfig(path="a:b")
    with pytest.raises(ConfigError, match="reward.functions.a/b: a name has letters, digits and _ only"):
        check_parts({"a/b": part})
    with pytest.raises(ConfigError, match="one, two all have weight 0"):
        check_parts({"one": NamedRewardConfig(path="a:b", weight=0), "two": NamedRewardConfig(path="a:b", weight=0)})
    with pytest.raises(ConfigError, match="one and two have served=true; only one reward model is served"):
        check_parts({"one": NamedRewardConfig(served=True), "two": NamedRewardConfig(served=True)})


@pytest.fixture
def endpoint():
    """(url, list of (headers, request) received, list of answers to give: (status, body); the last one is given again and again)."""
    received, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((dict(self.headers), request))
            status, body = answers[0] if len(answers) == 1 else answers.pop(0)
            if status is None:  # the connection breaks
                self.close_connection = True
                return
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score", received, answers
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_an_endpoint(endpoint, monkeypatch):
    url, received, answers = endpoint
    monkeypatch.setenv("JUDGE_TOKEN", "t0p")
    answers.append((200, {"rewards": [0.5, 1]}))
    reward = composed_reward({"judge": NamedRewardConfig(url=url, token_variable="JUDGE_TOKEN")}, decode)
    assert reward.score(ROLLOUTS[:2]).result(60).rewards.tolist() == [0.5, 1]
    reward.close()
    headers, request = received[0]
    assert request == {"prompts": ["A", "A"], "responses": ["one", "two"], "answers": ["0", "1"]}
    assert headers["Authorization"] == "Bearer t0p" and headers["Content-Type"] == "application/json"
    with pytest.raises(ConfigError, match="reward.functions.judge.token_variable=NO_SUCH_TOKEN: this environment variable is not set"):
        composed_reward({"judge": NamedRewardConfig(url=url, token_variable="NO_SUCH_TOKEN")}, decode)


def test_an_endpoint_that_is_busy_or_breaks_is_asked_again(endpoint):
    url, received, answers = endpoint
    answers += [(503, "later"), (None, None), (200, {"rewards": [1.0]})]
    assert asyncio.run(endpoint_function(url, 20.0)(["p"], ["r"], [None])) == [1.0]
    assert len(received) == 3


def test_an_endpoint_that_never_answers_well(endpoint):
    url, received, answers = endpoint
    answers.append((500, b"stack trace" + b"x" * 1000))
    with pytest.raises(EndpointRefused, match=r"answered status 500: 'stack tracex+\.\.\.'"):
        asyncio.run(endpoint_function(url, 20.0)(["p"], ["r"], [None]))
    assert len(received) == 1  # its own error would come again
    answers[:] = [(503, b"busy")]
    with pytest.raises(EndpointRefused, match=r"gave no answer in \d attempts \(timeout_seconds=0.3\); the last: status 503: .*busy"):
        asyncio.run(endpoint_function(url, 0.3)(["p"], ["r"], [None]))
    for body, text in (
        (b"<html>", "answered without rewards: '<html>'"),
        ({"scores": [1]}, "answered without rewards"),
        ([1.0], "answered without rewards"),
    ):
        answers[:] = [(200, body)]
        with pytest.raises(EndpointRefused, match=text):
            asyncio.run(endpoint_function(url, 20.0)(["p"], ["r"], [None]))


def test_nothing_listens():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_port
    server.server_close()
    with pytest.raises(EndpointRefused, match=r"gave no answer in \d attempts \(timeout_seconds=0.3\); the last: .*Connect call failed"):
        asyncio.run(endpoint_function(f"http://127.0.0.1:{port}/", 0.3)(["p"], ["r"], [None]))


def test_the_wrong_number_of_rewards_from_an_endpoint_names_the_sample(endpoint):
    url, _, answers = endpoint
    answers.append((200, {"rewards": [1.0, None, 2.0]}))
    reward = composed_reward({"judge": NamedRewardConfig(url=url)}, decode)
    with pytest.raises(
        RewardError,
        match=r"reward judge: .* reward.functions.judge.url=http://.* returned None \(NoneType\), expected a number.*train.jsonl:2",
    ):
        reward.score(ROLLOUTS).result(60)
    answers[:] = [(200, {"rewards": [1.0]})]
    with pytest.raises(RewardError, match="returned 1 numbers for 3 responses"):
        reward.score(ROLLOUTS).result(60)
    reward.close()
