"""Families and variants of them in several layouts: transformers' log-probs, gradients and greedy tokens, and the very tensors back."""

from __future__ import annotations

import functools
import json
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import VOCAB, write
from layout_models import exported, gradients, train_step
from ranks import world
from safetensors.torch import load_file
from tiers import cases
from transformers import AutoModelForCausalLM

from aligner.losses.sft import sft_loss
from aligner.models import weights
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, ModelConfig, Recompute
from aligner.models.create import create_policy, create_value_model, read_architecture, training
from aligner.models.families import weight_names
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.trainable import Training
from aligner.models.weights import export_hf, save_hf
from aligner.parallel.collectives import gather_objects
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import LabeledBatch, Prompt, SamplingConfig

NAMES = ["llama_biases_llama3_rope", "llama_linear_rope", "llama_yarn", "qwen3_yarn"]
NAMES += ["mistral", "qwen2_windows", "qwen3_layer_types"]
NAMES += ["gemma2", "gemma2_plain", "gemma3_text", "olmo2", "olmo2_tied", "glm4", "glm4_tied", "cohere", "cohere_untied"]
NAMES += ["qwen3_5_text", "cohere_plus", "cohere2", "olmo3", "ministral", "opt_projected", "opt_projected_untied"]
NAMES += ["gpt2_scaled", "phi3", "phi3_window", "phi3_longrope", "gpt_neox", "gpt_neox_sequential", "opt", "opt_untied"]
NAMES += ["gpt2", "nemotron", "qwen2_tied", "qwen3", "llama"]
PACKED = {"packing": True, "micro_batch_tokens": 96}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # processes, parallel, model
    "tp2": (2, {"tp": 2}, {}),
    "tp2_sp_recompute": (2, {"tp": 2, "sequence_parallel": True}, {"recompute": "full"}),
    "pp2_selective": (2, {"pp": 2}, {"recompute": "selective"}),
    "cp2": (2, {"cp": 2}, {}),
    "cp2_packed_recompute": (2, {"cp": 2}, PACKED | {"recompute": "full"}),
    "tp2_pp2_shared_prompts": (4, {"tp": 2, "pp": 2}, PACKED | {"share_prompts": True}),
}
MIXTURES = ["deepseek_v2_groups", "deepseek_v3", "qwen2_moe", "gpt_oss", "llama4_text", "qwen3_next", "mixtral", "qwen3_moe"]
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


def stream_without_hoarding(chunks) -> dict[str, torch.Tensor]:
    """Copies of the exported tensors; an export itself holds those of one parameter (at most three) besides this rank's own."""
    own = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}
    copies, seen = {}, []
    for key, tensor in export_hf(chunks):
        copies[key] = tensor.clone()
        if tensor.untyped_storage().data_ptr() not in own:
            seen.append(weakref.ref(tensor))
        deadline = time.monotonic() + 10  # gloo's thread may hold a tensor a little longer than the call that waited for it
        while (alive := sum(reference() is not None for reference in seen)) > 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert alive <= 3
    return copies


def responses(policy, tokens: torch.Tensor, tp: int) -> dict[int, tuple]:
    prompts = [Prompt(id=row, tokens=tuple(tokens[row, : 5 + 6 * row].tolist()), source=f"test:{row}") for row in range(len(tokens))]
    engine = create_engine(policy, RolloutConfig(tp=tp), eos_id=VOCAB + 5)
    sampling = SamplingConfig(temperature=0.0, max_response_length=12)
    own = [(r.prompt.id, (r.tokens, r.logprobs)) for part in engine.generate(prompts, [1] * len(prompts), sampling) for r in part]
    return {number: rollout for part in gather_objects(own) for number, rollout in part}


