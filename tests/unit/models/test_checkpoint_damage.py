"""Checkpoints that rotted, or that somebody made to do harm: found before anything of them is used."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from model_steps import train

from aligner.errors import CheckpointError
from aligner.models.checkpoint import checkpoint, safe_pickle, weights as checkpoint_weights
from aligner.models.training.optimizer import OptimizerConfig

# Megatron-Core 0.19 writes one file per rank, with the common state in it.
ONE_FILE = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)
FILES = (
    *("aligner.json", "manifest.json", "sums.json", "config.json", "config.yaml", "state.json", "state.pt", "tokenizer.json"),
    *(
        f"{part}/{name}"
        for part in ("weights", "optimizer")
        for name in (".metadata", "metadata.json", "__0_0.distcp", *(() if ONE_FILE else ("common.pt", "__0_1.distcp")))
    ),
)


@pytest.fixture(scope="module")
def original(make_model, tmp_path_factory) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text('{"tokens": "all of them"}')
    policy = make_model("policy", optimizer=OptimizerConfig())
    for step in (1, 2):
        train(policy, range(1))
        request = checkpoint.SaveRequest(step=step, state={}, config_yaml="run: {}\n", tokenizer=folder / "tokenizer")
        checkpoint.save(folder / "steps", policy.model, request)
    return folder / "steps"


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy of it that a test may spoil."""
    return shutil.copytree(original, tmp_path / "steps")


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("policy", optimizer=OptimizerConfig()).model


def test_every_file_is_in_the_manifest(folder):
    found = {str(path.relative_to(folder / "step_000002")) for path in (folder / "step_000002").rglob("*") if path.is_file()}
    assert found == set(FILES)
    assert set(json.loads((folder / "step_000002" / "manifest.json").read_text())) == set(FILES) - {"aligner.json", "manifest.json"}


@pytest.mark.parametrize("name", FILES)
def test_one_bit_in_any_file_is_found(name, folder, model):
    """In the middle of the file, and in its first and last byte; the message names the file and the checkpoint that is whole."""
    path = folder / "step_000002" / name
    data = path.read_bytes()
    for position in (0, len(data) // 2, len(data) - 1):
        spoilt = bytearray(data)
        spoilt[position] ^= 0x04
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=f"(?s){Path(name).name}.*step_000001 is intact: move step_000002 away"):
            checkpoint.load(model, folder)
    path.write_bytes(data)
    checkpoint.load(model, folder)


def test_a_damaged_checkpoint_is_not_refused_where_that_is_switched_off(folder, model):
    (folder / "step_000002" / "config.yaml").write_text("run: {seed: 1}\n")
    checkpoint.load(model, folder, verify=False)
    with pytest.raises(CheckpointError, match="config.yaml is damaged: it has 15 bytes, in manifest.json 8"):
        checkpoint.load(model, folder)


def test_missing_files_and_several_damaged_ones(folder, model):
    (folder / "step_000001" / "weights" / "__0_0.distcp").unlink()
    (folder / "step_000002" / "weights" / "__0_0.distcp").write_bytes(b"")
    (folder / "step_000002" / "state.pt").unlink()
    expected = r"state.pt cannot be read \(No such file or directory\) \(and 1 more\); no older checkpoint beside it is intact"
    with pytest.raises(CheckpointError, match=expected):
        checkpoint.load(model, folder)
    (folder / "step_000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        checkpoint.load(model, folder)


def test_weights_alone_are_verified_without_the_optimizer(folder, make_model):
    chunks = make_model("policy").model.chunks
    (folder / "step_000002" / "optimizer" / "__0_0.distcp").unlink()
    checkpoint_weights.load_weights(chunks, folder)
    (folder / "step_000002" / "weights" / "__0_0.distcp").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="weights/__0_0.distcp is damaged"):
        checkpoint_weights.load_weights(chunks, folder)


def test_a_checkpoint_of_a_later_megatron_is_refused_by_name(folder, model, monkeypatch):
    for part in ("weights", "optimizer"):
        (folder / "step_000002" / part / "common.pt").unlink(missing_ok=True)
    monkeypatch.setattr(checkpoint_weights, "NEEDS_COMMON_FILE", True)
    with pytest.raises(CheckpointError, match=r"step_000002.* has no common.pt, which Megatron-Core .* needs and 0.19 does not write"):
        checkpoint.load(model, folder, verify=False)


