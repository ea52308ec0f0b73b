"""Adapters in one process: what they add, what is trained, what is saved, and what other programs make of them."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from model_steps import same
from packed_models import adam, adapter_gradients, hf_logprobs, make_batch, train
from safetensors.torch import load_file

from aligner.errors import CheckpointError, ConfigError
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.losses.sft import sft_loss
from aligner.losses.value import value_loss
from aligner.models import create
from aligner.models.checkpoint import checkpoint, weights as checkpoint_weights
from aligner.models.config import Dtype, LoraConfig, LoraTarget, ModelConfig, Recompute
from aligner.models.modules.lora import initialise_adapters
from aligner.models.modules.peft import CONFIG_FILE, load_peft, save_peft
from aligner.models.modules.scalar_head import ScalarHead
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.policy import ReferencePolicy
from aligner.models.training.trainable import Training, generator_state, set_generator_state
from aligner.models.weights import save_hf
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig, VerifyRefit
from aligner.rollout.create import create_engine
from aligner.types import PreferenceBatch, Prompt, SamplingConfig, ValueBatch

ALL = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2, LoraTarget.experts]


@pytest.fixture
def make_policy(load_policy, hf_directory):
    """`make_policy(name, optimizer=..., config=ModelConfig fields, **LoraConfig fields)`: a random model of transformers, with adapters."""

    def make(name: str = "qwen2", *, path=None, optimizer=None, config=None, **lora):
        settings = {"rank": 4, "targets": ALL} | lora
        return load_policy(path or hf_directory(name), optimizer=optimizer, config={"lora": LoraConfig(**settings)} | (config or {}))

    return make


def weights(policy, *, adapters: bool) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.module.named_parameters() if (".adapter." in name) == adapters}


def test_only_adapters_are_trained_and_new_ones_change_nothing(make_policy, load_policy, hf_directory):
    policy, plain, batch = make_policy(optimizer=adam()), load_policy(hf_directory("qwen2")), make_batch()
    assert torch.equal(policy.logprobs(batch), plain.logprobs(batch))
    assert torch.equal(make_policy(dora=True, targets=ALL[:4]).logprobs(batch), plain.logprobs(batch))
    base, adapters = weights(policy, adapters=False), weights(policy, adapters=True)
    losses = train(policy, 3)
    assert losses[2] < losses[0] - 0.2
    assert same(weights(policy, adapters=False), base)
    assert not any(torch.equal(tensor, adapters[name]) for name, tensor in weights(policy, adapters=True).items())
    for name, parameter in policy.module.named_parameters():
        assert ("main_grad" in parameter.__dict__) == parameter.requires_grad == (".adapter." in name)


def test_the_optimizer_keeps_nothing_of_frozen_weights(make_policy):
    """Of the adapters two moments, and in bfloat16 a main copy; gradients are as many (buffers are padded to multiples of 128)."""
    policy = make_policy(optimizer=adam(), config={"dtype": Dtype.bfloat16})
    train(policy, 1)
    size = sum(tensor.numel() for tensor in weights(policy, adapters=True).values())
    (part,) = policy.model.optimizer.chained_optimizers
    main = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    moments = [value for state in part.optimizer.state.values() for value in state.values() if value.dim()]
    assert sum(parameter.numel() for parameter in main) == size and {parameter.dtype for parameter in main} == {torch.float32}
    assert sum(moment.numel() for moment in moments) == 2 * size
    (buffer,) = policy.model.runners[0].buffers
    assert size <= buffer.grad_data.numel() < 1.1 * size + 128


WIDTHS = {"linear_qkv": 32, "linear_proj": 32, "linear_fc1": 32, "linear_fc2": 48}  # what goes into the layers of the models below


def adapters_of(policy) -> dict[str, torch.nn.Module]:
    return {name.removesuffix(".adapter"): one for name, one in policy.module.named_modules() if name.endswith(".adapter")}


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_new_adapters_are_drawn_to_the_width_of_their_layer(name, make_policy):
    """A's entries are uniform in +-1 / sqrt(inputs), as PEFT's; B's are 0. Other layers have other numbers."""
    policy = make_policy(name, rank=16)
    found, seen = adapters_of(policy), set()
    assert len(found) == 2 * (2 + 2 * (4 if name == "mixtral" else 1))
    for layer, adapter in found.items():
        bound = WIDTHS[layer.rpartition(".")[2]] ** -0.5
        for a in adapter.a.detach().cpu().split(16):
            assert 0.95 * bound < a.abs().max() <= bound, layer
            assert a.square().mean() == pytest.approx(bound**2 / 3, rel=0.15), layer
            assert abs(a.mean()) < 0.1 * bound, layer
            seen.add(a[0, 0].item())
        assert not any(b.any() for b in adapter.b.values())
    assert len(seen) == sum(len(adapter.pairs.projections) for adapter in found.values())


