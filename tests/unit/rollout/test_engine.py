"""The built-in engine: its log-probs are the policy's, and a sample depends on its prompt, its seed and the weights, on nothing else."""

from __future__ import annotations

import pytest
import torch
from rollout_parts import engine_of, prompts, sampled

from aligner.data.collate import rollout_batch
from aligner.losses.sft import sft_loss
from aligner.models.config import Dtype
from aligner.models.training.optimizer import OptimizerConfig
from aligner.types import SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")

VOCAB, EOS = 61, 2
OLD = ["llama", "llama_tied_llama3_rope", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied"]
OLD += ["mixtral", "qwen3_moe", "qwen3_moe_unnormalized", "nemotron", "gpt2"]
NEW = ["llama_biases_llama3_rope", "llama_linear_rope", "llama_yarn", "qwen3_yarn", "qwen2_dynamic_rope"]
NEW += ["mistral", "mistral_no_window", "qwen2_windows", "qwen3_layer_types", "mixtral_window"]
NEW += ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_plain", "glm4_moe", "glm4_moe_plain", "olmo3", "olmo3_tied"]
NEW += ["qwen2_moe", "qwen2_moe_normalized", "qwen2_moe_windows", "qwen3_moe_dense_layers"]
NEW += ["gpt_oss", "gpt_oss_tied", "llama4_text", "llama4_text_tied"]
NEW += ["qwen3_next", "qwen3_next_tied", "qwen3_5_text", "qwen3_5_moe_text"]
NEW += ["gemma2", "gemma2_plain", "gemma3_text", "olmo2", "olmo2_tied", "glm4", "glm4_tied", "cohere", "cohere_untied"]
NEW += ["opt_projected", "opt_projected_untied", "ministral", "cohere_plus", "cohere2", "cohere2_untied"]
NEW += ["gpt2_scaled", "phi3", "phi3_window", "phi3_longrope", "phi3_longrope_short"]
NEW += ["gpt_neox", "gpt_neox_sequential", "opt", "opt_untied"]


PROMPTS = prompts(3, 12, 7, 1, 7, 20)


@pytest.mark.parametrize(("name", "temperature"), [*((name, 1.0) for name in OLD), *((name, 0.7) for name in NEW)])
def test_logprobs_equal_recomputed_ones(name, temperature, hf_directory, load_policy, logprob_gap):
    policy = load_policy(hf_directory(name), training={"temperature": temperature, "micro_batch_size": 2})
    sampling = {"temperature": temperature, "max_response_length": 40, "stop_token_ids": list(range(5, 12))}
    rollouts = sampled(engine_of(policy, sampling=sampling), PROMPTS, range(11, 17))
    assert len({len(rollout.response) for rollout in rollouts}) > 2  # rows left the cache at different times
    assert logprob_gap(policy, rollouts).max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama_tied_llama3_rope", "qwen2_tied", "qwen3", "mixtral", "qwen3_moe", "nemotron", "gpt2"])
def test_logprobs_of_chunked_and_evicted_responses_are_the_policys(family, hf_directory, load_policy, logprob_gap, mixed_prompts):
    """Prompts go into the cache in pieces of 6 tokens, and there is room for two or three responses: others wait, or lose their places."""
    temperature = {"llama": 0.3, "qwen3": 1.7, "nemotron": 0.7}.get(family, 1.0)
    policy = load_policy(hf_directory(family), config={"seq_length": 64}, training={"micro_batch_size": 4})
    policy.temperature = temperature
    sampling = {"temperature": temperature, "max_response_length": 18, "min_response_length": 14, "top_k": 50, "stop_token_ids": [7]}
    engine = engine_of(policy, max_batch_size=4, prefill_chunk_tokens=6, kv_cache_tokens=96, sampling=sampling)
    rollouts = sampled(engine, mixed_prompts)
    counters = engine.engine.generation.counters
    assert counters.preemptions > 0 and counters.shared_tokens > 0 and counters.prefill_passes > 6
    assert float(logprob_gap(policy, rollouts).max()) < 1e-4


@pytest.mark.parametrize(
    ("name", "eos"), [*((name, EOS) for name in ("llama", "qwen2_tied", "qwen3")), *((name, VOCAB + 5) for name in ("llama", *NEW))]
)
def test_greedy_tokens_equal_those_of_transformers(name, eos, hf_directory, load_policy):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": 0}
    engine = engine_of(load_policy(hf_directory(name)), eos_id=eos)
    for rollout in sampled(engine, PROMPTS, sampling=SamplingConfig(temperature=0.0, max_response_length=40)):
        prompt = torch.tensor([rollout.prompt.tokens])
        assert list(rollout.tokens) == theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()


def test_updated_weights_are_sampled_from_without_a_copy(make_model, logprob_gap):
    policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0), training={"micro_batch_size": 3})
    engine = engine_of(policy)
    before = sampled(engine, PROMPTS)
    addresses = [p.data_ptr() for p in policy.module.parameters()]
    policy.train_step(rollout_batch(before, 0), sft_loss)
    engine.refit(policy.version)
    after = sampled(engine, PROMPTS)
    assert [p.data_ptr() for p in policy.module.parameters()] == addresses
    layer, weights = policy.module.decoder.layers[1], engine.engine.decoder.weights.layers[1]
    assert weights.qkv.weight is layer.self_attention.linear_qkv.weight
    assert weights.experts[0].down.weight is layer.mlp.linear_fc2.weight
    assert [one.response for one in before] != [one.response for one in after]
    assert {rollout.policy_version for rollout in before} == {0} and {rollout.policy_version for rollout in after} == {1}
    assert logprob_gap(policy, after).max() < 1e-4


def test_16_bits_sample_with_the_policys_logprobs(make_model, logprob_gap):
    """float16 has three more bits of mantissa than bfloat16: its gap is about an eighth (2510.26788)."""
    gaps = {}
    for dtype, mean, most in ((Dtype.bfloat16, 0.02, 0.3), (Dtype.float16, 0.0025, 0.04)):
        policy = make_model("policy", config={"dtype": dtype})
        rollouts = sampled(engine_of(policy), PROMPTS, range(11, 17))
        gap = logprob_gap(policy, rollouts)
        assert gap.mean() < mean and gap.max() < most  # so neither is NaN
        assert all(0 <= token < VOCAB for rollout in rollouts for token in rollout.response)
        gaps[dtype] = gap.mean()
    assert gaps[Dtype.float16] < gaps[Dtype.bfloat16] / 4
