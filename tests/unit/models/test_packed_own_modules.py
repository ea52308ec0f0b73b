"""Weights in 4 and 8 bits under the adapters of `transformers`' own modules: what PEFT computes on bitsandbytes' layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from own_models import VISION
from packed_models import adam, adapter_gradients, codes, equal, make_batch, packed, rollouts_of, rounded, train
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, GraniteConfig
from vision_models import write_seeing
from vision_rows import Rows, plain, reference

from aligner.errors import ConfigError, ModelFilesError
from aligner.losses.sft import sft_loss
from aligner.models.checkpoint import checkpoint
from aligner.models.config import Dtype, Implementation, LoraConfig, LoraTarget, ModelConfig, Quantization, Recompute
from aligner.models.create import read_architecture
from aligner.models.families.own_modules import hf_architecture, packed_linears
from aligner.models.modules.hf_chunk import HFChunk
from aligner.models.modules.linear import linear_weight, operators
from aligner.models.modules.peft import save_peft
from aligner.models.weights import save_hf
from aligner.parallel import platform
from aligner.parallel.topology import ParallelConfig
from aligner.planner.dry_run import LiveStorage, shard_parameters
from aligner.planner.workload import Component, Head, Phase, Work
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine

ALL = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]
KINDS = [Quantization.nf4, Quantization.int8]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("granite")
    torch.manual_seed(1)
    config = GraniteConfig(vocab_size=61, max_position_embeddings=64, initializer_range=0.1, logits_scaling=4.0, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def make(load_policy, base):
    def made(kind: Quantization, path: Path | None = None, **fields):
        lora = fields.pop("lora", LoraConfig(rank=4, targets=ALL))
        return load_policy(path or base, optimizer=adam(), config={"quantization": kind, "lora": lora} | fields)

    return made


def with_adapter(base: Path, policy, folder: Path, kind: Quantization, nested: bool):
    """PEFT's model with the policy's adapters, on bitsandbytes' own layers for NF4, and on its numbers for INT8."""
    import bitsandbytes
    from peft import PeftModel

    save_peft(policy.chunks, folder, writer=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and name != "lm_head":
            if kind is Quantization.int8:
                layer.weight.data = rounded(layer.weight.data, kind)
                continue
            other = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, False, torch.float32, compress_statistics=nested, quant_type="nf4"
            )
            other.load_state_dict(layer.state_dict())
            model.set_submodule(name, other.to("cpu"))  # which packs it
    return PeftModel.from_pretrained(model, folder, is_trainable=True).train()  # its evaluation on a CPU has other kernels


@pytest.mark.parametrize(("kind", "nested"), [(Quantization.nf4, False), (Quantization.nf4, True), (Quantization.int8, False)])
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_logits_and_gradients_are_pefts_on_bitsandbytes_layers(kind, nested, recompute, make, base, tmp_path):
    policy, batch = make(kind, recompute=recompute, double_quantization=nested), make_batch()
    train(policy, 1)  # B's are zero before
    model = with_adapter(base, policy, tmp_path, kind, nested)
    (chunk,) = policy.chunks
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    logits = model(batch.tokens).logits
    with torch.no_grad():
        ours = chunk.logits(chunk(batch.tokens, positions).transpose(0, 1).flatten(0, 1)).view_as(logits)
    torch.testing.assert_close(ours, logits.detach(), rtol=0, atol=1e-5)
    found = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    (-(found * batch.loss_mask[:, 1:]).sum() / batch.loss_mask.sum()).backward()
    policy.train_step(batch, sft_loss)
    wanted = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients = adapter_gradients(policy)
    assert gradients.keys() == wanted.keys() and len(wanted) == 2 * 7 * 2
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 1e-5
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_samples_and_exports_what_it_trains(kind, make, load_policy, logprob_gap, tmp_path):
    policy, batch = make(kind), make_batch()
    first, losses = codes(policy), train(policy, 2)
    assert losses[1] < losses[0] and equal(codes(policy), first) and len(packed(policy)) == 14
    for staleness in (0, 1):  # an engine that samples while the policy trains has a dense copy
        config = RolloutConfig()
        config.asynchronous.max_staleness = staleness
        engine = create_engine(policy, config, eos_id=2, decode=None)
        engine.refit(1)
        assert logprob_gap(policy, rollouts_of(engine, policy)).max() < 1e-4
        engine.shutdown()
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}))
    further, again = train(policy, 2), make(kind)
    checkpoint.load(again.model, saved)
    assert equal(codes(again), first) and train(again, 2) == further
    assert torch.equal(again.logprobs(batch), policy.logprobs(batch))
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=4, state={}))
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    for path in (tmp_path / "export", saved):
        merged = load_policy(path, config={"implementation": Implementation.transformers})
        torch.testing.assert_close(merged.logprobs(batch), policy.logprobs(batch), rtol=0, atol=2e-5)
    assert equal(codes(make(kind, saved)), codes(make(kind, tmp_path / "export")))


