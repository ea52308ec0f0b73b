"""Adapters on weights in 4 and 8 bits: what PEFT computes on the same tensors, what is kept, saved, resumed, exported and sampled from."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_models import VOCAB
from packed_models import adam, adapter_gradients, codes, equal, hf_logprobs, make_batch, packed, rollouts_of, rounded, train

from aligner.errors import CheckpointError, ConfigError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models import create
from aligner.models.architecture.divisible import check_together
from aligner.models.checkpoint import checkpoint, weights
from aligner.models.config import (
    Architecture,
    Dtype,
    Family,
    Implementation,
    Layers,
    LoraConfig,
    LoraTarget,
    ModelConfig,
    Quantization,
    Recompute,
)
from aligner.models.modules import linear
from aligner.models.modules.build import build_model
from aligner.models.modules.linear import Packing, weight_storage
from aligner.models.training.offload import HostMemory
from aligner.models.training.policy import ReferencePolicy
from aligner.models.training.trainable import TrainableModel, Training
from aligner.models.weights import save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.planner.dry_run import LiveStorage
from aligner.rollout.builtin.refit import OwnWeights, TrainingWeights, negated, rollout_weights
from aligner.rollout.builtin.weights import tensors
from aligner.rollout.config import RolloutConfig, VerifyRefit
from aligner.rollout.create import create_engine

ALL = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]
KINDS = [Quantization.nf4, Quantization.int8]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def write_base(directory: Path, **sizes: int) -> Path:
    """A random Llama whose layers have 128 and 192 inputs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False, **(SIZES | sizes))
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def make(load_policy, base):
    """`make(kind, path=..., optimizer=..., config=ModelConfig fields, **LoraConfig fields)`."""

    def made(kind: Quantization = Quantization.nf4, *, path=None, optimizer=None, config=None, **lora):
        adapters = LoraConfig(**({"rank": 4, "targets": ALL} | lora))
        return load_policy(path or base, optimizer=optimizer, config={"quantization": kind, "lora": adapters} | (config or {}))

    return made


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    """PEFT's, with B's that are not zero."""
    from peft import LoraConfig as PeftConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("adapter")
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    torch.manual_seed(2)
    config = PeftConfig(r=4, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def theirs(base: Path, adapter: Path, kind: Quantization):
    """PEFT's model on the numbers that bitsandbytes stores of the base's layers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(module.weight, kind))
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_logprobs_and_gradients_are_pefts_on_the_same_numbers(kind, recompute, make, base, adapter):
    lora = LoraConfig(rank=4, targets=ALL, path=str(adapter))
    policy = make(kind, optimizer=adam(), config={"recompute": recompute, "lora": lora})
    model, batch = theirs(base, adapter, kind), make_batch()
    expected = hf_logprobs(model, batch)
    torch.testing.assert_close(policy.logprobs(batch), expected.detach(), rtol=0, atol=1e-5)
    plain = make(Quantization.none).logprobs(batch)
    assert (policy.logprobs(batch) - plain).abs().max() > 1e-2  # it matters
    (-expected.sum() / batch.loss_mask.sum()).backward()
    policy.train_step(batch, sft_loss)
    gradients = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    ours = adapter_gradients(policy)
    assert ours.keys() == gradients.keys() and len(ours) == 28
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_int8_has_a_scale_for_each_row():
    packing, weight = (
        Packing(Quantization.int8, torch.float32, None),
        torch.tensor([[127.0, -63.4, 0.6], [0.0, 0.0, 0.0], [-2.0, 1.0, 0.0]]),
    )
    numbers, scales = packing.pack(weight)
    assert numbers.tolist() == [[127, -63, 1], [0, 0, 0], [-127, 64, 0]] and scales.flatten().tolist() == pytest.approx([1, 0, 2 / 127])
    torch.testing.assert_close(packing.unpack(numbers, scales, dtype=torch.float32)[2], torch.tensor([-2.0, 128 / 127, 0.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_nothing_has_filled_are_refused(kind, topology):
    """Memory without contents is often 0: such a model has zeros for weights, and its adapters no gradient."""
    model = ModelConfig(dtype=Dtype.float32, quantization=kind, lora=LoraConfig(rank=4, targets=ALL))
    sizes = Architecture(family=Family.llama, num_layers=2, hidden_size=128, ffn_hidden_size=192, num_attention_heads=4, vocab_size=VOCAB)
    message = rf"model.quantization={kind.value}: 8 weights are not finite, or nothing has filled them; allowed: other weights, or none"
    with pytest.raises(ConfigError, match=message):
        TrainableModel(build_model(sizes, model, ParallelConfig(), load=True), topology, Training(optimizer=None))
    TrainableModel(build_model(sizes, model, ParallelConfig(), load=False), topology, Training(optimizer=None))


def as_files(folder: Path, files: Path, load_policy, own) -> Path:
    return files


def whole_checkpoint(folder: Path, files: Path, load_policy, own) -> Path:
    return checkpoint.save(folder, load_policy(files, optimizer=adam(), config=own).model, checkpoint.SaveRequest(step=0, state={}))


def adapted_checkpoint(folder: Path, files: Path, load_policy, own, *, on=whole_checkpoint) -> Path:
    """Of adapters on packed weights that begin with a whole checkpoint."""
    config = own | {"dtype": Dtype.bfloat16, "quantization": Quantization.nf4, "lora": LoraConfig(rank=1, targets=ALL)}
    policy = load_policy(on(folder / "whole", files, load_policy, own), optimizer=adam(), config=config)
    return checkpoint.save(folder / "adapted", policy.model, checkpoint.SaveRequest(step=0, state={}))


def adapted_files(folder: Path, files: Path, load_policy, own) -> Path:
    return adapted_checkpoint(folder, files, load_policy, own, on=as_files)


@pytest.mark.parametrize(("implementation", "in_layer"), [(Implementation.megatron, 4), (Implementation.transformers, 7)])
@pytest.mark.parametrize("source", [as_files, whole_checkpoint, adapted_checkpoint, adapted_files])
@pytest.mark.parametrize(("kind", "most"), [(Quantization.nf4, 0.57), (Quantization.int8, 1.04)])
def test_packed_weights_take_few_bytes_and_are_never_dense_together(
    kind, most, source, implementation, in_layer, make, load_policy, tmp_path
):
    """Six more layers cost what they have packed, also while files or checkpoints are read: a weight or a layer is dense at a time."""
    peaks, numbers, own = {}, {}, {"implementation": implementation}
    for layers in (2, 8):
        path = source(tmp_path / f"{layers} saved", write_base(tmp_path / str(layers), num_hidden_layers=layers), load_policy, own)
        with LiveStorage("cpu") as made:
            policy = make(kind, path=path, rank=1, config=own | {"dtype": Dtype.bfloat16})
        weights = packed(policy)
        assert len(weights) == in_layer * layers
        peaks[layers], numbers[layers] = made.peak, sum(weight.shape.numel() for weight in weights)
        assert sum(tensor.nbytes for weight in weights for tensor in weight.storage) <= most * numbers[layers]
        rest = sum(p.nbytes for p in policy.module.parameters() if p.is_floating_point())
    assert peaks[8] - peaks[2] < most * (numbers[8] - numbers[2]) + rest < 0.7 * 2 * (numbers[8] - numbers[2])


def test_nothing_dense_waits_for_the_backward_pass(make):
    policy, found = make(optimizer=adam()), set()

    def note(tensor):
        found.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        train(policy, 1)
    dense = {tuple(weight.shape) for weight in packed(policy)}
    assert len(dense) == 4 and len(found) > 10 and not any(shape in dense or shape[::-1] in dense for shape in found)


@pytest.mark.parametrize(
    ("config", "here"),
    [
        ({"quantization": Quantization.none}, "none"),
        ({"quantization": Quantization.int8}, "int8 of float32"),
        ({"dtype": Dtype.bfloat16}, "nf4 of bfloat16"),
    ],
)
def test_a_resume_with_other_weights_under_the_adapters_is_refused(config, here, make, tmp_path):
    saved = checkpoint.save(tmp_path, make(optimizer=adam()).model, checkpoint.SaveRequest(step=0, state={}))
    with pytest.raises(CheckpointError, match=f"trained with model.quantization=nf4 of float32, the model has {here}: it cannot be"):
        checkpoint.load(make(optimizer=adam(), config=config).model, saved)


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_and_the_checkpoint_as_a_model_are_what_was_trained(kind, make, load_policy, base, tmp_path):
    """W as it was rounded, with the adapters in it; packed again, that is another model near it."""
    policy, batch = make(kind, optimizer=adam()), make_batch()
    train(policy, 2)
    expected = policy.logprobs(batch)
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    torch.testing.assert_close(load_policy(tmp_path / "export").logprobs(batch), expected, rtol=0, atol=2e-5)
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}))
    marker = json.loads((saved / "aligner.json").read_text())
    assert marker["quantization"] == {"kind": kind.value, "dtype": "float32"} and marker["base"] == str(base)
    torch.testing.assert_close(load_policy(saved).logprobs(batch), expected, rtol=0, atol=2e-5)
    new, again = make(kind, path=saved), make(kind, path=tmp_path / "export")
    assert all(weight.parameter.dtype == (torch.uint8 if kind is Quantization.nf4 else torch.int8) for weight in packed(new))
    torch.testing.assert_close(new.logprobs(batch), again.logprobs(batch), rtol=0, atol=5e-2)
    assert 1e-3 < (new.logprobs(batch) - expected).abs().max() < 1.5


def test_a_checkpoint_of_whole_weights_is_packed_as_the_files_are(make, load_policy, base, tmp_path):
    found = make(path=whole_checkpoint(tmp_path, base, load_policy, {}))
    assert equal(codes(found), codes(make()))
    ours, theirs = (dict(one.module.named_parameters()) for one in (found, load_policy(base)))
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"):
        assert torch.equal(ours[name], theirs[name]), name


def test_a_checkpoint_that_is_read_layer_by_layer_is_verified(make, load_policy, base, tmp_path):
    saved = whole_checkpoint(tmp_path, base, load_policy, {})
    other = make(path=write_base(tmp_path / "other", num_hidden_layers=4)).chunks
    with pytest.raises(CheckpointError, match="does not fit the model: num_layers is 2 there and 4 here"):
        weights.load_weights(other, saved)
    sums = json.loads((saved / "sums.json").read_text())
    sums["decoder.layers.mlp.linear_fc2.weight"]["sum"] = "0" * 16
    (saved / "sums.json").write_text(json.dumps(sums))
    with pytest.raises(CheckpointError, match=r"1 of \d+ tensors are not those that were in memory .*linear_fc2"):
        weights.load_weights(make().chunks, saved, verify=False)


@pytest.mark.parametrize("kind", [*KINDS, Quantization.none])
def test_the_reference_and_a_teacher_take_the_place_of_the_policy(kind, make, base, tmp_path):
    policy, batch = make(kind, optimizer=adam()), make_batch()
    off, first = policy.logprobs(batch), codes(policy)
    reference, teacher = ReferencePolicy(policy), ReferencePolicy(policy, whole=True)
    train(policy, 2)
    save_hf(policy.chunks, tmp_path, writer=True)
    ours = policy.logprobs(batch)
    assert torch.equal(reference.logprobs(batch), off)
    lora = LoraConfig(rank=4, targets=ALL)
    teacher.restore(partial(create.load_source, config=ModelConfig(path=str(tmp_path), dtype=Dtype.float32, lora=lora, quantization=kind)))
    assert torch.equal(teacher.logprobs(batch), make(kind, path=tmp_path).logprobs(batch)) and not torch.equal(ours, off)
    assert torch.equal(policy.logprobs(batch), ours) and all(map(torch.equal, codes(policy), first))


def test_packed_weights_and_scales_go_to_host_memory_and_come_back(make):
    policy = make(optimizer=adam())
    train(policy, 1)
    before, held = policy.logprobs(make_batch()), HostMemory(kept=lambda: weight_storage(policy.chunks))
    held.move_out()
    assert all(tensor.untyped_storage().nbytes() == 0 for weight in packed(policy) for tensor in weight.storage)
    held.move_in()
    assert torch.equal(policy.logprobs(make_batch()), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("merged", "dora"), [(False, False), (True, False), (True, True)])
def test_the_engine_samples_as_the_policy_does(kind, merged, dora, make, logprob_gap):
    """From the packed weights with the adapters beside them; an engine that samples while the policy trains has a copy, which is dense. So
    has one under DoRA."""
    policy = make(kind, optimizer=adam(), dora=dora)
    config = RolloutConfig(verify_refit=VerifyRefit.checksum)
    if merged and not dora:
        config.asynchronous.max_staleness = 1
    engine = create_engine(policy, config, eos_id=2, decode=None)
    weights = engine.engine.weights if hasattr(engine, "engine") else engine.weights
    assert isinstance(weights, OwnWeights if merged else TrainingWeights)
    for version in (1, 2):
        train(policy, 1)
        engine.refit(version)
        assert logprob_gap(policy, rollouts_of(engine, policy)).max() < 1e-4
    with negated(policy.chunks):
        engine.refit(3)
        assert logprob_gap(policy, rollouts_of(engine, policy)).max() < 1e-4
    engine.shutdown()


def test_in_place_the_engine_has_no_weights_of_its_own(make):
    policy = make()
    weights = rollout_weights(policy.chunks, RolloutConfig(verify_refit=VerifyRefit.checksum))
    assert weights.fill() == 0
    own = {tensor.data_ptr() for tensor in (*weight_storage(policy.chunks),)}
    assert {tensor.data_ptr() for tensor in tensors(weights.model)} == own
    packed(policy)[3].scales[0][0, 0] = float("nan")
    with pytest.raises(EngineError, match=r"linear_fc2.weight .1 of 384 elements"):
        weights.fill()


NF4 = {"quantization": Quantization.nf4, "lora": LoraConfig(rank=2)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": Quantization.nf4}, "model.quantization=nf4: packed weights cannot be trained: needs .*model.lora.rank > 0"),
        ({"quantization": Quantization.int8}, "model.quantization=int8: packed weights cannot be trained"),
        ({"double_quantization": True}, "model.double_quantization=true: model.quantization=none has no blocks .*model.quantization=nf4"),
        (NF4 | {"fp8": True}, "model.quantization=nf4: not with model.fp8=true"),
        (NF4 | {"layers": Layers.transformer_engine}, "model.quantization=nf4: Transformer Engine's layers .*layers=auto, torch"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**fields)


LLAMA = {"family": Family.llama, "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"ffn_hidden_size": 192, "vocab_size": 61}
LATENT = {"family": Family.deepseek_v3, "latent_size": 64, "head_dim": 32, "value_head_dim": 32, "num_key_value_heads": 4}
EXPERTS = {"family": Family.mixtral, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64}


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({"hidden_size": 96}, 1, "nf4: linear_qkv has 96 inputs: no multiple of 64, .*allowed: int8, none$"),
        ({"ffn_hidden_size": 200}, 1, "nf4: linear_fc2 has 200 inputs: no multiple of 64"),
        ({}, 2, "nf4: linear_fc2 has 192 inputs over parallel.tp=2 ranks, 96 on each: no multiple of 64, .*or fewer ranks"),
        ({"head_dim": 32}, 4, "nf4: linear_proj has 128 inputs over parallel.tp=4 ranks, 32 on each"),
        (EXPERTS | {"expert_ffn_hidden_size": 96}, 1, "nf4: local_experts.linear_fc2 has 96 inputs: no multiple of 64"),
        (LATENT | {"latent_size": 96}, 1, "nf4: linear_kv_up_proj has 96 inputs"),
    ],
)
def test_models_without_a_packed_form_are_refused_by_name(sizes, tp, message):
    with pytest.raises(ConfigError, match=message):
        check_together(Architecture(**(LLAMA | sizes)), ModelConfig(**NF4), ParallelConfig(tp=tp))
    check_together(Architecture(**(LLAMA | sizes)), ModelConfig(**NF4 | {"quantization": Quantization.int8}), ParallelConfig(tp=tp))


def test_without_bitsandbytes_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    linear.operators.cache_clear()
    with pytest.raises(ConfigError, match=r"model.quantization=nf4: needs bitsandbytes .*aligner\[qlora\]"):
        Packing(Quantization.nf4, torch.float32, None).pack(torch.zeros(2, 64))
