"""The TensorRT-LLM adapter over a stand-in of the package that holds it to the recorded contract (tests/fakes/fake_tensorrt_llm.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tensorrt_llm import CONTEXT, EOS, engine_of
from torch.nn.utils.rnn import pad_sequence

from aligner.errors import ConfigError, EngineError
from aligner.rollout.config import (
    CudaGraphs,
    Sampler,
    TensorRTLLMConfig,
)
from aligner.rollout.engine import ALL_MEMORY, GenRequest, GenResult, ListedWork, Memory
from aligner.rollout.engine.foreign import weight_buckets
from aligner.types import FinishReason, LogprobKind, SamplingConfig

pytestmark = pytest.mark.cpu  # where the package's stand-in is, in this process: no handle of a GPU's memory opens where it was made
VERSIONS = ["1.2.1", "1.3.0rc24"]
PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5, 4), (11,)]
WEIGHTS, CACHE = frozenset({Memory.weights}), frozenset({Memory.kv_cache})


@pytest.fixture
def policy(topology, hf_directory, load_policy):
    return load_policy(hf_directory("llama"), training={"micro_batch_size": 4})


def build(path: Path, **settings: Any):
    return engine_of(path, **{"allow_drafts": True, "timeout_seconds": 60.0} | settings)


def refit(engine, policy, version: int = 1) -> int:
    """Everything the policy exports, in small buckets; how many there were."""
    from aligner.rollout.engine.manifest import hf_manifest

    manifest = hf_manifest(policy.chunks[0].architecture, torch.float32)
    engine.begin_refit(manifest)
    count = 0
    for bucket in weight_buckets(policy.export_weights(), bucket_bytes=12_000, manifest=manifest):
        engine.load(bucket)
        count += 1
    engine.finish_refit(version)
    return count


def ready(hf_directory, policy, **settings: Any):
    """An engine with the policy's weights."""
    engine = build(hf_directory("llama"), **settings)
    engine.start()
    refit(engine, policy)
    return engine


def requests(copies: int = 2) -> list[GenRequest]:
    rows = [prompt for prompt in PROMPTS for _ in range(copies)]
    return [GenRequest(index=i, tokens=row, seed=100 + i) for i, row in enumerate(rows)]


def generate(engine, sampling: SamplingConfig, wanted: list[GenRequest] | None = None) -> dict[int, GenResult]:
    wanted = requests() if wanted is None else wanted
    results = [one for part in engine.generate(ListedWork(wanted), sampling) for one in part]
    assert sorted(one.index for one in results) == [one.index for one in wanted]
    return {one.index: one for one in results}


def policy_logprobs(policy, wanted: list[GenRequest], results: dict[int, GenResult]) -> list[torch.Tensor]:
    """The trainer's log-probs of each response's tokens."""
    from aligner.types import LabeledBatch

    rows = [one.tokens + results[one.index].tokens for one in wanted]
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (one, row) in enumerate(zip(wanted, rows, strict=True)):
        mask[i, len(one.tokens) : len(row)] = True
    batch = LabeledBatch(tokens=tokens, lengths=torch.tensor([len(row) for row in rows]), loss_mask=mask)
    return [values[kept] for values, kept in zip(policy.logprobs(batch), mask, strict=True)]


@pytest.mark.parametrize("package", VERSIONS, indirect=True)
def test_after_a_refit_the_engines_logprobs_are_the_policys(package, policy, hf_directory):
    """The whole way: weights out of Megatron, through the adapter, tokens and log-probs back; for each version and both samplers."""
    sampling = SamplingConfig(temperature=0.7, max_response_length=12, stop_token_ids=list(range(20, 26)))
    for sampler, temperature in ((Sampler.trtllm, 0.7), (Sampler.torch, 1.0)):
        engine = build(hf_directory("llama"), sampling=sampling, sampler=sampler)
        assert engine.capabilities.logprobs == (LogprobKind.sampled if sampler == Sampler.trtllm else LogprobKind.raw)
        engine.start()
        assert refit(engine, policy, version=7) > 3
        wanted = requests(copies=3)
        results = generate(engine, sampling, wanted)
        policy.temperature = temperature
        for one, expected in zip(wanted, policy_logprobs(policy, wanted, results), strict=True):
            result = results[one.index]
            assert torch.tensor(result.logprobs).allclose(expected, atol=1e-4), result
            assert result.weight_version == 7 and result.kind == engine.capabilities.logprobs
            ended = result.tokens[-1] in {EOS, *sampling.stop_token_ids}
            assert result.finish_reason == (FinishReason.stop if ended else FinishReason.length)
            assert ended or len(result.tokens) == 12
        assert {one.finish_reason for one in results.values()} == {FinishReason.stop, FinishReason.length}
        assert len({results[i].tokens for i in range(3)}) > 1  # one prompt, three seeds
        engine.shutdown()
        engine.shutdown()


