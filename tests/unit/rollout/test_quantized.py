"""Weights, inputs, keys and values in 8 bits: their numbers, what the engine samples with, what is kept, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rollout_parts import engine_of, mixed_prompts, prompts, sampled

from aligner.data.collate import rollout_batch
from aligner.errors import ConfigError
from aligner.losses.sft import sft_loss
from aligner.models.config import Implementation, LoraConfig, LoraTarget, ModelConfig, Quantization
from aligner.models.modules.linear import operators
from aligner.models.modules.lora import named_adapters
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.builtin import weights as weights_module
from aligner.rollout.builtin.attention import DecodeBatch, GatheredAttention, PagedKV, plan_decode
from aligner.rollout.builtin.quantized import CODES, encoded, scales_of
from aligner.rollout.builtin.refit import OwnWeights, SnapshotWeights, TrainingWeights, rollout_weights
from aligner.rollout.builtin.weights import QuantizedWeight, is_quantized, named_parameters
from aligner.rollout.config import AsynchronousConfig, EngineKind, Precision, RolloutConfig, VerifyRefit, check_precision, check_settings
from aligner.types import LabeledBatch

pytestmark = pytest.mark.usefixtures("topology")
KINDS = [Precision.fp8, Precision.int8]
PROMPTS = prompts(3, 12, 7, 1, 7, 20)
# The numbers of e4m3 above 0: 3 bits behind the leading one, exponents from -6, below them equal steps; 448 is the largest.
E4M3 = torch.tensor(sorted({m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}))


def rounded(weight: torch.Tensor, kind: Precision) -> torch.Tensor:
    """The numbers of rows in 8 bits, written out: the nearest multiple of a row's scale by a number of the format."""
    scales = weight.abs().amax(dim=-1, keepdim=True) / (448 if kind is Precision.fp8 else 127)
    if kind is Precision.int8:
        return torch.round(weight / scales) * scales
    nearest = ((weight.abs() / scales).unsqueeze(-1) - E4M3).abs().argmin(dim=-1)
    return E4M3[nearest] * weight.sign() * scales


def train(policy) -> None:
    tokens = torch.arange(3, 27).view(2, 12)
    mask = (torch.arange(12) >= 4).expand(2, 12)
    policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.tensor([12, 12]), loss_mask=mask), sft_loss)


def test_codes_by_hand():
    rows = torch.tensor([[-2.0, 1.0, 0.5, 0.01], [0.0, 0.0, 0.0, 0.0]])
    scales = scales_of(rows, torch.int8)
    assert scales.tolist() == [[pytest.approx(2 / 127)], [1.0]]
    assert encoded(rows, scales, torch.int8).tolist() == [[-127, 64, 32, 1], [0, 0, 0, 0]]  # 63.5 and 31.75 and 0.635
    rows = torch.tensor([[448.0, 3.3, -17.0, 0.001]])
    scales = scales_of(rows, torch.float8_e4m3fn)
    codes = encoded(rows, scales, torch.float8_e4m3fn)
    # Between 2 and 4 the steps are 1/4, between 16 and 32 they are 2 (halfway to even), and at the lower end 2^-9.
    assert scales.item() == 1 and codes.float().tolist() == [[448.0, 3.25, -16.0, 2**-9]]
    assert encoded(2 * rows, scales, torch.float8_e4m3fn).float()[0, 0] == 448  # never NaN


def test_int8_codes_are_those_of_bitsandbytes():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    codes, largest, _ = operators().int8_vectorwise_quant(weight)
    assert torch.equal(encoded(weight, scales_of(weight, torch.int8), torch.int8), codes)
    torch.testing.assert_close(scales_of(weight, torch.int8)[:, 0], largest / 127)


