"""What a plan knows of the algorithms without a critic: who samples more than is learnt from, and who makes which passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aligner.algorithms.grpo import GRPOConfig, KLIn
from aligner.commands.plan import command as plan
from aligner.losses.advantages import Estimator
from aligner.planner.workload import Phase


@pytest.fixture(scope="module")
def config():
    return plan.load("grpo", ["model=llama3_8b"])


@pytest.mark.parametrize(
    ("settings", "extra", "phases"),
    [
        ({}, 0, {Phase.ref_logprobs}),  # one update: the policy is the one that sampled
        ({"mini_batch_size": 128, "kl_coef": 0.0}, 0, {Phase.logprobs}),
        (
            {"advantage_estimator": Estimator.remax, "kl_in": KLIn.reward},
            64,
            {Phase.logprobs, Phase.ref_logprobs},
        ),  # a greedy response per prompt
        ({"kl_in": KLIn.reward, "kl_coef": 0.0}, 0, set()),
    ],
)
def test_work_of_a_step(settings: dict, extra: int, phases: set[Phase], config) -> None:
    actor, *_ = plan.components(replace(config, algorithm=GRPOConfig(**settings)))
    assert (actor.work.rows, actor.work.extra_rows) == (512, extra)
    assert set(actor.work.phases) == {Phase.generate, Phase.train} | phases
    assert actor.has_reference == (Phase.ref_logprobs in phases)
