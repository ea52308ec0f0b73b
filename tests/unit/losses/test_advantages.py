import pytest
import torch
from torch import tensor

from aligner.losses.advantages import (
    discounted_sums,
    gae,
    group_advantages,
    outcome_rewards,
    rloo_advantages,
    shaped_rewards,
    whiten,
)

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


def test_outcome_reward_is_on_the_last_masked_token():
    mask = tensor([[False, True, True, False], [False, True, False, True], [True, False, False, False]])
    close(outcome_rewards(tensor([2.0, -1.0, 0.5]), mask), [[0, 0, 2, 0], [0, 0, 0, -1], [0.5, 0, 0, 0]])


def test_outcome_reward_without_a_token_names_the_row():
    mask = tensor([[True, False], [False, False], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1, 2\] \(2 in all\)"):
        outcome_rewards(torch.ones(3), mask)
    close(outcome_rewards(tensor([2.0, NAN, NAN]), mask, valid=tensor([True, False, False])), [[2, 0], [0, 0], [0, 0]])


def test_kl_in_the_reward_holds_the_policy_back():
    # 0.1 * k1 off every response token, and the score on the last; a positive KL lowers the reward
    mask = tensor([[False, True, True, False], [False, True, False, True]])
    kl = tensor([[NAN, 2.0, -1.0, NAN], [9.0, 3.0, 9.0, 4.0]]).requires_grad_()
    rewards = shaped_rewards(tensor([1.0, -1.0]), mask, kl, 0.1)
    close(rewards, [[0, -0.2, 1.1, 0], [0, -0.3, 0, -1.4]])
    assert not rewards.requires_grad


def test_gae_by_hand():
    # gamma 0.9, lambda 0.8, rewards 0 0 1, values 0.5 0.6 0.7
    # delta: 0.9*0.6-0.5 = 0.04, 0.9*0.7-0.6 = 0.03, 1-0.7 = 0.3
    # A2 = 0.3, A1 = 0.03 + 0.72*0.3 = 0.246, A0 = 0.04 + 0.72*0.246 = 0.21712
    rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.8)
    close(advantages, [[0.21712, 0.246, 0.3]])
    close(returns, [[0.71712, 0.846, 1.0]])


def looped_gae(rewards, values, mask, gamma, gae_lambda):
    """The recursion token by token: what `gae` computes at once."""
    advantages, next_value, next_advantage = torch.zeros_like(values), 0 * values[:, 0], 0 * values[:, 0]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], next_advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 64, 200, 1100])
@pytest.mark.parametrize("gaps", [False, True])
def test_gae_against_the_loop(width, gaps):
    """Widths around the blocks of the scan, and more than a block of blocks; rows that are all masked, or not at all, among them."""
    generator = torch.Generator().manual_seed(width)
    rewards, values = (torch.randn(7, width, generator=generator) for _ in range(2))
    ends = torch.randint(0, width + 1, (7, 2), generator=generator).sort(dim=1).values
    at = torch.arange(width)
    mask = (at >= ends[:, :1]) & (at < ends[:, 1:])
    mask[0], mask[1] = True, False
    if gaps:
        mask &= torch.rand(7, width, generator=generator) < 0.8
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.0, 1.0), (1.0, 0.0)):
        exact = looped_gae(rewards.double(), values.double(), mask, gamma, lam)
        for found, expected in zip(gae(rewards.double(), values.double(), mask, gamma, lam), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
        for found, expected in zip(gae(rewards, values, mask, gamma, lam), exact, strict=True):
            torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=3e-5)


def test_discounted_sums_by_hand_and_of_nothing():
    close(discounted_sums(tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 8.0]]), 0.5), [[3, 4, 4], [2, 4, 8]])
    close(discounted_sums(tensor([[1.0, 2.0, 4.0]]), 0.0), [[1, 2, 4]])
    assert discounted_sums(torch.zeros(0, 100), 0.9).shape == (0, 100) and discounted_sums(torch.zeros(3, 0), 0.9).shape == (3, 0)


def test_whiten_of_equal_values_and_of_nothing():
    x = torch.full((2, 2), 3.0)
    assert not whiten(x, torch.ones(2, 2, dtype=torch.bool)).any()
    assert not whiten(x, torch.zeros(2, 2, dtype=torch.bool)).any()


def test_equal_rewards_give_exactly_no_advantage():
    # in float32 the mean of twelve times 0.7 is off by 1.2e-7, which divided by (1.2e-7 + 1e-6) is an advantage of 0.1
    scores, groups = torch.full((12,), 0.7), torch.full((12,), 5)
    assert group_advantages(scores, groups, normalize_std=True).tolist() == [0.0] * 12
    assert rloo_advantages(scores, groups).tolist() == [0.0] * 12


@pytest.mark.parametrize("advantages", [lambda s, g: group_advantages(s, g, normalize_std=True), rloo_advantages])
def test_a_group_of_one_is_named(advantages):
    with pytest.raises(ValueError, match=r"groups \[8\] \(1 in all\) have 1 response"):
        advantages(torch.ones(3), tensor([4, 8, 4]))