def test_the_emulated_product_is_that_of_torchs_kernel(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    weight = QuantizedWeight(torch.empty(48, 32, dtype=torch.float8_e4m3fn), torch.empty(48, 1), torch.float32, None)
    weight.take(torch.randn(48, 32, generator=generator))
    x = torch.randn(5, 32, generator=generator) * torch.logspace(-2, 2, 5)[:, None]
    emulated = weight.product(x)
    torch.testing.assert_close(emulated, F.linear(rounded(x, Precision.fp8), weight.numbers()), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(weights_module, "multiplies_fp8", lambda x, codes: True)
    torch.testing.assert_close(weight.product(x), emulated, rtol=1e-4, atol=1e-4)  # of outputs up to 100
    assert not torch.allclose(emulated, F.linear(x, weight.numbers()), rtol=1e-3)  # inputs are rounded too


def overwrite(policy, kind: Precision) -> None:
    """Give the policy's linear layers the numbers that their codes stand for."""
    with torch.no_grad():
        for name, parameter in named_parameters(policy.chunks).items():
            if is_quantized(name):
                parameter.copy_(rounded(parameter, kind))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_int8_weights_sample_as_a_policy_with_the_same_numbers(name, hf_directory, load_policy, logprob_gap):
    policy = load_policy(hf_directory(name), training={"micro_batch_size": 2})
    rollouts = sampled(engine_of(policy, precision=Precision.int8), PROMPTS)
    before = float(logprob_gap(policy, rollouts).mean())
    overwrite(policy, Precision.int8)
    assert float(logprob_gap(policy, rollouts).max()) < 1e-4 and before > 1e-3


def test_fp8_rounds_the_inputs_of_the_layers_too(hf_directory, load_policy):
    """A transformers model whose layers round theirs: the same log-probs, but where a last bit decides a rounding."""
    from transformers import AutoModelForCausalLM

    rollouts = sampled(engine_of(load_policy(hf_directory("llama")), precision=Precision.fp8), PROMPTS)
    theirs = AutoModelForCausalLM.from_pretrained(hf_directory("llama"), dtype=torch.float32)
    batch, found = rollout_batch(rollouts, 0), []
    for rounds_inputs in (False, True):
        for key, module in theirs.model.layers.named_modules():
            if key.endswith("proj"):
                module.weight.data = rounded(module.weight.data, Precision.fp8)
                if rounds_inputs:
                    module.register_forward_pre_hook(lambda _, given: (rounded(given[0], Precision.fp8),))
        with torch.no_grad():
            logits = theirs(batch.tokens).logits  # padding comes behind, where a causal mask hides it
        logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
        found.append((logprobs - batch.rollout_logprobs[:, 1:])[batch.loss_mask[:, 1:]].abs())
    weights_only, both = found
    assert float(both.median()) < 1e-4 and float(both.mean()) < 0.1 * float(weights_only.mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_by_hand(kind):
    """Keys and values of one token in one byte and a scale for each head; attention over what they stand for."""
    generator = torch.Generator().manual_seed(3)
    codes, scales = torch.zeros(1, 3, 4, 2, 8, dtype=CODES[kind]), torch.zeros(1, 3, 4, 2, 1)
    cache = PagedKV(keys=codes, values=codes.clone(), scales=(scales, scales.clone()))
    keys, values = torch.randn(2, 6, 2, 8, generator=generator) * torch.tensor([1.0, 100.0])[:, None]
    slots = torch.tensor([4, 5, 6, 7, 0, 1])  # page 1, then page 0
    kept = cache.put(0, slots, (keys, values))
    for found, own in zip(kept, (keys, values), strict=True):
        torch.testing.assert_close(found, rounded(own, kind), rtol=1e-6, atol=0)
    for found, own in zip(cache.read(0, slots, by_slot=True), kept, strict=True):
        assert torch.equal(found, own)
    batch = DecodeBatch(tokens=torch.tensor([3]), positions=torch.tensor([5]), pages=torch.tensor([[1, 0]], dtype=torch.int32))
    queries = torch.randn(1, 2, 3, 8, generator=generator)
    found = GatheredAttention(4).decode(queries, cache, 0, plan_decode(batch, 4))
    scores = torch.einsum("bgqd,tgd->bgqt", queries, rounded(keys, kind)) / 8**0.5
    torch.testing.assert_close(found, torch.einsum("bgqt,tgd->bgqd", scores.softmax(-1), rounded(values, kind)))
    cache.copy_pages([1], [2])
    assert torch.equal(cache.read(0, torch.tensor([2]))[0], cache.read(0, torch.tensor([1]))[0])
    assert cache.keys.element_size() == 1 and sum(tensor.nbytes for tensor in cache.tensors) == 2 * 3 * 4 * 2 * (8 + 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_pieces_evictions_and_shared_pages_read_the_same_cache(kind, name, hf_directory, load_policy, logprob_gap):
    """Every pass reads what the cache has of keys and values, so a prompt in pieces is sampled from as a whole one."""
    policy, given = load_policy(hf_directory(name), config={"seq_length": 64}), mixed_prompts()
    tight = engine_of(policy, cache_precision=kind, max_batch_size=4, prefill_chunk_tokens=6, kv_cache_tokens=112)
    whole, pieces = (sampled(engine, given) for engine in (engine_of(policy, cache_precision=kind), tight))
    assert tight.engine.generation.counters.prefill_passes > 6
    same = [a for a, b in zip(whole, pieces, strict=True) if a.response == b.response]
    assert len(same) >= 5  # a last bit may decide a rounding
    gap = float(logprob_gap(policy, whole).mean())
    between = [
        abs(x - y)
        for a, b in zip(whole, pieces, strict=True)
        if a.response == b.response
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    assert gap > 3e-4 and sum(between) / len(between) < 0.1 * gap


def test_weights_are_kept_in_one_byte_and_rounded_in_each_refit(make_model, monkeypatch):
    policy = make_model("policy", optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0))
    engine = engine_of(policy, precision=Precision.int8, offload=True)
    linears = {name: p for name, p in named_parameters(policy.chunks).items() if is_quantized(name)}
    own = engine.engine.weights._rounded
    assert own.keys() == linears.keys() and len(own) == 2 * 4
    assert all(one.codes.untyped_storage().nbytes() == 0 for one in own.values())  # it sleeps
    engine.wake()
    before = sampled(engine, PROMPTS)
    engine.sleep()
    train(policy)
    engine.refit(policy.version)
    engine.wake()
    for name, one in own.items():
        torch.testing.assert_close(one.numbers(), rounded(linears[name].detach(), Precision.int8), rtol=1e-6, atol=1e-9)
        assert one.codes.nbytes == linears[name].numel()
    after = sampled(engine, PROMPTS)
    assert [one.logprobs for one in before] != [one.logprobs for one in after]
    assert engine.engine.weights.fill() == sum(p.numel() + 4 * len(p) for p in linears.values())
    from aligner.rollout.builtin import refit

    monkeypatch.setattr(refit, "usable_in_place", lambda chunk, *, tp, rounds: False)
    apart = engine_of(policy, precision=Precision.int8, verify_refit=VerifyRefit.checksum)
    weights = apart.engine.weights
    assert isinstance(weights, OwnWeights) and not linears.keys() & weights.named.keys()  # no dense copy stays
    assert [(one.response, one.logprobs) for one in sampled(apart, PROMPTS)] == [(one.response, one.logprobs) for one in after]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_copy_for_a_sampler_ahead_has_the_same_codes(ahead, make_model):
    policy = make_model("policy")
    config = RolloutConfig(precision=Precision.fp8, asynchronous=AsynchronousConfig(max_staleness=int(ahead)))
    weights = rollout_weights(policy.chunks, config)
    assert type(weights) is (SnapshotWeights if ahead else TrainingWeights)
    weights.fill()
    for name, parameter in named_parameters(policy.chunks).items():
        if is_quantized(name):
            torch.testing.assert_close(weights._rounded[name].numbers(), rounded(parameter.detach(), Precision.fp8), rtol=1e-6, atol=1e-9)


def test_adapters_stay_in_full_precision(hf_directory, load_policy, logprob_gap):
    targets = [LoraTarget.qkv, LoraTarget.proj, LoraTarget.fc1, LoraTarget.fc2]
    policy = load_policy(hf_directory("llama"), config={"lora": LoraConfig(rank=2, targets=targets)})
    with torch.no_grad():
        for number, (_, adapter) in enumerate(named_adapters(policy.chunks[0])):
            for b in adapter.b.values():
                b.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    engine = engine_of(policy, precision=Precision.int8)
    assert isinstance(engine.engine.weights, TrainingWeights)
    rollouts = sampled(engine, PROMPTS)
    overwrite(policy, Precision.int8)
    assert float(logprob_gap(policy, rollouts).max()) < 1e-4


LORA = LoraConfig(rank=2)


@pytest.mark.parametrize(
    ("model", "parallel", "rollout", "message"),
    [
        ({"batch_invariant": True}, {}, {"cache_precision": "fp8"}, "rollout.cache_precision=fp8: model.batch_invariant=true .*: model"),
        (
            {"quantization": Quantization.nf4, "lora": LORA},
            {},
            {"precision": "int8"},
            "rollout.precision=int8: .* model.quantization=nf4; allowed: model",
        ),
        ({"lora": replace(LORA, dora=True)}, {}, {"precision": "fp8"}, "rollout.precision=fp8: .*model.lora.dora=true"),
        ({"lora": LORA}, {"pp": 2}, {"precision": "fp8"}, "rollout.precision=fp8: .*parallel.pp=1"),
        ({"lora": LORA}, {}, {"precision": "fp8", "tp": 2}, "rollout.precision=fp8: .*rollout.tp=parallel.tp"),
    ],
)
def test_what_cannot_be_sampled_from_in_8_bits_is_refused_by_name(model, parallel, rollout, message):
    fields = {name: Precision(value) if "precision" in name else value for name, value in rollout.items()}
    with pytest.raises(ConfigError, match=message):
        check_precision(RolloutConfig(**fields), ModelConfig(**model), ParallelConfig(**parallel))
    check_precision(RolloutConfig(), ModelConfig(**model), ParallelConfig(**parallel))


def test_other_engines_and_modules_are_refused_by_name(hf_directory, load_policy):
    for name in ("precision", "cache_precision"):
        config = RolloutConfig(engine=EngineKind.vllm.value, **{name: Precision.fp8})
        with pytest.raises(ConfigError, match=f"rollout.{name}=fp8: is for the built-in engine, not rollout.engine=vllm; allowed: model"):
            check_settings(config, tp=1)
    own = load_policy(hf_directory("llama"), config={"implementation": Implementation.transformers})
    with pytest.raises(ConfigError, match="rollout.precision=int8: llama has transformers' own modules; allowed: model"):
        engine_of(own, precision=Precision.int8)
