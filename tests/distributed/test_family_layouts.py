"""Families and variants of them in several layouts: transformers' log-probs, gradients and greedy tokens, and the very tensors back."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, write
from safetensors.torch import load_file
from tiers import cases

JOB = Path(__file__).with_name("family_job.py")
NAMES = ["llama_biases_llama3_rope", "llama_linear_rope", "llama_yarn", "qwen3_yarn"]
NAMES += ["mistral", "qwen2_windows", "qwen3_layer_types"]
NAMES += ["gemma2", "gemma2_plain", "gemma3_text", "olmo2", "olmo2_tied", "glm4", "glm4_tied", "cohere", "cohere_untied"]
NAMES += ["qwen3_5_text", "cohere_plus", "cohere2", "olmo3", "ministral", "opt_projected", "opt_projected_untied"]
NAMES += ["gpt2_scaled", "phi3", "phi3_window", "phi3_longrope", "gpt_neox", "gpt_neox_sequential", "opt", "opt_untied"]
PACKED = {"packing": True, "micro_batch_tokens": 96}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # processes, parallel, model
    "tp2": (2, {"tp": 2}, {}),
    "tp2_sp_recompute": (2, {"tp": 2, "sequence_parallel": True}, {"recompute": "full"}),
    "pp2_selective": (2, {"pp": 2}, {"recompute": "selective"}),
    "cp2": (2, {"cp": 2}, {}),
    "cp2_packed_recompute": (2, {"cp": 2}, PACKED | {"recompute": "full"}),
    "tp2_pp2_shared_prompts": (4, {"tp": 2, "pp": 2}, PACKED | {"share_prompts": True}),
}
MIXTURES = ["deepseek_v2_groups", "deepseek_v3", "qwen2_moe", "gpt_oss", "llama4_text", "qwen3_next"]
VARIANTS = ["deepseek_v2", "deepseek_v3_plain", "glm4_moe", "glm4_moe_plain", "qwen2_moe_normalized", "qwen2_moe_windows"]
VARIANTS += ["qwen3_moe_dense_layers", "gpt_oss_tied", "llama4_text_tied", "qwen3_next_tied", "qwen3_5_moe_text"]
SPLIT_EXPERTS = {"tp": 2, "etp": 2, "sequence_parallel": True}
MIXTURE_LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2_etp2_packed": (2, SPLIT_EXPERTS, PACKED),
    "ep2_pp2_recompute": (4, {"ep": 2, "pp": 2}, {"recompute": "full"}),
    "cp2_selective": (2, {"cp": 2}, {"recompute": "selective"}),
    "cp2_packed": (2, {"cp": 2}, PACKED),
    "tp2_ep2": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}, {}),
    "pp2_shared_prompts": (2, {"pp": 2}, PACKED | {"share_prompts": True}),
}
EACH = pytest.mark.parametrize("layout", cases(LAYOUTS, fast=("tp2_sp_recompute", "pp2_selective", "cp2")))
EACH_OF_MIXTURES = pytest.mark.parametrize("layout", cases(MIXTURE_LAYOUTS, fast=("tp2_etp2_packed", "ep2_pp2_recompute", "cp2_selective")))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str], tuple[Path, dict]]:
    """`model(name)`: its directory, beside `tokens.pt`, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("families")
    tokens = torch.randint(3, VOCAB, (4, 24), generator=torch.Generator().manual_seed(5))
    torch.save(tokens, folder / "tokens.pt")

    @functools.cache
    def make(name: str) -> tuple[Path, dict]:
        write(name, folder / name)
        if name == "gemma2_plain":  # its config ties the two, but the file has another output layer
            config = json.loads((folder / name / "config.json").read_text())
            (folder / name / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        return folder / name, theirs(folder / name, tokens)

    return make


def theirs(directory: Path, tokens: torch.Tensor) -> dict:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    logprobs = model(tokens).logits.log_softmax(dim=-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    (-logprobs.mean()).backward()
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": VOCAB + 5, "pad_token_id": 0}
    rows = [model.generate(row[None, : 5 + 6 * number], **options)[0].tolist() for number, row in enumerate(tokens)]
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    stacked = model.config.model_type in ("gpt_oss", "llama4_text")  # their files have all experts in one, too
    gradients = dict(named if stacked else by_expert(named))
    if model.config.model_type == "gpt_neox" and "lm_head.weight" in gradients:  # what it is called in files
        gradients["embed_out.weight"] = gradients.pop("lm_head.weight")
    return {"logprobs": torch.nn.functional.pad(logprobs.detach(), (1, 0)), "gradients": gradients, "responses": rows}


def by_expert(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """As files name what transformers has in one tensor for all experts."""
    for name, tensor in named:
        block, _, stack = name.rpartition(".experts.")
        if not block:
            yield name, tensor
            continue
        for expert, one in enumerate(tensor):
            parts = {"gate": one.chunk(2)[0], "up": one.chunk(2)[1]} if stack == "gate_up_proj" else {"down": one}
            yield from ((f"{block}.experts.{expert}.{part}_proj.weight", each) for part, each in parts.items())


@EACH_OF_MIXTURES
def test_a_layout_of_mixtures_equals_transformers(layout, model, tmp_path, run_distributed):
    check(MIXTURES, MIXTURE_LAYOUTS[layout], model, tmp_path, run_distributed)


@pytest.mark.slow
@EACH_OF_MIXTURES
def test_a_layout_of_variants_equals_transformers(layout, model, tmp_path, run_distributed):
    check(VARIANTS, MIXTURE_LAYOUTS[layout], model, tmp_path, run_distributed)


@EACH
def test_a_layout_equals_transformers(layout, model, tmp_path, run_distributed):
    check(NAMES, LAYOUTS[layout], model, tmp_path, run_distributed)


def check(names, layout, model, tmp_path, run_distributed):
    nproc, parallel, settings = layout
    unsplit = ("qwen3_next", "qwen3_5") if "cp" in parallel else ()  # whose delta nets' sequences are whole
    names = [name for name in names if not name.startswith(unsplit)]
    for name in names:
        shutil.copytree(model(name)[0], tmp_path / name)
    shutil.copy(model(names[0])[0].parent / "tokens.pt", tmp_path)
    run_distributed(JOB, nproc, json.dumps({"parallel": parallel, "model": settings}), tmp_path, *names, timeout=400)
    for name in names:
        folder, expected = model(name)
        got, source = torch.load(tmp_path / f"{name}.pt"), load_file(folder / "model.safetensors")
        assert got["weights"].keys() == source.keys() and all(torch.equal(got["weights"][key], tensor) for key, tensor in source.items())
        torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        norm = torch.stack([gradient.norm() for gradient in expected["gradients"].values()]).norm()
        assert abs(got["norm"] / norm - 1) < 1e-4, name
        assert got["gradients"].keys() == expected["gradients"].keys(), name
        for key, gradient in expected["gradients"].items():
            error = (got["gradients"][key] - gradient).norm() / gradient.norm()
            assert error < 1e-4 or gradient.norm() < 1e-6, f"{name}: gradient of {key}: {error}"
        for number, row in enumerate(expected["responses"]):
            tokens, logprobs = got["responses"][number]
            assert list(tokens) == row and len(logprobs) == 12, f"{name}: {number}"
