"""The built-in engine: its log-probs are the policy's, and a sample depends on its prompt, its seed and the weights, on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from aligner.data.collate import rollout_batch
from aligner.errors import EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Dtype
from aligner.models.training.optimizer import OptimizerConfig
from aligner.types import FinishReason, LabeledBatch, Prompt, Rollout, SamplingConfig

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


def make_prompts(lengths: Sequence[int]) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(id=i, tokens=tuple(row), source=f"prompts.jsonl:{i + 1}") for i, row in enumerate(rows)]


PROMPTS = make_prompts([3, 12, 7, 1, 7, 20])
SEEDS = [11, 12, 13, 14, 15, 16]


def engine_of(policy, *, max_batch_size: int = 64, eos_id: int = EOS, **sampling):
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    settings = SamplingConfig(**({"max_response_length": 24} | sampling))
    return create_engine(policy, RolloutConfig(sampling=settings, max_batch_size=max_batch_size), eos_id=eos_id)


def generate(engine, prompts=PROMPTS, seeds=SEEDS, sampling=None) -> dict[tuple[int, int], Rollout]:
    """The rollouts by (prompt id, seed)."""
    rollouts = [rollout for part in engine.generate(prompts, seeds, sampling) for rollout in part]
    assert len(rollouts) == len(prompts)
    return {(rollout.prompt.id, rollout.seed): rollout for rollout in rollouts}


def as_batch(rollouts: Sequence[Rollout]) -> tuple[LabeledBatch, torch.Tensor]:
    """Right-padded rows and the engine's log-probs beside their tokens."""
    batch = rollout_batch(list(rollouts), 0)
    return LabeledBatch(tokens=batch.tokens, lengths=batch.lengths, loss_mask=batch.loss_mask), batch.rollout_logprobs


def samples(rollouts: dict) -> dict:
    return {key: (rollout.response, rollout.finish_reason) for key, rollout in rollouts.items()}


@pytest.mark.parametrize("name", [*OLD, *NEW])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_recomputed_ones(name, temperature, hf_directory, load_policy):
    policy = load_policy(hf_directory(name), training={"temperature": temperature, "micro_batch_size": 2})
    engine = engine_of(policy, temperature=temperature, max_response_length=40, stop_token_ids=list(range(5, 12)))
    rollouts = list(generate(engine).values())
    assert len({len(rollout.response) for rollout in rollouts}) > 2  # rows left the cache at different times
    batch, logprobs = as_batch(rollouts)
    assert (policy.logprobs(batch) - logprobs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "eos"), [*((name, EOS) for name in ("llama", "qwen2_tied", "qwen3")), *((name, VOCAB + 5) for name in ("llama", *NEW))]
)
def test_greedy_tokens_equal_those_of_transformers(name, eos, hf_directory, load_policy):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(hf_directory(name), dtype=torch.float32)
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": 0}
    engine = engine_of(load_policy(hf_directory(name)), eos_id=eos)
    for rollout in generate(engine, sampling=SamplingConfig(temperature=0.0, max_response_length=40)).values():
        prompt = torch.tensor([rollout.prompt.tokens])
        assert list(rollout.tokens) == theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()


def test_logprobs_are_before_top_k_and_top_p(make_model):
    policy = make_model("policy", training={"temperature": 0.9})
    batch, logprobs = as_batch(list(generate(engine_of(policy, temperature=0.9, top_k=5, top_p=0.8)).values()))
    assert (policy.logprobs(batch) - logprobs).abs().max() < 1e-4


def test_a_sample_depends_on_nothing_but_prompt_and_seed(make_model):
    """Other companions, another order, other batch sizes, alone: the same tokens, and log-probs within rounding."""
    policy = make_model("policy")
    expected = generate(engine_of(policy))
    assert len({rollout.response for rollout in expected.values()}) == len(PROMPTS)
    runs = [generate(engine_of(policy, max_batch_size=size)) for size in (1, 2, 4)]
    runs.append(generate(engine_of(policy), PROMPTS[::-1], SEEDS[::-1]))
    runs.append(generate(engine_of(policy), [*PROMPTS, *PROMPTS], [*SEEDS, *range(100, 106)]))
    for run in runs:
        for key, rollout in expected.items():
            assert run[key].response == rollout.response and run[key].finish_reason == rollout.finish_reason
            assert run[key].logprobs == pytest.approx(rollout.logprobs, abs=1e-4)


