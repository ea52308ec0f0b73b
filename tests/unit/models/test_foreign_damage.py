"""Checkpoints of Megatron-LM and NeMo that were made to do harm, rotted, or are of another form: one line names what is wrong."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
import tarfile
import types
from functools import partial
from pathlib import Path
from typing import Any

import megatron_files
import pytest
import torch
from megatron_files import chunks_of, with_common_file

from aligner.errors import CheckpointError
from aligner.models.checkpoint import safe_pickle
from aligner.models.checkpoint.foreign.model import describe, is_foreign

pytestmark = pytest.mark.cpu  # files, which no device reads
NEMO = megatron_files.nemo_config("llama")


class Harm:
    """Pickled, a call of os.system."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


@pytest.fixture
def copy(topology, tmp_path: Path) -> Path:
    """A checkpoint of Megatron-LM that a test may spoil."""
    args = megatron_files.arguments("llama")
    return megatron_files.save(tmp_path / "iter_0000007", megatron_files.build(args), args)


@pytest.mark.parametrize("file", ["common.pt", "argument", ".metadata", "tensor"])
def test_pickles_run_nothing(file: str, copy: Path, tmp_path: Path):
    harm = Harm(tmp_path / "proof")
    if file == ".metadata":
        (copy / file).write_bytes(pickle.dumps(harm))
    elif file == "tensor":
        _spoil_tensor(copy, harm)
    else:
        args = megatron_files.arguments("llama", spec=harm)
        torch.save(harm if file == "common.pt" else {"args": args}, copy / "common.pt")
    with pytest.raises(CheckpointError, match="posix.system|holds more than data") as raised:
        chunks_of(copy)
    assert not harm.proof.exists() and "\n" not in str(raised.value).splitlines()[0]
    pickle.loads(pickle.dumps(harm))
    assert harm.proof.exists()  # elsewhere it does harm


def _spoil_tensor(path: Path, harm: Harm) -> None:
    """Put a pickle into the place of one tensor, which is long enough for it."""
    metadata = safe_pickle.read_metadata(io.BytesIO((path / ".metadata").read_bytes()), "")
    stored = next(place for index, place in metadata.storage_data.items() if index.fqn == "embedding.word_embeddings.weight")
    buffer = io.BytesIO()
    torch.save(harm, buffer)
    data = bytearray((path / stored.relative_path).read_bytes())
    data[stored.offset : stored.offset + stored.length] = buffer.getvalue().ljust(stored.length, b"\0")
    (path / stored.relative_path).write_bytes(data)


def test_objects_of_other_classes_stand_for_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Those of Megatron's and numpy's are neither imported nor made: what is plain beside them is read."""
    module = types.ModuleType("megatron.core.transformer.enums")
    module.AttnBackend = megatron_files.AttnBackend
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where pickle looks the class up
    state = {"args": argparse.Namespace(backend=module.AttnBackend.auto, seed=7), "rng": torch.arange(3), "tags": {1, 2}}
    torch.save(state, tmp_path / "common.pt")
    monkeypatch.undo()
    with (tmp_path / "common.pt").open("rb") as file:
        read = safe_pickle.load_inert(file, "common.pt")
    assert read["args"].seed == 7
    assert repr(read["args"].backend) == "megatron.core.transformer.enums.AttnBackend(5,)"
    assert isinstance(read["rng"], safe_pickle.Inert)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "link", "device"])
def test_members_that_lead_out(name: str, copy: Path, tmp_path: Path):
    archive = megatron_files.pack(tmp_path / "model.nemo", copy, NEMO)
    member = tarfile.TarInfo(name)
    if name in ("link", "device"):
        member.type, member.linkname = (tarfile.SYMTYPE, "/etc/passwd") if name == "link" else (tarfile.CHRTYPE, "")
    with tarfile.open(archive, "a") as tar:
        tar.addfile(member)
    with pytest.raises(CheckpointError, match=f"model.nemo: '{name}' (leads out of the archive|is a link or a special file)"):
        chunks_of(archive)


def cut(path: Path, pattern: str, size: int) -> None:
    for file in path.glob(pattern):
        file.write_bytes(file.read_bytes()[:size])


def without(path: Path, pattern: str) -> None:
    for file in list(path.glob(pattern)):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: (path / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}'),
            "'fsdp_dtensor' is not read; allowed: torch_dist, zarr",
        ),
        (partial(cut, pattern="*.distcp", size=100), r"__0_\d.distcp is cut short"),
        pytest.param(partial(cut, pattern="common.pt", size=200), "common.pt: is refused or damaged", marks=with_common_file),
        (
            lambda path: torch.save({"iteration": 7}, path / "common.pt"),
            "common.pt: holds no args of Megatron-LM",
        ),
        (partial(without, pattern="*.distcp"), r"__0_\d.distcp is missing"),
        pytest.param(partial(without, pattern="common.pt"), "has neither common.pt nor a common state", marks=with_common_file),
        (partial(without, pattern=".metadata"), r"\.metadata is missing"),
        (partial(without, pattern="metadata.json"), "metadata.json is missing: not a distributed checkpoint"),
    ],
)
def test_damaged_files(damage: Any, says: str, copy: Path):
    damage(copy)
    with pytest.raises(CheckpointError, match=says):
        chunks_of(copy)


def test_damaged_archives(copy: Path, tmp_path: Path):
    archive = megatron_files.pack(tmp_path / "model.nemo", copy, NEMO)
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"\x1f\x8b" + whole[2:], b"PK" + bytes(2000)):
        archive.write_bytes(data)
        with pytest.raises(
            CheckpointError, match="model.nemo: (not a NeMo archive, or damaged|cannot be read|has no model_weights)"
        ) as raised:
            chunks_of(archive)
        assert "\n" not in str(raised.value)


@with_common_file
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("compressor", {"id": "blosc"}, r"compressor=\{'id': 'blosc'\} is not read; allowed: None"),
        ("dtype", ">f4", "dtype='>f4' is not read; allowed: bfloat16, <f2, <f4, <f8"),
        ("order", "F", "order='F' is not read"),
        ("chunks", [0, 4], r"is damaged: shape=\[64, 32\], chunks=\[0, 4\]"),
        ("chunks", [64, 31], "bytes, a chunk 7936"),
        ("chunks", None, "0.0 is missing"),
    ],
)
def test_damaged_arrays(key: str, value: Any, says: str, copy: Path, tmp_path: Path):
    path = megatron_files.to_zarr(copy, tmp_path / "zarr")
    array = path / "embedding.word_embeddings.weight"
    if value is None:
        (array / "0.0").unlink()
    else:
        (array / ".zarray").write_text(json.dumps(json.loads((array / ".zarray").read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=says):
        chunks_of(path)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["context/model.yaml", "weights/metadata.json"], "is of NeMo 2; allowed: the Hugging Face model that `nemo llm export` writes"),
        (["mp_rank_00/model_optim_rng.pt"], "mp_rank_00/model_optim_rng.pt: is of the form with a pickle per rank"),
        (["model_config.yaml", "model_weights.ckpt"], "model_weights.ckpt: is of the form with a pickle per rank"),
        (["latest_checkpointed_iteration.txt"], "names '', but iter_0000000 is not beside it"),
    ],
)
def test_other_forms(names: list[str], says: str, tmp_path: Path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert is_foreign(tmp_path)
    with pytest.raises(CheckpointError, match=says):
        describe(tmp_path)
