"""Runs whose model and data are names of the Hugging Face Hub, against one on this machine (HF_ENDPOINT)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from fake_hub import FakeHub
from training_jobs import run_aligner, write_task

pytestmark = pytest.mark.cpu
ROWS = "".join(f'{{"prompt": "{a}+{b}=", "response": "{a + b}"}}\n' for a in range(4) for b in range(4))
SIZES = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def model_files(folder: Path) -> dict[str, bytes]:
    """A random model with the character tokenizer, as a repository of the Hub has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    write_task(folder)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    files = [*(folder / "model").iterdir(), *(folder / "tokenizer").iterdir()]
    return {file.name: file.read_bytes() for file in files} | {"pytorch_model.bin": b"a pickle", "README.md": b"# Tiny"}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., str]:
    """`start(hub, *arguments, home="home")`: what `aligner ...` prints with that Hub and a cache of that name."""

    def run(hub: FakeHub, *arguments: object, home: str = "home", **extra: str) -> str:
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / home), "HF_HUB_DISABLE_XET": "1", **extra}
        code, shown = run_aligner(*arguments, cwd=tmp_path, **places)
        assert code == 0, shown
        return shown

    return run


def test_a_run_by_names_downloads_once_and_resumes_on_its_commits(tmp_path: Path, start) -> None:
    torch.manual_seed(0)
    with FakeHub() as hub:
        files = model_files(tmp_path / "made")
        model = hub.add("tiny/adder", files)
        data = hub.add("tiny/sums", {"train.jsonl": ROWS.encode(), "README.md": b"# Sums"}, kind="datasets")
        sizes = ["algorithm.batch_size=8", "model.micro_batch_size=4", "model.make_vocab_divisible_by=2", "loop.save_every=1"]
        names = ["model.path=tiny/adder", "data.train=tiny/sums", "data.validation=tiny/sums", "loop.validate_every=1"]
        run = ["launch", "local", "sft", "num_processes=2", "run.directory=run", *names, *sizes]
        said = start(hub, *run, "loop.max_steps=1")
        assert [hub.downloads(file) for file in ("config.json", "model.safetensors", "tokenizer.json", "train.jsonl")] == [1, 1, 1, 1]
        assert hub.downloads("pytorch_model.bin") == 0
        assert f"model.path=tiny/adder: commit {model}" in said
        for place in ("run/config.yaml", "run/checkpoints/policy/step_000001/config.yaml"):
            recorded = yaml.safe_load((tmp_path / place).read_text())
            assert (recorded["model"]["path"], recorded["data"]["train"]) == (f"tiny/adder@{model}", f"tiny/sums@{data}")

        hub.add("tiny/adder", {**files, "model.safetensors": b"damaged"})  # the branch moves on
        hub.add("tiny/sums", {"train.jsonl": b"damaged"}, kind="datasets")
        start(hub, *run, "loop.max_steps=2", home="other home")
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["path"] == f"tiny/adder@{model}"

        said = start(hub, "convert", "--from-hf", "run/export", "--push-to-hub", "tiny/result", HF_TOKEN=hub.token)
        assert f"pushed to {hub.url}/tiny/result/commit/" in said, said
        pushed = hub.files("tiny/result")
        assert set(pushed) == {file.name for file in (tmp_path / "run" / "export").iterdir()} | {"README.md"}
        assert pushed["model.safetensors"] == (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
        card = pushed["README.md"].decode()
        assert "base_model: tiny/adder\n" in card and "recipe `sft` for 2 steps" in card and "## Evaluation" in card
        options = ["--from-megatron", "run/checkpoints/policy", "--to-hf", "out", "--push-to-hub", "tiny/again"]
        start(hub, "convert", *options, HF_TOKEN=hub.token)
        assert hub.files("tiny/again")["model.safetensors"] == pushed["model.safetensors"]
        assert f"revision `{model}`" in hub.files("tiny/again")["README.md"].decode()

        count = len(hub.requests)
        said = start(hub, "preflight", "sft", *names, *sizes, "run.directory=run", "cluster.device=cpu", HF_HUB_OFFLINE="1")
        assert f"model.path: tiny/adder@{model}" in said, said
        assert len(hub.requests) == count

        (tmp_path / "sums.jsonl").write_text(ROWS)
        start(hub, "data", "validate", "sums.jsonl", "--kind", "sft", "--tokenizer", f"tiny/adder@{model}")
        start(hub, "convert", "--from-hf", f"tiny/adder@{model}", "--to-megatron", "megatron")
        assert (tmp_path / "megatron" / "step_000000" / "aligner.json").exists()
