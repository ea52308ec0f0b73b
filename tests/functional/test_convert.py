"""`aligner convert`: a Hugging Face model through a Megatron-Core checkpoint and back gives the same logits; what
Megatron-LM and NeMo saved at TP2 x PP2, and the archive of the same; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_files
import pytest
import torch
from ranks import world
from safetensors.torch import load_file, save_file
from training_jobs import run_aligner
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen2Config

from aligner.cli import main
from aligner.data.tokenizer import load_tokenizer
from aligner.parallel.mcore import dist_checkpointing, ensure_metadata_has_dp_cp_group


def convert(*arguments: object) -> str:
    """What it prints, in a process of its own: a conversion makes a torch.distributed world."""
    code, output = run_aligner("convert", *arguments)
    assert code == 0, output
    return output


def random_model(folder: Path) -> Path:
    """A random Qwen2 with an untied output layer and fewer key/value heads than heads; it has no tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(**sizes, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def add_values(folder: Path) -> dict[str, torch.Tensor]:
    """A head of values beside a model, as critic.kind=head exports it."""
    held = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.randn(1)}
    save_file(held, folder / "value_head.safetensors")
    return held


def same_values(folder: Path, held: dict[str, torch.Tensor]) -> bool:
    found = load_file(folder / "value_head.safetensors")
    return found.keys() == held.keys() and all(torch.equal(found[name], one) for name, one in held.items())


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(3, 27)[None]).logits


@pytest.mark.shared
def test_there_and_back(shared_data: Path, tmp_path: Path) -> None:
    """A model with tied weights and a tokenizer."""
    source = shared_data / "stories260k"
    convert("--from-hf", source, "--to-megatron", tmp_path / "megatron")
    assert (tmp_path / "megatron" / "step_000000" / "aligner.json").exists()
    convert("--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert not (tmp_path / "back" / "value_head.safetensors").exists()


def test_a_head_of_values_on_transformers_modules_comes_along(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GraniteConfig(**sizes, max_position_embeddings=64)).save_pretrained(tmp_path / "source")
    held = add_values(tmp_path / "source")
    convert("--from-hf", tmp_path / "source", "--to-megatron", tmp_path / "megatron")
    convert("--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back")
    assert same_values(tmp_path / "back", held) and torch.equal(logits(tmp_path / "back"), logits(tmp_path / "source"))


def convert_on_ranks(*arguments: str) -> None:
    assert main(["convert", *arguments]) == 0


def test_over_two_ranks(on_ranks, tmp_path: Path) -> None:
    """Each holds half of the layers; the checkpoint is the one that a single process writes, and the bits come back, those of a head of
    values on the second too."""
    source = random_model(tmp_path / "source")
    held = add_values(source)
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    on_ranks(convert_on_ranks, 2, "--pp", "2", "--from-hf", str(source), "--to-megatron", megatron)
    on_ranks(convert_on_ranks, 2, "--pp", "2", "--from-megatron", megatron, "--to-hf", back)
    assert torch.equal(logits(tmp_path / "back"), logits(source)) and same_values(tmp_path / "back", held)


def test_bfloat16_stays(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model(tmp_path / "source")).bfloat16()
    model.save_pretrained(tmp_path / "half")
    convert("--from-hf", tmp_path / "half", "--to-megatron", tmp_path / "megatron")
    convert("--from-megatron", tmp_path / "megatron", "--to-hf", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert back.dtype == torch.bfloat16
    for ours, theirs in zip(back.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


BOTH = "use --from-hf with --to-megatron, or --from-megatron with --to-hf"
REFUSED = {  # options with {} for the test's folder, and what is said
    "two targets": (["--from-hf", "{}", "--to-hf", "{}/out"], BOTH),
    "two sources": (["--from-megatron", "{}", "--to-megatron", "{}/out"], BOTH),
    "no target": (["--from-hf", "{}"], BOTH),
    "no model": (["--from-hf", "{}/none", "--to-megatron", "{}/out"], "no config.json"),
    "no checkpoint": (["--from-megatron", "{}/none", "--to-hf", "{}/out"], "no such directory"),
    "no archive": (["--from-megatron", "{}/none.nemo", "--to-hf", "{}/out"], "no such directory"),
    "an incomplete checkpoint": (["--from-megatron", "{}/checkpoints", "--to-hf", "{}/out"], "not a complete checkpoint"),
    "a target with a checkpoint": (["--from-hf", "{}/model", "--to-megatron", "{}/checkpoints"], "holds a checkpoint already"),
    "a target with a model": (["--from-megatron", "{}/empty.nemo", "--to-hf", "{}/model"], "holds a model already"),
    "an empty archive": (["--from-megatron", "{}/empty.nemo", "--to-hf", "{}/out"], "metadata.json is missing"),
    "no archive of tar": (["--from-megatron", "{}/damaged.nemo", "--to-hf", "{}/out"], "damaged.nemo: not a NeMo archive, or damaged"),
    "a tokenizer of its own": (["--from-hf", "{}", "--to-megatron", "{}/out", "--tokenizer", "{}"], "(--from-megatron)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything starts."""
    for name, text in (("checkpoints/latest", "step_000007\n"), ("model/config.json", "{}\n"), ("damaged.nemo", "no tar" * 200)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty.nemo").write_bytes(b"\0" * 600)
    options, said = REFUSED[case]
    assert main(["convert", *(option.format(tmp_path) for option in options)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and said in stderr
    assert not (tmp_path / "out").exists()


TOKENIZER = {"library": "megatron", "type": "GPT2BPETokenizer", "vocab_file": "nemo:0a1b_vocab.json", "merge_file": "nemo:0a1b_merges.txt"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
TOKENIZER_FILES = {
    "0a1b_vocab.json": json.dumps({text: number for number, text in enumerate([*LETTERS, "ab", "<|endoftext|>"])}),
    "0a1b_merges.txt": "#version: 0.2\na b\n",
}


def save_as_megatron(folder: Path, parallel: dict[str, int]) -> None:
    """As Megatron-LM does. Alone: `whole`, and `model.nemo` of the same. On four ranks: read `whole`, save `split`."""
    with world(parallel, seed=1) as here:
        args, tp, pp = megatron_files.arguments("mixtral"), parallel.get("tp", 1), parallel.get("pp", 1)
        model = megatron_files.build(args, tp=tp, pp=pp, first=here.pp_rank == 0, last=here.pp_rank == pp - 1)
        if parallel:
            state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
            model.load_state_dict(dist_checkpointing.load(state, str(folder / "whole" / "iter_0000007")), strict=False)
            megatron_files.save(folder / "split" / "iter_0000007", model, args)
            return
        megatron_files.save(folder / "whole" / "iter_0000007", model, args)
        (folder / "whole" / "latest_checkpointed_iteration.txt").write_text("7")
        weights = megatron_files.save(folder / "model_weights", model, None, prefix="model.")
        config = megatron_files.nemo_config("mixtral", num_moe_experts=4, tokenizer=TOKENIZER)
        megatron_files.pack(folder / "model.nemo", weights, config, {name: text.encode() for name, text in TOKENIZER_FILES.items()})


def test_every_layout_and_form_is_the_same_model(on_ranks, tmp_path: Path) -> None:
    """Whole with its padding; cut to the tokenizer's 61 tokens where one is at hand, in the archive or named."""
    on_ranks(save_as_megatron, 1, tmp_path, {})
    on_ranks(save_as_megatron, 4, tmp_path, {"tp": 2, "pp": 2, "etp": 2})
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
