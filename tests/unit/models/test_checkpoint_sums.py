"""Where a rank's part of the optimizer's state lies in the whole model's, and the sums by which a checkpoint checks itself."""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from model_steps import train

from aligner.errors import CheckpointError
from aligner.models.checkpoint import async_save, checkpoint, optimizer as checkpoint_optimizer, sums as checkpoint_sums
from aligner.models.checkpoint.optimizer import boxes
from aligner.models.config import Dtype
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import mcore
from aligner.parallel.mcore import ShardedTensor

pytestmark = pytest.mark.usefixtures("topology")


def test_boxes_hold_a_range_of_a_tensor_in_its_order():
    for dims in (1, 2, 3, 4):
        for shape in itertools.product((1, 2, 3), repeat=dims):
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
                found = list(boxes(shape, start, end))
                cut = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten() for box in found]
                assert (torch.cat(cut).tolist() if cut else []) == list(range(start, end)), (shape, start, end, found)
                assert len(found) <= 2 * dims - 1


def shard(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], replica: int = 0, **rest):
    return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=(0, 0, replica), **rest)


def sums_of(*shards, vocabulary: int = 100):
    return checkpoint_sums.saved(checkpoint_sums.find([list(shards)], vocabulary=vocabulary))


def test_a_sum_by_hand():
    """[[1, 2], [3, -1]] as int32 bits, times (2 row + 1) (2 column + 1): 1 * 1 + 2 * 3 + 3 * 3 - 1 * 9 = 7."""
    bits = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
    found = sums_of(shard("w", bits.view(torch.float32)))["w"]
    assert (int(found.sum, 16), found.elements, found.dtype) == (7, 4, "torch.float32")


def test_a_sum_adds_up_over_any_split_and_sees_every_change():
    torch.manual_seed(1)
    whole = torch.randn(6, 4)
    wanted = sums_of(shard("w", whole))
    rows = [shard("w", part.contiguous(), (0, place, 3)) for place, part in enumerate(whole.chunk(3))]
    columns = [shard("w", part.contiguous(), (1, place, 2)) for place, part in enumerate(whole.chunk(2, dim=1))]
    layers = [shard("w", row.clone(), (0, place, 6), prepend_axis_num=1) for place, row in enumerate(whole)]
    for split in (rows, columns, layers):
        assert sums_of(*split) == wanted
    assert sums_of(*rows[:2])["w"].elements == 16
    for changed in (whole.flip(0), whole.flip(1), whole.roll(1), -whole, whole[[1, 0, 2, 3, 4, 5]], whole.nextafter(torch.tensor(9.0))):
        assert sums_of(shard("w", changed.contiguous())) != wanted


def test_large_tensors_are_summed_in_parts(monkeypatch):
    whole = torch.randn(1, 1, 7, 5)
    wanted = sums_of(shard("w", whole))
    monkeypatch.setitem(checkpoint_sums._ELEMENTS_AT_A_TIME, "cpu", 6)
    assert sums_of(shard("w", whole)) == wanted


def test_rows_of_a_padded_vocabulary_do_not_count():
    small, large = torch.randn(8, 3), torch.randn(12, 3)
    large[:7] = small[:7]
    found = [sums_of(shard("w", one, allow_shape_mismatch=True), vocabulary=7) for one in (small, large)]
    assert found[0] == found[1] and found[0]["w"].elements == 21


def test_every_copy_is_compared():
    values = torch.randn(4)
    wanted = sums_of(shard("w", values))
    for other, is_right in ((values, True), (values + 1, False)):
        found = checkpoint_sums.find([[shard("w", values), shard("w", other, replica=1)]], vocabulary=9)
        message = r"here: 1 of 1 tensors are not those that were in memory .*\(sums.json\): w$"
        with nullcontext() if is_right else pytest.raises(CheckpointError, match=message):
            checkpoint_sums.compare(wanted, found, "here")
    checkpoint_sums.compare(wanted, checkpoint_sums.find([[shard("w", values.double())]], vocabulary=9), "converted")


