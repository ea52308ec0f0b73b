"""on_error=invalid: what a reward function fails for has no reward; what it can judge has."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from fake_parts import characters, written

from aligner.rewards import local
from aligner.rewards.config import OnError, RewardFunctionConfig
from aligner.rewards.forms import Factory, OnSamples
from aligner.rewards.load import build_reward_function
from aligner.rewards.local import FunctionReward, RewardHung

ROLLOUTS = [written(text, number, version=3) for number, text in enumerate(("one", "two", "three"))]


def score(function, rollouts=ROLLOUTS, timeout_seconds=20.0):
    model = FunctionReward(function, characters, timeout_seconds, name="mine.py:reward", on_error=OnError.invalid)
    scores = model.score(rollouts).result(60)
    model.close()
    return scores


def check(scores, rewards, capsys, *said):
    """NaN stands for no reward; everything that is said is on one line."""
    wanted = torch.tensor(rewards)
    assert torch.equal(scores.valid, ~wanted.isnan())
    assert torch.equal(scores.rewards[scores.valid], wanted[scores.valid]) and scores.rewards[~scores.valid].isnan().all()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said)
    assert all(text in lines[0] for text in said), lines


def test_one_that_raises(capsys):
    def reward(prompts, responses, answers):
        return [{"one": 1.0, "three": 3.0}[response] for response in responses]

    said = ("reward function mine.py:reward: 1 of 3 samples have no reward: KeyError: 'two'", "(prompt train.jsonl:2, response 'two')")
    check(score(reward), [1.0, math.nan, 3.0], capsys, *said)


def test_what_fails_only_together_is_scored_alone(capsys):
    check(score(lambda prompts, responses, answers: [7.0]), [7.0, 7.0, 7.0], capsys)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e40])
def test_what_is_not_finite(bad, capsys):
    check(score(lambda *_: [1.0, bad, 2.0]), [1.0, math.nan, 2.0], capsys, "1 of 3", "response 'two'")


def test_wrong_type_of_one_and_of_all(capsys):
    def reward(prompts, responses, answers):
        return ["2" if response == "two" else 1.0 for response in responses]

    check(score(reward), [1.0, math.nan, 1.0], capsys, "'2' (str)", "response 'two'")
    check(score(lambda *_: None), [math.nan] * 3, capsys, "3 of 3 samples have no reward", "NoneType")


def test_a_call_that_hangs_has_no_rewards_at_all(capsys, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(local, "MAX_HANGING", 2)
    model = FunctionReward(lambda *_: release.wait(60), characters, 0.05, name="slow", on_error=OnError.invalid)
    check(model.score(ROLLOUTS).result(60), [math.nan] * 3, capsys, "3 of 3 samples", "returned nothing within timeout_seconds=0.05")
    with pytest.raises(RewardHung, match="2 calls hang, too many for on_error=invalid"):
        model.score(ROLLOUTS).result(60)
    release.set()
    model.close()


def test_it_is_said_once_per_policy_version(capsys):
    model = FunctionReward(lambda p, r, a: [math.nan] * len(r), characters, 20.0, on_error=OnError.invalid)
    for version in (3, 3, 3, 4):
        assert not model.score([written("x", version=version)]).result(60).valid.any()
    model.close()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_several_calls_at_a_time():
    both = threading.Barrier(2, timeout=30)
    model = FunctionReward(lambda p, r, a: [float(both.wait() >= 0)] * len(r), characters, 40.0, num_threads=2)
    first, second = model.score(ROLLOUTS[:1]), model.score(ROLLOUTS[1:])  # each waits for the other
    assert first.result(60).rewards.tolist() == [1.0] and second.result(60).rewards.tolist() == [1.0, 1.0]
    model.close()


def test_a_function_on_samples():
    @OnSamples
    def reward(samples):
        return [
            len(sample.rollout.response) + 10 * sample.rollout.policy_version + (sample.source == "train.jsonl:1") for sample in samples
        ]

    assert score(reward).rewards.tolist() == [34.0, 33.0, 35.0]


def test_a_factory_is_called_also_without_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from aligner.rewards.forms import Factory\n\n"
        "@Factory\ndef make(gain=2):\n    return lambda p, r, a: [gain * len(one) for one in r]\n"
    )
    assert build_reward_function(RewardFunctionConfig(path=f"{file}:make"))([], ["ab"], []) == [4]
    assert build_reward_function(RewardFunctionConfig(path=f"{file}:make", arguments={"gain": 5}))([], ["ab"], []) == [10]
    assert Factory(lambda x: x)(3) == 3