READ_BY_PEFT = {"gpt_oss": [LoraTarget.qkv, LoraTarget.proj], "llama4_text": ALL[:4]}  # their experts have no adapters
READ_BY_PEFT["qwen3_5_text"] = [LoraTarget.q, LoraTarget.k, LoraTarget.v, *ALL[1:4]]


@pytest.mark.parametrize(
    "name",
    (
        "qwen2 gpt2 mixtral phi3 gpt_neox opt opt_projected gemma2 olmo2 glm4 cohere cohere_plus cohere2 phi3_longrope olmo3 "
        "deepseek_v2 deepseek_v3 qwen2_moe llama4_text gpt_oss qwen3_next qwen3_5_text"
    ).split(),
)
def test_merged_and_peft_exports_give_the_same_logits(name, make_policy, hf_directory, tmp_path):
    from transformers import AutoModelForCausalLM

    lora = {"targets": READ_BY_PEFT[name]} if name in READ_BY_PEFT else {}
    policy, batch = make_policy(name, optimizer=adam(), **lora), make_batch()
    before = policy.logprobs(batch)
    train(policy, 2)
    ours = policy.logprobs(batch)
    assert (ours - before).abs().max() > 0.1
    save_hf(policy.chunks, tmp_path / "merged", writer=True)
    torch.testing.assert_close(hf_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), batch), ours, rtol=0, atol=1e-4)
    save_peft(policy.chunks, tmp_path / "adapter", writer=True)
    assert len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1
    again = make_policy(name, **lora)
    load_peft(again.chunks, tmp_path / "adapter")
    assert same(weights(again, adapters=True), weights(policy, adapters=True))
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_directory(name)), tmp_path / "adapter")
    torch.testing.assert_close(hf_logprobs(theirs, batch), ours, rtol=0, atol=1e-4)


