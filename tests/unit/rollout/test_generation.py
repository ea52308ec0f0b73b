"""Continuous batching gives every response what it would get alone: any batch, order, cache, chunk, and after it lost its pages.

The decoder is a fake whose logits are a hash of what really is in the cache (tests/fakes/fake_decoder.py); with it log-probs are equal to
the bit. The last tests are with a model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from fake_decoder import CONTEXT, EOS, PAGE, VOCAB, draws_alone, generation_of

from aligner.errors import ConfigError, EngineError
from aligner.rollout.builtin.generation import Generation
from aligner.rollout.builtin.sampling import STOP
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import GenRequest, GenResult, ListedWork
from aligner.types import FinishReason, LogprobKind, SamplingConfig

pytestmark = pytest.mark.cpu  # where the decoder's stand-in is, and each response can be compared bit for bit


def run(requests: Sequence[GenRequest], sampling: SamplingConfig, **options) -> tuple[Generation, dict[int, GenResult]]:
    """A generation by the fake decoder, and its results by index."""
    generation = generation_of(**options)
    results = [result for part in generation.run(ListedWork(requests), sampling, 3) for result in part]
    assert len(results) == len(requests)
    return generation, {result.index: result for result in results}


def limit_of(request: GenRequest, sampling: SamplingConfig) -> int:
    """Tokens of its response at most."""
    return min(sampling.max_response_length, CONTEXT - len(request.tokens), request.limit or CONTEXT)


def alone(request: GenRequest, sampling: SamplingConfig, *, eos_id: int = EOS) -> GenResult:
    draws = draws_alone(request.tokens, request.seed, sampling, limit_of(request, sampling), eos_id=eos_id)
    return GenResult(
        index=request.index,
        tokens=tuple(int(draw.tokens) for draw in draws),
        logprobs=tuple(float(draw.logprobs) for draw in draws),
        raw_logprobs=tuple(float(draw.raw_logprobs) for draw in draws) if sampling.raw_logprobs else None,
        kind=LogprobKind.sampled,
        finish_reason=FinishReason.stop if int(draws[-1].ended) == STOP else FinishReason.length,
        weight_version=3,
    )


def random_requests(rng: random.Random) -> list[GenRequest]:
    """A few groups; some prompts begin alike, one of the whole pages, some are of exactly a page's length."""
    common = [rng.randrange(3, VOCAB) for _ in range(30)]
    requests: list[GenRequest] = []
    for _ in range(rng.randrange(1, 6)):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 4, 8, rng.randrange(1, 30)]))]
        if rng.random() < 0.5:
            shared = rng.randrange(len(prompt) + 1)
            prompt[:shared] = common[:shared]
        for _ in range(rng.choice([1, 1, 2, 5])):
            limit = rng.choice([None, None, None, 3])
            requests.append(GenRequest(index=len(requests), tokens=tuple(prompt), seed=rng.randrange(2**60), limit=limit))
    return requests


