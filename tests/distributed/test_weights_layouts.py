"""Every family, read into every kind of layout: transformers' log-probs, and the very tensors back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

JOB = Path(__file__).with_name("weights_job.py")
VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_inner": 48, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
}
EXPERTS = ("mixtral", "qwen3_moe")
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "etp": 2} | SEQUENCE),
    "pp2_uneven": (2, {"pp": 2, "first_stage_layers": 1}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2_pp2": (4, {"tp": 2, "etp": 2, "pp": 2} | SEQUENCE),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "tp2_ep2": (2, {"tp": 2, "ep": 2} | SEQUENCE),  # whole experts on tensor-parallel ranks
    "ep2_pp2": (4, {"ep": 2, "pp": 2}),
    "tp2_ep2_etp2": (4, {"tp": 2, "ep": 2, "etp": 2} | SEQUENCE),
}


@torch.no_grad()
def write_models(folder: Path) -> None:
    """Random models of every family by transformers, and their log-probs of the same tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (4, 16), generator=generator)
    expected = {}
    for name, fields in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | fields)))
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in key or ".ln_" in key else 0.2 * noise)
        model.save_pretrained(folder / name)
        logprobs = model.eval()(tokens).logits.log_softmax(dim=-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
        expected[name] = torch.nn.functional.pad(logprobs, (1, 0))
    torch.save(expected, folder / "expected.pt")
    torch.save(tokens, folder / "tokens.pt")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_models(folder)
    return folder


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERT_LAYOUTS])
def test_weights_of_every_family(layout, models, tmp_path, run_distributed):
    nproc, parallel = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    names = FAMILIES if layout in LAYOUTS else EXPERTS
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    run_distributed(JOB, nproc, json.dumps(parallel), tmp_path, *names, timeout=240)
    for name in names:
        source, written = (load_file(path / "model.safetensors") for path in (models / name, tmp_path / "out" / name))
        assert written.keys() == source.keys()
        assert all(torch.equal(written[key], tensor) for key, tensor in source.items())
    if "llama" in names:
        scores_are_those_of_transformers(tmp_path)


@torch.no_grad()
def scores_are_those_of_transformers(folder: Path) -> None:
    """A reward model that was exported from the layout, row by row (this config has no padding token)."""
    from transformers import AutoModelForSequenceClassification

    path = folder / "out" / "reward_llama"
    model, report = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.id2label == {0: "good", 1: "long"}
    logits = torch.cat([model.eval()(row[None]).logits for row in torch.load(folder / "tokens.pt")])
    scores = torch.load(path / "scores.pt")
    assert scores.std() > 0.1 and (logits - scores).abs().max() < 1e-4


def test_fewer_key_value_heads_than_ranks(models, tmp_path, run_distributed):
    """Two key-value heads over four ranks: the fused projection is cut within its groups."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    run_distributed(JOB, 4, json.dumps({"tp": 4} | SEQUENCE), tmp_path, "qwen2", timeout=240)
