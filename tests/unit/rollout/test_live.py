"""Requests of other threads, each with its settings: what it gets alone, whatever is asked, cancelled or wrong beside it.

Most tests are with the fake decoder (tests/fakes/fake_decoder.py), with which log-probs are equal to the bit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait as wait_for
from contextlib import contextmanager
from typing import Any

import pytest
from fake_decoder import CONTEXT, PAGE, VOCAB, RunEngine, generation_of
from training_jobs import eventually

from aligner.errors import ConfigError, EngineError
from aligner.rollout.builtin import generation as generations
from aligner.rollout.engine import Capabilities, GenRequest, GenResult, ListedWork
from aligner.rollout.engine.gate import Gate
from aligner.rollout.engine.lifecycle import PhasedEngine
from aligner.rollout.engine.work import WorkSharing
from aligner.rollout.live import LiveEngine, LiveRequest
from aligner.types import Images, LogprobKind, SamplingConfig

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("topology")]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


class Engine(RunEngine):
    """On the fake decoder."""

    def __init__(self, **settings: Any) -> None:
        self.generation = generation_of(**{"decode": text_of} | settings)
        self.decoder = self.generation.decoder
        super().__init__(self.generation.run, CONTEXT)

    def wake(self, memory: Any) -> None: ...
    def sleep(self, memory: Any) -> None: ...


def live_engine(*, missing: Sequence[int] = (), gate: Gate | None = None, **settings: Any) -> LiveEngine:
    engine = Engine(pauses=gate, **settings)
    phased = PhasedEngine(engine, SamplingConfig(), WorkSharing(engine.replica, None), offload=False, gate=gate, missing=missing)
    return LiveEngine(phased)


@contextmanager
def running(live: LiveEngine) -> Iterator[None]:
    """In the block a thread answers requests."""
    over, failed = threading.Event(), []

    def run() -> None:
        try:
            live.run(over.is_set)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive() and not failed, failed


@pytest.fixture
def loops(monkeypatch) -> list[Any]:
    """The loop of each generation."""
    made: list[Any] = []

    class Watched(generations._Loop):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(generations, "_Loop", Watched)
    return made


def pages_lost(loop: Any) -> int:
    """Pages that belong to nobody, once nothing is kept for later sequences."""
    assert not loop.scheduler.seated and not loop.scheduler.waiting and not loop.scheduler.prefilling and not len(loop.running)
    assert loop.scheduler.num_free_seats == loop.owner.max_batch_size and not loop.transcript._saved
    loop.scheduler.forget_everything()
    return loop.scheduler.pool.num_pages - loop.scheduler.pool.num_free


def random_settings(rng: random.Random) -> SamplingConfig:
    """Any of all settings, some of them often the usual ones."""
    longest = rng.choice([1, 6, 20, 40])
    return SamplingConfig(
        temperature=rng.choice([0.0, 1.0, 1.0, 0.7, 1.9]),
        top_k=rng.choice([0, 0, 1, 5, 12, 400]),
        top_p=rng.choice([1.0, 1.0, 0.4, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5]),
        min_response_length=rng.choice([0, 0, longest // 2]),
        max_response_length=longest,
        stop_token_ids=rng.choice([[], [], [5], [4, 9, 700]]),
        stop_strings=rng.choice([[], [], ["fg"], ["k", "hi"]]),
        raw_logprobs=rng.random() < 0.3,
    )


def random_requests(rng: random.Random, count: int) -> list[GenRequest]:
    """Some of one prompt, some that begin alike; each with one of five settings."""
    common, requests = [rng.randrange(3, VOCAB) for _ in range(24)], []
    settings = [random_settings(rng) for _ in range(5)]
    while len(requests) < count:
        prompt = common[: rng.randrange(20)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 8))]
        for _ in range(rng.choice([1, 1, 2])):
            given = {"seed": rng.randrange(-(2**63), 2**63), "sampling": rng.choice(settings)}
            requests.append(GenRequest(index=len(requests), tokens=tuple(prompt), **given))
    return requests


def in_a_run_of_its_own(request: GenRequest) -> GenResult:
    """With a run's settings, in place of the request's own."""
    generation = generation_of(max_batch_size=1, decode=text_of)
    plain = GenRequest(index=request.index, tokens=request.tokens, seed=request.seed)
    ((result,),) = list(generation.run(ListedWork([plain]), request.sampling, 0))
    return result


def asked(live: LiveEngine, request: GenRequest, **more: Any) -> Future[GenResult]:
    return live.submit(LiveRequest(tokens=request.tokens, seed=request.seed, sampling=request.sampling, **more))


def content(result: GenResult) -> tuple:
    return result.tokens, result.logprobs, result.raw_logprobs, result.finish_reason, result.weight_version, result.kind


@pytest.mark.parametrize("number", range(4))
def test_a_request_gets_what_a_run_of_its_settings_gives(number: int) -> None:
    """In one batch with others of other settings, few seats, few pages, prompts in pieces, steps ahead; through the live engine too."""
    rng, preemptions = random.Random(number), 0
    for _ in range(3):
        requests = random_requests(rng, rng.choice([1, 7, 13]))
        expected = [in_a_run_of_its_own(request) for request in requests]
        least = -(-max(len(request.tokens) + 40 for request in requests) // PAGE) * PAGE
        settings = {"max_batch_size": rng.choice([1, 3, 8, 16]), "kv_cache_tokens": rng.choice([0, least, least + 20])}
        settings |= {"prefill_chunk_tokens": rng.choice([3, 16]), "steps_ahead": rng.randrange(3)}
        engine = Engine(**settings)
        found = [one for part in engine.generate(ListedWork(requests), SamplingConfig(max_response_length=CONTEXT)) for one in part]
        assert [content(one) for one in sorted(found, key=lambda one: one.index)] == [content(one) for one in expected]
        preemptions += engine.generation.counters.preemptions
        live = live_engine(**settings)
        with running(live):
            answers = [asked(live, request) for request in requests]
            assert [content(one.result(60)) for one in answers] == [content(one) for one in expected]
    assert preemptions or number != 0


def test_ids_of_no_token_are_never_drawn_whatever_the_settings() -> None:
    missing = (3, 4, 5, 6, 7, 8)
    live = live_engine(missing=missing)
    requests = random_requests(random.Random(1), 12)
    with running(live):
        results = [one.result(60) for one in [asked(live, request) for request in requests]]
    assert not {token for result in results for token in result.tokens} & set(missing)


@pytest.mark.parametrize("number", range(6))
def test_who_leaves_frees_seat_and_pages_and_disturbs_nobody(number: int, loops: list) -> None:
    """Cancelled while waiting, while its prompt is computed, or running; also where others of the same beginning stay."""
    rng = random.Random(100 + number)
    requests = random_requests(rng, 16)
    expected = [in_a_run_of_its_own(request) for request in requests]
    settings = {"max_batch_size": rng.choice([2, 5, 16]), "prefill_chunk_tokens": rng.choice([2, 5, 16]), "steps_ahead": number % 3}
    live = live_engine(kv_cache_tokens=rng.choice([0, 72, 120]), **settings)
    leaving = rng.sample(range(16), 9)
    at = {index: rng.randrange(1, 25) for index in leaving}
    decoder, steps, answers = live.engine.engine.decoder, 0, []

    def stepping(step: Callable) -> Callable:
        def stepped(*given: Any) -> Any:
            nonlocal steps
            steps += 1
            for index in leaving:
                if at[index] == steps:
                    answers[index].cancel()
            return step(*given)

        return stepped

    decoder.prefill, decoder.decode = stepping(decoder.prefill), stepping(decoder.decode)
    answers += [asked(live, request) for request in requests]
    live.run(lambda: True)  # until none is left
    assert sum(one.cancelled() for one in answers) > 3
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.cancelled() or content(answer.result(0)) == content(wanted)
    assert pages_lost(loops[0]) == 0 and not live._calls and not live._given and not live._left


def test_pages_that_a_younger_prompt_counts_on_are_filled_though_nobody_waits(loops: list) -> None:
    """The second begins like the first, which leaves while its prompt is computed; the third leaves too, and nothing is left of it."""
    live, how = live_engine(prefill_chunk_tokens=6), SamplingConfig(max_response_length=4)
    prompts = [(*range(3, 13), *range(3, 13), last) for last in (5, 6, 7)]
    requests = [GenRequest(index=i, tokens=tokens, seed=i, sampling=how) for i, tokens in enumerate(prompts)]
    answers = [asked(live, request) for request in requests]
    decoder, prefill = live.engine.engine.decoder, live.engine.engine.decoder.prefill

    def prefilled(*given: Any) -> Any:
        answers[0].cancel()
        answers[2].cancel()
        return prefill(*given)

    decoder.prefill = prefilled
    live.run(lambda: True)
    assert content(answers[1].result(0)) == content(in_a_run_of_its_own(requests[1]))
    assert answers[0].cancelled() and answers[2].cancelled() and pages_lost(loops[0]) == 0


def test_who_leaves_a_group_takes_no_state_along(hf_directory, load_policy) -> None:
    """Of delta nets, whose states are at the seat of the group's first response while its prompt is computed in pieces."""
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    policy = load_policy(hf_directory("qwen3_next"))
    config = RolloutConfig(sampling=SamplingConfig(max_response_length=8), prefill_chunk_tokens=16, max_batch_size=4)
    found = []
    for leaves in (False, True):
        live = LiveEngine(create_engine(policy, config, eos_id=100))
        prompts = [tuple(range(3, 53)), (9, 8, 7)]
        given = {"sampling": SamplingConfig(max_response_length=8)}
        answers = [live.submit(LiveRequest(tokens=prompts[i // 3], seed=i, **given)) for i in range(4)]
        decoder, prefill = live.engine.engine.decoder, live.engine.engine.decoder.prefill

        def prefilled(*given: Any, prefill: Any = prefill, first: Any = answers[0], leaves: bool = leaves) -> Any:
            if leaves:
                first.cancel()
            return prefill(*given)

        decoder.prefill = prefilled
        live.run(lambda: True)
        assert answers[0].cancelled() == leaves
        found.append([answer.result(0).tokens for answer in answers[1:]])
    assert found[0] == found[1]


def test_a_bad_request_fails_alone() -> None:
    live = live_engine(kv_cache_tokens=40, decode=None)
    usual = SamplingConfig(max_response_length=6)
    good = GenRequest(index=0, tokens=(3, 4, 5), seed=1, sampling=usual)
    bad = {
        r"the token ids \[13, -1\] are none of the model's, allowed: 0 to 12": {"tokens": (3, 13, -1)},
        r"rollout.kv_cache_tokens=40 has no room": {"sampling": SamplingConfig(max_response_length=60)},
        r"stop_strings=\['a'\]: needs a tokenizer": {"sampling": SamplingConfig(stop_strings=["a"], max_response_length=6)},
    }
    with running(live):
        for message, wrong in bad.items():
            one, other = asked(live, good), live.submit(LiveRequest(**{"tokens": (3,), "seed": 1, "sampling": usual} | wrong))
            with pytest.raises(EngineError, match=message):
                other.result(60)
            assert content(one.result(60)) == content(in_a_run_of_its_own(good))
        for message, wrong in {
            "a prompt of 64 tokens leaves no room in the context of 64": {"tokens": (3,) * 64},
            "a prompt of 0 tokens": {"tokens": ()},
            "must have 64 bits": {"seed": 2**63},
            "has images, which rollout.engine=fake does not read": {"extras": {Images.name: Images.of(["0" * 64])}},
        }.items():
            with pytest.raises(EngineError, match=message):
                live.submit(LiveRequest(**{"tokens": (3,), "seed": 1, "sampling": usual} | wrong))
    with pytest.raises(EngineError, match="no room"):  # it ends a generation in which nobody is to be told
        list(live.engine.serve(ListedWork([GenRequest(index=0, tokens=(3,), seed=1)]), SamplingConfig(max_response_length=60)))


@pytest.mark.parametrize("ahead", [0, 2])
def test_pieces_arrive_as_they_are_sampled(ahead: int) -> None:
    """Also across a preemption, each token once; the last before the result. Whoever cannot listen fails alone."""
    long = SamplingConfig(max_response_length=40, min_response_length=40)
    requests = [GenRequest(index=i, tokens=(3 + i, 5), seed=i, sampling=long) for i in range(4)] + random_requests(random.Random(3), 9)
    live = live_engine(steps_ahead=ahead, kv_cache_tokens=72)
    pieces: list[list[tuple]] = [[] for _ in requests]

    def listener(number: int) -> Callable:
        def heard(tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]) -> None:
            pieces[number].append((tuple(tokens), tuple(logprobs), answers[number].done()))
            assert [len(top) for top in tops] == [number] * (len(tokens) if number else 0)
            assert all(dict(top).get(token, p) == pytest.approx(p, abs=1e-5) for token, p, top in zip(tokens, logprobs, tops, strict=False))

        return heard

    def deaf(*_: object) -> None:
        raise ValueError("gone")

    answers: list[Future] = []
    for number, request in enumerate(requests):
        answers.append(asked(live, request, on_tokens=listener(number), top=number))
    other = asked(live, requests[0], on_tokens=deaf)
    with running(live):
        wait_for([*answers, other], 60)
    for answer, heard, request in zip(answers, pieces, requests, strict=True):
        result = answer.result(0)
        assert content(result) == content(in_a_run_of_its_own(request))
        assert [t for tokens, _, _ in heard for t in tokens] == list(result.tokens) and len(heard) == len(result.tokens)
        assert [p for _, logprobs, _ in heard for p in logprobs] == list(result.logprobs) and not any(done for *_, done in heard)
    with pytest.raises(EngineError, match="on_tokens failed: ValueError: gone"):
        other.result(0)
    assert live.engine.engine.generation.counters.preemptions > 0


def test_the_next_turn_finds_the_one_before_though_nothing_was_asked_meanwhile(loops: list) -> None:
    """Between two questions the generation, its cache and what is in it stay; asked again and again they do not grow."""
    live, how = live_engine(eos_id=10**6), SamplingConfig(max_response_length=9)
    counters = None
    with running(live):
        first = live.submit(LiveRequest(tokens=tuple(range(3, 13)), seed=1, sampling=how)).result(60)
        counters, idle = loops[0].counters, len(live.engine.engine.decoder.passes)
        assert not eventually(lambda: len(live.engine.engine.decoder.passes) > idle, 0.3)
        before = counters.prefilled_tokens
        tokens = (*range(3, 13), *first.tokens, 5, 6)
        live.submit(LiveRequest(tokens=tokens, seed=2, sampling=how)).result(60)
        assert len(tokens) == 21 and counters.prefilled_tokens - before == 21 - 16  # 18 tokens were in the cache, 4 pages of them whole
        for seed in range(40):
            live.submit(LiveRequest(tokens=tuple(range(3, 13)), seed=seed, sampling=how)).result(60)
        sessions = {seed: (3 + seed, 5, 6, 7) for seed in range(6)}  # none of which asks at the same time as another
        for turn in range(3):
            for seed, tokens in sessions.items():
                before = counters.prefilled_tokens
                result = live.submit(LiveRequest(tokens=tokens, seed=seed, sampling=how)).result(60)
                assert counters.prefilled_tokens - before <= (4 if turn == 0 else 4 + PAGE)
                sessions[seed] = (*tokens, *result.tokens, 5, 6, 7)
        assert len(loops) == 1 and len(loops[0].scheduler._turns) <= loops[0].scheduler.pool.num_pages
    assert pages_lost(loops[0]) == 0


def test_a_free_seat_is_not_waited_for_long() -> None:
    """One of sixteen is free: too few for a pass over prompts in training, but not until the others have ended."""
    live, long = live_engine(max_batch_size=16), SamplingConfig(max_response_length=50, min_response_length=50)
    answers = [live.submit(LiveRequest(tokens=(3, 4), seed=seed, sampling=long)) for seed in range(15)]
    decoder, decode = live.engine.engine.decoder, live.engine.engine.decoder.decode
    late: list[Future] = []

    def decoded(*given: Any) -> Any:
        if decoder.passes[-1][0] == "decode" and not late:
            late.append(live.submit(LiveRequest(tokens=(5, 6), seed=1, sampling=SamplingConfig(max_response_length=1))))
            late[0].add_done_callback(lambda _: answers.append(sum(one.done() for one in answers)))
        return decode(*given)

    decoder.decode = decoded
    live.run(lambda: True)
    assert answers[15] == 0  # none had ended


def test_runs_follow_one_another_with_new_weights_between() -> None:
    live, how = live_engine(), SamplingConfig(max_response_length=3)
    for version in (1, 2, 3):
        live.engine.refit(version)
        assert live.version == version
        answer = live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how))
        over = iter([False, False, True, True, True, True])
        live.run(lambda over=over: next(over, True))
        assert answer.result(0).weight_version == version
    assert live.engine.engine.generation._kept is None  # the memory is given back
    waiting = live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how))
    live.close()
    with pytest.raises(EngineError, match="has ended"):
        waiting.result(0)
    with pytest.raises(EngineError, match="has ended: it answers no more requests"):
        live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how))
    live.run(lambda: False)  # ends at once