OPTIONS = {
    "rank, alpha and dropout": {"rank": 5, "alpha": 3.0, "dropout": 0.2},
    "attention": {"targets": [LoraTarget.qkv, LoraTarget.proj], "rslora": True},
    "queries": {"targets": [LoraTarget.q]},
    "feed-forward": {"targets": [LoraTarget.fc1, LoraTarget.fc2], "rslora": True, "dropout": 0.1},
    "gate": {"targets": [LoraTarget.gate]},
    "up and down": {"targets": [LoraTarget.up, LoraTarget.fc2]},
    "experts": {"targets": [LoraTarget.experts]},
    "experts, rslora": {"targets": [LoraTarget.experts], "rslora": True, "rank": 3},
    "attention and experts": {"targets": [LoraTarget.qkv, LoraTarget.experts], "dropout": 0.1},
    "dora": {"targets": ALL[:4], "dora": True, "rank": 3},
    "queries and up, dora": {"targets": [LoraTarget.q, LoraTarget.up], "dora": True, "rslora": True},
    "all, rslora": {"targets": ALL, "rslora": True, "rank": 2, "alpha": 7.0},
}
DORA = ("dora", "queries and up, dora")
ABSENT = {"qwen2": ("experts", "experts, rslora"), "mixtral": ("feed-forward", "gate", "up and down")}  # layers that it does not have


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["qwen2", "mixtral", "qwen2_moe", "qwen3_moe_dense_layers", "deepseek_v2", "glm4_moe"])
def test_peft_reads_what_was_trained(name, option, make_policy, hf_directory, tmp_path):
    """Whatever the targets, also those that PEFT would take for experts, and back."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    options = {"targets": ALL} | OPTIONS[option]
    if option in DORA and name in ("qwen2_moe", "deepseek_v2", "glm4_moe", "qwen3_moe_dense_layers"):
        with pytest.raises(ConfigError, match="PEFT takes .* for an expert's, of which it has no DoRA; allowed .*: qkv"):
            make_policy(name, **options)
        return
    if option in ABSENT.get(name, ()):
        with pytest.raises(ConfigError, match="the model has no such layer"):
            make_policy(name, **options)
        return
    policy, batch = make_policy(name, **options), make_batch()
    before, generator = policy.logprobs(batch), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in policy.module.named_parameters():
            if ".adapter.b" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif ".adapter.m" in parameter_name:
                parameter *= (0.5 + torch.rand(parameter.shape, generator=generator)).to(parameter.device)
    ours = policy.logprobs(batch)
    assert (ours - before).abs().max() > 0.01
    save_peft(policy.chunks, tmp_path, writer=True)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_directory(name)), tmp_path)
    torch.testing.assert_close(hf_logprobs(theirs, batch), ours, rtol=0, atol=1e-4)
    again = make_policy(name, **options)
    load_peft(again.chunks, tmp_path)
    assert same(weights(again, adapters=True), weights(policy, adapters=True))


def test_projections_that_a_delta_net_has_in_another_order_get_no_adapters(make_policy):
    with pytest.raises(ConfigError, match="model.lora.targets: qkv of family qwen3_5_text is of its delta nets too; allowed: .*q, k, v"):
        make_policy("qwen3_5_text", targets=[LoraTarget.qkv])


@pytest.mark.parametrize(
    ("name", "modules", "lora"),
    [
        ("qwen2", ["q_proj", "v_proj", "up_proj"], {"targets": [LoraTarget.q, LoraTarget.v, LoraTarget.up], "rslora": True}),
        ("gpt2", ["attn.c_proj", "c_fc"], {"targets": [LoraTarget.proj, LoraTarget.fc1]}),
        ("qwen2", ["q_proj", "down_proj", "up_proj"], {"targets": [LoraTarget.q, LoraTarget.up, LoraTarget.fc2], "dora": True}),
        ("gpt2", ["c_attn", "c_fc"], {"targets": [LoraTarget.qkv, LoraTarget.fc1], "dora": True}),
        ("phi3", ["qkv_proj", "gate_up_proj"], {"targets": [LoraTarget.qkv, LoraTarget.fc1], "dora": True}),
    ],
)
def test_an_adapter_made_by_peft(name, modules, lora, make_policy, hf_directory, tmp_path):
    """Its logits, and the same files back: GPT-2's two layers called c_proj are told apart."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    kinds = {"use_rslora": lora.get("rslora", False), "use_dora": lora.get("dora", False)}
    settings = peft.LoraConfig(r=3, lora_alpha=12, target_modules=modules, init_lora_weights=False, **kinds)
    settings.fan_in_fan_out, settings.task_type = name == "gpt2", "CAUSAL_LM"
    theirs, batch = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(hf_directory(name)), settings), make_batch()
    theirs.save_pretrained(tmp_path / "theirs")
    policy = make_policy(name, rank=3, alpha=12.0, path=hf_directory(name), **lora)
    load_peft(policy.chunks, tmp_path / "theirs")
    torch.testing.assert_close(policy.logprobs(batch), hf_logprobs(theirs, batch), rtol=0, atol=1e-4)
    assert (policy.logprobs(batch) - make_policy(name, **lora).logprobs(batch)).abs().max() > 0.01
    save_peft(policy.chunks, tmp_path / "ours", writer=True)
    one, other = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert same(one, other)
    assert json.loads((tmp_path / "ours" / CONFIG_FILE).read_text())["target_modules"] == sorted(modules)


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_gradients_of_dora_equal_pefts(name, make_policy, hf_directory, tmp_path):
    """The norm is a constant of the backward pass, here as there; biases are not scaled (qwen2 has them)."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    lora = {"dora": True, "rank": 3, "targets": ALL[:4]}
    policy, batch, generator = make_policy(name, optimizer=adam(), **lora), make_batch(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in adapters_of(policy).values():
            for parameter in (*adapter.b.values(), *adapter.m.values()):
                parameter += 0.3 * torch.rand(parameter.shape, generator=generator).to(parameter.device)
    save_peft(policy.chunks, tmp_path, writer=True)
    policy.train_step(batch, sft_loss)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_directory(name)), tmp_path, is_trainable=True)
    (-hf_logprobs(theirs, batch).sum() / batch.loss_mask.sum()).backward()
    expected = {one.replace(".default", "").removesuffix(".weight"): p.grad for one, p in theirs.named_parameters() if p.requires_grad}
    ours = {one.removesuffix(".weight"): gradient for one, gradient in adapter_gradients(policy).items()}
    assert ours.keys() == expected.keys()
    for one, gradient in expected.items():
        assert gradient.any(), one
        torch.testing.assert_close(ours[one], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=one)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_bs_of_loraplus_learn_faster(distributed, make_policy, load_policy, hf_directory, tmp_path):
    """Adam moves every entry with a gradient by about the learning rate: A by 1e-3, B by 16 times that, and the same after a resume."""
    rates = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "weight_decay": 0.0, "loraplus_ratio": 16.0}
    optimizer = OptimizerConfig(**rates, eps=1e-12, clip_grad=0.0, distributed=distributed)
    policy = make_policy(optimizer=optimizer)
    seen, lrs = [weights(policy, adapters=True)], []
    for _ in range(2):
        lrs.append(policy.train_step(make_batch(), sft_loss)["optim/lr"].value())
        seen.append(weights(policy, adapters=True))
    for name, before in seen[0].items():
        one, two = (seen[1][name] - before).abs(), (seen[2][name] - seen[1][name]).abs()
        if ".b." in name:
            torch.testing.assert_close(one[one > 0].median(), torch.tensor(16e-3, device=one.device), rtol=0.01, atol=0)
        else:
            assert not one.any()  # B was 0
            torch.testing.assert_close(two[two > 0].max(), torch.tensor(lrs[1], device=two.device), rtol=0.9, atol=0)
            assert two.max() < 2e-3
    assert lrs[0] == pytest.approx(1e-3)
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}))
    again, expected = make_policy(optimizer=optimizer), train(policy, 2)
    checkpoint.load(again.model, saved)
    assert train(again, 2) == expected
    with pytest.raises(ConfigError, match="optimizer.loraplus_ratio=16: is of adapters; needs model.lora.rank above 0"):
        load_policy(hf_directory("qwen2"), optimizer=optimizer)
    for fields in ({"loraplus_ratio": 0.5}, {"loraplus_ratio": 1e9}):
        with pytest.raises(ConfigError, match="optimizer.loraplus_ratio"):
            OptimizerConfig(**fields)


@pytest.mark.parametrize("lora", [{"dropout": 0.3}, {"dora": True, "targets": [LoraTarget.q, LoraTarget.fc2]}])
def test_a_run_continues_bitwise_from_adapters_alone(lora, make_policy, tmp_path):
    one = make_policy(optimizer=adam(), **lora)
    train(one, 2)
    saved = checkpoint.save(tmp_path, one.model, checkpoint.SaveRequest(step=2, state={"at": 2}))
    size = sum(path.stat().st_size for path in (saved / "weights").iterdir())
    assert size < sum(tensor.nbytes for tensor in weights(one, adapters=False).values())
    expected = train(one, 2)
    two = make_policy(optimizer=adam(), **lora)
    assert checkpoint.load(two.model, saved) == {"at": 2}
    assert train(two, 2) == expected
    assert all(same(weights(two, adapters=which), weights(one, adapters=which)) for which in (True, False))
    other = make_policy(optimizer=adam(), rank=2)
    with pytest.raises(CheckpointError, match="saved with .*'rank': 4.*the model has .*'rank': 2"):
        checkpoint.load(other.model, saved)


def test_a_checkpoint_of_adapters_is_a_model_to_start_from(make_policy, load_policy, hf_directory, tmp_path):
    base = shutil.copytree(hf_directory("qwen2"), tmp_path / "base")
    policy, batch = make_policy(path=base, optimizer=adam()), make_batch()
    train(policy, 2)
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}))
    ours = policy.logprobs(batch)
    torch.testing.assert_close(load_policy(saved).logprobs(batch), ours, rtol=0, atol=1e-5)  # merged
    again = load_policy(base, config={"lora": LoraConfig(rank=4, targets=ALL, path=str(saved))})  # the same adapters
    assert same(weights(again, adapters=True), weights(policy, adapters=True))
    further = make_policy(path=saved, rank=2, optimizer=adam())  # new adapters on top
    torch.testing.assert_close(further.logprobs(batch), ours, rtol=0, atol=1e-5)
    assert not any(bool(b.any()) for name, b in weights(further, adapters=True).items() if ".b." in name)
    marker = json.loads((saved / "aligner.json").read_text())
    assert marker["base"] == str(base)
    assert marker["lora"] == {"rank": 4, "alpha": 16.0, "rslora": False, "targets": [target.value for target in ALL]}
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="its adapters belong to the model that was in .*base; other weights are there now"):
        load_policy(saved)
    with pytest.raises(CheckpointError, match="belong to other weights .*base. than this run's"):
        checkpoint.load(make_policy(path=base, optimizer=adam()).model, saved)
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match="base, which is not there; a link to it"):
        load_policy(saved)


def test_dropout_is_of_training_alone_and_the_same_when_computed_again(make_policy):
    policy, batch = make_policy(optimizer=adam(), dropout=0.5), make_batch()
    generators, others = generator_state(), train(make_policy(optimizer=adam()), 2)
    losses = train(policy, 2)
    assert torch.equal(policy.logprobs(batch), policy.logprobs(batch))
    assert losses[0] == others[0] and losses[1] != others[1]  # B is zero at first
    set_generator_state(generators)
    again = make_policy(optimizer=adam(), dropout=0.5, config={"recompute": Recompute.full})
    assert train(again, 2) == pytest.approx(losses, rel=1e-6)


def test_the_reference_is_the_adapters_switched_off(make_policy, load_policy, hf_directory, tmp_path):
    policy, batch = make_policy(optimizer=adam()), make_batch()
    reference, off = ReferencePolicy(policy), load_policy(hf_directory("qwen2")).logprobs(batch)
    train(policy, 2)
    ours = policy.logprobs(batch)
    assert torch.equal(reference.logprobs(batch), off) and torch.equal(policy.logprobs(batch), ours)
    held = sum(tensor.numel() for tensor in reference._weights)
    assert held == sum(tensor.numel() for tensor in weights(policy, adapters=True).values())
    saved = checkpoint.save(tmp_path, policy.model, checkpoint.SaveRequest(step=2, state={}, weights_only=True))
    train(policy, 1)
    reference.restore(partial(checkpoint.load_same, path=saved))
    assert torch.equal(reference.logprobs(batch), ours)


@pytest.mark.parametrize(("name", "lora"), [("llama", {}), ("mixtral", {}), ("qwen2", {"dora": True, "targets": ALL[:4]})])
def test_the_engine_samples_from_merged_weights(name, lora, make_policy, logprob_gap):
    policy = make_policy(name, optimizer=adam(), **lora)
    engine = create_engine(policy, RolloutConfig(verify_refit=VerifyRefit.checksum), eos_id=2, decode=None)
    prompts = [Prompt(id=n, tokens=(3 + n, 7, 9), source="test") for n in range(3)]
    for version in (1, 2):
        train(policy, 1)
        engine.refit(version)
        rollouts = [rollout for part in engine.generate(prompts, [1, 2, 3], SamplingConfig(max_response_length=8)) for rollout in part]
        assert logprob_gap(policy, rollouts).max() < 1e-4
    engine.shutdown()


def test_a_reward_model_trains_adapters_and_its_head(make_model, tmp_path):
    batch = make_batch()
    pairs = PreferenceBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask, margins=torch.zeros(2))
    reward = make_model("reward", optimizer=adam(), config={"lora": LoraConfig(rank=2)})
    initialise_adapters(reward.model.chunks, 0)
    save_hf(reward.model.chunks, tmp_path / "base", writer=True)
    trained = {name for name, parameter in reward.model.module.named_parameters() if parameter.requires_grad}
    assert "score_head.weight" in trained and all(".adapter." in name or name.startswith("score_head.") for name in trained)
    for _ in range(2):
        reward.train_step(pairs, partial(bradley_terry_loss, variant=BradleyTerry.standard))
    saved, ours = checkpoint.save(tmp_path, reward.model, checkpoint.SaveRequest(step=2, state={})), reward.scores(pairs)
    again = make_model("reward", optimizer=adam(), config={"lora": LoraConfig(rank=2)})
    checkpoint.load(again.model, saved)
    assert torch.equal(again.scores(pairs), ours)
    with pytest.raises(CheckpointError, match="its adapters belong to random weights"):
        checkpoint_weights.load_weights(again.model.chunks, saved)
    save_peft(reward.model.chunks, tmp_path / "adapter", writer=True)
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    with torch.no_grad():
        scores = torch.cat([theirs(row[None, :length]).logits for row, length in zip(pairs.tokens, pairs.lengths.tolist(), strict=True)])
    torch.testing.assert_close(scores, ours, rtol=0, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    new = make_model("reward", seed=5, config={"lora": LoraConfig(rank=2)})
    with torch.no_grad():
        for name, parameter in reward.model.module.named_parameters():
            new.model.module.get_parameter(name).copy_(torch.zeros(()) if ".adapter." in name or "score_head" in name else parameter)
    load_peft(new.model.chunks, tmp_path / "theirs")  # with the head
    assert torch.equal(new.scores(pairs), ours)


def test_a_critic_on_a_reward_model_of_several_outputs(make_model, topology, tmp_path):
    """Its checkpoint has the head of one output, whatever the weights under its adapters have."""
    save_hf(make_model("reward", head=ScalarHead(outputs=("a", "b"))).model.chunks, tmp_path / "base", writer=True)
    config = ModelConfig(path=str(tmp_path / "base"), dtype=Dtype.float32, make_vocab_divisible_by=8, lora=LoraConfig(rank=2))

    def make(config: ModelConfig):
        training, architecture = Training(optimizer=adam()), create.read_architecture(config, vocab_size=0)
        return create.create_value_model(config, architecture, ParallelConfig(), topology, training, output_weights=(1.0, 0.5))

    critic, batch = make(config), make_batch()
    zeros = torch.zeros(batch.tokens.shape)
    values = ValueBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask, old_values=zeros, returns=zeros + 1)
    critic.train_step(values, partial(value_loss, clip=None))
    saved = checkpoint.save(tmp_path, critic.model, checkpoint.SaveRequest(step=1, state={}))
    merged = make(ModelConfig(path=str(saved), dtype=Dtype.float32, make_vocab_divisible_by=8))
    torch.testing.assert_close(merged.values(values), critic.values(values), rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused(make_policy, hf_directory, tmp_path):
    for fields, message in (
        ({"rank": -1}, "model.lora.rank=-1"),
        ({"rank": 2, "alpha": 0.0}, "model.lora.alpha=0.0"),
        ({"rank": 2, "dropout": 1.0}, "model.lora.dropout=1.0"),
        ({"rank": 2, "targets": []}, "model.lora.targets"),
        ({"rank": 2, "dora": True, "dropout": 0.1}, "model.lora.dropout=0.1: must be 0 with model.lora.dora=true"),
        ({"rank": 2, "dora": True, "targets": ALL}, "model.lora.targets: PEFT has no DoRA of experts"),
        ({"path": "somewhere"}, "model.lora.path=somewhere: needs model.lora.rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraConfig(**fields)
    with pytest.raises(ConfigError, match="model.batch_invariant=true: .*allowed with model.lora.rank=0"):
        ModelConfig(batch_invariant=True, lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="the model has no such layer"):
        make_policy(targets=[LoraTarget.experts])
    with pytest.raises(ConfigError, match="models of family gpt2 have q, k and v in one; allowed: qkv"):
        make_policy("gpt2", targets=[LoraTarget.v])
    with pytest.raises(
        ConfigError, match="model.lora.targets: models of family gpt_oss have all experts in one .* allowed: the other targets"
    ):
        make_policy("gpt_oss", targets=[LoraTarget.experts])
    with pytest.raises(CheckpointError, match="no adapter_config.json there"):
        load_peft(make_policy().chunks, tmp_path)
    save_peft(make_policy(rank=2, targets=[LoraTarget.q]).chunks, tmp_path, writer=True)
    with pytest.raises(ConfigError, match="model.lora.rank=4: the adapter at .* has r=2"):
        load_peft(make_policy().chunks, tmp_path)
    with pytest.raises(ConfigError, match="model.lora.alpha=8.0.* has lora_alpha=16"):
        load_peft(make_policy(rank=2, alpha=8.0).chunks, tmp_path)
    with pytest.raises(CheckpointError, match="k_proj.lora_A.weight is missing there .model.lora.targets.; 8 differ"):
        load_peft(make_policy(rank=2, targets=[LoraTarget.qkv]).chunks, tmp_path)
    ours, file = make_policy(rank=2, targets=[LoraTarget.q]), tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for field, value, allowed in (
        ("init_lora_weights", "pissa", "True, False, gaussian, eva, orthogonal"),
        ("rank_pattern", {"q_proj": 3}, "{}"),
        ("peft_type", "LOHA", "LORA"),
        ("modules_to_save", ["embed_tokens"], "none"),
    ):
        file.write_text(json.dumps(config | {field: value}))
        with pytest.raises(ConfigError, match=f"{field}=.*is not supported; allowed: {allowed}"):
            load_peft(ours.chunks, tmp_path)
    file.write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match="model.lora.dora=false: the adapter at .* has use_dora=True; allowed: that"):
        load_peft(ours.chunks, tmp_path)
    file.write_text(json.dumps(config)[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_peft(ours.chunks, tmp_path)
