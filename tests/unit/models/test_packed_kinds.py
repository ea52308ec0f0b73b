"""Weights in 4 and 8 bits of mixtures of experts, latent attention and delta nets: the numbers that bitsandbytes stores of every matrix in
the files, in training and in rollouts, resumed and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hf_models import HF_MODELS, SIZES, randomize
from packed_models import adam, codes, equal, make_batch, packed, rollouts_of, rounded, train
from safetensors.torch import load_file, save_file

from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig, LoraTarget, ModelConfig, Quantization
from aligner.models.create import create_policy
from aligner.models.families import architecture_from_hf
from aligner.models.modules.linear import weight_storage
from aligner.models.training.trainable import Training
from aligner.models.weights import export_hf, save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.builtin.refit import TrainingWeights
from aligner.rollout.builtin.weights import tensors
from aligner.rollout.config import RolloutConfig, VerifyRefit
from aligner.rollout.create import create_engine

WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 192}
_LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS = {  # deviations from `HF_MODELS`, and the packed weights of a layer of it with all that it has
    "mixtral": ({}, 2 + 4 * 2),
    "qwen3_moe": ({"moe_intermediate_size": 64}, 2 + 4 * 2),
    "deepseek_v3": (_LATENT | {"moe_intermediate_size": 64}, 3 + 8 * 2 + 2),
    "qwen3_next": (
        {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        3 + 4 * 2 + 2,
    ),
    "gpt_oss": ({"intermediate_size": 64, "head_dim": 16}, 2 + 4 * 2),
}
_ATTENTION = "q_proj k_proj v_proj o_proj q_b_proj kv_b_proj in_proj_qkvz in_proj_ba out_proj".split()
MATRICES = (*_ATTENTION, *"gate_proj up_proj down_proj w1 w2 w3".split())
CASES = [*((name, "nf4") for name in MODELS), *((name, kind) for name in ("qwen3_moe", "deepseek_v3") for kind in ("int8", "double"))]


def settings(kind: str) -> dict:
    """`double`: NF4 with scales of 8 bits."""
    return {"quantization": Quantization("nf4" if kind == "double" else kind), "double_quantization": kind == "double"}


def as_stored(directory: Path, kind: str) -> None:
    """Give the matrices of a Hugging Face directory the numbers that bitsandbytes stores of each, of each expert in a stack."""
    found = load_file(directory / "model.safetensors")
    how = (settings(kind)["quantization"], kind == "double")
    for name, tensor in found.items():
        if name.endswith(tuple(f".{matrix}.weight" for matrix in MATRICES)):
            found[name] = rounded(tensor, *how)
        elif name.endswith((".gate_up_proj", ".down_proj")):  # [experts, inputs, outputs]
            found[name] = torch.stack([rounded(one.t().contiguous(), *how).t() for one in tensor])
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """`bases(name, kind)`: the directories of a random model and of the same with rounded matrices."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict = {}

    def get(name: str, kind: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(WIDE | HF_MODELS[name] | MODELS[name][0])))
            randomize(model, seed=len(name))
            model.save_pretrained(made[name])
        there = made[name].parent / f"{made[name].name}_{kind}"
        if not there.exists():
            shutil.copytree(made[name], there)
            as_stored(there, kind)
        return made[name], there

    return get


def targets(name: str) -> list[LoraTarget]:
    attention = [] if name == "qwen3_next" else [LoraTarget.qkv]
    return [*attention, LoraTarget.proj, *([] if name == "gpt_oss" else [LoraTarget.experts])]