def check_checkpoint(folder: Path, policy) -> None:
    """What is saved comes back into a model whose weights were something else."""
    before = exported(policy.chunks)
    request = checkpoint.SaveRequest(step=1, state={})
    saved = checkpoint.start_save(folder, policy.model, request, in_background=False).publish(60)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(0.5)
    checkpoint.load(policy.model, saved)
    after = exported(policy.chunks)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def config_of(path: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(path=str(path), **{"make_vocab_divisible_by": 8, "dtype": Dtype.float32, "micro_batch_size": 2} | fields)


def check_other_models(folder: Path, name: str, parallel: ParallelConfig, topology) -> None:
    """In bfloat16; and with a head that the files lack, written, and read again into the same layout."""
    frozen = Training(optimizer=None, micro_batch_size=2)
    half = config_of(folder / name, dtype=Dtype.bfloat16)
    architecture = read_architecture(half, vocab_size=0)
    chunks = create_policy(half, architecture, parallel, topology, frozen).chunks
    source = load_file(folder / name / "model.safetensors")
    assert all(torch.equal(tensor, source[key].bfloat16()) for key, tensor in exported(chunks).items())
    first = create_value_model(config_of(folder / name), architecture, parallel, topology, frozen)
    target = folder / f"value_{name}_{dist.get_world_size()}_{parallel}"
    save_hf(first.model.chunks, target, writer=dist.get_rank() == 0)
    dist.barrier()
    again = create_value_model(config_of(target), architecture, parallel, topology, frozen)
    batch = batch_of(torch.load(folder / "tokens.pt"))
    values = first.values(batch)
    assert values.abs().max() > 0.1 and torch.equal(again.values(batch), values)
    names = list(exported(again.model.chunks))
    assert names[-2:] == ["score_head.bias", "score_head.weight"] and "lm_head.weight" not in names


def batch_of(tokens: torch.Tensor) -> LabeledBatch:
    mask = torch.arange(tokens.shape[1]).expand_as(tokens) > 0
    return LabeledBatch(tokens=tokens, lengths=torch.full((len(tokens),), tokens.shape[1]), loss_mask=mask)


def run_model(name: str, folder: Path, output: Path, settings: dict, parallel: ParallelConfig, topology, saved: set[str]) -> dict:
    """Log-probs, the gradient of their sum, the tensors back, and greedy responses. A checkpoint is checked of models with kinds of
    parameters that are not yet among those `saved`."""
    config = config_of(folder / name, **settings | {"recompute": Recompute(settings.get("recompute", "none"))})
    architecture = read_architecture(config, vocab_size=0)
    optimizer = OptimizerConfig(lr=1e-6, min_lr=1e-6, warmup_steps=0, distributed=False, clip_grad=1e6)
    policy = create_policy(config, architecture, parallel, topology, training(config, optimizer, total_steps=2))
    tokens, table = torch.load(folder / "tokens.pt"), weight_names(architecture)
    batch, streamed = batch_of(tokens), stream_without_hoarding(policy.chunks)
    if not name.startswith(("gpt_oss", "llama4")):  # whose files have all experts in one tensor
        assert list(streamed) == [hf for key in table.names(architecture) for hf in table.find(key).hf_names], name
    result = {"weights": streamed}
    if parallel.ep > 1 and parallel.etp > 1:  # gloo gathers only parts of one size; Megatron-Core sends others
        return result
    result |= {"logprobs": policy.logprobs(batch), "responses": responses(policy, tokens, 2 if parallel.ep > 1 else parallel.tp)}
    if not (kinds := {re.sub(r"\d+", "#", key) for key in table.names(architecture)}) <= saved:
        check_checkpoint(output / name, policy)
        saved |= kinds
    result["norm"] = train_step(policy, batch, sft_loss)["optim/grad_norm"]
    full = gradients(policy.chunks)
    return result | {"gradients": {key: one for key, one in full.items() if not key.endswith("e_score_correction_bias")}}


def run_models(names: list[str], folder: Path, output: Path, parallel: dict, settings: dict) -> dict[str, dict]:
    """By model; on the first rank."""
    weights.SLICE_BYTES = 1000  # the columns of these small tensors are gathered in several slices too
    with world(parallel) as topology:
        layout, saved = ParallelConfig(**parallel), set[str]()
        found = {name: run_model(name, folder, output, settings, layout, topology, saved) for name in names}
        if names[-1] in ("llama", "qwen3_moe") and "responses" in found[names[-1]]:
            check_other_models(folder, names[-1], layout, topology)
        return found if dist.get_rank() == 0 else {}


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
    if model.config.model_type == "mixtral":
        called = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items()
        gradients = {functools.reduce(lambda key, pair: key.replace(*pair), called, name): one for name, one in gradients.items()}
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
def test_a_layout_of_mixtures_equals_transformers(layout, model, tmp_path, on_ranks):
    check(MIXTURES, MIXTURE_LAYOUTS[layout], model, tmp_path, on_ranks)


@pytest.mark.slow
@EACH_OF_MIXTURES
def test_a_layout_of_variants_equals_transformers(layout, model, tmp_path, on_ranks):
    check(VARIANTS, MIXTURE_LAYOUTS[layout], model, tmp_path, on_ranks)


@EACH
def test_a_layout_equals_transformers(layout, model, tmp_path, on_ranks):
    check(NAMES, LAYOUTS[layout], model, tmp_path, on_ranks)


@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}])
def test_experts_that_are_split_both_ways_are_read(parallel, model, tmp_path, on_ranks):
    check(["mixtral", "qwen3_moe"], (4, parallel, {}), model, tmp_path, on_ranks)


def check(names, layout, model, tmp_path, on_ranks):
    nproc, parallel, settings = layout
    unsplit = ("qwen3_next", "qwen3_5") if "cp" in parallel else ()  # whose delta nets' sequences are whole
    names = [name for name in names if not name.startswith(unsplit)]
    folder = [model(name)[0] for name in names][0].parent
    found = on_ranks(run_models, nproc, names, folder, tmp_path, parallel, settings, timeout=400)[0]
    for name in names:
        expected, got, source = model(name)[1], found[name], load_file(folder / name / "model.safetensors")
        assert got["weights"].keys() == source.keys() and all(torch.equal(got["weights"][key], tensor) for key, tensor in source.items())
        if "logprobs" not in got:
            continue
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
