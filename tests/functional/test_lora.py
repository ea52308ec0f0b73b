"""Adapters in whole runs, on plain weights and on packed ones: SFT at TP2 that is stopped and continues, GRPO from its checkpoint, DPO; the
base model's weights nobody changes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_jobs import grpo_settings, launcher, metrics_of, run_job, series, supervised_settings, write_rows, write_task
from transformers import AutoConfig, AutoModelForCausalLM

from aligner.jobs.serving_policy import _described
from aligner.models.config import Dtype, Quantization

pytestmark = pytest.mark.timeout(600)
NO_VALIDATION = ("data.validation=''", "loop.validate_every=0")
LORA = ("model.lora.rank=4", "model.lora.dropout=0.1", "optimizer.lr=1e-2")
QUANTIZED = {"plain": "none", "packed": "nf4"}


def on_base(folder: Path, settings: list[str]) -> list[str]:
    kept = [one for one in settings if not one.startswith(("model.architecture.", "model.tokenizer="))]
    return [*kept, f"model.path={folder / 'base'}", f"model.quantization={QUANTIZED[folder.name]}", *LORA]


@pytest.fixture(scope="module", params=QUANTIZED)
def sft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a random model (of layers with 128 inputs, which can be packed) on prompts like `3+4=`, answered with even digits."""
    folder, draw = tmp_path_factory.mktemp("runs") / request.param, random.Random(1)
    write_task(folder)
    shutil.copytree(folder / "tokenizer", folder / "base")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=18, max_position_embeddings=32, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    prompts = [f"{draw.randrange(10)}+{draw.randrange(10)}=" for _ in range(64)]
    write_rows(folder / "answers.jsonl", ({"prompt": prompt, "response": "".join(draw.choices("02468", k=4))} for prompt in prompts))
    settings = on_base(folder, supervised_settings(folder, folder / "answers.jsonl", "algorithm.batch_size=32", *NO_VALIDATION))
    settings += ["num_processes=2", "parallel.tp=2", "parallel.sequence_parallel=true"]
    run_job(launcher("sft"), folder / "sft", [*settings, "loop.max_steps=3"])
    said = run_job(launcher("sft"), folder / "sft", [*settings, "loop.max_steps=6"])
    assert "resumed after step 3" in said
    assert ("adapters merged into the weights as model.quantization=nf4 rounds them" in said) == (request.param == "packed")
    if request.param == "packed":
        run_job(launcher("sft"), folder / "whole", [*settings, "loop.max_steps=6"])
    losses = series(folder / "sft", "sft/loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
    return folder / "sft"


@pytest.mark.parametrize("sft", ["packed"], indirect=True)
def test_a_resumed_run_is_one_that_was_not_stopped(sft: Path) -> None:
    whole = sft.parent / "whole"
    assert series(whole, "sft/loss") == series(sft, "sft/loss")
    for name in ("adapter/adapter_model.safetensors", "export/model.safetensors"):
        ours, theirs = load_file(sft / name), load_file(whole / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


@pytest.mark.parametrize("sft", ["plain"], indirect=True)
def test_what_it_leaves_is_one_model(sft: Path) -> None:
    """The merged export is the base with the adapter's products added, to rounding; nothing else differs from the base."""
    base, merged = (load_file(directory / "model.safetensors") for directory in (sft.parent / "base", sft / "export"))
    adapter = load_file(sft / "adapter" / "adapter_model.safetensors")
    config = json.loads((sft / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 16.0, str(sft.parent / "base"))
    for name, tensor in merged.items():
        pair = [adapter.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_{kind}.weight", None) for kind in "BA"]
        added = 4.0 * pair[0] @ pair[1] if pair[0] is not None else torch.zeros_like(tensor)
        assert torch.equal(tensor, base[name]) == (pair[0] is None)
        torch.testing.assert_close(tensor, base[name] + added, rtol=1e-5, atol=1e-6)
    assert not adapter


def test_grpo_samples_from_what_it_trains(sft: Path) -> None:
    """From the checkpoint of adapters, which is merged (and packed again), with new ones on top."""
    folder = sft.parent
    settings = [s for s in on_base(folder, grpo_settings(folder)) if not s.startswith("model.path=")]
    settings += [f"model.path={sft / 'checkpoints' / 'policy'}", "reward.function.path=aligner.rewards.builtin:length"]
    settings += ["loop.max_steps=3", "rollout.verify_refit=checksum"]
    run_job(launcher("grpo"), folder / "grpo", settings)
    lines = [line.values for line in metrics_of(folder / "grpo") if line.step]
    assert len(lines) == 3 and all(line["rollout/logprob_gap"] < 1e-4 for line in lines)
    assert lines[-1]["policy/ref_kl"] > 1e-6


@pytest.mark.parametrize("sft", ["packed"], indirect=True)
def test_a_stored_reference_is_the_model_without_the_adapters(sft: Path) -> None:
    """DPO whose reference was asked before the first step takes the steps of one that switches its adapters off for every batch."""
    folder = sft.parent
    pairs = ({"prompt": f"{i % 10}+{i % 7}=", "chosen": "2468"[: 1 + i % 4], "rejected": "13579"[: 1 + i % 5]} for i in range(64))
    data = write_rows(folder / "pairs.jsonl", pairs)
    settings = on_base(folder, supervised_settings(folder, data, "algorithm.batch_size=16", *NO_VALIDATION))
    for kind in ("live", "precomputed"):
        run_job(launcher("dpo"), folder / kind, [*settings, f"algorithm.reference={kind}", "loop.max_steps=4", "run.export_hf=false"])
    for name in ("preference/loss", "preference/margin", "optim/grad_norm"):
        live, stored = (series(folder / kind, name) for kind in ("live", "precomputed"))
        assert len(live) == 4 and stored == pytest.approx(live, rel=1e-3, abs=1e-5)
    assert series(folder / "live", "preference/loss")[-1] < 0.69


@pytest.mark.parametrize("sft", ["packed"], indirect=True)
def test_a_served_policy_is_packed_as_it_was_trained(sft: Path) -> None:
    config, _, _ = _described(str(sft), dtype=Dtype.auto, context=0, images=False)
    assert (config.quantization, config.dtype, config.lora.rank) == (Quantization.nf4, Dtype.float32, 4)
    assert config.path == str(sft.parent / "base") and config.lora.path.startswith(str(sft / "checkpoints" / "policy"))