# Pickles. Whoever can write a checkpoint can write its manifest too: these are refused without it.


class Harmful:
    """Unpickling it makes a directory, by a function of the standard library."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path) -> Path:
    """What harmful code would make; the last test that it is not there belongs to the fixture."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


def test_a_metadata_file_that_runs_code_is_refused(folder, model, mark):
    directory = folder / "step_000002" / "weights"
    (directory / ".metadata").write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(CheckpointError, match=r"weights/.metadata: is not a checkpoint's metadata: it refers to posix.mkdir, which no"):
        checkpoint.load(model, folder, verify=False)
    for content, message in ((pickle.dumps({"state_dict_metadata": {}}), "it holds dict"), (b"\x80\x04", "is not a checkpoint's metadata")):
        (directory / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            safe_pickle.check(directory)


@pytest.mark.parametrize("name", ["eval", "load", "nn.Module", "float32.__class__"])
def test_only_data_types_of_torch_are_known(name, folder, model):
    """A name is taken from the module's own names and must be a dtype: no function of torch, nothing behind a dot."""
    (folder / "step_000002" / "weights" / ".metadata").write_bytes(
        b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    )
    with pytest.raises(CheckpointError, match=f"it refers to torch.{name}"):
        checkpoint.load(model, folder, verify=False)


def test_common_state_and_random_states_that_run_code_are_refused(folder, model, mark):
    torch.save({"optimizer": Harmful(mark)}, folder / "step_000002" / "optimizer" / "common.pt")
    with pytest.raises(CheckpointError, match="optimizer/common.pt: holds more than data"):
        checkpoint.load(model, folder, verify=False)
    (folder / "step_000002" / "optimizer" / "common.pt").unlink()
    if not ONE_FILE:
        shutil.copyfile(folder / "step_000001" / "optimizer" / "common.pt", folder / "step_000002" / "optimizer" / "common.pt")
    torch.save(Harmful(mark), folder / "step_000002" / "state.pt")
    with pytest.raises(CheckpointError, match="state.pt: holds more than data"):
        checkpoint.load(model, folder, verify=False)


def test_an_object_in_a_tensors_place_is_refused(folder, model, mark):
    """torch unpickles what the metadata calls bytes without restrictions, whatever the model expects under that name."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    directory = folder / "step_000002" / "weights"
    metadata = FileSystemReader(str(directory)).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    torch.save(Harmful(mark), directory / "evil.distcp")
    metadata.storage_data[index].relative_path = "evil.distcp"
    metadata.storage_data[index].offset, metadata.storage_data[index].length = 0, (directory / "evil.distcp").stat().st_size
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="evil.distcp: holds more than data"):
        checkpoint.load(model, folder, verify=False)
    metadata.storage_data[index].relative_path = "../../step_000001/weights/__0_0.distcp"
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which is not a file beside it"):
        checkpoint.load(model, folder, verify=False)


def test_getattr_gives_members_of_enums_only(tmp_path):
    """Some interpreters pickle an enum's member as (getattr, (class, name)); the same opcodes must not reach anything else."""
    from torch.distributed.checkpoint.planner import WriteItemType

    class ByAttribute:
        def __init__(self, owner, name: str) -> None:
            self.owner, self.name = owner, name

        def __reduce__(self):
            return getattr, (self.owner, self.name)

    def read(owner, name: str):
        file = tmp_path / "pickle"
        file.write_bytes(pickle.dumps(ByAttribute(owner, name)))
        with file.open("rb") as opened:
            return safe_pickle._MetadataUnpickler(opened).load()

    assert read(WriteItemType, "TENSOR") is WriteItemType.TENSOR
    for owner, name in ((WriteItemType, "__class__"), (torch.Size, "__doc__"), (torch.float32, "is_complex")):
        with pytest.raises(pickle.UnpicklingError, match=f"refers to the attribute '{name}'"):
            read(owner, name)
