"""The weighted sum of rewards, and rewards from HTTP endpoints."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
import torch
from fake_parts import characters, done, failed, written
from judge_server import BREAKS, JudgeServer, Refusal, judge_server

from aligner.errors import ConfigError, ServerTimeout
from aligner.rewards.chat_client import EndpointRefused
from aligner.rewards.compose import Part, WeightedReward, composed_reward, endpoint_function
from aligner.rewards.config import NamedRewardConfig, OnError, check_parts, formula
from aligner.rewards.local import RewardError
from aligner.types import Scores

ROLLOUTS = [written(text, number, answer=str(number)) for number, text in enumerate(("one", "two", "three"))]


class Fixed:
    """A reward model that has its answer ready."""

    def __init__(self, *rewards, valid=None, error=None):
        self.closed = False
        mask = torch.tensor(valid) if valid else torch.ones(len(rewards), dtype=torch.bool)
        self._scores = failed(error) if error else done(Scores(rewards=torch.tensor(rewards), valid=mask))

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
    reward = composed_reward(configs, characters)
    assert reward.score(ROLLOUTS).result(60).rewards.tolist() == pytest.approx([1.3, 1.3, 1.5])
    reward.close()


def test_an_error_names_part_function_and_sample(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def reward(p, r, a):\n    return [{'one': 1, 'three': 2}[x] for x in r]\n")
    reward = composed_reward({"form": NamedRewardConfig(path=f"{file}:reward")}, characters)
    with pytest.raises(RewardError, match=r"reward form: reward function .*bad.py:reward raised KeyError: 'two'.* \(prompt train.jsonl:2"):
        reward.score(ROLLOUTS).result(60)
    reward.close()


def test_a_served_part():
    reward = composed_reward({"judge": NamedRewardConfig(served=True, weight=2.0)}, characters, Fixed(1.0, 2.0, 3.0))
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


def rewarding(*rewards) -> Refusal:
    """An endpoint's good answer."""
    return Refusal(200, json.dumps({"rewards": rewards}))


def asked(server: JudgeServer, timeout_seconds: float = 20.0):
    return asyncio.run(endpoint_function(server.url, timeout_seconds)(["p"], ["r"], [None]))


def test_an_endpoint(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "t0p")
    with judge_server(lambda body: rewarding(0.5, 1)) as server:
        reward = composed_reward({"judge": NamedRewardConfig(url=server.url, token_variable="JUDGE_TOKEN")}, characters)
        assert reward.score(ROLLOUTS[:2]).result(60).rewards.tolist() == [0.5, 1]
        reward.close()
    assert server.requests == [{"prompts": ["A", "A"], "responses": ["one", "two"], "answers": ["0", "1"]}]
    assert server.keys == ["Bearer t0p"]
    with pytest.raises(ConfigError, match="reward.functions.judge.token_variable=NO_SUCH_TOKEN: this environment variable is not set"):
        composed_reward({"judge": NamedRewardConfig(url=server.url, token_variable="NO_SUCH_TOKEN")}, characters)


def test_an_endpoint_that_is_busy_or_breaks_is_asked_again():
    answers = iter([Refusal(503), Refusal(BREAKS), rewarding(1.0)])
    with judge_server(lambda body: next(answers)) as server:
        assert asked(server) == [1.0]
    assert len(server.requests) == 3


def test_an_endpoint_that_never_answers_well():
    with judge_server(lambda body: Refusal(500, "stack trace" + "x" * 1000)) as server:
        with pytest.raises(EndpointRefused, match=r"answered status 500: 'stack tracex+\.\.\.'"):
            asked(server)
    assert len(server.requests) == 1  # its own error would come again
    with judge_server(lambda body: Refusal(503, "busy")) as server:
        with pytest.raises(EndpointRefused, match=r"gave no answer in \d attempts \(timeout_seconds=0.3\); the last: status 503: .*busy"):
            asked(server, 0.3)
    with pytest.raises(EndpointRefused, match=r"gave no answer in \d attempts \(timeout_seconds=0.3\); the last: .*Connect call failed"):
        asked(server, 0.3)  # nothing listens there any more


@pytest.mark.parametrize("body", ["<html>", '{"scores": [1]}', "[1.0]"])
def test_an_endpoint_that_answers_without_rewards(body):
    with judge_server(lambda _: Refusal(200, body)) as server:
        with pytest.raises(EndpointRefused, match=f"answered without rewards: {re.escape(repr(body))}"):
            asked(server)


def test_the_wrong_number_of_rewards_from_an_endpoint_names_the_sample():
    answers = iter([rewarding(1.0, None, 2.0), rewarding(1.0)])
    with judge_server(lambda body: next(answers)) as server:
        reward = composed_reward({"judge": NamedRewardConfig(url=server.url)}, characters)
        with pytest.raises(
            RewardError,
            match=r"reward judge: .* reward.functions.judge.url=http://.* returned None \(NoneType\), expected a number.*train.jsonl:2",
        ):
            reward.score(ROLLOUTS).result(60)
        with pytest.raises(RewardError, match="returned 1 numbers for 3 responses"):
            reward.score(ROLLOUTS).result(60)
        reward.close()
