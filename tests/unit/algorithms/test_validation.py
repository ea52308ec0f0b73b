"""Validation: pass@k and best@k by hand and against all choices, what is reported, and that this is what the settings say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import fake_parts
import pytest
import torch

from aligner.algorithms.dpo import TrainDPO
from aligner.algorithms.grpo import TrainGRPO
from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.reward_model import TrainRewardModel
from aligner.algorithms.sft import TrainSFT
from aligner.data.config import PreferenceDataConfig, PromptDataConfig, SFTDataConfig
from aligner.errors import ConfigError
from aligner.online.config import ValidationConfig
from aligner.online.validation import best_at_k, pass_at_k, validate
from aligner.rewards.config import RewardFunctionConfig
from aligner.run.settings import CheckpointConfig, LoopConfig
from aligner.types import FinishReason, SamplingConfig, Scores

VALIDATE = LoopConfig(validate_every=5)


def test_pass_at_k_by_hand() -> None:
    """Four samples, one right: 1/4, 1 - C(3,2)/C(4,2) = 1/2, 3/4, 1."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert [pass_at_k(4, 0, k) for k in (1, 4)] == [0.0, 0.0]
    assert [pass_at_k(4, 4, k) for k in (1, 4)] == [1.0, 1.0]
    assert pass_at_k(10000, 1, 100) == pytest.approx(0.01)  # where the binomials do not fit into floats


@pytest.mark.parametrize("right", range(7))
def test_pass_at_k_is_the_mean_over_all_choices(right) -> None:
    marks = [True] * right + [False] * (6 - right)
    for k in range(1, 7):
        choices = [any(choice) for choice in combinations(marks, k)]
        assert pass_at_k(6, right, k) == pytest.approx(sum(choices) / len(choices))


def test_best_at_k_is_the_mean_over_all_choices() -> None:
    assert best_at_k([1.0, 4.0, 2.0], 2) == pytest.approx((4 + 2 + 4) / 3)
    rewards = [0.3, -1.0, 2.0, 2.0, 0.7, -0.2]
    for k in range(1, 7):
        choices = [max(choice) for choice in combinations(rewards, k)]
        assert best_at_k(rewards, k) == pytest.approx(sum(choices) / len(choices))
    assert best_at_k([0.25], 1) == 0.25


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_samples(k) -> None:
    for estimate in (lambda: pass_at_k(4, 1, k), lambda: best_at_k([0.0] * 4, k)):
        with pytest.raises(ValueError, match=f"k={k} of 4 samples: must be from 1 to 4"):
            estimate()


class Engine(fake_parts.FakeEngine):
    """Answers seed s with s % 3 + 1 tokens, of which three were cut; the last ones first."""

    def generate(self, prompts, seeds, sampling=None):
        self.asked.append(([prompt.id for prompt in prompts], list(seeds), sampling))
        said = [[(fake_parts.EOS,), (7, fake_parts.EOS), (7, 7, 7)][seed % 3] for seed in seeds]
        yield [fake_parts.rollout(p, *tokens, seed=seed) for p, tokens, seed in zip(prompts, said, seeds, strict=True)][::-1]


class Judge:
    """Scores as given, by (prompt id, length of the response); None: not valid."""

    def __init__(self, score) -> None:
        self._score = score

    def score(self, rollouts):
        found = [self._score(rollout.prompt.id, len(rollout.response)) for rollout in rollouts]
        valid = torch.tensor([one is not None for one in found])
        return fake_parts.done(Scores(rewards=torch.tensor([one or 0.0 for one in found]), valid=valid))


@pytest.fixture
def task(make_task):
    """`task(config, reward, accuracy)`: over two held-out prompts."""

    def make(config: ValidationConfig, reward=lambda number, length: float(length), accuracy=None, **fields):
        return make_task(
            [],
            engine=Engine([]),
            reward=Judge(reward),
            held_out={
                "scorer": None if accuracy is None else Judge(accuracy),
                "sampling": SamplingConfig(temperature=0.0, max_response_length=3),
                "config": config,
                **fields,
            },
        )

    return make


def named(**metrics: float) -> dict[str, float]:
    return {f"validation/{name}": value for name, value in metrics.items()}


def test_greedy_alone(task) -> None:
    made = task(ValidationConfig(), accuracy=lambda number, length: float(length == 2))
    # Responses of 1 and 2 tokens.
    assert validate(made) == named(reward=1.5, response_length=1.5, truncated_fraction=0.0, accuracy=0.5)
    assert [asked[:2] for asked in made.engine.asked] == [([0, 1], [0, 1])]
    assert validate(task(ValidationConfig())) == named(reward=1.5, response_length=1.5, truncated_fraction=0.0)


def test_the_greedy_responses_are_kept(task) -> None:
    """Of prompts 0 and 1, of 1 and 2 tokens."""
    kept = []
    validate(task(ValidationConfig(num_samples=2), keep_samples=kept.append))
    assert [[(row.reward, row.finish_reason) for row in rows] for rows in kept] == [[(1.0, FinishReason.stop), (2.0, FinishReason.stop)]]