@pytest.mark.parametrize("kind", KINDS)
def test_one_dense_layer_at_a_time_is_on_the_device(kind, monkeypatch, topology):
    """What fake tensors take on a GPU while a model is made: the packed weights, and what it needs to pack a layer."""
    config = GraniteConfig(vocab_size=61, max_position_embeddings=64, **(SIZES | {"num_hidden_layers": 8}))
    model = ModelConfig(quantization=kind, dtype=Dtype.float32, lora=LoraConfig(rank=4, targets=ALL))
    architecture = hf_architecture(config.to_dict())
    names = packed_linears(architecture, kind)
    operators()  # before tensors are fake
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    with FakeTensorMode(), LiveStorage("cuda") as made:
        chunk = HFChunk(architecture, model, source=None)
        weights = [linear_weight(chunk.hf.get_parameter(f"{name}.weight")) for name in names]
        assert len(weights) == 7 * 8
        stays = sum(tensor.nbytes for weight in weights for tensor in weight.storage)
        dense = [4 * weight.shape.numel() for weight in weights]
    assert stays < made.peak < stays + 3 * max(dense) < sum(dense)


QWEN_SIZES = {"num_attention_heads": 4, "head_dim": 16}
QWEN_SIZES |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [("llava", Quantization.nf4, 14), *((name, kind, 8) for name in ("qwen2_5_vl", "qwen3_vl") for kind in KINDS)],
)
def test_of_a_model_that_sees_the_text_part_alone_is_packed(name, kind, layers, load_policy, tmp_path, monkeypatch, capsys):
    """Of transformers' modules and, of Qwen's models, on Megatron-Core's layers."""
    from peft import PeftModel

    is_own = name == "llava"
    whole, text, tower, more = VISION[name]
    if not is_own:
        monkeypatch.setitem(VISION, name, (whole, text, tower | {"out_hidden_size": 64}, more))
    write_seeing(name, tmp_path, hidden_size=64, intermediate_size=128, **({} if is_own else QWEN_SIZES))
    rows, fields = Rows(name, tmp_path), {"implementation": Implementation.transformers} if is_own else {"images": True}
    config = fields | {"quantization": kind, "lora": LoraConfig(rank=4, targets=ALL)}
    policy = load_policy(tmp_path, optimizer=adam(), config=config, training={"sees": rows.vision})
    assert not is_own or "14 layers in nf4, " in capsys.readouterr().out
    names = [one for one, parameter in policy.module.named_parameters() if "packed" in parameter.__dict__]
    assert len(names) == layers and not any("vis" in one for one in names)
    policy.train_step(rows.batch(), sft_loss)  # B's are zero before
    save_peft(policy.chunks, tmp_path / "adapter", writer=True)
    model = reference(tmp_path)
    for layer in model.model.language_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data, kind)
    model = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    wanted, _ = plain(model.base_model.model, rows)
    torch.testing.assert_close(policy.logprobs(rows.batch()), wanted, rtol=0, atol=1e-5)
    gradients = {one.replace(".default", ""): p.grad for one, p in model.named_parameters() if p.requires_grad}
    policy.train_step(rows.batch(), sft_loss)
    ours = adapter_gradients(policy)
    # PEFT takes the tower's layers, which have the same names, too.
    assert len(ours) == 2 * 14 and gradients.keys() - ours.keys() == {one for one in gradients if "vision_tower" in one}
    for one in ours:
        torch.testing.assert_close(ours[one], gradients[one], rtol=0, atol=1e-5, msg=lambda text, one=one: f"{one}: {text}")


def test_a_layer_whose_inputs_have_no_blocks_is_refused(make, tmp_path):
    config = GraniteConfig(vocab_size=61, max_position_embeddings=64, **(SIZES | {"intermediate_size": 200}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.quantization=nf4: model.layers.0.mlp.down_proj has 200 inputs: no multiple of 64.*int8"):
        make(Quantization.nf4, tmp_path)
    assert len(packed(make(Quantization.int8, tmp_path))) == 14


def test_a_matrix_of_another_shape_than_the_config_makes_it_is_refused(make, base, tmp_path):
    shutil.copytree(base, tmp_path / "other")
    config = json.loads((base / "config.json").read_text()) | {"intermediate_size": 256}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelFilesError, match=r"tensors are missing or do not have the shape in the config, e.g. .*mlp\.(gate|up|down)_proj"
    ):
        make(Quantization.nf4, tmp_path / "other")


@pytest.mark.parametrize(("kind", "nested"), [(Quantization.nf4, False), (Quantization.nf4, True), (Quantization.int8, False)])
def test_the_plan_has_their_bytes(kind, nested, make, base):
    policy, packing = make(kind, double_quantization=nested), {"quantization": kind, "double_quantization": nested}
    config = ModelConfig(path=str(base), dtype=Dtype.float32, **packing, lora=LoraConfig(rank=4, targets=ALL))
    work = Work(phases=(Phase.train,), rows=4, length=12, response_length=4, update_rows=4, num_updates=1)
    plan = Component(
        name="trainer",
        head=Head.language,
        num_ranks=1,
        architecture=read_architecture(config, vocab_size=0),
        model=config,
        parallel=ParallelConfig(),
        optimizer=adam(),
        work=work,
    )
    ((*parameters,),) = shard_parameters(plan, 0)
    ours = sum(tensor.nbytes for weight in packed(policy) for tensor in weight.storage)
    assert sum(one.packed_bytes for one in parameters) == ours > 0
    if nested:
        assert ours < 0.53 * sum(weight.shape.numel() for weight in packed(policy))
