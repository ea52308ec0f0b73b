"""A gap between engine and trainer is put down to the layer and the operation that it comes from: one thing of the engine's is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_parts import prompts

from aligner.types import SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")
FAMILIES = ("llama", "qwen2_tied", "qwen3", "mixtral", "nemotron", "gpt2")
OTHERS = (
    "mistral",
    "phi3",
    "gpt_neox",
    "opt",
    "opt_projected",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "glm4",
    "cohere",
    "cohere_plus",
    "cohere2",
    "phi3_longrope",
    "olmo3",
    "deepseek_v3",
    "qwen2_moe",
    "llama4_text",
    "gpt_oss",
    "qwen3_next",
    "llama_yarn",
)
LENGTHS = (3, 22, 9)


@pytest.fixture(scope="module")
def made(hf_directory, load_policy) -> Callable:
    """`made(family, kernels, **model)`: policy, engine and config; one of each."""
    from aligner.algorithms.grpo import TrainGRPO
    from aligner.rollout.config import Kernels, RolloutConfig
    from aligner.rollout.create import create_engine
    from aligner.settings.compose import compose

    known: dict[tuple, Any] = {}
    config = compose(TrainGRPO, "grpo", ["data.train=unread"])

    def make(family: str, kernels: str = "torch", **model: Any):
        key = (family, kernels, *model)
        if key not in known:
            training = {name: model[name] for name in model if name in ("packing", "micro_batch_tokens")}
            policy = load_policy(hf_directory(family), config={"seq_length": 64} | model, training={"micro_batch_size": 2} | training)
            sampling = SamplingConfig(max_response_length=10, min_response_length=10)
            rollout = RolloutConfig(sampling=sampling, kernels=Kernels[kernels], prefill_chunk_tokens=8)
            known[key] = policy, create_engine(policy, rollout, eos_id=2), replace(config, rollout=rollout)
        return known[key]

    return make


def report(policy, engine, config, **tolerance):
    """As `aligner gap` makes it."""
    from aligner.commands.gap import GapReport, Tolerance, most_different, trace_paths
    from aligner.data.collate import rollout_batch
    from aligner.losses.correction import gap_metrics
    from aligner.models.config import Dtype
    from aligner.telemetry.metrics import values

    engine.wake()
    rollouts = sorted((one for part in engine.generate(prompts(*LENGTHS, seed=12), [5, 6, 7]) for one in part), key=lambda one: one.seed)
    batch = rollout_batch(rollouts, 0)
    logprobs = policy.logprobs(batch)
    gaps = (logprobs - batch.rollout_logprobs).abs() * batch.loss_mask
    return GapReport(
        engine="megatron",
        num_layers=2,
        tolerance=Tolerance.of(Dtype.float32, **tolerance),
        num_rollouts=len(rollouts),
        num_tokens=int(batch.loss_mask.sum()),
        statistics=values(gap_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask)),
        worst=(),
        paths=trace_paths(engine, policy, config, most_different(rollouts, batch, gaps, 3)),
    )


@pytest.fixture
def with_change(made, monkeypatch) -> Callable:
    """`with_change(family, change, kernels)`: the report of an engine whose decoder is made of `change(weights)` and other frequencies."""
    from aligner.rollout.builtin.decode import Decoder

    def make(family: str, change: Callable = lambda weights: weights, kernels: str = "torch", theta: float = 0.0):
        policy, engine, config = made(family, kernels)
        built_in = engine.engine
        frequencies = policy.module.rotary_pos_emb.inv_freq if policy.module.architecture.position_embedding == "rope" else None
        if theta:
            size = policy.module.architecture.head_dim
            frequencies = 1.0 / theta ** (torch.arange(0, size, 2) / size)
        decoder = Decoder(
            change(built_in.weights.model),
            policy.module.architecture,
            built_in.shards,
            max_sequence_length=64,
            frequencies=frequencies,
            kernels=config.rollout.kernels,
        )
        monkeypatch.setattr(built_in, "decoder", decoder)
        monkeypatch.setattr(built_in.generation, "decoder", decoder)
        return report(policy, engine, config)

    return make


def changed(number: int, name: str, change: Callable) -> Callable:
    """Weights of which one layer's `name` is another."""

    def apply(weights):
        layers = list(weights.layers)
        layers[number] = replace(layers[number], **{name: change(getattr(layers[number], name))})
        return replace(weights, layers=tuple(layers))

    return apply


def scaled(factor: float) -> Callable:
    return lambda affine: replace(affine, weight=affine.weight * factor)


def flipped_bias(affine):
    return replace(affine, bias=-affine.bias)


def first(found) -> tuple[str, int, str]:
    path, one = found.first
    return path, one.place.layer, one.place.operation.value


@pytest.mark.parametrize(
    ("family", "kernels"), [(name, "torch") for name in (*FAMILIES, *OTHERS)] + [("qwen2_tied", "auto"), ("mixtral", "auto")]
)
def test_nothing_is_found_where_nothing_is(made, family, kernels) -> None:
    found = report(*made(family, kernels))
    assert found.agrees, found.verdict()
    seen = {one.place.operation.value for one in found.paths["prefill"]}
    # No second norm; no queries and keys by head; norms of sums alone.
    assert len(seen) >= {"cohere": 12, "cohere2": 12, "deepseek_v3": 12, "opt_projected": 11}.get(family, 14)
    assert ("router" in seen) == (family in ("mixtral", "deepseek_v3", "qwen2_moe", "gpt_oss", "llama4_text", "qwen3_next"))
    assert ("q_norm" in seen) == (family in ("qwen3", "gemma3_text", "olmo2", "olmo3", "cohere_plus", "qwen3_next"))
    assert all(one.num_tokens == 30 for one in found.paths["decode"])
    assert {one.num_tokens for one in found.paths["prefill"]} >= {30 + sum(LENGTHS)}


