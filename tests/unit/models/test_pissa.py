"""PiSSA: adapters that begin with the weights' largest singular vectors are PEFT's, and leave an adapter of the original weights."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from model_steps import adam, make_batch, same, save, train, weights_of
from packed_models import adapter_gradients, hf_logprobs
from transformers import AutoModelForCausalLM

from aligner.errors import CheckpointError, ConfigError
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, LoraConfig, LoraInit, LoraTarget, ModelConfig, Quantization
from aligner.models.modules.lora import named_adapters
from aligner.models.modules.peft import CONFIG_FILE, export_adapters, pair_of, save_peft
from aligner.models.training.policy import ReferencePolicy
from aligner.models.weights import export_hf, save_hf

MODULES = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "granite": ["q_proj", "v_proj"],
}
ALL = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]


@pytest.fixture
def make(load_policy, hf_directory):
    """A policy with PiSSA's adapters."""

    def policy(name: str = "llama", *, path=None, optimizer=None, config=None, **lora):
        targets = [LoraTarget.q, LoraTarget.v] if name == "granite" else ALL
        settings = {"rank": 3, "alpha": 12.0, "targets": targets, "init": LoraInit.pissa} | lora
        own = {"lora": LoraConfig(**settings)} | (config or {})
        return load_policy(path or hf_directory(name), optimizer=optimizer, config=own, training={"total_steps": 10})

    return policy


def adapters(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in export_adapters(policy.chunks)}


def of_peft(path, name: str, init: str = "pissa", **changes) -> peft.PeftModel:
    settings = {"r": 3, "lora_alpha": 12, "target_modules": MODULES[name], "init_lora_weights": init, "task_type": "CAUSAL_LM"}
    settings |= {"fan_in_fan_out": name == "gpt2"} | changes
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), peft.LoraConfig(**settings))


@pytest.mark.parametrize("rslora", [False, True], ids=["", "rslora"])
@pytest.mark.parametrize("name", MODULES)
def test_adapters_logits_gradients_and_exports_are_pefts(name, rslora, make, hf_directory, tmp_path):
    """At the start, where both are the model itself, and with trained pairs, which here are drawn."""
    policy, batch = make(name, rslora=rslora, optimizer=adam(clip_grad=0.0)), make_batch()
    theirs = of_peft(hf_directory(name), name, use_rslora=rslora)
    theirs.save_pretrained(tmp_path / "initial")
    plain = AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32)
    torch.testing.assert_close(policy.logprobs(batch), hf_logprobs(plain, batch).detach(), rtol=0, atol=1e-5)
    named = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    own = adapters(policy)
    assert own.keys() == named.keys()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name_, parameter in named.items():
            first = own[name_][:3] if "lora_A" in name_ else own[name_][:, :3]
            torch.testing.assert_close(first, parameter.detach(), rtol=1e-4, atol=1e-6)
        for parameter in (p for _, one in named_adapters(policy.module) for p in (one.a, *one.b.values())):
            parameter += (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.device)
        for name_, tensor in adapters(policy).items():
            named[name_].copy_(tensor[:3] if "lora_A" in name_ else tensor[:, :3])
    policy.model.optimizer.reload_model_params()
    ours, wanted = policy.logprobs(batch), hf_logprobs(theirs.eval(), batch)
    torch.testing.assert_close(ours, wanted.detach(), rtol=0, atol=1e-5)
    assert (ours - hf_logprobs(plain, batch).detach()).abs().max() > 0.01
    save_peft(policy.chunks, tmp_path / "ours", writer=True)
    save_hf(policy.chunks, tmp_path / "merged", writer=True)
    policy.train_step(batch, sft_loss)
    (-wanted.sum() / batch.loss_mask.sum()).backward()
    for name_, whole in adapter_gradients(policy).items():
        gradient = whole[:3] if "lora_A" in name_ else whole[:, :3]  # of the trained pairs
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, named[name_].grad, rtol=1e-4, atol=1e-5)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32), tmp_path / "ours")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (again, merged):  # on the original weights
        torch.testing.assert_close(hf_logprobs(model.eval(), batch).detach(), ours, rtol=0, atol=2e-5)
    config = json.loads((tmp_path / "ours" / CONFIG_FILE).read_text())
    assert config["r"] == 6 and "init_lora_weights" not in config


