"""`optimizer.cpu_offload` and `nvme_path`: the state is the host's or in a file, the numbers are those of an optimizer on the device."""

from __future__ import annotations

import errno
import os
import re
import resource
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype
from aligner.models.training.nvme import StateFile
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


def assert_trains_what_was_loaded(model) -> None:
    """Weights that change behind the optimizer are where its next step begins."""
    with torch.no_grad():
        for weight in model.model.module.parameters():
            weight.add_(1.0)
    loaded = [weight.detach().clone() for weight in model.model.module.parameters()]
    model.model.optimizer.reload_model_params()
    train(model, "policy", range(1))
    for weight, before in zip(model.model.module.parameters(), loaded, strict=True):
        assert (weight - before).abs().max() < 0.05  # a step of at most 1e-2, not back by 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_change_behind_the_optimizer_are_taken(make_model, dtype):
    model = model_with(make_model, "policy", dtype, 1.0)
    assert_trains_what_was_loaded(model)


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


def model_in(make_model, folder: Path | None, *, kind: str = "policy", dtype: str = "float32", **options):
    disk = {} if folder is None else {"cpu_offload": True, "nvme_path": str(folder)}
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, **disk, **options)
    return make_model(kind, optimizer=optimizer, config={"dtype": Dtype(dtype)}, training={"micro_batch_size": 2})


def saved(model, folder: Path, step: int) -> Path:
    request = checkpoint.SaveRequest(step=step, state={})
    return checkpoint.start_save(folder, model.model, request, in_background=True, read_back=True).publish(60)


@contextmanager
def files_of_at_most(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("kind", "dtype"), [("policy", "float32"), ("policy", "bfloat16"), ("policy", "float16"), ("value", "bfloat16")])
def test_a_file_gives_the_numbers_of_an_optimizer_on_the_device(make_model, tmp_path, kind, dtype):
    device, disk = (model_in(make_model, folder, kind=kind, dtype=dtype, clip_grad=0.1, offload=True) for folder in (None, tmp_path))
    for step in range(4):
        assert_same(train(disk, kind, range(step, step + 1)), train(device, kind, range(step, step + 1)))
        disk.model.sleep()  # what is in a file stays there
    if not torch.cuda.is_available():
        for ours, theirs in zip(disk.model.module.parameters(), device.model.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert not os.listdir(tmp_path)  # nothing that a killed run would leave
    (part,) = disk.model.optimizer.chained_optimizers
    for copy in part.optimizer.cpu_copys_map_gpu_param:
        assert copy.untyped_storage().filename.startswith("/proc/self/fd/") and copy.grad is None
    before = disk.model.fingerprint()
    train(disk, kind, range(4, 5))
    assert before and disk.model.fingerprint() != before


def test_a_run_goes_on_from_a_checkpoint_of_file_or_device(make_model, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    for place in (None, folder):
        model = model_in(make_model, place, dtype="bfloat16")
        train(model, "policy", range(3))
        path = saved(model, tmp_path / str(place is None), 3)
        expected = train(model, "policy", range(3, 5))
        for other in (None, folder):
            resumed = model_in(make_model, other, dtype="bfloat16")
            checkpoint.load(resumed.model, path)
            assert_same(train(resumed, "policy", range(3, 5)), expected)


def test_a_file_takes_weights_that_change_behind_the_optimizer(make_model, tmp_path):
    model = model_in(make_model, tmp_path)
    assert_trains_what_was_loaded(model)


def test_a_folder_without_room_is_an_error_at_the_start(make_model, tmp_path):
    with files_of_at_most(4096), pytest.raises(ConfigError, match=rf"^optimizer\.nvme_path={re.escape(str(tmp_path))}: no room .*EFBIG"):
        model_in(make_model, tmp_path)
    assert not os.listdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^optimizer\.nvme_path=\S*/absent: no room for 0\.00 GiB of this rank's optimizer: .*ENOENT"):
        model_in(make_model, tmp_path / "absent")


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
def test_a_disk_that_fails_is_an_error_with_its_path_and_the_last_checkpoint_stands(call, make_model, tmp_path, monkeypatch):
    folder = tmp_path / "disk"
    folder.mkdir()
    model = model_in(make_model, folder)
    train(model, "policy", range(2))
    path = saved(model, tmp_path / "checkpoints", 2)
    expected = train(model_from(make_model, path), "policy", range(2, 4))
    with monkeypatch.context() as broken:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        broken.setattr(os, call, fail)
        said = rf"optimizer\.nvme_path={re.escape(str(folder))}: its disk failed: .*EIO.*; the last checkpoint stands"
        with pytest.raises(AlignerError, match=rf"^{said}"):
            train(model, "policy", range(2, 4))  # of what is written behind a step at the latest in the next
        if call != "pwritev":  # nothing is written any more
            train_once_more = model_in(make_model, folder)
            if call == "fdatasync":
                train(train_once_more, "policy", range(1))
            with pytest.raises(CheckpointError, match=rf"^rank 0: {said}"):
                saved(train_once_more, tmp_path / "checkpoints", 3)
    assert checkpoint.resolve(tmp_path / "checkpoints") == path and sorted(os.listdir(path.parent)) == ["latest", path.name]
    assert_same(train(model_from(make_model, path), "policy", range(2, 4)), expected)


def model_from(make_model, path: Path):
    model = model_in(make_model, None)
    checkpoint.load(model.model, path)
    return model


def test_calls_that_move_a_part_are_continued(tmp_path, monkeypatch):
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, buffers, start: preadv(file, [buffers[0][:5]], start))
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, start: pwritev(file, [buffers[0][:7]], start))
    shapes = [torch.Size((3,)), torch.Size((0,)), torch.Size((2, 5)), torch.Size((1,))]
    file = StateFile(tmp_path, shapes)
    for turn in range(3):
        for number, (*held, room) in enumerate(file.stream(range(4))):
            assert [one.shape for one in (*held, room)] == [shapes[number]] * 4
            for state, tensor in enumerate(held):
                assert (tensor == turn * (100 * number + state)).all()
                tensor += 100 * number + state
    assert [float(file[2][state][1, 4]) for state in range(3)] == [600.0, 603.0, 606.0]
    file.settle(read=True)


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True, "cpu_offload_fraction": 0.5}])
def test_a_file_needs_an_optimizer_on_the_host(options):
    message = r"^optimizer\.nvme_path=/scratch: needs optimizer\.cpu_offload=true and cpu_offload_fraction=1$"
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(nvme_path="/scratch", **options)
