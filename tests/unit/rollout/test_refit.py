"""When an engine reads the training parameters in place, when it keeps weights of its own, and what those hold and cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rollout_parts import engine_of, sampled

from aligner.errors import ConfigError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Architecture, Family, Quantization
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.reshard import replicated
from aligner.rollout.config import VerifyRefit, check_splits
from aligner.types import LabeledBatch, Prompt

pytestmark = pytest.mark.usefixtures("topology")

OPTIMIZER = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0)
PROMPTS = [Prompt(id=i, tokens=tokens, source="") for i, tokens in enumerate([(5, 9, 11), (40,), (7, 8, 9, 10, 3)])]


def samples(engine) -> dict[int, tuple]:
    return {r.seed: (r.response, r.logprobs) for r in sampled(engine, PROMPTS)}


def train(policy) -> None:
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 4:] = True
    policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.tensor([12, 12]), loss_mask=mask), sft_loss)


@pytest.fixture
def own_weights(monkeypatch) -> None:
    """Engines keep weights of their own although this one process could read the parameters in place."""
    from aligner.rollout.builtin import refit

    monkeypatch.setattr(refit, "usable_in_place", lambda chunk, *, tp, rounds: False)


def bytes_of(engine) -> int:
    """Device memory of the layers' matrices."""
    layers = engine.engine.decoder.weights.layers
    return sum(tensor.untyped_storage().nbytes() for layer in layers for tensor in (layer.qkv.weight, layer.experts[0].up.weight))


def weight_bytes(policy) -> int:
    """Device memory of the policy's parameters."""
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in policy.module.parameters()}.values())


def test_own_weights_are_a_copy_until_the_refit(make_model, own_weights):
    policy = make_model("policy", optimizer=OPTIMIZER)
    engine = engine_of(policy)
    before = samples(engine)
    train(policy)
    assert samples(engine) == before  # the policy has moved on; the engine has not
    engine.refit(policy.version)
    after = samples(engine)
    assert after != before and engine.version == 1
    # The very tensors, vocabulary without padding: the policy's own engine, in place, gives the same bits.
    embedding, output = engine.engine.decoder.weights.embedding, engine.engine.decoder.weights.output
    assert embedding is output and embedding.shape[0] == 61  # tied: held once
    assert torch.equal(embedding, policy.module.embedding.word_embeddings.weight[:61])


def test_own_and_shared_weights_give_the_same_samples(make_model, own_weights, monkeypatch):
    from aligner.rollout.builtin import refit

    architecture = {"num_experts": 3, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "family": Family.mixtral}
    architecture |= {"qkv_bias": False, "tied_embeddings": False}
    policy = make_model("policy", architecture=architecture)
    own = engine_of(policy)
    monkeypatch.setattr(refit, "usable_in_place", lambda chunk, *, tp, rounds: True)
    shared = engine_of(policy)
    assert shared.engine.decoder.weights.layers[0].qkv.weight is policy.module.decoder.layers[0].self_attention.linear_qkv.weight
    assert own.engine.decoder.weights.layers[0].qkv.weight is not shared.engine.decoder.weights.layers[0].qkv.weight
    assert samples(own) == samples(shared)


def test_experts_in_one_tensor_are_filled_and_given_back_like_others(make_model, own_weights, monkeypatch):
    """As on a GPU, where kernels multiply by all experts of a layer at once."""
    from aligner.rollout.builtin import refit
    from aligner.rollout.builtin.decode_layers import stack_of

    architecture = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "family": Family.mixtral}
    policy = make_model("policy", architecture=architecture | {"qkv_bias": False, "tied_embeddings": False})
    monkeypatch.setattr(refit, "_stacks", lambda: False)
    apart = engine_of(policy)
    monkeypatch.setattr(refit, "_stacks", lambda: True)
    engine = engine_of(policy, offload=True)
    layers = engine.engine.decoder.weights.layers
    assert bytes_of(engine) == 0 < weight_bytes(policy)
    for _ in range(2):
        engine.wake()
        assert samples(engine) == samples(apart)
        for layer, own in zip(layers, apart.engine.decoder.weights.layers, strict=True):
            stack = stack_of(layer.experts)
            assert stack_of(own.experts) is None and stack.up.weight.untyped_storage().nbytes() == stack.up.weight.nbytes
            for number, expert in enumerate(own.experts):
                assert torch.equal(stack.up.weight[number], expert.up.weight) and torch.equal(stack.down.weight[number], expert.down.weight)
        engine.sleep()
        assert bytes_of(engine) == 0 < weight_bytes(policy)


