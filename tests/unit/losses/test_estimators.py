"""`estimate`: every critic-free estimator by hand on five responses of 1 to 3 tokens, and who takes part in its statistics."""

import pytest
import torch
from torch import tensor

from aligner.losses.advantages import (
    GROUPED,
    Estimator,
    counted_rows,
    estimate,
    group_advantages,
    outcome_rewards,
    rloo_advantages,
    shaped_rewards,
)

NAN = float("nan")
MASK = tensor([
    [0, 1, 1, 0],
    [0, 1, 1, 1],
    [0, 1, 0, 0],
    [0, 1, 0, 1],  # its third token is an environment's
    [0, 0, 1, 1],
], dtype=torch.bool)  # fmt: skip
GROUPS = tensor([7, 3, 7, 3, 7])
SCORES = tensor([1.0, 10.0, 2.0, 14.0, 3.0])  # group 7: 1 2 3, group 3: 10 14
GREEDY = tensor([2.0, 11.0, 2.0, 11.0, 2.0])


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, tensor(expected, dtype=actual.dtype), rtol=0, atol=atol)


def found(estimator, rewards=None, mask=MASK, groups=GROUPS, **options):
    rewards = outcome_rewards(SCORES, MASK) if rewards is None else rewards
    if estimator is Estimator.remax:
        options.setdefault("baselines", GREEDY)
    return estimate(estimator, rewards, mask, groups, **options)


def on_tokens(per_row, mask=MASK):
    return (tensor(per_row)[:, None] * mask).tolist()


def whitened(rows, mask=MASK):
    """The masked tokens of nested lists, whitened by plain Python."""
    x = [value for row, keep in zip(rows, mask.tolist(), strict=True) for value, here in zip(row, keep, strict=True) if here]
    mean = sum(x) / len(x)
    std = (sum((value - mean) ** 2 for value in x) / len(x) + 1e-8) ** 0.5
    return [
        [(value - mean) / std if here else 0.0 for value, here in zip(row, keep, strict=True)]
        for row, keep in zip(rows, mask.tolist(), strict=True)
    ]


def test_grpo_and_dr_grpo():
    close(found(Estimator.grpo), on_tokens([-1.0, -0.7071068, 0.0, 0.7071068, 1.0]))
    close(found(Estimator.grpo, normalize_std=False), on_tokens([-1.0, -2.0, 0.0, 2.0, 1.0]))
    close(found(Estimator.grpo, std_epsilon=1.0), on_tokens([-0.5, -0.5224078, 0.0, 0.5224078, 0.5]))  # 2 / 3.8284271


def test_rloo():
    close(found(Estimator.rloo), on_tokens([1 - 2.5, 10.0 - 14, 0.0, 14.0 - 10, 3 - 1.5]))


def test_remax_subtracts_the_greedy_reward():
    close(found(Estimator.remax), on_tokens([-1.0, -1.0, 0.0, 3.0, 1.0]))
    # discounted: reward and baseline alike, from the last token back; the environment's token is no step
    half = [[0, -0.5, -1, 0], [0, -0.25, -0.5, -1], [0, 0, 0, 0], [0, 1.5, 0, 3], [0, 0, 0.5, 1]]
    close(found(Estimator.remax, gamma=0.5), half)


def test_reinforce_is_the_return_as_it_is():
    close(found(Estimator.reinforce), on_tokens([1.0, 10.0, 2.0, 14.0, 3.0]))
    half = [[0, 0.5, 1, 0], [0, 2.5, 5, 10], [0, 2, 0, 0], [0, 7, 0, 14], [0, 0, 1.5, 3]]
    close(found(Estimator.reinforce, gamma=0.5), half)


def test_reinforce_pp_whitens_over_all_tokens_of_the_batch():
    # of tokens, not of responses: 1 1 10 10 10 2 14 14 3 3, mean 6.8
    close(found(Estimator.reinforce_pp), whitened(on_tokens([1.0, 10.0, 2.0, 14.0, 3.0])))
    first = (1 - 6.8) / ((2 * 5.8**2 + 3 * 3.2**2 + 4.8**2 + 2 * 7.2**2 + 2 * 3.8**2) / 10) ** 0.5
    assert found(Estimator.reinforce_pp)[0, 1].item() == pytest.approx(first, abs=1e-5)