def test_new_weights_come_between_two_steps_and_while_nothing_is_asked() -> None:
    """A gate's other thread holds the engine: idle or in the middle of a response, whose tokens say their versions."""
    gate = Gate(timeout_seconds=20)
    live, how = live_engine(gate=gate, eos_id=10**6), SamplingConfig(max_response_length=40)
    decoder, reached, go_on = live.engine.engine.decoder, threading.Event(), threading.Event()
    decode = decoder.decode

    def decoded(*given: Any) -> Any:
        if len([one for one in decoder.passes if one[0] == "decode"]) == 9:
            reached.set()
            go_on.wait(20)
        return decode(*given)

    decoder.decode = decoded
    gate.expect()
    with running(live):
        live.engine.refit(1)  # nothing is asked
        answer = live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how))
        assert reached.wait(20)
        threading.Timer(0.05, go_on.set).start()
        live.engine.refit(2)
        result = answer.result(60)
    gate.ended()
    assert result.weight_version == 2 and result.versions[0] == (0, 1) and result.versions[1][1] == 2


def test_what_ends_the_engine_reaches_everyone() -> None:
    live, how = live_engine(), SamplingConfig(max_response_length=30, min_response_length=30)
    answers = [live.submit(LiveRequest(tokens=(3, 4), seed=seed, sampling=how)) for seed in range(20)]
    live.engine.engine.decoder.decode = lambda *given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        live.run(lambda: False)
    for answer in answers:
        with pytest.raises(EngineError, match="the engine has failed: division by zero"):
            answer.result(0)
    with pytest.raises(EngineError, match="the engine has failed"):
        live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how))
    del live.engine.engine.decoder.decode
    over = iter([False] * 9)
    live.run(lambda: next(over, True))  # again
    assert isinstance(live.submit(LiveRequest(tokens=(3, 4), seed=1, sampling=how)), Future)

    def broken() -> bool:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        live.run(broken)