@pytest.fixture
def make(load_policy, bases):
    def made(name: str, kind: str, **fields):
        lora = LoraConfig(rank=4, targets=targets(name))
        return load_policy(bases(name, kind)[0], optimizer=adam(), config=settings(kind) | {"lora": lora} | fields)

    return made


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_numbers_are_those_of_dequantised_files(name, kind, make, bases, load_policy, logprob_gap, tmp_path):
    policy, batch = make(name, kind), make_batch()
    stored = load_file(bases(name, kind)[1] / "model.safetensors")
    for own, tensor in export_hf(policy.chunks):
        torch.testing.assert_close(tensor, stored[own], rtol=0, atol=1e-6 if kind == "double" else 0, msg=own)
    dense = load_policy(bases(name, kind)[1], optimizer=adam(), config={"lora": LoraConfig(rank=4, targets=targets(name))})
    first = codes(policy)
    before = policy.logprobs(batch)
    torch.testing.assert_close(before, dense.logprobs(batch), rtol=0, atol=1e-5)
    assert (before - load_policy(bases(name, kind)[0]).logprobs(batch)).abs().max() > 1e-3  # it matters
    of_layers = [own.split(".")[2] for own, p in policy.module.named_parameters() if hasattr(p, "packed")]
    assert max(map(of_layers.count, "01")) == MODELS[name][1]
    assert train(policy, 1) == pytest.approx(train(dense, 1), abs=1e-5)
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=1, state={}))
    torch.testing.assert_close(load_policy(saved).logprobs(batch), policy.logprobs(batch), rtol=0, atol=2e-5)
    samples_in_place(policy, logprob_gap)
    further, again = train(policy, 1), make(name, kind)
    assert further == pytest.approx(train(dense, 1), abs=1e-5)
    torch.testing.assert_close(policy.logprobs(batch), dense.logprobs(batch), rtol=0, atol=2e-4)
    checkpoint.load(again.model, saved)
    assert equal(codes(again), first) and train(again, 1) == further
    assert torch.equal(again.logprobs(batch), policy.logprobs(batch))
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    torch.testing.assert_close(load_policy(tmp_path / "export").logprobs(batch), policy.logprobs(batch), rtol=0, atol=2e-5)


def samples_in_place(policy, logprob_gap) -> None:
    """An engine that reads the trainer's packed weights."""
    engine = create_engine(policy, RolloutConfig(verify_refit=VerifyRefit.checksum), eos_id=2, decode=None)
    assert isinstance(engine.engine.weights, TrainingWeights)
    own = {tensor.data_ptr() for tensor in weight_storage(policy.chunks)}
    assert {tensor.data_ptr() for tensor in tensors(engine.engine.weights.model)} <= own
    engine.refit(1)
    assert logprob_gap(policy, rollouts_of(engine, policy)).max() < 1e-4
    engine.engine.decoder.fixed_shapes = True  # as on a GPU: every expert on all tokens
    assert logprob_gap(policy, rollouts_of(engine, policy)).max() < 1e-4
    engine.shutdown()


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "nf4"), ("deepseek_v3", "int8"), ("qwen3_next", "double")])
def test_random_weights_are_packed_too(name, kind, topology):
    """A model without `model.path` has what a dense one draws, packed, and its adapters learn."""
    architecture = architecture_from_hf(WIDE | HF_MODELS[name] | MODELS[name][0])
    how = {"dtype": Dtype.float32, "make_vocab_divisible_by": 8, "lora": LoraConfig(rank=4, targets=targets(name))}
    models = [ModelConfig(**how, **more) for more in (settings(kind), {})]
    ours, dense = (create_policy(one, architecture, ParallelConfig(), topology, Training(optimizer=adam())) for one in models)
    drawn = dict(dense.module.named_parameters())
    names = [name for name, parameter in ours.module.named_parameters() if hasattr(parameter, "packed")]
    assert len(names) >= MODELS[name][1]
    for weight, own in zip(packed(ours), names, strict=True):
        assert drawn[own].std() > 5e-3  # initializer_range=0.02, and smaller for what is added to the residual stream
        assert torch.equal(weight.read(), weight.packing.unpack(*weight.packing.pack(drawn[own].detach()), dtype=torch.float32))
    losses = train(ours, 3)
    assert losses[2] < losses[0]
    assert all(p.main_grad.any() for p in ours.module.parameters() if p.requires_grad)