def trained(make_model, **model):
    policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-2), **model)
    train(policy, range(1))
    return policy.model


def begin(model, folder: Path, **options):
    request = checkpoint.SaveRequest(step=1, state={})
    return checkpoint.start_save(folder, model, request, in_background=False, **options)


@pytest.fixture
def spoil(monkeypatch):
    """`spoil(part)`: what is written of tensors in a folder is the negative of what was in memory; every digest is of what was written."""
    real = async_save._write_bucket

    def start(name: str) -> None:
        def write(part, number: int):
            if part.path.name == name:
                path, file, (objects, tensors) = part.buckets[number]
                part.buckets[number] = (path, file, (objects, [(item, -tensor) for item, tensor in tensors]))
            return real(part, number)

        monkeypatch.setattr(async_save, "_write_bucket", write)

    return start


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_what_was_written_wrongly_is_found_when_it_is_loaded(part, spoil, make_model, tmp_path):
    model = trained(make_model)
    spoil(part)
    path = begin(model, tmp_path).publish()
    with pytest.raises(CheckpointError, match="not those that were in memory|not that of the weights"):
        checkpoint.load(model, path)


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_or_before_it_is_published(part, spoil, make_model, tmp_path):
    model = trained(make_model)
    assert begin(model, tmp_path, read_back=True).publish() == tmp_path / "step_000001"
    (tmp_path / "latest").write_text("step_000000\n")
    spoil(part)
    with pytest.raises(CheckpointError, match=rf"{part}: as it was read back: .*not those that were in memory.*\(sums.json\)"):
        begin(model, tmp_path, read_back=True).publish()
    assert (tmp_path / "latest").read_text() == "step_000000\n" and not list(tmp_path.glob(".writing*"))


def test_weights_written_wrongly_do_not_start_a_run(spoil, make_model, load_policy, tmp_path):
    model = trained(make_model)
    spoil("weights")
    path = begin(model, tmp_path).publish()
    with pytest.raises(CheckpointError, match="step_000001: .* not those that were in memory"):
        load_policy(path)


@pytest.mark.parametrize("dtype", list(Dtype)[1:])
def test_a_checkpoint_of_an_earlier_version_whose_optimizer_state_is_anothers(dtype, make_model, tmp_path, monkeypatch):
    """As Megatron-Core 0.16.1 writes it behind a padded bucket: shifted, the end filled with zeros; and no sums."""
    model = trained(make_model, config={"dtype": dtype})
    real = checkpoint_optimizer._Held.values

    def shifted(held):
        for state, values in real(held):
            yield state, torch.nn.functional.pad(values[8:], (0, 8)) if values.numel() > 100 else values

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_optimizer._Held, "values", shifted)
        patch.setattr(checkpoint_sums, "write", lambda directory, sums: None)
        path = begin(model, tmp_path).publish()
    assert not (path / "sums.json").exists()
    before = [tensor.clone() for chunk in model.chunks for tensor in chunk.parameters()]
    with pytest.raises(
        CheckpointError, match=r"the optimizer's state is not that of the weights \(\d+ parameters.*model.path=.*step_000001"
    ):
        checkpoint.load(model, path)
    after = [tensor for chunk in model.chunks for tensor in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_checkpoint_of_an_earlier_version_is_read_without_sums(make_model, tmp_path, monkeypatch):
    model = trained(make_model)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_sums, "write", lambda directory, sums: None)
        path = begin(model, tmp_path).publish()
    assert checkpoint.load(model, path) == {} and model.version == 1


def test_upstreams_warning_of_corruption_is_an_error():
    logger = logging.getLogger(mcore.DistributedOptimizer.__module__)
    with pytest.raises(RuntimeError, match="padded with zeros which can lead to data corruption"):
        logger.warning(
            "'w' param range exceeds unpadded buffer by 8 elements. It will be padded with zeros which can lead to data corruption."
        )
    logger.warning("something else")
