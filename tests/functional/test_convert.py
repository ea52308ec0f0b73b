"""`aligner convert`: a Hugging Face model through a Megatron-Core checkpoint and back gives the same logits; what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from preloaded import preloaded

from aligner.cli import main

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k"


def convert(*arguments: object) -> None:
    """In a process of its own: a conversion makes a torch.distributed world."""
    code, output = preloaded().run(["-m", "aligner.cli", "convert", *map(str, arguments)], os.environ, Path.cwd(), timeout=200)
    assert code == 0, output


def random_model(folder: Path) -> Path:
    """A random Qwen2 with an untied output layer and fewer key/value heads than heads; it has no tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**sizes, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(3, 27)[None]).logits


@pytest.mark.parametrize("name", ["random", pytest.param("stories260k", marks=pytest.mark.shared)])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    source = random_model(tmp_path / "source") if name == "random" else SHARED
    convert("--from-hf", source, "--to-megatron", tmp_path / "megatron")
    assert (tmp_path / "megatron" / "step_000000" / "aligner.json").exists()
    convert("--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    assert (tmp_path / "back" / "tokenizer.json").exists() == (source / "tokenizer.json").exists()


def test_over_two_ranks(run_distributed, tmp_path: Path) -> None:
    """Each holds half of the layers; the checkpoint is the one that a single process writes, and the bits come back."""
    source = random_model(tmp_path / "source")
    script = tmp_path / "convert.py"
    script.write_text("import sys\nfrom aligner.cli import main\nsys.exit(main(['convert', *sys.argv[1:]]))\n")
    run_distributed(script, 2, "--pp", 2, "--from-hf", source, "--to-megatron", tmp_path / "megatron", timeout=200)
    run_distributed(script, 2, "--pp", 2, "--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back", timeout=200)
    assert torch.equal(logits(tmp_path / "back"), logits(source))


def test_bfloat16_stays(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model(tmp_path / "source")).bfloat16()
    model.save_pretrained(tmp_path / "half")
    convert("--from-hf", tmp_path / "half", "--to-megatron", tmp_path / "megatron")
    convert("--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert back.dtype == torch.bfloat16
    for ours, theirs in zip(back.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that looks like one of checkpoints."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest").write_text("step_000007\n")
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that is refused before anything starts."""
    assert main(["convert", *map(str, arguments)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    return stderr


def test_wrong_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = "use --from-hf with --to-megatron, or --from-megatron with --to-hf"
    assert both in refusal(capsys, "--from-hf", tmp_path, "--to-hf", tmp_path / "out")
    assert both in refusal(capsys, "--from-megatron", tmp_path, "--to-megatron", tmp_path / "out")
    assert both in refusal(capsys, "--from-hf", tmp_path)


def test_a_source_that_is_not_there(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no config.json" in refusal(capsys, "--from-hf", tmp_path / "none", "--to-megatron", tmp_path / "out")
    assert "no such directory" in refusal(capsys, "--from-megatron", tmp_path / "none", "--to-hf", tmp_path / "out")
    assert "not a complete checkpoint" in refusal(capsys, "--from-megatron", checkpoint, "--to-hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_something(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}\n")
    assert "holds a checkpoint already" in refusal(capsys, "--from-hf", source, "--to-megatron", checkpoint)
    (checkpoint / "aligner.json").write_text('{"format": 1, "kind": "language", "step": 7}\n')
    assert "holds a model already" in refusal(capsys, "--from-megatron", checkpoint, "--to-hf", source)