CHANGES = [
    ("llama", {"theta": 9000.0}, 0, "queries"),
    ("llama", {"change": changed(1, "input_norm", scaled(1.001))}, 1, "input_norm"),
    ("llama", {"change": changed(1, "mlp_norm", scaled(1.001))}, 1, "mlp_norm"),
    ("llama", {"change": lambda weights: replace(weights, final_norm=scaled(1.001)(weights.final_norm))}, 2, "final_norm"),
    ("llama", {"change": lambda weights: replace(weights, output=weights.output.roll(1, 0))}, 2, "logits"),
    ("llama", {"change": lambda weights: replace(weights, embedding=weights.embedding.roll(1, 0))}, -1, "embedding"),
    ("qwen2_tied", {"change": changed(1, "qkv", flipped_bias)}, 1, "qkv"),
    ("qwen3", {"change": changed(1, "k_norm", scaled(1.001))}, 1, "k_norm"),
    ("gpt2", {"change": changed(0, "attention_out", flipped_bias)}, 0, "projection"),
    ("gpt2", {"change": changed(1, "experts", lambda experts: (replace(experts[0], up=flipped_bias(experts[0].up)),))}, 1, "activation"),
    ("gpt2", {"change": changed(1, "experts", lambda experts: (replace(experts[0], down=flipped_bias(experts[0].down)),))}, 1, "mlp"),
    ("gpt2", {"change": lambda weights: replace(weights, positions=weights.positions.roll(1, 0))}, -1, "embedding"),
    ("mixtral", {"change": changed(1, "router", scaled(1.001))}, 1, "router"),
    ("mixtral", {"change": changed(0, "experts", lambda experts: (*experts[1:], experts[0]))}, 0, "mlp"),
]


@pytest.mark.parametrize(("family", "change", "layer", "operation"), CHANGES)
def test_the_operation_that_was_changed_is_named(with_change, family, change, layer, operation) -> None:
    found = with_change(family, **change)
    assert first(found) == ("prefill", layer, operation) and not found.agrees
    assert f"layer {layer}, " in found.verdict() if 0 <= layer < 2 else operation.replace("_", " ") in found.verdict()


@pytest.mark.cpu
def test_compiled_kernels_say_what_they_do_not_show(with_change) -> None:
    found = with_change("qwen2_tied", changed(1, "qkv", flipped_bias), kernels="auto")
    assert first(found) == ("prefill", 1, "qkv")  # prompts are computed in torch
    agreeing = [replace(one, relative=0.0) for one in found.paths["prefill"]]
    found = replace(found, paths={"prefill": agreeing, "decode": found.paths["decode"]})
    assert first(found) == ("decode", 1, "attention")
    assert "layer 1, attention (or qkv, queries, keys before it, which compiled kernels do not show" in found.verdict()


def test_a_decode_step_that_forgets_a_token(made, monkeypatch) -> None:
    """Prefill passes are right: only decode passes differ, from the first attention on."""
    policy, engine, config = made("llama")
    attention = engine.engine.decoder.attention
    right = attention.decode

    def forgetful(queries, cache, layer, plan):
        later = torch.arange(plan.visible.shape[-1], device=plan.visible.device) > 0
        return right(queries, cache, layer, replace(plan, visible=plan.visible & later))

    engine.engine.decoder.release()  # graphs that were recorded without it, and with it
    with monkeypatch.context() as patched:
        patched.setattr(attention, "decode", forgetful)
        found = report(policy, engine, config)
    engine.engine.decoder.release()
    assert first(found) == ("decode", 0, "attention")
    assert not any(found.is_beyond(one) for one in found.paths["prefill"])


def test_a_sampler_that_is_wrong(made, monkeypatch) -> None:
    """Temperature 0.9 where the policy has 1: no operation differs, and that is what is said."""
    policy, engine, config = made("llama")
    monkeypatch.setattr(engine, "sampling", replace(engine.sampling, temperature=0.9))
    found = report(policy, engine, config)
    assert found.first is None and not found.agrees
    assert found.verdict().startswith("every operation of the decoder agrees with the trainer's") and "sampler" in found.verdict()


@pytest.mark.parametrize("model", [{"packing": True, "micro_batch_tokens": 40}, {"batch_invariant": True}])
def test_other_ways_of_computing(made, model) -> None:
    found = report(*made("llama", **model))
    assert found.agrees
    if "batch_invariant" in model:
        assert {one.absolute for ones in found.paths.values() for one in ones} == {0.0} == {found.statistics["rollout/logprob_gap_max"]}


def test_engines_whose_layers_cannot_be_seen(made) -> None:
    """A wrapped engine gives log-probs and nothing else."""
    from aligner.commands.gap import trace_paths

    policy, engine, config = made("llama")

    class Foreign:
        engine = object()

    assert trace_paths(Foreign(), policy, config, None) == {}
    found = replace(report(policy, engine, config), paths={}, engine="vllm")
    assert found.agrees and found.verdict() == "the gap is within what rounding explains; the layers of engine vllm are not compared here"