def least_tokens(requests: Sequence[GenRequest], sampling: SamplingConfig) -> int:
    """Room for the longest response, to the page."""
    lengths = [len(request.tokens) + limit_of(request, sampling) - 1 for request in requests]
    return -(-max(lengths) // PAGE) * PAGE


def test_the_context_ends_a_response():
    """59 tokens of a prompt leave room for 5 in a context of 64, whatever may be sampled at most."""
    request = GenRequest(index=0, tokens=tuple(range(3, 13)) * 5 + tuple(range(3, 12)), seed=1)
    _, results = run([request], SamplingConfig(max_response_length=50, min_response_length=50))
    assert (len(results[0].tokens), results[0].finish_reason) == (5, FinishReason.length)


@pytest.mark.parametrize("number", range(5))
def test_any_schedule_gives_what_each_response_gets_alone(number):
    rng = random.Random(number)
    preemptions = 0
    for _ in range(3):
        penalty, raw = rng.choice([1.0, 1.3]), rng.random() < 0.5
        sampling = SamplingConfig(max_response_length=rng.choice([1, 5, 20, 40]), repetition_penalty=penalty, raw_logprobs=raw)
        requests = random_requests(rng)
        expected = {request.index: alone(request, sampling) for request in requests}
        least = least_tokens(requests, sampling)
        for options in (
            {"max_batch_size": 1},
            {"max_batch_size": 64, "prefill_chunk_tokens": 1000},
            {"max_batch_size": 8, "kv_cache_tokens": least, "prefill_chunk_tokens": 5},
            {"kv_cache_tokens": least + rng.randrange(100), "prefill_chunk_tokens": rng.choice([1, 3, 50]), "steps_ahead": 1},
            {"max_batch_size": rng.randrange(1, 9), "steps_ahead": rng.randrange(3)},
        ):
            generation, results = run(rng.sample(requests, len(requests)) if rng.random() < 0.3 else requests, sampling, **options)
            assert results == expected, options
            preemptions += generation.counters.preemptions
    assert preemptions > 0 or number != 0


def test_a_group_of_sixteen_computes_its_prompt_once():
    tokens = tuple(random.Random(1).randrange(3, VOCAB) for _ in range(30))
    requests = [GenRequest(index=i, tokens=tokens, seed=i) for i in range(16)]
    sampling = SamplingConfig(max_response_length=9)
    for options in ({"max_batch_size": 16}, {"max_batch_size": 5}, {"max_batch_size": 1}, {"prefill_chunk_tokens": 7}):
        generation, results = run(requests, sampling, **options)
        assert generation.counters.prefilled_tokens == 30 and generation.counters.shared_tokens == 15 * 30
        assert [length for kind, length in generation.decoder.passes if kind == "prefill"] == {7: [7, 7, 7, 7, 2]}.get(
            options.get("prefill_chunk_tokens", 0), [16, 14]
        )
        assert len({result.tokens for result in results.values()}) > 8


def test_prompts_that_begin_alike_share_whole_pages():
    """Pages of 4: of 10 common tokens, 8 are computed once, in whichever pass; the fourth prompt begins otherwise."""
    common = (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    prompts = [(*common, 3, 3), (*common, 4), common, (12, *common)]
    requests = [GenRequest(index=i, tokens=tokens, seed=i) for i, tokens in enumerate(prompts)]
    for chunk in (100, 5):
        generation, _ = run(requests, SamplingConfig(max_response_length=9), prefill_chunk_tokens=chunk)
        assert generation.counters.shared_tokens == 16 and generation.counters.prefilled_tokens == 12 + 3 + 2 + 11


def test_a_response_that_ends_makes_room_at_once():
    """Ten prompts of one token at two seats, responses of 3 or 12 tokens: the short ones pass by the long one."""
    requests = [GenRequest(index=i, tokens=(3 + i % 9,), seed=i) for i in range(10)]
    sampling = SamplingConfig(max_response_length=12, stop_token_ids=[5, 6, 7, 8])
    generation, results = run(requests, sampling, max_batch_size=2)
    decoded = sum(len(result.tokens) - 1 for result in results.values())
    assert generation.counters.decoded_tokens == decoded
    assert generation.counters.decode_steps <= decoded // 2 + 12  # both seats are taken but at the end
    assert len({len(result.tokens) for result in results.values()}) > 4


def test_results_are_given_as_they_end():
    requests = [GenRequest(index=i, tokens=(3 + i,), seed=i) for i in range(6)]
    sampling = SamplingConfig(max_response_length=30)
    generation = generation_of(max_batch_size=6)
    lengths = [[len(result.tokens) for result in part] for part in generation.run(ListedWork(requests), sampling, 0)]
    assert len(lengths) > 2 and lengths == sorted(lengths) and all(len(set(part)) == 1 for part in lengths)


def test_where_pages_run_out_the_youngest_waits():
    """Room for one and a half of four: nothing is lost, and the one that came first is never interrupted."""
    requests = [GenRequest(index=i, tokens=(3, 4, 5 + i), seed=i) for i in range(4)]
    sampling = SamplingConfig(max_response_length=29)
    never = 10**6
    expected = run(requests, sampling, eos_id=never)[1]
    generation, results = run(requests, sampling, kv_cache_tokens=48, eos_id=never)
    assert results == expected and list(results) == [0, 1, 2, 3]
    assert generation.counters.preemptions >= 2 and generation.decoder.caches == [12]
    assert generation.counters.prefilled_tokens > 12  # what had been sampled was computed again


def test_a_request_that_does_not_fit_alone_is_named():
    requests = [GenRequest(index=7, tokens=(3,) * 10, seed=1)]
    sampling = SamplingConfig(max_response_length=20)  # 29 tokens in the cache: 8 pages
    with pytest.raises(EngineError, match=r"request 7: .* need 32 tokens .* rollout.kv_cache_tokens=31 .* at least 32"):
        run(requests, sampling, kv_cache_tokens=31)
    assert len(run(requests, sampling, kv_cache_tokens=32)[1]) == 1


def test_a_cache_of_no_stated_size_grows_with_the_requests():
    """The first prompt is short; a later one needs more than all the pages that there are."""

    class Trickle:
        """One request at a time, as if others took theirs too."""

        is_open = False

        def __init__(self, requests: list[GenRequest]) -> None:
            self.requests = requests

        def take(self, room: int) -> list[GenRequest]:
            assert room > 0
            return [self.requests.pop(0)] if self.requests else []

    requests = [GenRequest(index=i, tokens=(3 + i,) * length, seed=i) for i, length in enumerate((2, 2, 50, 3))]
    sampling = SamplingConfig(max_response_length=5)
    for seats, sizes in ((1, [3, 15]), (2, [3, 6, 15, 30])):  # 2 pages for 2 + 4 tokens, 14 for 50 + 4; each has one to spare
        generation = generation_of(max_batch_size=seats, prefill_chunk_tokens=64, eos_id=10**6)
        results = {result.index: result for part in generation.run(Trickle(list(requests)), sampling, 3) for result in part}
        assert results == {request.index: alone(request, sampling, eos_id=10**6) for request in requests}
        assert generation.decoder.caches == sizes and generation.counters.preemptions == 0


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("kv_cache_tokens", -1, 0), ("prefill_chunk_tokens", 0, 1), ("tp", -1, 0), ("refit_bucket_mib", 0, 1), ("max_batch_size", 0, 1)],
)
def test_settings_that_cannot_work_are_named(name, value, least):
    with pytest.raises(ConfigError, match=f"rollout.{name}={value}: must be at least {least}"):
        RolloutConfig(**{name: value})


