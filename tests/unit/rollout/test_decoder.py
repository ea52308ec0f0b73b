"""The incremental decoder computes what the Megatron-Core modules do, for every kind of layer that an `Architecture` can describe."""

from __future__ import annotations

import pytest
import torch

from aligner.models.config import Activation, Normalization, PositionEmbedding
from aligner.types import LabeledBatch, Prompt, SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")

MOE = {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
ARCHITECTURES = {
    "layer_norm": {"normalization": Normalization.layer_norm},
    "layer_norm_1p": {"normalization": Normalization.layer_norm_1p},
    "biases": {"linear_bias": True},
    "gelu_ungated": {"gated_mlp": False, "activation": Activation.gelu, "linear_bias": True},
    "gelu_tanh_ungated": {"gated_mlp": False, "activation": Activation.gelu_tanh},
    "squared_relu_ungated": {"gated_mlp": False, "activation": Activation.squared_relu},
    "gelu_gated": {"activation": Activation.gelu},
    "learned_positions": {"position_embedding": PositionEmbedding.learned, "normalization": Normalization.layer_norm, "linear_bias": True},
    "partial_rotary": {"rotary_fraction": 0.5},
    "qk_layer_norm": {"qk_norm": True, "normalization": Normalization.layer_norm},
    "experts": MOE,
    "experts_unnormalized": MOE | {"normalize_expert_weights": False},
    "experts_one_each_untied": MOE | {"experts_per_token": 1, "normalize_expert_weights": False, "tied_embeddings": False},
    "experts_all": MOE | {"experts_per_token": 5, "qk_norm": True},
    "experts_ungated": MOE | {"gated_mlp": False, "activation": Activation.squared_relu},
}
GENERATOR_SEED = 5


def engine_of(policy, **fields):
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    sampling = SamplingConfig(max_response_length=20, stop_token_ids=[5, 6, 7, 8])
    return create_engine(policy, RolloutConfig(sampling=sampling, **fields), eos_id=2)


def generate(engine) -> dict[int, tuple]:
    """(prompt and response, log-probs) by seed; prompts of different lengths, so that rows are padded."""
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    prompts = [
        Prompt(id=length, tokens=tuple(torch.randint(3, 61, (length,), generator=generator).tolist()), source="")
        for length in (9, 1, 4, 17)
    ]
    rollouts = [rollout for part in engine.generate(prompts, [1, 2, 3, 4]) for rollout in part]
    return {rollout.seed: (rollout.tokens, rollout.logprobs) for rollout in rollouts}


def recomputed(policy, rollouts: dict[int, tuple]) -> dict[int, torch.Tensor]:
    """The policy's own log-probs of the same responses, from a pass over whole sequences."""
    width = max(len(tokens) for tokens, _ in rollouts.values())
    tokens, mask = torch.zeros(len(rollouts), width, dtype=torch.int64), torch.zeros(len(rollouts), width, dtype=torch.bool)
    lengths = torch.tensor([len(row) for row, _ in rollouts.values()])
    for number, (row, logprobs) in enumerate(rollouts.values()):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, len(row) - len(logprobs) : len(row)] = True
    whole = policy.logprobs(LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask))
    return {seed: whole[number][mask[number]] for number, seed in enumerate(rollouts)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_the_modules(name, make_model):
    policy = make_model("policy", architecture={"num_attention_heads": 4} | ARCHITECTURES[name], training={"micro_batch_size": 2})
    rollouts = generate(engine_of(policy))
    expected = recomputed(policy, rollouts)
    assert max(len(logprobs) for _, logprobs in rollouts.values()) > 5
    for seed, (_, logprobs) in rollouts.items():
        torch.testing.assert_close(torch.tensor(logprobs), expected[seed], rtol=0, atol=1e-4)