@pytest.mark.parametrize("zero_is_none", [False, True])
def test_a_version_that_takes_zero_log_probs_for_none_is_asked_for_one(zero_is_none, package, policy, hf_directory):
    package.zero_is_none = zero_is_none
    engine = ready(hf_directory, policy)
    first, again = (generate(engine, SamplingConfig(max_response_length=6)) for _ in range(2))
    assert {index: one.tokens for index, one in first.items()} == {index: one.tokens for index, one in again.items()}
    for one, expected in zip(requests(), policy_logprobs(policy, requests(), first), strict=True):
        for results in (first, again):  # in batches of other sizes, perhaps: not to the last bit
            assert torch.tensor(results[one.index].logprobs).allclose(expected, atol=1e-4)
    # Those that were on their way are asked for again, later ones are asked for at once.
    in_vain = package.asked.count(0) if zero_is_none else 0
    assert package.asked[-6:] == [int(zero_is_none)] * 6 and in_vain <= 6 and len(package.asked) == 12 + in_vain
    engine.shutdown()


@pytest.mark.parametrize("package", VERSIONS, indirect=True)
def test_memory_sleeps_and_wakes_by_tags_and_in_order(package, policy, hf_directory):
    engine = build(hf_directory("llama"), offload=True)
    engine.start()
    given = package.llms[-1].given
    assert given["cuda_graph_config"] is None and (given.get("enable_sleep") or given.get("sleep_config"))
    engine.sleep(ALL_MEMORY)
    with pytest.raises(EngineError, match="never refitted"):
        next(engine.generate(ListedWork(requests()), SamplingConfig()))
    engine.wake(WEIGHTS)
    refit(engine, policy)
    with pytest.raises(EngineError, match="kv_cache sleep"):
        next(engine.generate(ListedWork(requests()), SamplingConfig()))
    engine.wake(CACHE)
    assert len(generate(engine, SamplingConfig(max_response_length=3))) == 6
    engine.sleep(ALL_MEMORY)
    engine.wake(ALL_MEMORY)
    with pytest.raises(EngineError, match="woke and were not refitted"):
        next(engine.generate(ListedWork(requests()), SamplingConfig()))
    refit(engine, policy, version=2)
    assert {one.weight_version for one in generate(engine, SamplingConfig(max_response_length=3)).values()} == {2}
    model = "model" if package.contract.version == "1.2.1" else "model model_weights"
    exchanged = [event for event in package.events if event.startswith(("release", "materialize"))]
    assert exchanged == [
        f"release kv_cache {model}",
        f"materialize {model}",
        "materialize kv_cache",
        f"release kv_cache {model}",
        f"materialize kv_cache {model}",
    ]
    engine.shutdown()


@pytest.mark.parametrize("package", VERSIONS, indirect=True)
def test_a_refit_that_fails_forbids_generating_until_one_succeeds(package, policy, hf_directory):
    from aligner.rollout.engine.manifest import hf_manifest

    engine = ready(hf_directory, policy)
    manifest = hf_manifest(policy.chunks[0].architecture, torch.float32)
    buckets = list(weight_buckets(policy.export_weights(), bucket_bytes=12_000, manifest=manifest))
    engine.begin_refit(manifest)
    engine.load(buckets[0])
    q_only = [(name, tensor) for bucket in buckets for name, tensor in bucket if "layers.0.self_attn.q_proj" in name]
    with pytest.raises(EngineError, match="Misuse: .*q_proj.*without.*k_proj"):
        engine.load(q_only)
    engine.abort_refit()
    with pytest.raises(EngineError, match="does not generate: its last refit failed"):
        next(engine.generate(ListedWork(requests()), SamplingConfig()))
    assert not package.engine.paused
    refit(engine, policy, version=3)
    assert len(generate(engine, SamplingConfig(max_response_length=2))) == 6
    engine.shutdown()


