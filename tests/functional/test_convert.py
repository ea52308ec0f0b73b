"""`aligner convert`: a Hugging Face model through a Megatron-Core checkpoint and back gives the same logits; what
Megatron-LM and NeMo saved at TP2 x PP2, and the archive of the same; what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_jobs import run_aligner

from aligner.cli import main
from aligner.data.tokenizer import load_tokenizer

SAVER = Path(__file__).with_name("megatron_saver.py")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k"


def convert(*arguments: object) -> str:
    """What it prints, in a process of its own: a conversion makes a torch.distributed world."""
    code, output = run_aligner("convert", *arguments)
    assert code == 0, output
    return output


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


def test_archives_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "model.nemo"
    archive.write_bytes(b"\0" * 600)
    assert "metadata.json is missing" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "out")
    archive.write_bytes(b"no tar" * 200)
    assert "model.nemo: not a NeMo archive, or damaged" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "out")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "holds a model already" in refusal(capsys, "--from-megatron", archive, "--to-hf", tmp_path / "model")
    wrong = refusal(capsys, "--from-hf", tmp_path, "--to-megatron", tmp_path / "out", "--tokenizer", tmp_path)
    assert "--tokenizer" in wrong and "only for --from-megatron" in wrong
    assert "no such directory" in refusal(capsys, "--from-megatron", tmp_path / "none.nemo", "--to-hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
