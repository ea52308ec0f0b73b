"""A float16 model learns what a float32 one does; gradients that overflow cost an update and half of the loss scale, nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from model_steps import make_batch

from aligner.errors import ConfigError, RunHalted
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype
from aligner.models.training.guard import LOSS_SCALE, OVERFLOWS, SKIPPED, UPDATES
from aligner.models.training.optimizer import OptimizerConfig
from aligner.types import LossOutput

pytestmark = pytest.mark.usefixtures("topology")


def policy(make_model, *, dtype: Dtype = Dtype.float16, seed: int = 0, **optimizer):
    settings = OptimizerConfig(**({"lr": 1e-2, "min_lr": 1e-2, "warmup_steps": 0, "eps": 1e-3} | optimizer))
    return make_model("policy", optimizer=settings, seed=seed, config={"dtype": dtype}, training={"micro_batch_size": 2})


def step(model, number: int = 0, loss=sft_loss) -> dict[str, float]:
    return {name: metric.value() for name, metric in model.train_step(make_batch("policy", number), loss).items()}


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize("distributed", [True, False])
def test_an_update_is_that_of_float32(distributed, make_model):
    exact = policy(make_model, dtype=Dtype.float32, distributed=distributed)
    half = policy(make_model, distributed=distributed)
    assert {p.dtype for p in half.module.parameters()} == {torch.float16}
    expected, got = step(exact), step(half)
    assert got.pop(LOSS_SCALE) == 1024 and got.pop(OVERFLOWS) == 0
    assert got == pytest.approx(expected, rel=5e-3) and got["optim/grad_norm"] > 0.1  # of the gradient itself, not of the scaled one
    for ours, theirs in zip(weights(half), weights(exact), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=3e-3)


def test_the_scale_changes_no_bit_where_nothing_vanishes(make_model):
    """It is a power of two: of gradients that are all normal numbers every scale gives the same bits."""
    models = [policy(make_model, initial_loss_scale=2.0**n) for n in (9, 10)]
    norms = [step(model)["optim/grad_norm"] for model in models]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for one, other in zip(*(weights(model) for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def test_small_gradients_vanish_without_a_scale(make_model):
    """What the scale is for: float16 has nothing below 6e-8."""

    def faint(outputs, part) -> LossOutput:
        result = sft_loss(outputs, part)
        return LossOutput(total=result.total * 1e-7, count=result.count, metrics=result.metrics)

    scaled, plain = (policy(make_model, initial_loss_scale=scale, clip_grad=1.0) for scale in (2.0**24, 1.0))
    exact = policy(make_model, dtype=Dtype.float32)
    norms = [step(model, loss=faint)["optim/grad_norm"] for model in (exact, scaled, plain)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02) and not norms[2] == pytest.approx(norms[0], rel=0.2)


@pytest.mark.parametrize("distributed", [True, False])
def test_an_overflow_leaves_everything_but_the_scale(distributed, make_model):
    model = policy(make_model, initial_loss_scale=2.0**60, min_loss_scale=2.0**57, distributed=distributed)
    loss = step(policy(make_model, dtype=Dtype.float32))["sft/loss"]
    before, generators = weights(model), torch.get_rng_state()
    metrics = step(model)
    assert (metrics[OVERFLOWS], metrics[UPDATES], metrics[SKIPPED]) == (1, 0, 0) and metrics[LOSS_SCALE] == 2.0**59
    assert "optim/skipped_in_a_row" not in metrics and math.isnan(metrics["optim/grad_norm"])
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-2)
    assert model.version == 0 and torch.equal(torch.get_rng_state(), generators)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert [step(model)[LOSS_SCALE] for _ in range(2)] == [2.0**58, 2.0**57]
    with pytest.raises(RunHalted, match="the gradient of optimizer step 1 is not finite"):  # a lower scale is not allowed: the guard's case
        step(model)


def test_a_loss_that_is_not_finite_is_no_overflow(make_model):
    def spoilt(outputs, part) -> LossOutput:
        result = sft_loss(outputs, part)
        return LossOutput(total=result.total * math.inf, count=result.count, metrics=result.metrics)

    model = policy(make_model)
    with pytest.raises(RunHalted, match="of optimizer step 1 is not finite"):
        step(model, loss=spoilt)
    assert model.model.loss_scale.value == 1024


def test_the_scale_falls_until_an_update_is_made_and_rises_again(make_model):
    model = policy(make_model, initial_loss_scale=2.0**30, loss_scale_window=3)
    seen = [step(model, number) for number in range(40)]
    overflows = [metrics[OVERFLOWS] for metrics in seen]
    first = overflows.index(0)
    assert 5 < first < 30 and overflows[:first] == [1] * first
    scales = [metrics[LOSS_SCALE] for metrics in seen]
    assert scales[:first] == [2.0 ** (29 - n) for n in range(first)]
    assert scales[first + 2] == 2 * scales[first + 1] == 2 * scales[first]  # three in a row without an overflow
    assert model.version == overflows.count(0)
    assert seen[-1]["sft/loss"] < seen[0]["sft/loss"]


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(distributed, make_model, tmp_path):
    settings = {"initial_loss_scale": 2.0**20, "loss_scale_window": 4, "distributed": distributed}
    first = policy(make_model, seed=1, **settings)
    begun = [step(first, number) for number in range(8)]
    assert 0 < sum(metrics[OVERFLOWS] for metrics in begun) < 8
    checkpoint.save(tmp_path, first.model, checkpoint.SaveRequest(step=8, state={}))
    rest = [step(first, number) for number in range(8, 20)]
    assert len({metrics[LOSS_SCALE] for metrics in rest}) > 1  # it moves on the way
    resumed = policy(make_model, seed=2, **settings)
    checkpoint.load(resumed.model, tmp_path)
    assert str([step(resumed, number) for number in range(8, 20)]) == str(rest)  # to the last digit, NaN too
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(first), strict=True))
    assert resumed.model.loss_scale.state() == first.model.loss_scale.state()


def test_other_precisions_have_no_scale(make_model):
    model = policy(make_model, dtype=Dtype.bfloat16, initial_loss_scale=2.0**60)
    metrics = step(model)
    assert LOSS_SCALE not in metrics and OVERFLOWS not in metrics and metrics[UPDATES] == 1
    assert model.model.loss_scale.state() is None and model.model.loss_scale.value == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_loss_scale": 1000.0}, "optimizer.initial_loss_scale=1000.0: must be a power of two"),
        ({"min_loss_scale": 0.0}, "optimizer.min_loss_scale=0.0: must be a power of two"),
        ({"initial_loss_scale": math.inf}, "optimizer.initial_loss_scale=inf: must be a power of two"),
        ({"min_loss_scale": 2048.0}, "optimizer.min_loss_scale=2048.0: must be at most initial_loss_scale=1024.0"),
        ({"loss_scale_window": 0}, "optimizer.loss_scale_window=0: must be at least 1"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)