def test_errors_and_silence_of_the_package_come_to_the_caller(package, policy, hf_directory):
    engine = build(hf_directory("llama"), timeout_seconds=0.3)
    with pytest.raises(EngineError, match="not running: start"):
        next(engine.generate(ListedWork(requests()), SamplingConfig()))
    engine.start()
    with pytest.raises(EngineError, match="started twice"):
        engine.start()
    refit(engine, policy)
    package.error = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(EngineError, match=r"failed at request 0 \(3 prompt tokens\): RuntimeError: CUDA error"):
        list(engine.generate(ListedWork(requests()[:1]), SamplingConfig()))
    package.error, package.answers = None, False
    with pytest.raises(EngineError, match=r"ended none of its 4 running requests \(0, 1, 2, 3, ...\) in 0 s.*timeout_seconds"):
        list(engine.generate(ListedWork(requests()[:4]), SamplingConfig()))
    package.answers = True
    assert len(generate(engine, SamplingConfig(max_response_length=2))) == 6  # what hung was taken back
    long = GenRequest(index=9, tokens=(5,) * CONTEXT, seed=0)
    with pytest.raises(EngineError, match="request 9: a prompt of 64 tokens leaves no room in the context of 64"):
        list(engine.generate(ListedWork([long]), SamplingConfig()))
    near = GenRequest(index=9, tokens=(5,) * (CONTEXT - 2), seed=0)
    assert len(generate(engine, SamplingConfig(max_response_length=20), [near])[9].tokens) <= 2
    engine.shutdown()
    with pytest.raises(EngineError, match="not running"):
        engine.sleep(ALL_MEMORY) if engine._config.offload else next(engine.generate(ListedWork([]), SamplingConfig()))


def test_finished_responses_come_before_the_others_and_leaving_early_takes_the_rest_back(package, policy, hf_directory):
    engine = ready(hf_directory, policy, max_batch_size=2)
    parts = engine.generate(ListedWork(requests(copies=4)), SamplingConfig(max_response_length=8))
    first = next(parts)
    assert 1 <= len(first) <= 3  # as many as there is room for: max_batch_size, and one that waits
    parts.close()
    assert not package.engine._running
    assert len(generate(engine, SamplingConfig(max_response_length=8))) == 6
    engine.shutdown()


def test_settings_that_cannot_work_are_refused_before_the_package_is_imported(package, hf_directory):
    with pytest.raises(ConfigError, match="cuda_graphs=always: version 1.2.1 cannot replay.*rollout.offload=false"):
        build(hf_directory("llama"), offload=True, cuda_graphs=CudaGraphs.always)
    for field, value in (("kv_memory_fraction", 0.0), ("timeout_seconds", 0.0), ("pause_seconds", -1.0), ("start_seconds", float("nan"))):
        with pytest.raises(ConfigError, match=f"rollout.tensorrt_llm.{field}={value}"):
            TensorRTLLMConfig(**{field: value})


def test_read_back_tells_what_is_kept_as_it_came(package, policy, hf_directory):
    engine = ready(hf_directory, policy)
    for name, tensor in policy.export_weights():
        held = engine.read_back(name)
        if "_proj" in name and "o_proj" not in name and "down_proj" not in name:
            assert held is None
        else:
            assert torch.equal(held, tensor)
    assert engine.read_back("no.such.weight") is None
    engine.shutdown()


def test_episodes_of_several_turns(package, policy, hf_directory):
    """Further turns of an episode are requests like others; they are asked for while other requests run."""
    from fake_environment import repeats

    from aligner.rollout.engine.episodes import Conversing, Episodes, EpisodeWork
    from aligner.types import Prompt

    sampling = SamplingConfig(max_response_length=24, stop_token_ids=list(range(20, 40)))
    prompts = [Prompt(id=one.index, tokens=one.tokens, source=f"p:{one.index}") for one in requests()]
    found = []
    for seats in (2, 8):
        engine = ready(hf_directory, policy, sampling=sampling, max_batch_size=seats, sampler=Sampler.torch)
        conversing = Conversing(follow_up=repeats())
        exchange = conversing.follow_up.open()
        episodes = Episodes(exchange, prompts, requests(), [24] * len(prompts), max_turns=3)
        for results in engine.generate(EpisodeWork(ListedWork(requests()), conversing, episodes), sampling):
            episodes.record(results)
        found.append({one.prompt.id: one.response for one in episodes.take_ended()})
        engine.shutdown()
    assert found[0] == found[1] and sorted(found[0]) == [one.index for one in requests()]
    assert all(len(response) <= 24 for response in found[0].values())
