"""`optimizer.cpu_offload` and `nvme_path`: the state is the host's or in a file, the numbers are those of an optimizer on the device."""

from __future__ import annotations

import errno
import os
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from model_steps import train

from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype
from aligner.models.training.nvme import StateFile
from aligner.models.training.offload import optimizer_tensors
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import platform

pytestmark = pytest.mark.usefixtures("topology")


PLACES = [0.0, 0.4, 1.0, "file"]  # of the optimizer's state: a fraction of it on the host, or a file


def model_with(make_model, place: float | Path, *, kind: str = "policy", dtype: str = "float32", **options):
    """`place`: one of `PLACES`, the file by its folder."""
    host = {"nvme_path": str(place)} if isinstance(place, Path) else {"cpu_offload_fraction": place or 1.0}
    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, cpu_offload=place != 0.0, **host, **options)
    return make_model(kind, optimizer=optimizer, config={"dtype": Dtype(dtype)}, training={"micro_batch_size": 2})


@pytest.fixture
def at(tmp_path):
    """`at(place)`: what `model_with` takes for it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return lambda place: folder if place == "file" else place


def assert_same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """To the bit without a GPU; there AdamW's kernels on the two sides round otherwise."""
    for one, other in zip(ours, theirs, strict=True):
        assert one == (pytest.approx(other, rel=1e-2) if torch.cuda.is_available() else other)


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("policy", "float32"), ("policy", "bfloat16"), ("policy", "float16"), ("value", "bfloat16"), ("value", "float32")]
)
def test_the_numbers_are_those_of_an_optimizer_on_the_device(make_model, at, kind, dtype, place):
    own = {"kind": kind, "dtype": dtype, "clip_grad": 0.1, "offload": True}
    device, other = (model_with(make_model, at(one), **own) for one in (0.0, place))
    for step in range(4):
        assert_same(train(other, range(step, step + 1), kind), train(device, range(step, step + 1), kind))
        other.model.sleep()  # what is the host's or in a file stays there
    if not torch.cuda.is_available():
        for ours, theirs in zip(other.model.module.parameters(), device.model.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("place", "dtype"), [(1.0, "float32"), (1.0, "bfloat16"), ("file", "float32")])
def test_weights_that_change_behind_the_optimizer_are_where_its_next_step_begins(make_model, at, place, dtype):
    model = model_with(make_model, at(place), dtype=dtype)
    with torch.no_grad():
        for weight in model.model.module.parameters():
            weight.add_(1.0)
    loaded = [weight.detach().clone() for weight in model.model.module.parameters()]
    model.model.optimizer.reload_model_params()
    train(model, range(1))
    for weight, before in zip(model.model.module.parameters(), loaded, strict=True):
        assert (weight - before).abs().max() < 0.05  # a step of at most 1e-2, not back by 1


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_state_and_main_weights_are_the_hosts(make_model, fraction):
    model = model_with(make_model, fraction, kind="value", dtype="bfloat16", offload=True)
    train(model, range(1), "value")
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
    train(model, range(1, 2), "value")
    assert model.model.fingerprint() != before


def test_a_file_holds_the_state_and_has_no_name(make_model, tmp_path):
    model = model_with(make_model, tmp_path)
    train(model, range(1))
    assert not os.listdir(tmp_path)  # nothing that a killed run would leave
    (part,) = model.model.optimizer.chained_optimizers
    for copy in part.optimizer.cpu_copys_map_gpu_param:
        assert copy.untyped_storage().filename.startswith("/proc/self/fd/") and copy.grad is None
    before = model.model.fingerprint()
    train(model, range(1, 2))
    assert before and model.model.fingerprint() != before


def saved(model, folder: Path, step: int) -> Path:
    request = checkpoint.SaveRequest(step=step, state={})
    return checkpoint.start_save(folder, model.model, request, in_background=True, read_back=True).publish(60)


@pytest.mark.parametrize(
    ("kind", "dtype", "place"),
    [*(("value", "bfloat16", place) for place in PLACES), *(("policy", "float32", place) for place in (0.4, "file"))],
)
def test_a_run_goes_on_from_a_checkpoint_of_every_place(make_model, at, tmp_path, kind, dtype, place):
    model = model_with(make_model, at(place), kind=kind, dtype=dtype)
    train(model, range(3), kind)
    path = saved(model, tmp_path / "checkpoints", 3)
    expected = train(model, range(3, 5), kind)
    for other in PLACES:
        resumed = model_with(make_model, at(other), kind=kind, dtype=dtype)
        checkpoint.load(resumed.model, path)
        assert_same(train(resumed, range(3, 5), kind), expected)


def test_what_does_not_go_with_it_is_said():
    for options, message in (
        ({"distributed": False}, r"^optimizer\.cpu_offload=true: needs optimizer\.distributed=true$"),
        ({"precision_aware": True}, r"^optimizer\.cpu_offload=true: .* allowed beside it: optimizer\.precision_aware=false$"),
        *(
            ({"cpu_offload_fraction": fraction}, rf"^optimizer\.cpu_offload_fraction={fraction}: must be above 0 and at most 1$")
            for fraction in (0.0, -0.5, 1.5, float("nan"))
        ),
        *(
            (options | {"nvme_path": "/scratch"}, r"^optimizer\.nvme_path=/scratch: needs .*cpu_offload=true and cpu_offload_fraction=1$")
            for options in ({"cpu_offload": False}, {"cpu_offload_fraction": 0.5})
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            OptimizerConfig(**({"cpu_offload": True} | options))


@contextmanager
def files_of_at_most(size: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_without_room_is_an_error_at_the_start(make_model, tmp_path):
    with files_of_at_most(4096), pytest.raises(ConfigError, match=rf"^optimizer\.nvme_path={re.escape(str(tmp_path))}: no room .*EFBIG"):
        model_with(make_model, tmp_path)
    assert not os.listdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^optimizer\.nvme_path=\S*/absent: no room for 0\.00 GiB of this rank's optimizer: .*ENOENT"):
        model_with(make_model, tmp_path / "absent")


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
def test_a_disk_that_fails_is_an_error_with_its_path_and_the_last_checkpoint_stands(call, make_model, at, tmp_path, monkeypatch):
    folder = at("file")
    model = model_with(make_model, folder)
    train(model, range(2))
    path = saved(model, tmp_path / "checkpoints", 2)
    expected = train(model_from(make_model, path), range(2, 4))
    with monkeypatch.context() as broken:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        broken.setattr(os, call, fail)
        said = rf"optimizer\.nvme_path={re.escape(str(folder))}: its disk failed: .*EIO.*; the last checkpoint stands"
        with pytest.raises(AlignerError, match=rf"^{said}"):
            train(model, range(2, 4))  # of what is written behind a step at the latest in the next
        if call != "pwritev":  # nothing is written any more
            once_more = model_with(make_model, folder)
            if call == "fdatasync":
                train(once_more, range(1))
            with pytest.raises(CheckpointError, match=rf"^rank 0: {said}"):
                saved(once_more, tmp_path / "checkpoints", 3)
    assert checkpoint.resolve(tmp_path / "checkpoints") == path and sorted(os.listdir(path.parent)) == ["latest", path.name]
    assert_same(train(model_from(make_model, path), range(2, 4)), expected)


def model_from(make_model, path: Path):
    model = model_with(make_model, 0.0)
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
