"""Episodes of several token sequences: one reward, one place in a group; numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rollout_parts import Episode, scored

from aligner.algorithms.grpo import GRPO, GRPOConfig, has_signal
from aligner.data.collate import rollout_batch
from aligner.losses.aggregation import Aggregation
from aligner.online.collect import ScoredRollouts, joined
from aligner.types import EpisodeRows, TokenOutputs


@pytest.fixture
def episodes(fakes) -> list[Episode]:
    """Prompts 0, 0 | 1, 1 with rewards 1, 0 | 5, 3; the first and the last episode have two sequences each."""

    def episode(number: int, reward: float | None, *responses: tuple[int, ...]) -> Episode:
        rollouts = tuple(fakes.rollout(fakes.prompt(number), *response) for response in responses)
        return Episode(rollouts=rollouts, reward=reward)

    return [episode(0, 1.0, (1,), (2, 3)), episode(0, 0.0, (4,)), episode(1, 5.0, (5, 6)), episode(1, 3.0, (7,), (8,))]


def grpo(fakes, task, **config) -> GRPO:
    settings = {"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4, "normalize_std": False, "kl_coef": 0.0}
    return GRPO(GRPOConfig(**{**settings, **config}), fakes.FakePolicy([]), task)


def made(fakes, task, episodes: list[Episode], **config):
    collected = scored(episodes)
    batch = rollout_batch(collected.rollouts, pad_id=9)
    algorithm = grpo(fakes, task, **config)
    return algorithm, algorithm.experience(batch, collected, None, None)


def test_advantages_and_loss_of_episodes_with_two_sequences(fakes, make_task, episodes) -> None:
    """Deviations 0.5, -0.5 | 1, -1 of four episodes, not of six rows, on every token that the policy wrote in any sequence."""
    algorithm, batch = made(fakes, make_task([]), episodes, aggregation=Aggregation.token_mean)
    assert batch.advantages.tolist() == [[0, 0.5, 0], [0, 0.5, 0.5], [0, -0.5, 0], [0, 1, 1], [0, -1, 0], [0, -1, 0]]
    logprobs = torch.full(batch.tokens.shape, -1.0, requires_grad=True)
    loss = algorithm.loss()(TokenOutputs(logprobs=logprobs), batch)
    assert loss.count.item() == 8 and loss.total.item() == -(3 * 0.5 - 0.5 + 2 - 2)
    loss.total.backward()
    assert torch.equal(logprobs.grad, -batch.advantages)


def test_episodes_are_discounted_as_one_long_response(fakes, make_task, episodes) -> None:
    config = {"advantage_estimator": "reinforce", "normalize_std": True, "gamma": 0.5}
    _, batch = made(fakes, make_task([]), episodes, **config)
    assert batch.advantages.tolist() == [[0, 0.25, 0], [0, 0.5, 1], [0, 0, 0], [0, 2.5, 5], [0, 1.5, 0], [0, 3, 0]]


def test_an_episode_without_a_reward_leaves_its_group(fakes, make_task, episodes) -> None:
    episodes[3] = replace(episodes[3], reward=None)
    _, batch = made(fakes, make_task([]), episodes)
    assert batch.loss_mask.any(dim=1).tolist() == [True, True, True, False, False, False]  # nothing is left to compare prompt 1's with


def test_one_sequence_each_changes_nothing(fakes, make_task) -> None:
    rollouts = [fakes.rollout(fakes.prompt(i // 2), i, 7) for i in range(4)]
    plain = ScoredRollouts(rollouts=rollouts, rewards=torch.tensor([1.0, 0.3, 2.0, 7.1]))
    each = scored([Episode(rollouts=(r,), reward=x) for r, x in zip(rollouts, plain.rewards.tolist(), strict=True)])
    batch = rollout_batch(rollouts, pad_id=9)
    for config in ({}, {"normalize_std": True}, {"advantage_estimator": "reinforce_pp", "normalize_std": True}):
        one, other = (grpo(fakes, make_task([]), **config).experience(batch, collected, None, None) for collected in (plain, each))
        assert torch.equal(one.advantages, other.advantages) and torch.equal(one.loss_mask, other.loss_mask)
    assert plain.episodes.joined(batch.loss_mask) is batch.loss_mask  # no copy


def test_rounds_are_joined_and_episodes_selected(episodes) -> None:
    collected = joined([scored(episodes)] * 2)
    assert collected.episodes.owner.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 7]
    assert collected.valid_rewards.tolist() == [1, 0, 5, 3] * 2 and has_signal(collected, 2).tolist() == [True] * 4
    rows = collected.episodes.rows_of(torch.tensor([3, 4]))
    part = collected.select(rows)
    assert rows.tolist() == [4, 5, 6, 7] and part.rewards.tolist() == [3, 3, 1, 1]
    assert part.episodes.owner.tolist() == [0, 0, 1, 1]


def test_long_rows_there_and_back() -> None:
    rows = EpisodeRows(torch.tensor([0, 0, 1, 2, 2, 2]))
    x = torch.arange(12).view(6, 2) + 1
    assert rows.joined(x).tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0], [7, 8, 9, 10, 11, 12]]
    assert torch.equal(rows.split(rows.joined(x)), x) and rows.total(torch.ones(6)).tolist() == [2, 1, 3]
    for owner in ([1, 1], [0, 2], [0, 1, 0]):
        with pytest.raises(ValueError, match="must begin at 0 and stay or grow by 1"):
            EpisodeRows(torch.tensor(owner))