def test_engines_without_settings_of_single_requests_are_refused() -> None:
    engine = Engine()
    engine.capabilities = Capabilities(name="TensorRT-LLM", logprobs=LogprobKind.sampled)
    phased = PhasedEngine(engine, SamplingConfig(), WorkSharing(engine.replica, None), offload=False)
    with pytest.raises(ConfigError, match="rollout.engine=TensorRT-LLM: answers no requests from outside; allowed: megatron, vllm"):
        LiveEngine(phased)


def test_many_threads_ask_and_leave_at_once() -> None:
    """Nothing hangs and nothing is lost."""
    live = live_engine(max_batch_size=3, kv_cache_tokens=120)
    requests = random_requests(random.Random(8), 24)
    expected = [content(in_a_run_of_its_own(request)) for request in requests]
    wrong: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(6):
            at = rng.randrange(24)
            answer = asked(live, requests[at])
            if rng.random() < 0.4:
                answer.cancel()
            elif content(answer.result(120)) != expected[at]:
                wrong.append(f"request {at}")

    with running(live):
        clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(8)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(120)
        assert not any(one.is_alive() for one in clients) and not wrong


def test_transformers_own_modules(tmp_path_factory, load_policy) -> None:
    """Each request as in a run of its settings; who leaves and who is wrong disturbs nobody; pieces; rows of cancelled ones make room."""
    from own_models import make_directory

    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    policy = load_policy(make_directory(tmp_path_factory)("granite"))
    config = RolloutConfig(max_batch_size=3, sampling=SamplingConfig(max_response_length=12))
    engine = create_engine(policy, config, eos_id=1, decode=text_of)
    live, rng = LiveEngine(engine), random.Random(2)
    requests = [
        GenRequest(index=i, tokens=tuple(rng.randrange(3, 50) for _ in range(rng.randrange(1, 12))), seed=i, sampling=random_settings(rng))
        for i in range(12)
    ]
    expected = []
    for request in requests:
        plain = GenRequest(index=0, tokens=request.tokens, seed=request.seed)
        expected += [one for part in engine.serve(ListedWork([plain]), request.sampling) for one in part]
    pieces: list[int] = []
    likely: list[int] = []

    def hear(tokens: Sequence[int], _: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]) -> None:
        pieces.extend(tokens)
        likely.extend(len(top) for top in tops)

    answers = [asked(live, request, on_tokens=hear if not i else None, top=2) for i, request in enumerate(requests)]
    leaving = [asked(live, requests[i], on_tokens=lambda *_, i=i: leaving[i].cancel()) for i in range(6)]
    waiting = asked(live, requests[0])
    waiting.cancel()
    wrong = live.submit(LiveRequest(tokens=(3, 10**6), seed=1, sampling=SamplingConfig()))
    with running(live):
        wait_for(answers, 120)
    for answer, wanted in zip(answers, expected, strict=True):
        result = answer.result(0)
        assert (result.tokens, result.finish_reason) == (wanted.tokens, wanted.finish_reason)
        assert result.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        assert (result.raw_logprobs is None) == (wanted.raw_logprobs is None)
    assert pieces == list(expected[0].tokens) and likely == [2] * len(pieces)
    with pytest.raises(EngineError, match="none of the model's"):
        wrong.result(0)
    assert all(one.cancelled() for one in leaving)
