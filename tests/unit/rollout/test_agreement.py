"""What the built-in engine says of its samples is what the policy says of them, in every family and however the sampling is done."""

from __future__ import annotations

import pytest

from aligner.types import SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")

FAMILIES = ("llama", "llama_tied_llama3_rope", "qwen2_tied", "qwen3", "mixtral", "qwen3_moe", "nemotron", "gpt2")
EXACT = 1e-4  # nats, float32 on the CPU


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_policys(family, hf_directory, load_policy, logprob_gap, mixed_prompts):
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    temperature = {"llama": 0.3, "qwen3": 1.7, "nemotron": 0.7}.get(family, 1.0)
    policy = load_policy(hf_directory(family), config={"seq_length": 64}, training={"micro_batch_size": 4})
    policy.temperature = temperature
    sampling = SamplingConfig(temperature=temperature, max_response_length=18, min_response_length=14, top_k=50, stop_token_ids=[7])
    # Prompts go into the cache in pieces of 6 tokens, and there is room for two or three responses: others wait, or lose their places.
    config = RolloutConfig(sampling=sampling, max_batch_size=4, prefill_chunk_tokens=6, kv_cache_tokens=96)
    engine = create_engine(policy, config, eos_id=2)
    rollouts = [rollout for part in engine.generate(mixed_prompts, range(6)) for rollout in part]
    counters = engine.engine.generation.counters
    assert counters.preemptions > 0 and counters.shared_tokens > 0 and counters.prefill_passes > 6
    assert float(logprob_gap(policy, rollouts).max()) < EXACT
