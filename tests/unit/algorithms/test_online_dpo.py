"""Online DPO on fakes: pairs by hand, the loss, what a step asks of its parts, the moving reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from aligner.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig, online_dpo_loss
from aligner.data.collate import rollout_batch
from aligner.jobs.samples import unused
from aligner.loop.loop import Clock
from aligner.losses.preference import DPOVariant, dpo_loss
from aligner.online.collect import ScoredRollouts
from aligner.telemetry.metrics import values
from aligner.types import PreferenceBatch, TokenOutputs


def online_dpo(fakes, task, log=None, **settings) -> OnlineDPO:
    config = OnlineDPOConfig(**({"prompts_per_step": 2, "group_size": 2, "mini_batch_size": 4} | settings))
    reference = fakes.FakeMovingReference([]) if config.variant.needs_reference else None
    return OnlineDPO(config, fakes.FakePolicy([] if log is None else log), task, reference)


def by_length(rollout) -> float:
    """The second response of a group is the longer one below."""
    return float(len(rollout.response))


def longer_second(task, fakes) -> None:
    """Responses 7 EOS | 7 7 EOS to each prompt, by turns."""

    def generate(prompts, seeds, sampling):
        turns = enumerate(zip(prompts, seeds, strict=True))
        yield [fakes.rollout(p, *[7] * (1 + turn % 2), fakes.EOS, seed=seed) for turn, (p, seed) in turns]

    task.engine.generate = generate


def test_a_response_that_was_cut_is_penalised_before_pairing(fakes, make_task) -> None:
    """Rewards 1, 2 (cut) | 3, 3.5 (cut): with a penalty of 0.75 the second prompt's order turns, the first one's stays."""
    responses = [(1, fakes.EOS), (2, 2), (3, fakes.EOS), (4, 4)]
    rollouts = [fakes.rollout(fakes.prompt(row // 2), *response) for row, response in enumerate(responses)]
    given, batch = ScoredRollouts(rollouts=rollouts, rewards=torch.tensor([1.0, 2, 3, 3.5])), rollout_batch(rollouts, 9)
    plain = online_dpo(fakes, make_task([])).pair(batch, given, seed=1)
    assert plain.rows.tolist() == [1, 0, 3, 2]
    penalised = online_dpo(fakes, make_task([]), missing_eos_penalty=0.75).pair(batch, given, seed=1)
    assert penalised.rows.tolist() == [1, 0, 2, 3] and penalised.gaps.tolist() == [0.25, 0.25]


def test_a_step(fakes, make_task) -> None:
    log: list[str] = []
    task = make_task(log, batch_size=2, reward=fakes.FakeReward(by_length))
    longer_second(task, fakes)
    algorithm = online_dpo(fakes, task, log)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["policy sleeps", "engine wakes", "engine sleeps", "update", "policy sleeps", "refit 1"]
    (batch,) = algorithm.policy.trained
    assert batch.tokens.tolist() == [[1, 7, 7, 0], [1, 7, 0, 9], [2, 7, 7, 0], [2, 7, 0, 9]]  # chosen, rejected of each prompt
    assert batch.loss_mask.sum(dim=1).tolist() == [3, 2, 3, 2] and batch.margins.tolist() == [1.0, 1.0]
    torch.testing.assert_close(batch.ref_logprobs, -1.5 * batch.loss_mask)
    assert torch.equal(batch.rollout_logprobs, -1.0 * batch.loss_mask)
    expected = {"count": 2.0, "ties": 0.0, "prompts_without_any": 0.0, "reward_gap": 1.0}
    assert {name: metrics[f"pairs/{name}"] for name in expected} == expected


def test_a_loss_without_a_reference_asks_none(fakes, make_task) -> None:
    task = make_task([], batch_size=2, reward=fakes.FakeReward(by_length))
    longer_second(task, fakes)
    algorithm = online_dpo(fakes, task, loss=DPOVariant.simpo)
    algorithm.step(1, Clock())
    assert algorithm.policy.trained[0].ref_logprobs is None


def test_a_step_of_ties_trains_nothing(fakes, make_task) -> None:
    """The fake rewards a prompt's id: both responses are worth the same."""
    log: list[str] = []
    algorithm = online_dpo(fakes, make_task(log, batch_size=2), log)
    metrics = algorithm.step(1, Clock()).metrics
    assert "update" not in log and not algorithm.reference.num_passes
    assert (metrics["pairs/ties"], metrics["pairs/count"], metrics["pairs/prompts_without_any"]) == (2.0, 0.0, 1.0)


def test_the_loss_is_the_preference_loss_with_the_kl(fakes) -> None:
    """d = log-ratios 0.5 on three tokens, -0.5 on two: k3 = exp(-d) + d - 1."""
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    ref = -1.5 * mask
    batch = PreferenceBatch(
        tokens=torch.ones(2, 4, dtype=torch.int64), lengths=torch.tensor([4, 3]), loss_mask=mask, margins=torch.ones(1), ref_logprobs=ref
    )
    outputs = TokenOutputs(logprobs=torch.where(torch.tensor([[True], [False]]), -1.0, -2.0) * mask)
    for variant in (DPOVariant.sigmoid, DPOVariant.ipo, DPOVariant.hinge, DPOVariant.robust, DPOVariant.rpo_sq):
        settings = {"beta": 0.3, "variant": variant, "sft_coef": 0.1, "label_smoothing": 0.1 * variant.takes_smoothing}
        made, expected = online_dpo_loss(outputs, batch, **settings), dpo_loss(outputs, batch, **settings)
        assert made.total == expected.total and made.count == expected.count == 1
        kl = (3 * (math.exp(-0.5) - 0.5) + 2 * (math.exp(0.5) - 1.5)) / 5
        assert values(made.metrics) == pytest.approx(values(expected.metrics) | {"pairs/ref_kl": kl})
    without = online_dpo_loss(outputs, replace(batch, ref_logprobs=None), beta=2.0, variant=DPOVariant.simpo)
    assert without.total.item() == pytest.approx(math.log1p(math.exp(-2.0 * (-1.0 + 2.0)))) and "pairs/ref_kl" not in without.metrics


def test_the_reference_follows_every_so_many_steps(fakes, make_task) -> None:
    """Also where the step at which it would was left out; the state says which it is."""
    task = make_task([], batch_size=2)
    algorithm = online_dpo(fakes, task, reference_every=2)
    for step in (1, 2, 3, 4, 6, 7, 8):
        algorithm.step(step, Clock())
    assert algorithm.reference.log == ["renewed 2", "renewed 5", "renewed 7"]
    other = online_dpo(fakes, make_task([], batch_size=2), reference_every=2)
    other.load_state(algorithm.state())
    other.step(9, Clock())
    assert other.reference.log == ["restored 7"]
    fixed = online_dpo(fakes, make_task([], batch_size=2))
    fixed.load_state({"rounds": {}, "reference_step": 0})
    fixed.step(1, Clock())
    assert fixed.reference.log == []


def test_references_that_nobody_goes_on_with() -> None:
    """Renewed after 2, 4, 6, 8. A checkpoint of step 5 goes on with 4, one of step 6 (saved before the renewal) with 4 too."""
    assert unused([2, 4, 6, 8], [5, 6]) == [2]
    assert unused([2, 4, 6, 8], [3, 9]) == [4, 6]
    assert unused([2, 4, 6, 8], []) == []
    assert unused([2, 4], [1]) == []