def test_another_seed_gives_another_sample(make_model):
    engine = engine_of(make_model("policy"))
    assert len({r.response for r in generate(engine, [PROMPTS[1]] * 8, list(range(8))).values()}) == 8


def test_a_group_shares_the_computation_of_its_prompt(make_model):
    policy = make_model("policy")
    engine = engine_of(policy)
    prompts, seeds = [PROMPTS[2]] * 3 + [PROMPTS[0]] * 3, list(range(20, 26))
    group = generate(engine, prompts, seeds)
    counters = engine.engine.generation.counters
    assert counters.prefilled_tokens == 7 + 3 and counters.shared_tokens == 2 * (7 + 3) and counters.prefill_passes == 1
    for prompt, seed in zip(prompts, seeds, strict=True):
        alone = generate(engine, [prompt], [seed])
        assert samples(group)[prompt.id, seed] == samples(alone)[prompt.id, seed]


def test_a_stop_token_ends_a_response_and_belongs_to_it(make_model):
    policy = make_model("policy")
    free = generate(engine_of(policy, eos_id=VOCAB + 5))  # an id that cannot be sampled: all run to the limit
    assert all(len(r.response) == 24 and r.finish_reason == FinishReason.length for r in free.values())
    stop = [free[0, 11].response[5], free[5, 16].response[9]]
    for engine in (engine_of(policy, eos_id=stop[0], stop_token_ids=[stop[1]]), engine_of(policy, eos_id=stop[1], stop_token_ids=stop)):
        for key, rollout in generate(engine).items():
            full = free[key].response
            cut = next((i + 1 for i, token in enumerate(full) if token in stop), None)
            assert rollout.response == full[:cut]
            assert rollout.finish_reason == (FinishReason.length if cut is None else FinishReason.stop)
            assert rollout.logprobs == pytest.approx(free[key].logprobs[: len(rollout.response)], abs=1e-4)


def test_a_stop_token_at_the_very_limit_counts_as_a_stop(make_model):
    policy = make_model("policy")
    free = generate(engine_of(policy, eos_id=VOCAB + 5))[0, 11].response
    limit = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2) + 1
    (rollout,) = generate(engine_of(policy, eos_id=free[limit - 1], max_response_length=limit), PROMPTS[:1], SEEDS[:1]).values()
    assert rollout.response == free[:limit] and rollout.finish_reason == FinishReason.stop


def test_settings_of_one_call_replace_the_engines(make_model):
    """Validation: another length, greedy, and its own stop tokens."""
    policy = make_model("policy")
    engine = engine_of(policy, eos_id=VOCAB + 5)
    free = generate(engine)
    sampling = SamplingConfig(max_response_length=10, stop_token_ids=[free[1, 12].response[4]])
    called = generate(engine, sampling=sampling)
    assert called[1, 12].finish_reason == FinishReason.stop and len(called[1, 12].response) <= 5
    assert max(len(rollout.response) for rollout in called.values()) == 10
    greedy = SamplingConfig(temperature=0.0, max_response_length=6)
    assert samples(generate(engine, PROMPTS[:1], [1], greedy))[0, 1] == samples(generate(engine, PROMPTS[:1], [2], greedy))[0, 2]
    assert samples(generate(engine)) == samples(free)


def test_max_response_length_of_one(make_model):
    rollouts = generate(engine_of(make_model("policy"), max_response_length=1, eos_id=VOCAB + 5))
    assert all(len(rollout.response) == 1 and rollout.finish_reason == FinishReason.length for rollout in rollouts.values())


@pytest.mark.parametrize("length", [0, 64, 70])
def test_a_prompt_that_leaves_no_room_is_named(make_model, length):
    prompts = [*PROMPTS[:2], Prompt(id=9, tokens=(5,) * length, source="data/train.jsonl:17")]
    with pytest.raises(EngineError, match=f"data/train.jsonl:17: a prompt of {length} tokens .* context of 64"):
        next(engine_of(make_model("policy")).generate(prompts, [1, 2, 3]))