def test_caches_of_different_sizes_at_one_address(topology, make_model, monkeypatch):
    """What the allocator does now and then: nothing of the earlier cache may be taken for the later one's."""
    from aligner.rollout.builtin.attention import PagedKV
    from aligner.rollout.builtin.megatron import MegatronEngine

    policy = make_model("policy")
    sampling = SamplingConfig(max_response_length=12)
    arena = torch.zeros(2, 1 << 16)

    def generate(engine: MegatronEngine, count: int) -> list[GenResult]:
        requests = [GenRequest(index=i, tokens=(3 + i, 9), seed=i) for i in range(count)]
        return sorted((result for part in engine.generate(ListedWork(requests), sampling) for result in part), key=lambda r: r.index)

    def engine_of() -> MegatronEngine:
        return MegatronEngine(policy.chunks, RolloutConfig(sampling=sampling), eos_id=10**6)

    def new_cache(num_pages: int) -> PagedKV:
        shape = (2, num_pages + 1, decoder.page_size, decoder.groups, decoder.head_dim)
        size = torch.Size(shape).numel()
        return PagedKV(keys=arena[0, :size].view(shape), values=arena[1, :size].view(shape))

    engine = engine_of()
    decoder = engine.decoder
    monkeypatch.setattr(decoder, "new_cache", new_cache)
    for count in (1, 5, 2):
        for found, wanted in zip(generate(engine, count), generate(engine_of(), count), strict=True):
            assert found.tokens == wanted.tokens and found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
