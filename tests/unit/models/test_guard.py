"""Updates that are not finite: left out without a trace, or the end of the run, as the guard's settings say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from model_steps import make_batch

from aligner.errors import CheckpointError, ConfigError, RollBack, RunHalted
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.training.guard import SKIPPED, SKIPPED_IN_A_ROW, SPOILT, Guard, GuardConfig, NonFinite, ReportingGuard, judge_reply
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.trainable import generator_state
from aligner.telemetry.metrics import Max, Mean, Sum, merge, values
from aligner.types import LossOutput

pytestmark = pytest.mark.usefixtures("topology")


def bad_gradient(outputs, part) -> LossOutput:
    good = sft_loss(outputs, part)
    torch.rand(3)  # a pass may draw numbers, as dropout does
    return LossOutput(total=good.total * math.nan, count=good.count, metrics=good.metrics | {"sft/largest": Max(maximum=math.inf)})


def bad_loss_only(outputs, part) -> LossOutput:
    good = sft_loss(outputs, part)
    return LossOutput(total=good.total + math.inf, count=good.count, metrics=good.metrics)


@pytest.fixture
def guarded(make_model) -> Callable:
    def make(guard: Guard):
        optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2)
        return make_model("policy", optimizer=optimizer, training={"guard": guard, "micro_batch_size": 2, "total_steps": 10})

    return make


def everything(policy) -> list[torch.Tensor]:
    """Weights, optimizer state, and where the random generators are."""
    model = policy.model
    states = [value for part in model.optimizer.chained_optimizers for state in part.optimizer.state.values() for value in state.values()]
    tensors = [p.detach() for p in model.module.parameters()] + [value for value in states if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in tensors] + [generator_state()["torch"]]


@pytest.mark.parametrize("bad", [bad_gradient, bad_loss_only])
def test_a_skipped_update_leaves_no_trace(guarded, bad):
    policy, undisturbed = (guarded(Guard(GuardConfig(non_finite=NonFinite.skip))) for _ in range(2))
    for model in (policy, undisturbed):
        model.train_step(make_batch("policy", 0), sft_loss)
    before, schedule = everything(policy), policy.model.scheduler.state_dict()
    metrics = policy.train_step(make_batch("policy", 1), bad)
    assert policy.version == 1 and policy.model.scheduler.state_dict() == schedule
    assert len(before) > 20 and all(torch.equal(a, b) for a, b in zip(everything(policy), before, strict=True))
    assert metrics[SKIPPED] == Sum(total=1) and metrics[SKIPPED_IN_A_ROW] == Max(maximum=1)
    assert metrics["sft/loss"] == Mean(total=0.0, count=0)  # what was measured on the batch is not reported
    for model in (policy, undisturbed):
        metrics = model.train_step(make_batch("policy", 2), sft_loss)
    assert metrics[SKIPPED] == Sum(total=0) and policy.model.guard.skipped_in_a_row == 0
    ours, theirs = everything(policy)[:-1], everything(undisturbed)[:-1]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_too_many_in_a_row_end_the_run(guarded):
    policy = guarded(Guard(GuardConfig(non_finite=NonFinite.skip, max_skips=1)))
    policy.train_step(make_batch("policy", 0), bad_gradient)
    policy.train_step(make_batch("policy", 0), sft_loss)  # breaks the row
    policy.train_step(make_batch("policy", 0), bad_gradient)
    with pytest.raises(RunHalted, match=r"the gradient of optimizer step 2 is not finite .*: 2 updates in a row \(guard.max_skips=1\)"):
        policy.train_step(make_batch("policy", 0), bad_gradient)


@pytest.mark.parametrize(("policy", "error"), [(NonFinite.stop, RunHalted), (NonFinite.roll_back, RollBack)])
def test_the_end_of_the_run_says_what_was_not_finite(guarded, policy, error):
    model = guarded(Guard(GuardConfig(non_finite=policy)))
    before = everything(model)
    with pytest.raises(error, match=r"the gradient .*its norm on rank 0: nan, the loss of 2 of 2 micro-batches too.*the weights are those"):
        model.train_step(make_batch("policy", 0), bad_gradient)
    with pytest.raises(error, match="^the loss of optimizer step 1 is not finite"):
        model.train_step(make_batch("policy", 0), bad_loss_only)
    assert model.version == 0 and all(torch.equal(a, b) for a, b in zip(everything(model), before, strict=True))


def test_a_served_model_leaves_the_decision_to_its_client(guarded, capsys):
    model = guarded(ReportingGuard(GuardConfig()))
    parts = [model.train_step(make_batch("policy", number), loss) for number, loss in enumerate((bad_gradient, bad_gradient, sft_loss))]
    reply = values(merge(parts))
    assert (reply[SKIPPED], reply[SKIPPED_IN_A_ROW]) == (2, 2) and math.isfinite(reply["sft/loss"])
    assert "guard: the gradient of optimizer step 1 is not finite" in capsys.readouterr().out
    judge_reply(GuardConfig(non_finite=NonFinite.skip, max_skips=2), reply, step=7)
    with pytest.raises(RunHalted, match=r"2 updates of step 7: .*: 2 updates in a row \(guard.max_skips=1\)"):
        judge_reply(GuardConfig(non_finite=NonFinite.skip, max_skips=1), reply, step=7)
    with pytest.raises(RunHalted, match="the critic left out 2 updates of step 7"):
        judge_reply(GuardConfig(), reply, step=7)
    with pytest.raises(RollBack) as raised:
        judge_reply(GuardConfig(non_finite=NonFinite.roll_back), reply, step=7)
    assert raised.value.step == 7
    judge_reply(GuardConfig(), {SKIPPED: 0.0}, step=7)


# Updates that were made and left bad parameters.


def spoil_next_update(policy, value: float) -> None:
    """The optimizer's next step, whose gradient is sound, leaves `value` in one of the parameters."""
    step, parameter = policy.model.optimizer.step, policy.model.module.decoder.final_layernorm.weight

    def spoiling():
        result = step()
        with torch.no_grad():
            parameter[3] = value
        return result

    policy.model.optimizer.step = spoiling


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1e29])
@pytest.mark.parametrize(("setting", "error"), [("stop", RunHalted), ("skip", RollBack), ("roll_back", RollBack)])
def test_an_update_that_leaves_a_bad_parameter_is_not_gone_on_from(guarded, setting, error, value):
    policy = guarded(Guard(GuardConfig(non_finite=NonFinite(setting))))
    policy.train_step(make_batch("policy", 0), sft_loss)
    spoil_next_update(policy, value)
    with pytest.raises(error) as raised:
        policy.train_step(make_batch("policy", 1), sft_loss)
    message = str(raised.value)
    magnitude = "nan" if math.isnan(value) else f"{abs(value):.3g}"
    assert "optimizer step 2 was made and left 1 of " in message and f"final_layernorm.weight: {magnitude} on rank 0" in message
    assert f"(guard.non_finite={setting})" in message and "the weights are those" not in message and "cannot be taken back" in message
    assert policy.version == 2  # what would be saved is no longer the step before