def test_the_context_cuts_each_response_by_its_own_prompt(make_model):
    """A long prompt in the batch must not shorten the responses of the others."""
    policy = make_model("policy", config={"seq_length": 40})
    prompts = make_prompts([39, 30, 3, 20])
    engine = engine_of(policy, max_response_length=32, eos_id=VOCAB + 5)
    rollouts = generate(engine, prompts, [1, 2, 3, 4])
    assert [len(rollouts[key].response) for key in ((0, 1), (1, 2), (2, 3), (3, 4))] == [1, 10, 32, 20]
    assert all(rollout.finish_reason == FinishReason.length for rollout in rollouts.values())
    for prompt, seed in zip(prompts, [1, 2, 3, 4], strict=True):
        assert samples(generate(engine, [prompt], [seed])) == {(prompt.id, seed): samples(rollouts)[prompt.id, seed]}
    batch, logprobs = as_batch(list(rollouts.values()))
    assert (policy.logprobs(batch) - logprobs).abs().max() < 1e-4


def test_rows_that_leave_the_cache_do_not_disturb_the_others(make_model):
    """Ten rows that stop one by one: the cache is compacted several times, and every number stays what it was alone."""
    policy = make_model("policy", seed=3)
    free = generate(engine_of(policy, eos_id=VOCAB + 5), [PROMPTS[1]] * 10, list(range(10)))
    common = torch.bincount(torch.tensor([t for r in free.values() for t in r.response]), minlength=VOCAB).argsort(descending=True)
    engine = engine_of(policy, eos_id=int(common[2]), stop_token_ids=common[3:5].tolist())
    prompts = [PROMPTS[1], PROMPTS[3]] * 5
    rollouts = generate(engine, prompts, list(range(10)))
    assert len({len(rollout.response) for rollout in rollouts.values()}) > 4
    for (_, seed), rollout in rollouts.items():
        (alone,) = generate(engine, [rollout.prompt], [seed]).values()
        assert alone.response == rollout.response and rollout.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_finished_rollouts_arrive_before_the_others_end(make_model):
    policy = make_model("policy")
    free = generate(engine_of(policy, eos_id=VOCAB + 5))
    engine = engine_of(policy, eos_id=free[0, 11].response[0])
    parts = [part for part in engine.generate(PROMPTS, SEEDS)]
    assert len(parts) > 1 and 0 in {rollout.prompt.id for rollout in parts[0]}
    assert max(len(rollout.response) for rollout in parts[-1]) > 1


def test_updated_weights_are_sampled_from_without_a_copy(make_model):
    policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0), training={"micro_batch_size": 3})
    engine = engine_of(policy)
    before = generate(engine)
    addresses = [p.data_ptr() for p in policy.module.parameters()]
    batch, _ = as_batch(list(before.values()))
    policy.train_step(batch, sft_loss)
    engine.refit(policy.version)
    after = generate(engine)
    assert [p.data_ptr() for p in policy.module.parameters()] == addresses
    layer, weights = policy.module.decoder.layers[1], engine.engine.decoder.weights.layers[1]
    assert weights.qkv.weight is layer.self_attention.linear_qkv.weight
    assert weights.experts[0].down.weight is layer.mlp.linear_fc2.weight
    assert samples(before) != samples(after)
    assert {rollout.policy_version for rollout in before.values()} == {0}
    assert {rollout.policy_version for rollout in after.values()} == {1}
    batch, logprobs = as_batch(list(after.values()))
    assert (policy.logprobs(batch) - logprobs).abs().max() < 1e-4


def test_16_bits_sample_with_the_policys_logprobs(make_model):
    """float16 has three more bits of mantissa than bfloat16: its gap is about an eighth (2510.26788)."""
    gaps = {}
    for dtype, mean, most in ((Dtype.bfloat16, 0.02, 0.3), (Dtype.float16, 0.0025, 0.04)):
        policy = make_model("policy", config={"dtype": dtype})
        rollouts = list(generate(engine_of(policy)).values())
        batch, logprobs = as_batch(rollouts)
        gap = (policy.logprobs(batch) - logprobs).abs()
        assert torch.isfinite(logprobs).all() and gap.mean() < mean and gap.max() < most
        assert all(0 <= token < VOCAB for rollout in rollouts for token in rollout.response)
        gaps[dtype] = gap.mean()
    assert gaps[Dtype.float16] < gaps[Dtype.bfloat16] / 4
