"""Advantages per turn, by hand: discounted returns of turns (per_turn), and GiGPO's of episodes and of turns in one state."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from aligner.algorithms.grpo import GRPOConfig
from aligner.errors import ConfigError
from aligner.losses.advantages import Estimator, Turns, estimate, outcome_rewards
from aligner.losses.shaping import ShapingConfig
from aligner.online.policy_gradient import turns_of
from aligner.types import EpisodeRows, FinishReason, Prompt, Rollout, TurnMark

# Episode 0: turns of 2 and 1 tokens, then one more; 1: two turns; 2: one turn; 3 is alone in its group after 4 lost its reward.
MASK = tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
TURNS = Turns(
    number=tensor([[9, 0, 0, 7, 1, 2], [0, 0, 5, 1, 1, 0], [0] * 6, [0] * 6, [0] * 6]),
    rewards=tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 9.0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]),  # row 1 has no third turn
    states=tensor([[4, 5, 4], [4, 5, 0], [4, 0, 0], [4, 0, 0], [4, 0, 0]]),
)
SCORES = tensor([2.0, 3.0, 1.0, 5.0, 7.0])  # of whole episodes, the turns' among them
GROUPS = tensor([1, 1, 1, 2, 2])
VALID = tensor([True, True, True, True, False])


def found(estimator: Estimator, **options) -> list[list[float]]:
    rewards = outcome_rewards(SCORES, MASK)
    options = {"turns": TURNS, "valid": VALID, "normalize_std": False} | options
    return estimate(estimator, rewards, MASK, GROUPS, **options).tolist()


def test_returns_of_turns_against_those_of_the_same_number() -> None:
    """Rewards by turn: 1, 0, 0.5 + 0.5 | 0, 2 + 1 | 1. With a discount of 0.5 returns are 1.25, 0.5, 1 | 1.5, 3 | 1."""
    first = (1.25 + 1.5 + 1) / 3
    assert found(Estimator.per_turn, gamma=0.5) == [
        pytest.approx([0, 1.25 - first, 1.25 - first, 0, 0.5 - 1.75, 0]),  # no other episode has a third turn
        pytest.approx([0, 1.5 - first, 0, 3 - 1.75, 3 - 1.75, 0]),
        pytest.approx([0, 1 - first, 1 - first, 1 - first, 0, 0]),
        [0] * 6,
        [0] * 6,
    ]
    second = (3 - 1.75) / (2 * 1.25**2) ** 0.5
    assert found(Estimator.per_turn, gamma=0.5, normalize_std=True)[1][3] == pytest.approx(second, abs=1e-5)


def test_gigpo() -> None:
    """Episodes 2, 3, 1 against their mean 2; turns in state 4: returns 1.25, 1 | 1.5 | 1, in state 5: 0.5 | 3."""
    four, five = (1.25 + 1 + 1.5 + 1) / 4, 1.75
    assert found(Estimator.gigpo, gamma=0.5, step_weight=2.0) == [
        pytest.approx([0, *[0 + 2 * (1.25 - four)] * 2, 0, 2 * (0.5 - five), 2 * (1 - four)]),
        pytest.approx([0, 1 + 2 * (1.5 - four), 0, *[1 + 2 * (3 - five)] * 2, 0]),
        pytest.approx([0, *[-1 + 2 * (1 - four)] * 3, 0, 0]),
        [0] * 6,
        [0] * 6,
    ]
    plain = estimate(Estimator.grpo, outcome_rewards(SCORES, MASK), MASK, GROUPS, valid=VALID).tolist()
    assert [pytest.approx(row, abs=1e-5) for row in plain] == found(Estimator.gigpo, step_weight=0.0, normalize_std=True)


def test_the_kl_in_the_reward_is_its_turns() -> None:
    rewards = outcome_rewards(SCORES, MASK)
    rewards[0, 1] -= 0.25
    got = estimate(Estimator.per_turn, rewards, MASK, GROUPS, turns=TURNS, valid=VALID, normalize_std=False, gamma=0.5)
    first = (1.0 + 1.5 + 1) / 3
    assert got[0, 1:3].tolist() == pytest.approx([1 - first] * 2) and got[0, 4].item() == pytest.approx(0.5 - 1.75)


def test_turns_of_rows_and_of_responses_without_marks() -> None:
    def rollout(prompt: tuple[int, ...], response: tuple[int, ...], *marks: TurnMark) -> Rollout:
        fields = {"finish_reason": FinishReason.stop, "policy_version": 0, "seed": 0}
        own = Prompt(id=0, tokens=prompt, source="x")
        return Rollout(prompt=own, response=response, logprobs=(0.0,) * len(response), turns=marks, **fields)

    first = rollout((1,), (2, 3, 4), TurnMark(start=0, end=1, number=0, state=7, reward=1.0), TurnMark(start=2, end=3, number=2, state=8))
    second = rollout((1, 5), (6,), TurnMark(start=0, end=1, number=1, state=9, reward=0.5))
    rows = EpisodeRows(tensor([0, 0, 1]))
    mask = tensor([[0, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    turns = turns_of([first, second, rollout((4,), (2,))], rows, mask)
    assert turns.number.tolist() == [[0, 0, 0, 2, 0, 0, 1, 0], [0] * 8]
    assert turns.rewards.tolist() == [[1.0, 0.5, 0.0], [0.0] * 3] and turns.states.tolist() == [[7, 9, 8], [hash((4,)), 0, 0]]


def test_settings() -> None:
    for estimator in ("per_turn", "gigpo"):
        GRPOConfig(advantage_estimator=estimator, gamma=0.9, normalize_std=False, dynamic_sampling=True)
        with pytest.raises(ConfigError, match=f"algorithm.shaping: advantage_estimator={estimator} takes the rewards of single turns"):
            GRPOConfig(advantage_estimator=estimator, shaping=ShapingConfig(scale=2.0))
        with pytest.raises(ConfigError, match="algorithm.group_size=1: a group needs at least 2"):
            GRPOConfig(advantage_estimator=estimator, group_size=1)
    GRPOConfig(advantage_estimator="gigpo", step_weight=0.5)
    with pytest.raises(ConfigError, match="algorithm.step_weight=0.5: advantage_estimator=per_turn has none; allowed: 1"):
        GRPOConfig(advantage_estimator="per_turn", step_weight=0.5)
    with pytest.raises(ConfigError, match="algorithm.step_weight=-1.0: must not be negative"):
        GRPOConfig(advantage_estimator="gigpo", step_weight=-1.0)
