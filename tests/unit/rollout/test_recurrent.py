"""Delta nets in the built-in engine: whatever is computed with a response, and wherever it sits, it is what it is alone."""

from __future__ import annotations

import pytest
import rollout_parts
import torch
from rollout_parts import prompts

from aligner.errors import ConfigError
from aligner.parallel import platform
from aligner.rollout.config import RolloutConfig, check_engine
from aligner.types import LabeledBatch, Prompt

pytestmark = pytest.mark.usefixtures("topology")

VOCAB = 61
MODEL = "qwen3_next"


def sampled(policy, prompts, seeds, **settings):
    """(responses and log-probs by prompt and seed, the engine's counters)."""
    engine = rollout_parts.engine_of(policy, eos_id=VOCAB + 5, **settings)
    found = {(one.prompt.id, one.seed): (one.response, one.logprobs) for one in rollout_parts.sampled(engine, prompts, seeds)}
    return found, engine.engine.generation.counters


@pytest.fixture(scope="module")
def policy(hf_directory, load_policy):
    return load_policy(hf_directory(MODEL))


GROUPS = [prompt for prompt in prompts(70, 3, 33, 1, 20) for _ in range(3)]
SEEDS = list(range(len(GROUPS)))


@pytest.fixture(scope="module")
def alone(policy):
    """Each response by itself."""
    found = {}
    for prompt, seed in zip(GROUPS, SEEDS, strict=True):
        found |= sampled(policy, [prompt], [seed])[0]
    return found


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "shared_tokens"),
        ({"max_batch_size": 2}, "prefill_passes"),
        ({"max_batch_size": 4, "prefill_chunk_tokens": 11}, "prefill_passes"),
        ({"kv_cache_tokens": 160}, "preemptions"),
        ({"kv_cache_tokens": 160, "prefill_chunk_tokens": 32}, "preemptions"),
    ],
)
def test_a_sample_depends_on_its_prompt_and_seed_alone(settings, what, policy, alone):
    """Few seats, prompts in pieces, responses that lose their seats and are computed again, groups that share a prompt."""
    found, counters = sampled(policy, GROUPS, SEEDS, **settings)
    assert getattr(counters, what) > 0
    assert found.keys() == alone.keys()
    for key, (response, logprobs) in alone.items():
        assert found[key][0] == response
        assert found[key][1] == pytest.approx(logprobs, abs=1e-4)


def test_a_group_computes_its_prompt_once_and_no_other_beginning_is_shared(policy):
    (long,) = prompts(40)
    beginning = Prompt(id=9, tokens=(*long.tokens[:32], 5, 6, 7), source="test:9")
    _, counters = sampled(policy, [long, long, beginning], [1, 2, 3])
    assert (counters.prefilled_tokens, counters.shared_tokens) == (40 + 35, 40)


def test_seats_are_made_as_they_are_needed_and_keep_what_they_have(policy):
    decoder = rollout_parts.engine_of(policy).engine.decoder
    states = decoder.new_cache(2).states
    states.reserve(2)
    one = torch.tensor([1], device=platform.device())
    tails, state = states.at(0, one)
    assert tails.shape[0] == 1 and state.shape[1:] == (4, 14, 22) and decoder.new_cache(2).keys.shape[0] == 1  # of four layers one has keys
    states.put(0, one, tails + 2, state + 3)
    states.reserve(3)
    states.copy([1], [2])
    for seat, value in ((0, 0.0), (1, 3.0), (2, 3.0)):
        assert (states.at(0, torch.tensor([seat]))[1] == value).all()
    states.clear()
    assert not any(part.any() for part in states.at(0, torch.tensor([0, 1, 2])))


@pytest.mark.parametrize("engine", ["vllm", "tensorrt_llm"])
def test_engines_of_other_packages_are_refused(engine, policy):
    architecture = policy.module.architecture
    with pytest.raises(ConfigError, match=f"rollout.engine={engine}: the model's delta nets .*; allowed: megatron"):
        check_engine(RolloutConfig(engine=engine), architecture, tp=1, world_size=1)


def test_states_stay_in_float32_where_weights_are_not(hf_directory, load_policy):
    """In bfloat16 the engine's log-probs are the trainer's as nearly as its 8 bits allow."""
    policy = load_policy(hf_directory(MODEL), config={"dtype": "bfloat16"})
    (prompt,) = prompts(70)
    found, _ = sampled(policy, [prompt], [1], prefill_chunk_tokens=32)
    ((response, logprobs),) = found.values()
    tokens = torch.tensor([[*prompt.tokens, *response]])
    mask = torch.arange(tokens.shape[1])[None] >= 70
    batch = LabeledBatch(tokens=tokens, lengths=torch.tensor([tokens.shape[1]]), loss_mask=mask)
    assert (policy.logprobs(batch)[0, 70:] - torch.tensor(logprobs)).abs().mean() < 0.05
