"""Reward functions get fields of the records by their names; functions that were written for TRL work as they are."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from fake_parts import characters, written

from aligner.environments.exchange import EnvironmentReward
from aligner.rewards.compose import Part, WeightedReward
from aligner.rewards.config import OnError
from aligner.rewards.forms import Factory, OnSamples, columns_read
from aligner.rewards.local import FunctionReward, RewardError
from aligner.types import Rollout

TURNS = ({"role": "user", "content": "q"},)


def rollout(response: str, *, messages=(), reward=None, **columns) -> Rollout:
    of_prompt = {"text": "<q>", "answer": columns.get("answer"), "columns": columns, "messages": messages}
    return written(response, version=7, reward=reward, **of_prompt)


def model(function, on_error=OnError.stop) -> FunctionReward:
    return FunctionReward(function, characters, 20.0, name="f", on_error=on_error)


def score(function, *rollouts, on_error=OnError.stop):
    reward = model(function, on_error)
    try:
        return reward.score(rollouts).result(timeout=60)
    finally:
        reward.close()


def _plain(prompts, responses, answers, level, source="x"): ...


def _all(prompts, responses, answers, **columns): ...


def _trl(prompts, completions, solution, trainer_state=None): ...


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_plain, {"level", "source"}),
        (_all, None),
        (_trl, {"solution"}),
        (OnSamples(_plain), None),
        (Factory(_plain), None),
        (partial(_plain, level=1), {"level", "source"}),
        (max, set()),  # of native code: texts alone
    ],
)
def test_the_fields_that_a_function_reads(function, names):
    assert columns_read(function) == names


# From TRL's documentation of GRPOTrainer (docs/source/grpo_trainer.md), as they stand there.
def reward_func(completions, ground_truth, **kwargs):
    import re

    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905


def format_reward_func(completions, **kwargs):
    import re

    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):  # noqa: B905, B007
        if t == "math":
            rewards.append(1.0 if completion == "4" else -1.0)
        else:
            rewards.append(None)
    return rewards


def test_functions_of_trls_documentation():
    right, wrong = rollout(r"\boxed{4}", ground_truth="4"), rollout("5", ground_truth="4")
    assert score(reward_func, right, wrong).rewards.tolist() == [1, 0]
    thought = "<think>a</think><answer>b</answer>"
    assert score(format_reward_func, rollout(thought, messages=TURNS), rollout("b", messages=TURNS)).rewards.tolist() == [1, 0]
    found = score(math_reward_func, rollout("4", task="math"), rollout("5", task="math"), rollout("5", task="code"))
    assert found.rewards.tolist()[:2] == [1, -1] and found.valid.tolist() == [True, True, False] == (~found.silent).tolist()


def test_what_trls_arguments_are():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, **columns):
        seen.update(columns, all=(prompts, completions, completion_ids), step=trainer_state.global_step)
        with pytest.raises(AttributeError, match="trainer_state.epoch is not supported"):
            trainer_state.epoch  # noqa: B018
        return [0.0] * len(prompts)

    score(reward, rollout("a", prompt="q", level=2), rollout("bc", messages=TURNS, prompt=list(TURNS), answer="x"))
    prompts, completions, ids = seen.pop("all")
    assert prompts == ["<q>", list(TURNS)] and completions == ["a", [{"role": "assistant", "content": "bc"}]] and ids == [[97], [98, 99]]
    assert seen == {"level": [2, None], "answer": [None, "x"], "step": 7}


def test_fields_reach_plain_functions():
    def named(prompts, responses, answers, level, scale=10):
        return [place * scale + len(prompt) for place, prompt in zip(level, prompts, strict=True)]

    def all_of_them(prompts, responses, answers, **columns):
        return [sum(map(len, columns))] * len(prompts)

    assert score(named, rollout("a", level=2), rollout("b", level=3)).rewards.tolist() == [23, 33]
    assert score(all_of_them, rollout("a", level=2, answers="1", id=0)).rewards.tolist() == [len("level") + len("id")]
    with pytest.raises(
        RewardError, match=r"reward function f raised TypeError: it takes 'level', which is no field of the records \(there are id\)"
    ):
        score(named, rollout("a", id=1))
    with pytest.raises(RewardError, match="returned None .*expected a number"):
        score(lambda prompts, responses, answers: [None], rollout("a"))


def test_silence_is_no_failure_and_a_sum_goes_on_without_it(capsys):
    rows = [rollout("4", task="math"), rollout("4", task="code"), rollout("4444", task="code")]
    silent = score(math_reward_func, *rows, on_error=OnError.invalid)
    assert silent.valid.tolist() == [True, False, False] and capsys.readouterr().out == ""
    for weight, rewards in ((1.0, [3, 1, 4]), (0.0, [2, math.nan, math.nan])):
        length = Part(model=model(lambda p, r, a: [len(x) for x in r]), weight=weight)
        whole = WeightedReward({"maths": Part(model=model(math_reward_func), weight=2.0), "length": length})
        found = whole.score(rows).result(timeout=60)
        whole.close()
        assert str(found.rewards.tolist()) == str(list(map(float, rewards)))
        assert found.valid.tolist() == [not math.isnan(reward) for reward in rewards] == (~found.silent).tolist()
        assert math.isnan(found.parts["maths"][1]) and found.parts["maths"][0] == 1


def test_an_environment_goes_on_without_it():
    rows = [rollout("4", task="math", reward=0.5), rollout("4", task="code", reward=0.25)]
    reward = EnvironmentReward(model(math_reward_func))
    found = reward.score(rows).result(timeout=60)
    reward.close()
    assert torch.equal(found.rewards, torch.tensor([1.5, 0.25])) and found.valid.all()


def test_reasoning_and_answer_are_named_like_fields():
    def plain(prompts, responses, answers, reasoning, answer_text):
        return [len(thought) + 10 * len(said) for thought, said in zip(reasoning, answer_text, strict=True)]

    def as_in_trl(completions, answer_text, **columns):
        return [float(len(said) if "reasoning" not in columns else -1) for said in answer_text]

    @OnSamples
    def on_samples(samples):
        return [len(sample.reasoning) + 10 * len(sample.answer_text) for sample in samples]

    rows = [rollout("<think>abc</think> 12"), rollout("12")]
    for function in (plain, on_samples):
        assert score(function, *rows).rewards.tolist() == [23, 20]
    assert score(as_in_trl, *rows).rewards.tolist() == [2, 2]
    assert score(plain, rollout("12", reasoning="own field")).rewards.tolist() == [29]  # a field of the records comes first