@pytest.mark.parametrize("distributed", [True, False])
def test_what_is_too_large_is_a_setting(make_model, distributed):
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, distributed=distributed)
    for most, error in ((0.0, None), (1e30, None), (1e28, RunHalted)):
        policy = make_model("policy", optimizer=optimizer, training={"guard": Guard(GuardConfig(max_weight=most))})
        spoil_next_update(policy, 1e29)
        if error is None:
            policy.train_step(make_batch("policy", 0), sft_loss)
        else:
            with pytest.raises(error, match=r"above guard.max_weight=1e\+28 \(largest magnitudes: .*: 1e\+29"):
                policy.train_step(make_batch("policy", 0), sft_loss)


def test_a_served_model_that_was_spoilt_ends_the_run_of_its_client(guarded, capsys):
    model = guarded(ReportingGuard(GuardConfig()))
    spoil_next_update(model, math.nan)
    reply = values(merge([model.train_step(make_batch("policy", number), sft_loss) for number in range(2)]))  # the second is NaN throughout
    assert reply[SPOILT] == 1 and reply[SKIPPED] == 2
    assert "guard: optimizer step 1 was made and left 1 of " in capsys.readouterr().out
    for setting, error in ((NonFinite.stop, RunHalted), (NonFinite.skip, RollBack), (NonFinite.roll_back, RollBack)):
        with pytest.raises(error, match="an update of the critic in step 7 left parameters that are not finite") as raised:
            judge_reply(GuardConfig(non_finite=setting, max_skips=9), reply, step=7)
        assert error is RunHalted or raised.value.step == 7


@pytest.mark.parametrize("part", ["weights", "exp_avg_sq"])
def test_nothing_that_is_not_finite_is_published(guarded, tmp_path, part):
    policy = guarded(Guard(GuardConfig()))
    policy.train_step(make_batch("policy", 0), sft_loss)
    checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=1, state={}))
    tensor = policy.model.module.decoder.final_layernorm.weight
    if part != "weights":
        states = policy.model.optimizer.chained_optimizers[0].optimizer.state
        tensor = next(iter(states.values()))[part]
    with torch.no_grad():
        tensor.view(-1)[0] = math.inf
    with pytest.raises(CheckpointError, match=f"1 of .* tensors of the {'weights' if part == 'weights' else 'optimizer'} are not finite"):
        checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]
    assert checkpoint.resolve(tmp_path).name == "step_000001"


def test_settings():
    with pytest.raises(ConfigError, match="guard.max_skips=-1"):
        GuardConfig(max_skips=-1)
    with pytest.raises(ConfigError, match="guard.max_weight=nan"):
        GuardConfig(max_weight=math.nan)
