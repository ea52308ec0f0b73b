"""Where a sum of rewards is not finite, the part that is to blame is named."""

from __future__ import annotations

import math
from concurrent.futures import Future

import pytest
import torch

from aligner.errors import RunHalted
from aligner.online.collect import Scorers, collect
from aligner.types import Scores


class Summed:
    """Prompt 1 gets NaN from `style`; prompt 2 has no reward, which is no number either, and nobody's fault here."""

    def score(self, rollouts):
        maths = torch.tensor([float(r.prompt.id) for r in rollouts])
        style = torch.tensor([math.nan if r.prompt.id == 1 else 0.5 for r in rollouts])
        valid = torch.tensor([r.prompt.id != 2 for r in rollouts])
        scores: Future = Future()
        total = torch.where(valid, maths + style, math.nan)
        scores.set_result(Scores(rewards=total, valid=valid, parts={"maths": maths, "style": style}))
        return scores

    def close(self): ...


class Refused(Summed):
    """A number that its judge takes back."""

    def score(self, rollouts):
        scores: Future = Future()
        scores.set_result(Scores(rewards=torch.ones(len(rollouts)), valid=torch.tensor([r.prompt.id != 1 for r in rollouts])))
        return scores


def test_a_number_in_a_row_that_is_not_valid_is_no_reward(fakes, topology):
    prompts = [fakes.prompt(number) for number in range(3)]
    found = collect(fakes.FakeEngine([]), prompts, [1, 2, 3], scorers=Scorers(reward=Refused()))
    assert found.valid.tolist() == [True, False, True] and found.rewards.tolist() == [1, 0, 1]


def test_the_part_is_named(fakes, topology):
    prompts = [fakes.prompt(number) for number in range(3)]
    with pytest.raises(RunHalted, match=r"reward maths \+ style gave 1 of 3 rewards that are not finite: nan \(style=nan\) for prompt "):
        collect(fakes.FakeEngine([]), prompts, [1, 2, 3], scorers=Scorers(reward=Summed(), reward_name="reward maths + style"))
