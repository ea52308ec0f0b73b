"""Requests of the leading rank's threads, answered by the two ranks of a replica: the single process's responses, and nothing hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layout_models import train_step
from ranks import world
from sampled_models import VOCAB, make_engine, make_inputs, make_policy, write_model

from aligner.errors import EngineError
from aligner.losses.sft import sft_loss
from aligner.models.config import Family
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import AsynchronousConfig
from aligner.rollout.live import LiveEngine, LiveRequest
from aligner.types import SamplingConfig

SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 9},
    {"top_p": 0.8, "stop_token_ids": [11, 12, 13]},
    {"repetition_penalty": 1.4, "min_response_length": 8},
    {"min_p": 0.1, "presence_penalty": 1.0},
]


def requests_of(inputs: dict[str, Any]) -> list[LiveRequest]:
    """Each of the prompts with other settings."""
    rows = zip(inputs["prompts"], inputs["seeds"], SETTINGS, strict=True)
    return [
        LiveRequest(tokens=tuple(prompt), seed=seed, sampling=SamplingConfig(**how, max_response_length=24)) for prompt, seed, how in rows
    ]


def answered(live: LiveEngine, inputs: dict[str, Any]) -> list[tuple]:
    """All requests in one run; one that leaves after its third token, one that waits in vain and one that is wrong beside them."""
    answers, heard = [], []

    def leave(tokens: Any, *_: Any) -> None:
        heard.extend(tokens)
        if len(heard) == 3:
            leaving.cancel()

    if live.engine.replica.is_leader:
        long = {"seed": 9, "sampling": SamplingConfig(max_response_length=40, min_response_length=40)}
        answers = [live.submit(request) for request in requests_of(inputs)]
        leaving = live.submit(LiveRequest(tokens=(8, 9), on_tokens=leave, **long))
        wrong = live.submit(LiveRequest(tokens=(8, VOCAB), **long))
        live.submit(LiveRequest(tokens=(8,), **long)).cancel()
    live.run(lambda: True)
    if live.engine.replica.is_leader:
        assert leaving.cancelled() and len(heard) == 3
        with pytest.raises(EngineError, match="none of the model's"):
            wrong.result(0)
    assert not live._given and not live._queue and not live._calls
    return [(one.result(0).tokens, one.result(0).logprobs, one.result(0).finish_reason.value) for one in answers]


def idle(live: LiveEngine) -> None:
    """The followers hear from a leading rank that has nothing to do, and start with it."""
    over, found = threading.Event(), []

    def ask() -> None:
        request = LiveRequest(tokens=(8, 9), seed=1, sampling=SamplingConfig(max_response_length=3))
        threading.Event().wait(0.4)
        found.append(live.submit(request).result(60))
        over.set()

    asking = threading.Thread(target=ask, daemon=True)
    if live.engine.replica.is_leader:
        asking.start()
    live.run(over.is_set)
    if live.engine.replica.is_leader:
        asking.join(60)
        assert found


def failures(engine: Any) -> list[str]:
    """What the leading rank raises reaches the other one: where it asks whether the end has come, and between two steps."""
    said, leads = [], engine.replica.is_leader

    def broken(*_: Any) -> bool:
        raise OSError("no such file")

    for between_steps in (False, True):
        live = LiveEngine(engine)
        if leads:
            answer = live.submit(LiveRequest(tokens=(8, 9), seed=1, sampling=SamplingConfig(max_response_length=3)))
            if between_steps:
                live._answer = broken
        with pytest.raises(OSError if leads else EngineError) as error:
            live.run((lambda: False) if between_steps else broken)
        said.append(str(error.value))
        if leads:
            with pytest.raises(EngineError, match="the engine has failed: no such file"):
                answer.result(0)
        live.run(lambda: True)  # both are in step again
    return said


def held(directory: Path, topology: Any, inputs: dict[str, Any]) -> tuple:
    """Another thread gives both ranks new weights, while they sample and while nothing is asked."""
    policy = make_policy(directory, topology, ParallelConfig(tp=2))
    ahead = AsynchronousConfig(max_staleness=1, timeout_seconds=60)
    engine = make_engine(policy, asynchronous=ahead)
    live, over, at_fifth, go_on = LiveEngine(engine), threading.Event(), threading.Event(), threading.Event()
    engine.gate.expect()
    thread = threading.Thread(target=live.run, args=(over.is_set,), daemon=True)
    thread.start()
    engine.refit(1)

    def hear(tokens: Any, *_: Any) -> None:
        heard.extend(tokens)
        if len(heard) == 5:
            at_fifth.set()
            go_on.wait(60)

    heard, result = [], None
    if live.engine.replica.is_leader:
        sampling = SamplingConfig(max_response_length=24, min_response_length=24)
        answer = live.submit(LiveRequest(tokens=(8, 9), seed=1, sampling=sampling, on_tokens=hear))
        assert at_fifth.wait(60)
        threading.Timer(0.3, go_on.set).start()
    engine.refit(2)
    if live.engine.replica.is_leader:
        result = answer.result(60)
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    engine.gate.ended()
    return None if result is None else (result.versions, result.weight_version)


def two_ranks(directory: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    with world({"tp": 2}) as topology:
        policy = make_policy(directory, topology, ParallelConfig(tp=2))
        engine = make_engine(policy, max_batch_size=3)
        live = LiveEngine(engine)
        found = {"first": answered(live, inputs)}
        counters = engine.engine.generation.counters
        found["counters"] = counters
        train_step(policy, inputs["batch"], sft_loss)
        engine.refit(1)
        found["second"] = answered(live, inputs)
        idle(live)
        found["failures"] = failures(engine)
        found["again"] = answered(live, inputs)
        found["held"] = held(directory, topology, inputs)
        dist.barrier()
        return found


@pytest.fixture(scope="module")
def directory(topology, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), family=Family.qwen2, qkv_bias=True)


def test_two_ranks_answer_as_one(on_ranks, directory, topology):
    inputs = make_inputs()
    leader, follower = on_ranks(two_ranks, 2, directory, inputs)
    policy = make_policy(directory, topology, ParallelConfig())
    engine = make_engine(policy, max_batch_size=6)
    live = LiveEngine(engine)
    expected = answered(live, inputs)
    train_step(policy, inputs["batch"], sft_loss)
    engine.refit(1)
    trained = answered(live, inputs)
    assert expected != trained and len({len(tokens) for tokens, *_ in expected}) > 2
    for found, wanted in ((leader["first"], expected), (leader["second"], trained), (leader["again"], trained)):
        for (tokens, logprobs, reason), (own, its, why) in zip(found, wanted, strict=True):
            assert (tokens, reason) == (own, why) and logprobs == pytest.approx(its, abs=1e-4)
    assert leader["counters"] == follower["counters"] and not follower["first"]
    assert leader["failures"] == ["no such file"] * 2
    assert all("the leading rank of this replica has failed" in message for message in follower["failures"])
    versions, last = leader["held"]
    assert last == 2 and [version for _, version in versions] in ([1, 2], [0, 1, 2])