def test_reinforce_pp_has_the_kl_of_later_tokens_in_a_tokens_return():
    # 0.1 * KL off every token: row 0 has rewards -0.1, 1 - 0.2 and so returns 0.7, 0.8
    kl = tensor([[0, 1.0, 2.0, NAN], [0, 0, 0, 0], [0, 1.0, 0, 0], [0, 2.0, 50.0, -1.0], [0, 0, 1.0, 1.0]])
    rewards = shaped_rewards(SCORES, MASK, kl, 0.1)
    returns = [[0, 0.7, 0.8, 0], [0, 10, 10, 10], [0, 1.9, 0, 0], [0, 13.9, 0, 14.1], [0, 0, 2.8, 2.9]]
    close(found(Estimator.reinforce_pp, rewards), whitened(returns))
    close(found(Estimator.reinforce, rewards), returns)


def test_reinforce_pp_baseline_subtracts_the_group_mean_first():
    close(found(Estimator.reinforce_pp_baseline), whitened(on_tokens([-1.0, -2.0, 0.0, 2.0, 1.0])))


def test_kl_in_the_reward_of_group_estimators_is_that_of_the_whole_response():
    # sums of KL 3 0 1 1 2 times 0.5 off 1 10 2 14 3: -0.5 10 1.5 13.5 2
    kl = tensor([[0, 1.0, 2.0, NAN], [0, 0, 0, 0], [0, 1.0, 0, 0], [0, 2.0, 50.0, -1.0], [0, 0, 1.0, 1.0]])
    rewards, totals = shaped_rewards(SCORES, MASK, kl, 0.5), tensor([-0.5, 10.0, 1.5, 13.5, 2.0])
    close(found(Estimator.grpo, rewards), on_tokens(group_advantages(totals, GROUPS, normalize_std=True).tolist()))
    close(found(Estimator.rloo, rewards), on_tokens(rloo_advantages(totals, GROUPS).tolist()))
    # the -baseline variant: G[t] - mean of the totals (1 and 11.75)
    returns = [[0, -1.5, -1, 0], [0, -1.75, -1.75, -1.75], [0, 0.5, 0, 0], [0, 1.75, 0, 2.75], [0, 0, 1, 1.5]]
    close(found(Estimator.reinforce_pp_baseline, rewards), whitened(returns))


@pytest.mark.parametrize("estimator", list(Estimator))
def test_rows_without_a_reward_take_part_in_nothing(estimator):
    """Whatever they hold, the others have what they would have alone; so has a row that is then alone in its group."""
    valid = tensor([True, True, True, False, True])  # row 1 stays alone in group 3
    rewards = outcome_rewards(SCORES, MASK)
    rewards[3] = NAN
    got = found(estimator, rewards, valid=valid)
    counted = counted_rows(estimator, GROUPS, valid)
    assert counted.tolist() == [True, estimator not in GROUPED, True, False, True]
    assert not got[~counted].any()
    options = {"baselines": GREEDY[counted]} if estimator is Estimator.remax else {}
    alone = found(estimator, rewards[counted], MASK[counted], GROUPS[counted], **options)
    torch.testing.assert_close(got[counted], alone, rtol=0, atol=0)


@pytest.mark.parametrize("estimator", list(Estimator))
def test_no_row_at_all(estimator):
    got = found(estimator, valid=torch.zeros(5, dtype=torch.bool))
    assert got.shape == MASK.shape and not got.any()


@pytest.mark.parametrize("estimator", list(Estimator))
def test_what_stands_outside_the_mask_changes_nothing(estimator):
    rewards = outcome_rewards(SCORES, MASK)
    expected = found(estimator, rewards)
    for garbage in (NAN, float("inf"), 7.0):
        got = found(estimator, rewards.masked_fill(~MASK, garbage))
        assert torch.equal(got, expected)
        assert not got[~MASK].any()


@pytest.mark.parametrize(
    ("estimator", "options", "named"),
    [
        (Estimator.grpo, {"groups": None}, "group_ids is None: estimator grpo"),
        (Estimator.reinforce_pp_baseline, {"groups": None}, "group_ids is None: estimator reinforce_pp_baseline"),
        (Estimator.remax, {"baselines": None}, "baselines are missing: estimator remax"),
        (Estimator.rloo, {"baselines": GREEDY}, "baselines were given: estimator rloo"),
        (Estimator.grpo, {"gamma": 0.9}, "gamma is 0.9: estimator grpo has one advantage per response"),
        (Estimator.reinforce, {"mask": MASK & tensor([True, True, False, True, True])[:, None]}, r"False everywhere in rows \[2\]"),
    ],
)
def test_what_cannot_be_is_named(estimator, options, named):
    with pytest.raises(ValueError, match=named):
        found(estimator, **options)