def test_sampled(task) -> None:
    """Lengths by seed: prompt 0 has 1 2 3 1, prompt 1 has 2 3 1 2. Right is a response of 2 tokens: c = 1 and 2 of n = 4."""
    config = ValidationConfig(num_samples=4, temperature=0.7, top_p=0.9, k=[1, 2, 4])
    made = task(config, accuracy=lambda number, length: float(length == 2))
    found = validate(made)
    expected = {"reward": 1.5, "response_length": 1.5, "truncated_fraction": 0.0, "accuracy": 0.5}
    expected |= {"reward_mean@4": (7 / 4 + 8 / 4) / 2, "truncated@4": 2 / 8}
    # best of two: of 1 1 2 3 (3 + 3 + 3 + 2 + 2 + 1) / 6, of 1 2 2 3 (3 + 3 + 3 + 2 + 2 + 2) / 6
    expected |= {"reward_best@1": 15 / 8, "reward_best@2": (14 / 6 + 15 / 6) / 2, "reward_best@4": 3.0}
    expected |= {"mean@4": (1 / 4 + 2 / 4) / 2, "pass@1": 3 / 8, "pass@2": (1 / 2 + 5 / 6) / 2, "pass@4": 1.0}
    assert found == pytest.approx(named(**expected))
    (_, _, greedy), (prompts, seeds, sampled) = made.engine.asked
    assert prompts == [0] * 4 + [1] * 4 and seeds == list(range(8))
    assert greedy.temperature == 0 and (sampled.temperature, sampled.top_p, sampled.max_response_length) == (0.7, 0.9, 3)
    assert validate(made) == found and made.engine.asked[2:] == made.engine.asked[:2]  # the same seeds again


def test_responses_without_a_score_count_as_not_sampled(task) -> None:
    """Of prompt 0 only the second and third are judged (rewards 2 and 3), of prompt 1 all: k = 4 is known of prompt 1 alone."""
    found = validate(
        task(ValidationConfig(num_samples=4), reward=lambda number, length: None if (number, length) == (0, 1) else float(length))
    )
    assert found["validation/reward_mean@4"] == pytest.approx((2.5 + 2) / 2)
    assert found["validation/reward_best@2"] == pytest.approx((3 + 15 / 6) / 2)
    assert found["validation/reward_best@4"] == 3.0
    nothing = validate(task(ValidationConfig(num_samples=2), reward=lambda number, length: None))
    assert math.isnan(nothing["validation/reward_best@2"]) and math.isnan(nothing["validation/reward"])


@pytest.mark.parametrize("config", [ValidationConfig(), ValidationConfig(num_samples=3), ValidationConfig(num_samples=8, k=[8, 5])])
def test_what_is_reported_is_what_the_settings_say(task, config) -> None:
    judged = replace(config, scorer=RewardFunctionConfig(path="module:name"))
    assert set(validate(task(config))) == set(config.reports())
    assert set(validate(task(judged, accuracy=lambda number, length: 1.0))) == set(judged.reports())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_samples": -1}, "validation.num_samples=-1"),
        ({"temperature": 0.0}, "validation.temperature=0.0"),
        ({"top_p": 0.0}, "validation.top_p=0.0"),
        ({"num_samples": 4, "k": [1, 5]}, r"validation.k=\[1, 5\]: 5 must be from 1 to num_samples=4"),
        ({"k": [1]}, r"validation.k=\[1\]: 1 must be from 1 to num_samples=0"),
    ],
)
def test_bad_settings_are_named(settings, text) -> None:
    with pytest.raises(ConfigError, match=text):
        ValidationConfig(**settings)


def test_a_best_metric_that_is_not_reported_is_refused_at_the_start() -> None:
    data = PromptDataConfig(validation="held_out.jsonl")
    best = CheckpointConfig(best_metric="validation/pass@4")
    sampled = ValidationConfig(num_samples=4)
    scorer = RewardFunctionConfig(path="module:name")
    judged = replace(sampled, scorer=scorer)
    for recipe in (TrainGRPO, TrainPPO):
        made = recipe(checkpoint=best, loop=VALIDATE, data=data, validation=judged)
        assert made.validation is judged
        with pytest.raises(
            ConfigError, match=r"best_metric=validation/pass@4: .* accuracy, mean@n and pass@k need validation\.scorer\.path"
        ):
            recipe(checkpoint=best, loop=VALIDATE, data=data, validation=sampled)
        with pytest.raises(ConfigError, match="best_metric=validation/pass@4: validation reports validation/reward, .*accuracy$"):
            recipe(checkpoint=best, loop=VALIDATE, data=data, validation=ValidationConfig(scorer=scorer))
    pairs, examples = PreferenceDataConfig(validation="held_out.jsonl"), SFTDataConfig(validation="held_out.jsonl")
    for recipe, held_out, metric in ((TrainSFT, examples, "loss"), (TrainDPO, pairs, "margin"), (TrainRewardModel, pairs, "accuracy")):
        recipe(checkpoint=CheckpointConfig(best_metric=f"validation/{metric}"), loop=VALIDATE, data=held_out)
        with pytest.raises(ConfigError, match=f"best_metric=validation/pass@4: validation reports validation/.*{metric}"):
            recipe(checkpoint=best, loop=VALIDATE, data=held_out)
