"""Which responses are learnt from, and how updates are cut, by hand."""

from __future__ import annotations

import pytest
import torch

from aligner.online.selection import Pairing, best_rows, num_compared, pairs_of, updates_of
from aligner.types import LabeledBatch, PreferenceBatch

# Three prompts with four responses each; the fourth row of the first, and all but the second of the last have no reward.
REWARDS = torch.tensor([1.0, 3, 3, 9, 2, 2, 2, 2, 0, -1, 0, 0])
VALID = torch.tensor([True, True, True, False, True, True, True, True, False, True, False, False])


@pytest.mark.parametrize(
    ("keep", "min_reward", "rows"),
    [
        (1, None, [1, 4, 9]),  # of equals the first
        (2, None, [1, 2, 4, 5, 9]),
        (4, None, [0, 1, 2, 4, 5, 6, 7, 9]),
        (3, 2.0, [1, 2, 4, 5, 6]),
        (1, 10.0, []),
    ],
)
def test_the_best_rows(keep: int, min_reward: float | None, rows: list[int]) -> None:
    assert best_rows(REWARDS, VALID, group_size=4, keep=keep, min_reward=min_reward).tolist() == rows


def pairs(pairing: Pairing, *, min_gap: float = 0.0, seed: int = 0):
    return pairs_of(REWARDS, VALID, group_size=4, pairing=pairing, min_gap=min_gap, seed=seed)


def test_best_against_worst() -> None:
    """1 (reward 3) over 0 (reward 1); the second prompt is a tie; the third has one response and nothing to compare it with."""
    found = pairs(Pairing.best_worst)
    assert (found.chosen.tolist(), found.rejected.tolist(), found.gaps.tolist(), found.num_ties) == ([1], [0], [2.0], 1)
    assert found.rows.tolist() == [1, 0]
    none = pairs(Pairing.best_worst, min_gap=2.0)
    assert (len(none.gaps), none.num_ties, none.rows.dtype) == (0, 2, torch.int64)


def test_each_with_each() -> None:
    """Of the first prompt (0, 1), (0, 2) and the tie (1, 2); of the second six ties."""
    found = pairs(Pairing.all)
    assert (found.chosen.tolist(), found.rejected.tolist(), found.num_ties) == ([1, 2], [0, 0], 7)
    assert num_compared(Pairing.all, 4) == 6 and num_compared(Pairing.random, 4) == 1


def test_random_pairs() -> None:
    """One pair of valid responses per prompt that has two; over the seeds every pair of the first prompt, its tie too."""
    drawn = [pairs(Pairing.random, seed=seed) for seed in range(40)]
    assert {(*one.chosen.tolist(), *one.rejected.tolist()) for one in drawn} == {(1, 0), (2, 0), ()}
    assert all(len(one.gaps) + one.num_ties == 2 for one in drawn)
    assert pairs(Pairing.random, seed=7).rows.tolist() == pairs(Pairing.random, seed=7).rows.tolist()


def labelled(count: int) -> LabeledBatch:
    tokens, mask = torch.arange(count)[:, None].repeat(1, 2), torch.ones(count, 2, dtype=torch.bool)
    return LabeledBatch(tokens=tokens, lengths=torch.full((count,), 2), loss_mask=mask, rollout_logprobs=-tokens.float())


def test_updates_are_of_about_equal_size() -> None:
    """Nine rows in parts of at most four: 3, 3, 3 and not 4, 4, 1; the second epoch has them in another order, the same every time."""
    parts = updates_of(labelled(9), 4, 2, key="1/1", least=1)
    assert [part.tokens[:, 0].tolist() for part in parts[:3]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(parts[0].rollout_logprobs, -parts[0].tokens.float())  # the sampler is the policy of the first update alone
    assert [part.rollout_logprobs for part in parts[1:]] == [None] * 5
    again = [part.tokens[:, 0].tolist() for part in parts[3:]]
    assert sorted(row for part in again for row in part) == list(range(9)) and again != [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert again == [part.tokens[:, 0].tolist() for part in updates_of(labelled(9), 4, 2, key="1/1", least=1)[3:]]


def test_every_replica_gets_an_example() -> None:
    (part,) = updates_of(labelled(2), 8, 1, key="", least=4)
    assert part.tokens[:, 0].tolist() == [0, 1, 0, 0] and part.loss_mask.any(dim=1).tolist() == [True, True, False, False]


def test_pairs_stay_together() -> None:
    """Three pairs in parts of at most two, and of at least two: the last part is filled with a pair without a token to learn from."""
    rows = labelled(6)
    batch = PreferenceBatch(tokens=rows.tokens, lengths=rows.lengths, loss_mask=rows.loss_mask, margins=torch.tensor([1.0, 2, 3]))
    first, last = updates_of(batch, 2, 1, key="", least=2)
    assert sorted([first.margins.tolist(), last.margins.tolist()]) == [[1.0, 1.0], [2.0, 3.0]]
    filled = first if first.margins.tolist() == [1.0, 1.0] else last
    assert filled.tokens[:, 0].tolist() == [0, 1, 0, 1] and filled.loss_mask.any(dim=1).tolist() == [True, True, False, False]