def test_the_function_is_the_models_to_the_last_bit(make):
    policy, plain, batch = make(), make(init=LoraInit.uniform), make_batch()
    assert torch.equal(ReferencePolicy(policy).logprobs(batch), policy.logprobs(batch))
    assert torch.equal(plain.logprobs(batch), policy.logprobs(batch))


def test_a_randomized_decomposition_is_close(make):
    """Of a matrix whose singular values fall, as those of trained weights do; the same at every start."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 48, generator=generator) @ torch.diag(0.7 ** torch.arange(48)) @ torch.randn(48, 48, generator=generator)
    exact, fast = (pair_of("x", matrix, LoraConfig(rank=3, init=LoraInit.pissa, pissa_iterations=count)) for count in (0, 16))
    assert (exact[1] @ exact[0] - fast[1] @ fast[0]).norm() < 0.05 * (exact[1] @ exact[0]).norm()
    started = adapters(make(pissa_iterations=16))
    assert same(started, adapters(make(pissa_iterations=16))) and not same(started, adapters(make()))


def test_a_run_continues_bitwise_and_its_checkpoint_is_a_model(make, load_policy, hf_directory, tmp_path):
    whole, first, resumed = (make(optimizer=adam()) for _ in range(3))
    train(whole, range(4))
    train(first, range(2))
    saved = save(first, tmp_path)
    with torch.no_grad():  # what another machine's decomposition might be: the first pair comes from the checkpoint
        for _, adapter in named_adapters(resumed.module):
            adapter.a0 += 1.0
    checkpoint.load(resumed.model, saved)
    merged, batch = load_policy(saved), make_batch()
    torch.testing.assert_close(merged.logprobs(batch), first.logprobs(batch), rtol=0, atol=1e-5)
    lora = LoraConfig(rank=3, alpha=12.0, targets=ALL, init=LoraInit.pissa, path=str(saved))
    assert same(weights_of(make(config={"lora": lora})), weights_of(first))
    train(resumed, range(2, 4))
    assert same(weights_of(whole), weights_of(resumed))
    with pytest.raises(CheckpointError, match="'init': 'pissa'"):
        checkpoint.load(make(init=LoraInit.uniform, optimizer=adam()).model, saved)


def test_bfloat16_keeps_the_model_at_the_start(make, load_policy, hf_directory):
    policy, plain = make(config={"dtype": Dtype.bfloat16}), load_policy(hf_directory("llama"), config={"dtype": Dtype.bfloat16})
    assert torch.equal(policy.logprobs(make_batch()), plain.logprobs(make_batch()))
    own = dict(export_hf(policy.chunks))
    for name, tensor in export_hf(plain.chunks):
        assert torch.equal(own[name], tensor), name


def test_what_cannot_be_is_refused(make, hf_directory, tmp_path):
    for fields, message in (
        ({"dora": True}, "model.lora.init=pissa: not with model.lora.dora=true"),
        ({"pissa_iterations": -1}, "model.lora.pissa_iterations=-1: must not be negative"),
        ({"pissa_iterations": 4, "init": LoraInit.uniform}, "model.lora.pissa_iterations=4: needs model.lora.init=pissa"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraConfig(**({"rank": 2, "init": LoraInit.pissa} | fields))
    with pytest.raises(ConfigError, match="model.lora.init=pissa: not with model.quantization=int8"):
        ModelConfig(lora=LoraConfig(rank=2, init=LoraInit.pissa), quantization=Quantization.int8)
    with pytest.raises(ConfigError, match="model.lora.rank=40: .*has (16|32) singular values"):
        make(rank=40)
    save_peft(make().chunks, tmp_path, writer=True)
    with pytest.raises(ConfigError, match="model.lora.path=.*PEFT's adapters have no first pair.*allowed: uniform"):
        make(config={"lora": LoraConfig(rank=6, init=LoraInit.pissa, path=str(tmp_path))})
