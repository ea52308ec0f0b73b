"""`aligner convert` from Megatron-LM and NeMo: a model saved at TP2 x PP2, the archive of the same, to both forms; what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from preloaded import preloaded
from safetensors.torch import load_file

from aligner.cli import main
from aligner.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.cpu
SAVER = Path(__file__).with_name("megatron_saver.py")


def convert(*arguments: object) -> str:
    """What it prints."""
    code, output = preloaded().run(["-m", "aligner.cli", "convert", *map(str, arguments)], os.environ, Path.cwd(), timeout=200)
    assert code == 0, output
    return output


def test_every_layout_and_form_is_the_same_model(run_distributed, tmp_path: Path) -> None:
    """Whole with its padding; cut to the tokenizer's 61 tokens where one is at hand, in the archive or named."""
    run_distributed(SAVER, 1, tmp_path)
    run_distributed(SAVER, 4, tmp_path)
    said = convert("--from-megatron", tmp_path / "split" / "iter_0000007", "--to-hf", tmp_path / "hf_split")
    assert "no tokenizer written: give --tokenizer DIR" in said
    convert("--from-megatron", tmp_path / "model.nemo", "--to-megatron", tmp_path / "checkpoints")
    convert("--from-megatron", tmp_path / "checkpoints", "--to-hf", tmp_path / "hf_nemo")
    convert("--from-megatron", tmp_path / "whole", "--to-hf", tmp_path / "hf_whole", "--tokenizer", tmp_path / "hf_nemo")
    assert load_tokenizer(tmp_path / "hf_nemo").encode("abba") == [59, 1, 0]
    split, nemo, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("hf_split", "hf_nemo", "hf_whole"))
    assert split.keys() == nemo.keys() == whole.keys() and len(split) == 41
    for name, tensor in split.items():
        rows = 61 if "embed_tokens" in name or "lm_head" in name else len(tensor)
        assert torch.equal(tensor[:rows], nemo[name]) and torch.equal(nemo[name], whole[name]), name
    for name in ("hf_nemo", "hf_whole"):
        assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / name).iterdir()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that is refused before anything starts."""
    assert main(["convert", *map(str, arguments)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    return stderr


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "model.nemo"
    archive.write_bytes(b"\0" * 600)
    assert "metadata.json is missing" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "out")
    archive.write_bytes(b"no tar" * 200)
    assert "model.nemo: not a NeMo archive, or damaged" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "out")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "holds a model already" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "model")
    wrong = refusal(capsys, "--from-hf", tmp_path, "--to-megatron", tmp_path / "out", "--tokenizer", tmp_path)
    assert "--tokenizer" in wrong and "others bring their own" in wrong
    assert "no such directory" in refusal(capsys, "--from-megatron", tmp_path / "none.nemo", "--to-hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
