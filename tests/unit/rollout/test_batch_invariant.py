"""Under `model.batch_invariant` the built-in engine and the trainer agree to the bit, whatever is computed together."""

from __future__ import annotations

import pytest
import torch
from rollout_parts import engine_of, mixed_prompts, sampled

from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.models.config import Activation, Layers, ModelConfig, Normalization, PositionEmbedding, Recompute
from aligner.types import FinishReason, LossOutput, Rollout

pytestmark = pytest.mark.usefixtures("topology")

ARCHITECTURES = {
    "llama": {"qkv_bias": False, "tied_embeddings": False, "hidden_size": 36, "ffn_hidden_size": 51, "num_attention_heads": 6},
    "qwen3": {"qk_norm": True, "qkv_bias": False, "num_key_value_heads": 1, "rope_llama3_factor": 8.0},
    "gpt2": {
        "position_embedding": PositionEmbedding.learned,
        "normalization": Normalization.layer_norm,
        "linear_bias": True,
        "gated_mlp": False,
        "activation": Activation.gelu_tanh,
        "num_key_value_heads": 4,
    },
    "nemotron": {
        "normalization": Normalization.layer_norm_1p,
        "gated_mlp": False,
        "activation": Activation.squared_relu,
        "rotary_fraction": 0.5,
    },
    "gelu": {"activation": Activation.gelu},
}
# How the trainer may lay a batch out, and how the engine may sample.
PACKED = {"micro_batch_size": 1, "micro_batch_tokens": 130, "packing": True}
LAYOUTS = (
    {"micro_batch_size": 1, "logits_chunk_size": 7},
    {"micro_batch_size": 2},
    {"micro_batch_size": 6},
    {"micro_batch_size": 1, "micro_batch_tokens": 90},
    PACKED,
    PACKED | {"share_prompts": True},
)
ENGINES = (
    {"prefill_chunk_tokens": 5},
    {"max_batch_size": 2},
    {"max_batch_size": 1},
    {"kv_cache_tokens": 96, "prefill_chunk_tokens": 6, "max_batch_size": 4},
)
SHAPE = ("micro_batch_size", "micro_batch_tokens", "packing", "share_prompts")


@pytest.fixture
def make_policy(make_model):
    """`make_policy(architecture, **layout)`: always the same weights."""

    def make(architecture: dict, *, optimizer=None, batch_invariant: bool = True, temperature: float = 0.7, **layout):
        training = {name: layout[name] for name in SHAPE if name in layout} | {"temperature": temperature}
        config = layout | {"batch_invariant": batch_invariant}
        architecture = {"num_attention_heads": 4} | architecture
        return make_model("policy", optimizer=optimizer, architecture=architecture, config=config, training=training)

    return make


def generate(policy, **config) -> list[Rollout]:
    sampling = {"temperature": 0.7, "max_response_length": 16, "stop_token_ids": [5, 6, 7, 8]}
    return sampled(engine_of(policy, sampling=sampling, **({"max_batch_size": 6} | config)), mixed_prompts())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rollouts_and_training_agree_to_the_bit(name, make_policy):
    architecture = ARCHITECTURES[name]
    rollouts = generate(make_policy(architecture))
    batch = rollout_batch(rollouts, 0)
    expected = batch.rollout_logprobs[batch.loss_mask]
    assert expected.shape[0] > 40
    for layout in LAYOUTS if name == "llama" else LAYOUTS[2::3]:
        assert torch.equal(make_policy(architecture, **layout).logprobs(batch)[batch.loss_mask], expected), layout


def test_a_sample_is_the_same_however_the_engine_computes_it(make_policy):
    policy = make_policy(ARCHITECTURES["qwen3"])
    rollouts = generate(policy)
    assert {rollout.finish_reason for rollout in rollouts} == {FinishReason.stop, FinishReason.length}
    for config in ENGINES:
        assert generate(policy, **config) == rollouts, config  # tokens and log-probs


def test_in_bfloat16(make_policy):
    rollouts = generate(policy := make_policy({}, dtype="bfloat16"))
    batch = rollout_batch(rollouts, 0)
    assert torch.equal(policy.logprobs(batch)[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask])


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full, Recompute.selective])
def test_the_first_update_has_a_ratio_of_one_and_the_ordinary_gradient(make_policy, recompute):
    from aligner.models.training.optimizer import OptimizerConfig

    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0, eps=1e-3)
    layout = {"optimizer": optimizer, "recompute": recompute} | (PACKED if recompute == Recompute.none else {"micro_batch_size": 2})
    policy, ordinary = make_policy(ARCHITECTURES["llama"], **layout), make_policy(ARCHITECTURES["llama"], batch_invariant=False, **layout)
    batch = rollout_batch(generate(policy), 0)
    seen: list[torch.Tensor] = []

    def loss(outputs, part) -> LossOutput:
        ratio = (outputs.logprobs - part.rollout_logprobs).exp()[part.loss_mask]
        seen.append(ratio.detach())
        weights = torch.linspace(-1, 1, part.tokens.shape[1])
        return LossOutput(total=-(ratio * weights.expand_as(part.tokens)[part.loss_mask]).sum(), count=part.loss_mask.sum(), metrics={})

    norm = policy.train_step(batch, loss)["optim/grad_norm"].value()
    assert sum(ratio.shape[0] for ratio in seen) == int(batch.loss_mask.sum())
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in seen)
    assert norm == pytest.approx(ordinary.train_step(batch, loss)["optim/grad_norm"].value(), rel=1e-3)
    for (name, ours), (_, theirs) in zip(policy.module.named_parameters(), ordinary.module.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=name)
    after = rollout_batch(generate(policy), 0)  # of the new weights
    assert torch.equal(policy.logprobs(after)[after.loss_mask], after.rollout_logprobs[after.loss_mask])
    assert not torch.equal(policy.logprobs(batch), batch.rollout_logprobs)


def test_what_has_no_invariant_form_is_refused(make_policy):
    with pytest.raises(ConfigError, match="model.batch_invariant=true: not for mixtures of experts"):
        make_policy({"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24})
    with pytest.raises(ConfigError, match="model.batch_invariant=true: the sums of Transformer Engine's layers depend on the batch"):
        ModelConfig(batch_invariant=True, layers=Layers.transformer_engine)