@pytest.mark.parametrize("gated", [True, False])
def test_experts_that_are_trained_in_place_can_be_multiplied_at_once(make_model, gated):
    """Megatron-Core's buffers of weights hold a model's last parameters first."""
    from aligner.rollout.builtin.decode_layers import stack_of

    architecture = {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "family": Family.mixtral, "gated_mlp": gated}
    policy = make_model("policy", architecture=architecture | {"qkv_bias": False, "tied_embeddings": False}, optimizer=OPTIMIZER)
    for layer in engine_of(policy).engine.decoder.weights.layers:
        stack = stack_of(layer.experts)
        assert stack.is_backwards
        for number, expert in enumerate(reversed(layer.experts)):
            assert torch.equal(stack.up.weight[number], expert.up.weight) and torch.equal(stack.down.weight[number], expert.down.weight)


def test_asleep_it_holds_nothing_and_awake_the_newest_weights(make_model, own_weights):
    policy, twin = make_model("policy", optimizer=OPTIMIZER), make_model("policy", optimizer=OPTIMIZER)
    engine = engine_of(policy, offload=True)
    assert bytes_of(engine) == 0 < weight_bytes(policy)
    with pytest.raises(EngineError, match="while it sleeps"):
        samples(engine)
    engine.wake()
    size, before = bytes_of(engine), samples(engine)
    assert size > 0 and before == samples(engine_of(twin))
    assert weight_bytes(policy) == 0  # they take turns
    with pytest.raises(EngineError, match="sleep\\(\\) it first"):
        engine.refit(policy.version)
    engine.sleep()
    assert bytes_of(engine) == 0 and weight_bytes(policy) == weight_bytes(twin)
    train(policy)
    train(twin)
    for ours, theirs in zip(policy.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    engine.refit(policy.version)  # nothing is copied before it is needed
    assert bytes_of(engine) == 0
    engine.wake()
    assert bytes_of(engine) == size and samples(engine) != before
    assert samples(engine) == samples(engine_of(twin))


def test_weights_in_place_are_not_given_back(make_model):
    policy = make_model("policy")
    engine = engine_of(policy, offload=True)
    engine.wake()
    before = samples(engine)
    engine.sleep()
    assert policy.module.embedding.word_embeddings.weight.untyped_storage().nbytes() > 0
    with pytest.raises(EngineError, match="while it sleeps"):
        samples(engine)
    engine.wake()
    assert samples(engine) == before


def chunk_of(*, tp=1, pp=1, ep=1, expert_tp=1, num_experts=0, groups=4, adapters=False, quantization=Quantization.none):
    sizes = {"tp": tp, "pp": pp, "ep": ep, "expt_tp": expert_tp}
    collection = SimpleNamespace(**{name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})
    architecture = SimpleNamespace(num_experts=num_experts, num_key_value_heads=groups)
    kinds = {"lora": SimpleNamespace(is_on=adapters, dora=False), "quantization": quantization}
    return SimpleNamespace(pg_collection=collection, architecture=architecture, **kinds)


@pytest.mark.parametrize(
    ("layout", "tp", "usable"),
    [
        ({}, 1, True),
        ({"tp": 2}, 2, True),
        ({"tp": 2, "adapters": True}, 2, False),  # the engine has them merged
        ({"tp": 2, "adapters": True, "quantization": Quantization.nf4}, 2, True),  # and beside packed weights as they are
        ({"pp": 2, "adapters": True, "quantization": Quantization.nf4}, 1, False),
        ({"tp": 2}, 1, False),
        ({"tp": 1}, 2, False),
        ({"pp": 2}, 1, False),
        ({"tp": 4, "groups": 2}, 4, False),  # a rank of training holds rows across heads
        ({"num_experts": 8}, 1, True),
        ({"num_experts": 8, "ep": 2}, 1, False),
        ({"num_experts": 8, "tp": 2, "expert_tp": 2}, 2, True),
        ({"num_experts": 8, "tp": 2, "expert_tp": 1}, 2, False),
        ({"ep": 2}, 1, True),  # a dense model has nothing that expert parallelism could split
    ],
)
def test_when_the_training_parameters_can_be_read_in_place(layout, tp, usable):
    from aligner.rollout.builtin.weights import usable_in_place

    assert usable_in_place(chunk_of(**layout), tp=tp) == usable


@pytest.mark.parametrize(
    ("fields", "tp", "world", "message"),
    [
        ({}, 3, 4, r"rollout.tp=3: does not divide the 4 ranks of this component; allowed: 1, 2, 4"),
        ({"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 2}, 4, 4, "rollout.tp=4: .* num_attention_heads=6"),
        ({"ffn_hidden_size": 350}, 4, 4, "rollout.tp=4: does not divide the model's ffn_hidden_size=350"),
        ({"num_experts": 2, "experts_per_token": 2, "expert_ffn_hidden_size": 9}, 2, 2, "rollout.tp=2: .* expert_ffn_hidden_size=9"),
        ({"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": 3}, 2, 2, "rollout.tp=2: .* num_key_value_heads=3"),
    ],
)
def test_a_rollout_layout_that_does_not_fit_the_model_is_refused(fields, tp, world, message):
    with pytest.raises(ConfigError, match=message):
        check_splits(Architecture(**fields), tp=tp, world_size=world)


NORM, QKV = "decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
DAMAGED = {
    "drop": "decoder.layers.1.mlp.linear_fc2.weight of 16 tensors missing in the training weights of this rank",
    "add": "decoder.layers.2.mlp.linear_fc2.weight is extra in the training weights of this rank",
    "reshape": rf"{NORM} has the shape \[31\], the model's config requires \[32\]",
    "retype": f"{NORM} is float16, the model is float32",
    "spoil": rf"not finite: {QKV} \(2 of 2048 elements\) of 16 tensors",
}


def damaged(sources: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    if how == "drop":
        del sources["decoder.layers.1.mlp.linear_fc2.weight"]
        return sources
    bad = sources[QKV].detach().clone()
    bad[3, 4], bad[5, 6] = float("nan"), float("inf")
    others = {"add": {"decoder.layers.2.mlp.linear_fc2.weight": torch.zeros(1)}, "spoil": {QKV: bad}}
    others |= {"reshape": {NORM: torch.zeros(31)}, "retype": {NORM: torch.zeros(32, dtype=torch.float16)}}
    return sources | others[how]


@pytest.mark.parametrize("how", DAMAGED)
def test_damaged_training_weights_are_named_and_nothing_is_sampled_from_them(how, make_model, own_weights, monkeypatch):
    from aligner.rollout.builtin import refit

    engine = engine_of(make_model("policy"))
    before, named = samples(engine), refit.named_parameters
    with monkeypatch.context() as patch:
        patch.setattr(refit, "named_parameters", lambda chunks: damaged(named(chunks), how))
        with pytest.raises(EngineError, match=f"weights of version 1 failed: .*{DAMAGED[how]}"):
            engine.refit(1)
        with pytest.raises(EngineError, match=f"does not generate: its last refit failed .*{DAMAGED[how]}"):
            samples(engine)
    engine.refit(2)
    assert samples(engine) == before and engine.refitted_bytes > 0


def test_a_plan_that_is_not_of_the_whole_model_is_refused(make_model):
    from aligner.rollout.builtin.refit import check_moves
    from aligner.rollout.builtin.weights import moves

    policy = make_model("policy")
    found = moves(policy.chunks, tp=1)
    check_moves(found, policy.chunks)
    with pytest.raises(EngineError, match=f"{found[3].name} came twice in the plan of the refit"):
        check_moves([*found, found[3]], policy.chunks)
    with pytest.raises(EngineError, match=f"{found[2].name} of 16 tensors missing in the plan"):
        check_moves(found[:2] + found[3:], policy.chunks)
    wide = replace(found[-1], shape=(33,), target=replicated(33), source=replicated(33))
    with pytest.raises(EngineError, match=r"final_layernorm.weight has the shape \[33\]"):
        check_moves([*found[:-1], wide], policy.chunks)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_checksum_notices_what_arrived_wrong(swapped, make_model, own_weights, monkeypatch):
    """One bit of one number, or the same numbers in other rows."""
    from aligner.parallel import transfer

    engine = engine_of(make_model("policy"), verify_refit=VerifyRefit.checksum)
    samples(engine)
    run = transfer.Refill.run

    def damage(self, sources, targets):
        run(self, sources, targets)
        weight = targets["decoder.layers.1.self_attention.linear_proj.weight"]
        if swapped:
            weight[:, [0, 1]] = weight[:, [1, 0]]
        else:
            weight.view(torch.int32)[7, 7] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(transfer.Refill, "run", damage)
        with pytest.raises(EngineError, match="layers.1.self_attention.linear_proj.weight of 16 tensors arrived with a different checksum"):
            engine.refit(1)
    engine.refit(2)


def test_weights_in_place_are_checked_where_that_is_asked_for(make_model):
    policy = make_model("policy")
    engine = engine_of(policy, verify_refit=VerifyRefit.checksum)
    assert engine.refitted_bytes == 0  # nothing moves
    with torch.no_grad():
        policy.module.decoder.layers[1].mlp.linear_fc2.weight[0, 0] = float("inf")
    with pytest.raises(EngineError, match=r"not finite: decoder.layers.1.mlp.linear_fc2.weight \(1 of 1536 elements\) of 16 tensors"):
        engine.refit(1)
    with pytest.raises(EngineError, match="its last refit failed"):
        samples(engine)
    engine_of(policy).refit(1)


def test_negated_weights_come_back_to_the_bit(make_model):
    from aligner.rollout.builtin.refit import negated

    policy = make_model("policy")
    engine = engine_of(policy)
    before, weights = samples(engine), [p.detach().clone() for p in policy.module.parameters()]
    with negated(policy.chunks):
        assert all(torch.equal(p, -old) for p, old in zip(policy.module.parameters(), weights, strict=True))
        engine.refit(1)
        assert samples(engine) != before
    engine.refit(2)
    assert samples(engine) == before
