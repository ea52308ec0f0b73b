"""The order of an engine's phases, what a failed refit forbids, and the stream of weights into an inference package, checked on the way."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from fake_foreign import FakeForeign

from aligner.errors import ConfigError, EngineError
from aligner.protocols import Replica
from aligner.rollout.engine.manifest import Manifest, TensorSpec
from aligner.types import FinishReason, LogprobKind, Prompt, SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")

PROMPTS = [Prompt(id=i, tokens=(5 + i,), source=f"p:{i}") for i in range(3)]
NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.norm.weight",
]
SHAPES = [(6, 4), (4, 4), (2, 4), (4,)]


def manifest() -> Manifest:
    return Manifest(tensors={name: TensorSpec(shape=shape, dtype=torch.float32) for name, shape in zip(NAMES, SHAPES, strict=True)})


class Policy:
    """What is exported: a list that a test can damage."""

    def __init__(self) -> None:
        self.weights = [(name, torch.randn(shape)) for name, shape in zip(NAMES, SHAPES, strict=True)]

    def export(self):
        yield from self.weights


def engine_of(foreign: FakeForeign, policy: Policy, *, offload: bool = False, verified: bool = False, **ids):
    from aligner.models.training.offload import HostMemory
    from aligner.rollout.engine.foreign import StreamedEngine
    from aligner.rollout.engine.lifecycle import PhasedEngine
    from aligner.rollout.engine.work import WorkSharing

    memory = HostMemory(kept=lambda: (tensor for _, tensor in policy.weights)) if offload else None
    engine = StreamedEngine(foreign, policy.export, manifest(), Replica(), bucket_bytes=112, verified=verified, policy=memory)
    return PhasedEngine(engine, SamplingConfig(), WorkSharing(Replica(), None), offload=offload, **ids)


def generate(engine) -> list:
    rollouts = [one for part in engine.generate(PROMPTS, [7, 8, 9]) for one in part]
    return sorted(rollouts, key=lambda one: one.seed)


def test_phases_in_order(monkeypatch):
    from aligner.parallel import platform

    foreign, policy = FakeForeign(), Policy()
    with monkeypatch.context() as patch:  # the package takes memory from the device, which torch must not keep
        patch.setattr(platform, "release_cached", lambda: foreign.log.append("release"))
        engine = engine_of(foreign, policy, offload=True)
        engine.refit(3)  # nothing is copied before it is needed
        assert "begin" not in foreign.log
        engine.wake()
    assert [foreign.log[foreign.log.index(one) - 1] for one in ("start", "wake weights", "wake kv_cache")] == ["release"] * 3
    foreign.log[:] = [one for one in foreign.log if one != "release"]
    assert foreign.log[:2] == ["start", "sleep kv_cache weights"]
    assert foreign.log[2:] == ["wake weights", "begin", "load 1", "load 3", "finish 3", "wake kv_cache"]  # q with k: 96 bytes, then 112
    assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in policy.weights)  # they take turns
    engine.wake()
    rollouts = generate(engine)
    assert [(r.prompt.id, r.seed, r.response, r.policy_version) for r in rollouts] == [(0, 7, (3,), 3), (1, 8, (3,), 3), (2, 9, (3,), 3)]
    assert rollouts[0].logprob_kind is LogprobKind.raw and engine.refitted_bytes == 4 * (24 + 16 + 8 + 4)
    engine.sleep()
    engine.sleep()
    assert foreign.log[8:] == ["sleep kv_cache weights"] and policy.weights[0][1].untyped_storage().nbytes() == 96
    engine.wake()  # after validation: what was given back is lost
    assert foreign.log[9:] == ["wake weights", "begin", "load 1", "load 3", "finish 3", "wake kv_cache"]
    engine.shutdown()
    engine.shutdown()
    assert foreign.log[-2:] == ["shutdown", "shutdown"]
    with pytest.raises(EngineError, match="after its shutdown: make another one"):
        engine.wake()


@pytest.mark.parametrize("is_leader", [True, False])
def test_requests_are_recorded_on_the_leading_rank(is_leader, tmp_path):
    """From when the engine takes one until its response has ended; without a recording nothing is kept."""
    from aligner.rollout.engine import GenRequest, ListedWork
    from aligner.rollout.engine.lifecycle import RecordedWork
    from aligner.telemetry import recording

    def recorded() -> RecordedWork:
        requests = [GenRequest(index=i, tokens=(1,) * (3 + i), seed=i) for i in range(2)]
        return RecordedWork(ListedWork(requests), Replica(index=2, count=4, is_leader=is_leader))

    recording.record_in(tmp_path / "actor.0.jsonl", rank=0, most_bytes=1 << 20)
    work, foreign = recorded(), FakeForeign()
    foreign.start()
    for results in foreign.generate(work, SamplingConfig()):
        work.ended(results[::-1])
    recording.close()
    found = [(span.name, span.lane, dict(span.arguments)) for span in recording.read_spans(tmp_path)[0]]
    assert found == [("response", "replica 2", {"prompt": 3 + i, "tokens": 1, "ended_by": "length"}) for i in range(2)] * is_leader
    assert not work.is_open and (idle := recorded()).take(2) and idle._taken == {}


def test_without_offload_the_weights_are_there_from_the_start():
    foreign = FakeForeign()
    engine = engine_of(foreign, Policy())
    assert foreign.log == ["start", "begin", "load 1", "load 3", "finish 0"]
    engine.wake()
    engine.sleep()
    assert len(foreign.log) == 5 and generate(engine)[0].policy_version == 0
    engine.refit(2)
    assert generate(engine)[0].response == (2,)


def wrong_orders():
    """(phases that went well, the one that must not come now, what is said)"""
    yield lambda e: None, generate, "generate while it sleeps: wake\\(\\) it first"
    yield lambda e: e.wake(), lambda e: e.refit(1), "while it is ready to generate: sleep\\(\\) it first"
    yield lambda e: (e.wake(), next(begin(e))), lambda e: e.sleep(), "asked to sleep during a generation: consume"


def begin(engine):
    """A generation that is held open."""
    engine.held = engine.generate(PROMPTS, [7, 8, 9])
    return engine.held


@pytest.mark.parametrize("number", range(3))
def test_a_wrong_order_is_refused_and_says_what_comes_first(number):
    before, wrong, message = list(wrong_orders())[number]
    engine = engine_of(FakeForeign(), Policy(), offload=True)
    before(engine)
    with pytest.raises(EngineError, match=message):
        wrong(engine)


def test_a_generation_that_was_closed_makes_way():
    engine = engine_of(FakeForeign(), Policy())
    responses = engine.generate(PROMPTS, [7, 8, 9])
    next(responses)
    with pytest.raises(EngineError, match="take new weights during a generation"):
        engine.refit(1)
    responses.close()
    engine.refit(1)
    assert generate(engine)[0].policy_version == 1


FAULTS = {
    "drop": "model.layers.0.self_attn.k_proj.weight of 4 tensors missing",
    "add": "model.extra.weight is extra",
    "double": "model.embed_tokens.weight came twice",
    "reshape": r"model.norm.weight has the shape \[5\], the model's config requires \[4\]",
    "retype": "model.norm.weight is bfloat16, the model is float32",
    "spoil": "not finite: model.layers.0.self_attn.q_proj.weight, model.norm.weight of 4 tensors",
}


def damage(weights: list[tuple[str, torch.Tensor]], how: str) -> None:
    if how == "drop":
        del weights[2]
    elif how == "spoil":
        weights[1][1][2, 3], weights[3][1][0] = float("nan"), float("-inf")
    elif how in ("add", "double"):
        weights.insert(1, weights[0] if how == "double" else ("model.extra.weight", torch.zeros(2)))
    else:
        weights[3] = (NAMES[3], torch.zeros(5) if how == "reshape" else torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("offload", [False, True])
def test_a_failed_refit_forbids_generating_until_another_succeeds(how, offload):
    foreign, policy = FakeForeign(), Policy()
    engine = engine_of(foreign, policy, offload=offload)
    good = list(policy.weights)
    values = [tensor.clone() for _, tensor in good]
    damage(policy.weights, how)
    with pytest.raises(EngineError, match=f"weights of version 1 failed: .*{FAULTS[how]}"):
        engine.refit(1)
        engine.wake()
    assert foreign.log[-1] == "abort" and "finish 1" not in foreign.log
    with pytest.raises(EngineError, match=f"does not generate: its last refit failed .*{FAULTS[how]}.*; refit\\(\\) it again"):
        generate(engine)
    policy.weights = good
    for (_, tensor), value in zip(good, values, strict=True):
        tensor.copy_(value)
    engine.refit(2)
    engine.wake()
    assert generate(engine)[0].policy_version == 2


@pytest.mark.parametrize("method", ["begin", "load", "finish"])
def test_an_engine_that_fails_to_take_weights_is_named_and_left(method):
    foreign = FakeForeign()
    engine = engine_of(foreign, Policy())
    foreign.fails_at = method
    with pytest.raises(EngineError, match="RuntimeError: the package says no"):
        engine.refit(1)
    assert foreign.log[-1] == "abort"
    with pytest.raises(EngineError, match="its last refit failed"):
        generate(engine)


def test_an_engine_that_does_not_start_gives_back_what_it_took():
    foreign = FakeForeign()
    foreign.fails_at = "start"
    with pytest.raises(EngineError, match="starting fake failed: RuntimeError: the package says no"):
        engine_of(foreign, Policy())
    assert foreign.log == ["start", "shutdown"]


def test_what_was_read_back_is_compared_with_what_was_sent():
    foreign, policy = FakeForeign(), Policy()
    engine = engine_of(foreign, policy, verified=True)
    assert generate(engine)[0].policy_version == 0
    foreign.damages = NAMES[1]  # the same numbers, in other places
    with pytest.raises(EngineError, match="q_proj.weight of 4 tensors that were read back are not what was sent"):
        engine.refit(1)
    with pytest.raises(EngineError, match="its last refit failed"):
        generate(engine)
    foreign.damages, foreign.can_read_back = "", False
    with pytest.raises(ConfigError, match="verify_refit=checksum: fake cannot read its weights back; allowed: none"):
        engine.refit(2)


def test_an_engine_that_answers_with_other_weights_is_found_out():
    """Newer ones, or those of before the refit."""
    foreign = FakeForeign()
    engine = engine_of(foreign, Policy())
    foreign.version = 5
    with pytest.raises(EngineError, match="sampled from weights of version 5, not of 0"):
        generate(engine)
    stale = FakeForeign()
    engine = engine_of(stale, Policy())
    engine.refit(3)
    stale.version = 2
    with pytest.raises(EngineError, match="sampled from weights of version 2, not of 3"):
        generate(engine)


@pytest.mark.parametrize("length", [0, 32, 40])
def test_a_prompt_that_leaves_no_room_is_named(length):
    engine = engine_of(FakeForeign(), Policy())
    prompts = [*PROMPTS[:2], Prompt(id=9, tokens=(5,) * length, source="data/train.jsonl:17")]
    with pytest.raises(EngineError, match=f"data/train.jsonl:17: a prompt of {length} tokens .* context of 32"):
        engine.generate(prompts, [1, 2, 3])


def test_every_end_token_is_a_stop_token_of_every_generation():
    foreign = FakeForeign()
    engine = engine_of(foreign, Policy(), end_ids=(4, 6), missing=(9, 8))
    given = []
    answers = foreign.generate
    foreign.generate = lambda work, sampling: given.append(sampling) or answers(work, sampling)
    list(engine.generate(PROMPTS, [7, 8, 9]))
    list(engine.generate(PROMPTS, [7, 8, 9], SamplingConfig(temperature=0.0, stop_token_ids=[3])))  # as in validation
    assert [one.stop_token_ids for one in given] == [[4, 6], [3, 4, 6]] and [one.temperature for one in given] == [1.0, 0.0]
    assert [one.missing_ids for one in given] == [(8, 9), (8, 9)]


def test_an_engine_that_samples_what_is_no_token_is_not_believed():
    engine = engine_of(FakeForeign(), Policy(), missing=(0, 5))
    with pytest.raises(EngineError, match=r"fake sampled ids that stand for no token of the tokenizer: \[0\]"):
        generate(engine)  # its tokens are the version, 0


class Words:
    """A tokenizer of ids 0 to 50, without 7."""

    end_ids, vision = (2, 11, 12), None

    def missing_ids(self, num_rows):
        return [7, *range(51, num_rows)]

    def decode(self, ids, *, skip_special):
        return ""


def test_a_tokenizer_says_what_ends_and_what_is_no_token(make_model):
    from aligner.rollout.config import RolloutConfig
    from aligner.rollout.create import create_engine

    policy = make_model("policy", seed=3)
    last = policy.chunks[0].architecture.vocab_size
    engine = create_engine(policy, RolloutConfig(sampling=SamplingConfig(max_response_length=40)), tokenizer=Words())
    rollouts = [one for part in engine.generate(PROMPTS * 60, range(180)) for one in part]
    drawn = {token for one in rollouts for token in one.response}
    assert last > 51 and not drawn & {7, *range(51, last)} and len(drawn) > 45
    ends = {one.response[-1] for one in rollouts if one.finish_reason is FinishReason.stop}
    assert ends == {2, 11, 12} and not any(set(one.response[:-1]) & ends for one in rollouts)


def test_an_engine_of_another_package(make_model, monkeypatch):
    """An entry point of the group aligner.engines is its name; it is called with what a wrapped engine needs to know."""
    from importlib.metadata import EntryPoint

    from aligner.rollout import config, create

    given = {}

    class Ours(FakeForeign):
        def __init__(self, rollout, **settings):
            given.update(settings, rollout=rollout, files=[path.name for path in settings["path"].iterdir()])
            super().__init__()

    monkeypatch.setattr(sys.modules[__name__], "Ours", Ours, raising=False)
    monkeypatch.setitem(sys.modules, "stranger", sys.modules[__name__])
    point = EntryPoint(name="ours", value="stranger:Ours", group=config.ENGINES)
    for module in (config, create):
        monkeypatch.setattr(module, "entry_points", lambda group, name="ours": [point] if (group, name) == (point.group, "ours") else [])
    with pytest.raises(ConfigError, match=r"rollout.engine=our: allowed: megatron, tensorrt_llm, vllm, auto, ours \(entry points"):
        config.RolloutConfig(engine="our")
    policy = make_model("policy")
    engine = create.create_engine(policy, config.RolloutConfig(engine="ours"), eos_id=2)
    assert engine.capabilities.name == "fake" and given["rollout"].engine == "ours"
    assert given["architecture"] == policy.chunks[0].architecture and given["files"] == ["config.json"]
    assert (given["eos_id"], given["tp"], given["max_sequence_length"]) == (2, 1, policy.chunks[0].max_sequence_length)
    engine = create.create_engine(policy, config.RolloutConfig(engine="ours"), tokenizer=Words())
    assert given["architecture"] == replace(policy.chunks[0].architecture, vocab_size=51)  # rows behind the last token are not sent
    full = dict(policy.export_weights())
    sent = engine.engine.foreign.weights
    assert sent.keys() == full.keys() and sent["model.embed_tokens.weight"].shape[0] == 51 and given["eos_id"] == 2
    assert all(torch.equal(tensor, full[name][: len(tensor)]) for name, tensor in sent.items())
    assert all(
        len(tensor) == len(full[name]) for name, tensor in sent.items() if name not in ("model.embed_tokens.weight", "lm_head.weight")
    )
