"""When an engine reads the training parameters in place, when it keeps weights of its own, and what those hold and cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aligner.errors import ConfigError, EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Architecture, Family
from aligner.models.optimizer import OptimizerConfig
from aligner.rollout.config import RolloutConfig, check_splits
from aligner.types import LabeledBatch, Prompt, SamplingConfig

OPTIMIZER = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0)
PROMPTS = [Prompt(id=i, tokens=tokens, source="") for i, tokens in enumerate([(5, 9, 11), (40,), (7, 8, 9, 10, 3)])]
SEEDS = [1, 2, 3]


@pytest.fixture(autouse=True)
def _world(topology) -> None: ...


def engine_of(policy, *, offload: bool = False):
    from aligner.rollout.megatron import MegatronEngine

    return MegatronEngine(policy.chunks, RolloutConfig(sampling=SamplingConfig(max_response_length=12), offload=offload), eos_id=2)


def samples(engine) -> dict[int, tuple]:
    return {r.seed: (r.response, r.logprobs) for part in engine.generate(PROMPTS, SEEDS) for r in part}


def train(policy) -> None:
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 4:] = True
    policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.tensor([12, 12]), loss_mask=mask), sft_loss)


@pytest.fixture
def own_weights(monkeypatch) -> None:
    """Engines keep weights of their own although this one process could read the parameters in place."""
    from aligner.rollout import refit

    monkeypatch.setattr(refit, "usable_in_place", lambda chunk, *, tp: False)


def bytes_of(engine) -> int:
    """Device memory of the layers' matrices."""
    layers = engine.decoder.weights.layers
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
    embedding, output = engine.decoder.weights.embedding, engine.decoder.weights.output
    assert embedding is output and embedding.shape[0] == 61  # tied: held once
    assert torch.equal(embedding, policy.module.embedding.word_embeddings.weight[:61])


def test_own_and_shared_weights_give_the_same_samples(make_model, own_weights, monkeypatch):
    from aligner.rollout import refit

    architecture = {"num_experts": 3, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "family": Family.mixtral}
    architecture |= {"qkv_bias": False, "tied_embeddings": False}
    policy = make_model("policy", architecture=architecture)
    own = engine_of(policy)
    monkeypatch.setattr(refit, "usable_in_place", lambda chunk, *, tp: True)
    shared = engine_of(policy)
    assert shared.decoder.weights.layers[0].qkv.weight is policy.module.decoder.layers[0].self_attention.linear_qkv.weight
    assert own.decoder.weights.layers[0].qkv.weight is not shared.decoder.weights.layers[0].qkv.weight
    assert samples(own) == samples(shared)


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


def test_without_offload_sleep_changes_nothing(make_model, own_weights):
    engine = engine_of(make_model("policy"))
    before = samples(engine)
    engine.sleep()
    assert samples(engine) == before
    engine.wake()


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


def chunk_of(*, tp=1, pp=1, ep=1, expert_tp=1, num_experts=0, groups=4):
    sizes = {"tp": tp, "pp": pp, "ep": ep, "expt_tp": expert_tp}
    collection = SimpleNamespace(**{name: SimpleNamespace(size=lambda size=size: size) for name, size in sizes.items()})
    return SimpleNamespace(pg_collection=collection, architecture=SimpleNamespace(num_experts=num_experts, num_key_value_heads=groups))


@pytest.mark.parametrize(
    ("layout", "tp", "usable"),
    [
        ({}, 1, True),
        ({"tp": 2}, 2, True),
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
    from aligner.rollout.weights import usable_in_place

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


def test_rollout_layouts_that_fit():
    check_splits(Architecture(num_key_value_heads=2), tp=4, world_size=8)  # ranks share a key-value group
    check_splits(Architecture(num_experts=2, experts_per_token=2, expert_ffn_hidden_size=8, ffn_hidden_size=7), tp=2, world_size=2)


@pytest.mark.parametrize(("field", "value", "least"), [("tp", -1, 0), ("refit_bucket_mib", 0, 1), ("max_batch_size", 0, 1)])
def test_settings_out_of_range_are_refused(field, value, least):
    with pytest.raises(ConfigError, match=f"rollout.{field}={value}: must be at least {least}"):
        RolloutConfig(**{field: value})
