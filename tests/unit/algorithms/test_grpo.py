"""GRPO on fakes: group advantages by hand, and what a step asks of its parts."""

from __future__ import annotations

import pytest
import torch

from aligner.algorithms.grpo import GRPO, GRPOConfig
from aligner.data.collate import rollout_batch
from aligner.loop.loop import Clock
from aligner.online.collect import ScoredRollouts


def grpo(fakes, task, log=None, **config) -> GRPO:
    settings = {"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4} | config
    return GRPO(GRPOConfig(**settings), fakes.FakePolicy([] if log is None else log), task)


def scored(rewards: list[float], **fields) -> ScoredRollouts:
    """As many rollouts (of which nothing but their number is looked at) with these rewards."""
    return ScoredRollouts(rollouts=[None] * len(rewards), rewards=torch.tensor(rewards), **fields)


def batch_of(fakes, *responses: tuple[int, ...], ids: tuple[int, ...]):
    return rollout_batch([fakes.rollout(fakes.prompt(i), *response) for i, response in zip(ids, responses, strict=True)], pad_id=9)


def test_groups_are_by_position(fakes, make_task) -> None:
    """Prompt 0 in two groups, as where a step straddles an epoch: rewards 1, 0 | 5, 3 and not one group of four."""
    batch = batch_of(fakes, (1,), (2,), (3,), (4,), ids=(0, 0, 0, 0))
    made = grpo(fakes, make_task([]), normalize_std=False).experience(batch, scored([1.0, 0, 5, 3]), None, None)
    assert made.advantages[:, 1].tolist() == [0.5, -0.5, 1, -1] and made.rollout_logprobs is batch.rollout_logprobs


def test_truncated_responses_are_masked_but_count_in_their_group(fakes, make_task) -> None:
    batch = batch_of(fakes, (1, fakes.EOS), (2,), (3, fakes.EOS), (4, fakes.EOS), ids=(0, 0, 1, 1))
    made = grpo(fakes, make_task([]), normalize_std=False, mask_truncated=True).experience(batch, scored([1.0, 0, 3, 3]), None, None)
    assert made.advantages.tolist() == [[0, 0.5, 0.5], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert made.loss_mask.tolist() == [[False, True, True], [False, False, False], [False, True, True], [False, True, True]]


def test_a_step_of_one_update_makes_no_pass_for_old_logprobs(fakes, make_task) -> None:
    log: list[str] = []
    task = make_task(log, batch_size=2)
    algorithm = grpo(fakes, task, log)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["policy sleeps", "engine wakes", "generate", "engine sleeps", "update", "policy sleeps", "refit 1"]
    prompts, seeds = task.engine.asked[0]
    assert prompts == [0, 0, 1, 1]  # a prompt's group side by side
    assert len(set(seeds)) == 4
    (batch,) = algorithm.policy.trained
    assert batch.old_logprobs is None
    torch.testing.assert_close(batch.ref_logprobs, -1.5 * batch.loss_mask)
    assert metrics["rollout/groups_without_signal"] == 1.0  # the fake rewards a prompt's id
    assert metrics["rollout/reward"] == 0.5
    algorithm.step(2, Clock())
    assert task.engine.asked[1][0] == [2, 2, 3, 3]
    assert not set(task.engine.asked[1][1]) & set(seeds)


@pytest.mark.parametrize("several", [{"mini_batch_size": 2}, {"num_epochs": 2}])
def test_a_step_of_two_updates_keeps_the_samplers_policy_as_the_old_one(several: dict, fakes, make_task) -> None:
    log: list[str] = []
    algorithm = grpo(fakes, make_task(log, batch_size=2, reference=None), log, **several)
    algorithm.step(1, Clock())
    sampling = ["policy sleeps", "engine wakes", "generate", "engine sleeps"]
    assert log == [*sampling, "logprobs", "update", "update", "policy sleeps", "refit 2"]
    for batch in algorithm.policy.trained:
        torch.testing.assert_close(batch.old_logprobs, -1.0 * batch.loss_mask)
        assert batch.ref_logprobs is None
