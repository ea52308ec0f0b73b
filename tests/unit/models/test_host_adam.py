"""`optimizer.cpu_offload`: the state is the host's, the numbers are those of an optimizer on the device."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype
from aligner.models.training.offload import optimizer_tensors
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import platform
from aligner.types import LabeledBatch, ValueBatch

pytestmark = pytest.mark.usefixtures("topology")


def train(model, kind: str, steps: range) -> list[dict[str, float]]:
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(1, 61, (4, 12), generator=generator)
        common = {"tokens": tokens, "lengths": torch.full((4,), 12), "loss_mask": torch.arange(12).expand(4, 12) > 2}
        if kind == "policy":
            metrics = model.train_step(LabeledBatch(**common), sft_loss)
        else:
            old, returns = torch.randn(2, 4, 12, generator=generator)
            metrics = model.train_step(ValueBatch(**common, old_values=old, returns=returns), partial(value_loss, clip=None))
        found.append({name: metric.value() for name, metric in metrics.items()})
    return found


def model_with(make_model, kind: str, dtype: str, fraction: float, **options):
    optimizer = OptimizerConfig(
        lr=1e-2, min_lr=1e-3, warmup_steps=1, cpu_offload=fraction > 0, cpu_offload_fraction=fraction or 1.0, **options
    )
    return make_model(kind, optimizer=optimizer, config={"dtype": Dtype(dtype)}, training={"micro_batch_size": 2})


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """To the bit without a GPU; there AdamW's kernels on the two sides round otherwise."""
    for one, other in zip(ours, theirs, strict=True):
        assert one == (pytest.approx(other, rel=1e-2) if torch.cuda.is_available() else other)


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("policy", "float32"), ("policy", "bfloat16"), ("policy", "float16"), ("value", "bfloat16"), ("value", "float32")]
)
def test_the_numbers_are_those_of_an_optimizer_on_the_device(make_model, kind, dtype, fraction):
    device, host = (model_with(make_model, kind, dtype, part, clip_grad=0.1) for part in (0.0, fraction))
    assert_same(train(host, kind, range(4)), train(device, kind, range(4)))
    if not torch.cuda.is_available():
        for ours, theirs in zip(host.model.module.parameters(), device.model.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_change_behind_the_optimizer_are_taken(make_model, dtype):
    model = model_with(make_model, "policy", dtype, 1.0)
    with torch.no_grad():
        for weight in model.model.module.parameters():
            weight.add_(1.0)
    loaded = [weight.detach().clone() for weight in model.model.module.parameters()]
    model.model.optimizer.reload_model_params()
    train(model, "policy", range(1))
    for weight, before in zip(model.model.module.parameters(), loaded, strict=True):
        assert (weight - before).abs().max() < 0.05  # a step of at most 1e-2, not back by 1


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_state_and_main_weights_are_the_hosts(make_model, fraction):
    model = model_with(make_model, "value", "bfloat16", fraction, offload=True)
    train(model, "value", range(1))
    (part,) = model.model.optimizer.chained_optimizers
    adam = part.optimizer
    sizes = {"host": sum(p.numel() for p in adam.cpu_copys_map_gpu_param), "all": sum(p.numel() for p in model.model.module.parameters())}
    largest = max(p.numel() for p in model.model.module.parameters())
    assert fraction * sizes["all"] <= sizes["host"] <= fraction * sizes["all"] + largest
    for copy in adam.cpu_copys_map_gpu_param:
        state = next(one.state[copy] for one in adam.cpu_optimizers if copy in one.state)
        assert {t.device.type for t in (copy, copy.grad, state["exp_avg"], state["exp_avg_sq"])} == {"cpu"}
        assert {t.dtype for t in (copy, copy.grad, state["exp_avg"], state["exp_avg_sq"])} == {torch.float32}
        assert copy.is_pinned() == copy.grad.is_pinned() == torch.cuda.is_available()
    assert len({copy.untyped_storage().data_ptr() for copy in adam.cpu_copys_map_gpu_param}) == 1  # not a power of two for each
    away = [t.device.type for t in optimizer_tensors(model.model.optimizer)]
    assert set(away) >= {"cpu", *([platform.device().type] if fraction < 1 else [])}
    before = model.model.fingerprint()
    model.model.sleep()  # the host's stay; gradients go
    assert not any(buffer.grad_data.untyped_storage().nbytes() for buffer in model.model.runners[0].buffers)
    assert before and model.model.fingerprint() == before
    train(model, "value", range(1, 2))
    assert model.model.fingerprint() != before


@pytest.mark.parametrize("saved", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("kind", "dtype"), [("value", "bfloat16"), ("policy", "float32")])
def test_a_run_goes_on_from_a_checkpoint_of_either_kind(make_model, tmp_path, kind, dtype, saved):
    model = model_with(make_model, kind, dtype, saved)
    train(model, kind, range(3))
    began = checkpoint.start_save(tmp_path, model.model, checkpoint.SaveRequest(step=3, state={}), in_background=True, read_back=True)
    expected = train(model, kind, range(3, 5))
    path = began.publish(60)
    for fraction in (0.0, 0.4, 1.0):
        other = model_with(make_model, kind, dtype, fraction)
        checkpoint.load(other.model, path)
        assert_same(train(other, kind, range(3, 5)), expected)


def test_what_does_not_go_with_it_is_said():
    for options, message in (
        ({"distributed": False}, r"^optimizer\.cpu_offload=true: needs optimizer\.distributed=true$"),
        ({"precision_aware": True}, r"^optimizer\.cpu_offload=true: .* allowed beside it: optimizer\.precision_aware=false$"),
    ):
        with pytest.raises(ConfigError, match=message):
            OptimizerConfig(cpu_offload=True, **options)
    for fraction in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=rf"^optimizer\.cpu_offload_fraction={fraction}: must be above 0 and at most 1$"):
            OptimizerConfig(cpu_offload_fraction=fraction)


def test_megatron_core_is_asked_for_it_by_its_own_settings(make_model):
    from megatron.core.optimizer import HybridDeviceOptimizer, distrib_optimizer

    (part,) = model_with(make_model, "policy", "bfloat16", 0.4).model.optimizer.chained_optimizers
    assert part.config.optimizer_cpu_offload and part.config.optimizer_offload_fraction == 0.4
    assert isinstance(part.optimizer, HybridDeviceOptimizer) and type(part.optimizer) is not HybridDeviceOptimizer
    assert distrib_optimizer.HybridDeviceOptimizer is HybridDeviceOptimizer  # as before
    assert all(p.device.type == platform.device().type for group in part.optimizer.param_groups for p in group["params"])
