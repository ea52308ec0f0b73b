"""Responses that go on with new weights: every token is of the version that is said, and its log-prob is that version's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fake_decoder import EOS, PAGE, VOCAB, FakeDecoder, draws_alone, generation_of
from rollout_parts import sampled
from torch import Tensor

from aligner.losses.sft import sft_loss
from aligner.models.training.optimizer import OptimizerConfig
from aligner.parallel import platform
from aligner.rollout.builtin.attention import DecodeBatch, PagedKV, PrefillChunk
from aligner.rollout.config import AsynchronousConfig, EngineKind, RolloutConfig
from aligner.rollout.engine import GenRequest, GenResult, ListedWork
from aligner.types import LabeledBatch, Prompt, Rollout, SamplingConfig


class Versioned(FakeDecoder):
    """A decoder whose weights have versions: each is other noise, and sends tokens to another expert."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self._noises = [2 * torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(version)) for version in range(9)]
        self.take(0)

    def take(self, version: int) -> None:
        self.version, self._noise = version, self._noises[version]

    def new_cache(self, num_pages: int) -> PagedKV:
        return replace(super().new_cache(num_pages), routes=torch.full((1, num_pages + 1, PAGE, 1), 255, dtype=torch.uint8))

    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                cache.routes[0, chunk.pages[position // PAGE], position % PAGE] = self.version
        return super().prefill(chunks, cache)

    def decode(self, batch: DecodeBatch, cache: PagedKV) -> Tensor:
        cache.routes[0].flatten(0, 1)[batch.slots(PAGE)] = self.version
        return super().decode(batch, cache)


class Switches:
    """New weights before the steps with these numbers."""

    def __init__(self, take: Callable[[int], None], at: Sequence[int]) -> None:
        self._take = take
        self._at = list(at)
        self.steps = 0
        self.version = 0

    def between_steps(self, settle: Callable[[], None]) -> int | None:
        self.steps += 1
        if self.steps not in self._at:
            return None
        settle()
        self.version += 1
        self._take(self.version)
        return self.version


def version_at(result: GenResult, token: int) -> int:
    """Of the weights that are said to have sampled this token."""
    versions = result.versions or ((0, result.weight_version),)
    return [version for start, version in versions if start <= token][-1]


def expected(request: GenRequest, result: GenResult, sampling: SamplingConfig) -> tuple[list[int], list[float]]:
    """Tokens and log-probs by the plainest loop, each of the version that the result says."""
    decoder = Versioned()
    how = {"decoder": decoder, "before": lambda number: decoder.take(version_at(result, number))}
    draws = draws_alone(request.tokens, request.seed, sampling, sampling.max_response_length, **how)
    return [int(draw.tokens) for draw in draws], [float(draw.logprobs) for draw in draws]


@pytest.mark.cpu  # where the decoder's stand-in is
@pytest.mark.parametrize("recompute", [False, True])
def test_any_schedule_of_new_weights(recompute):
    rng = random.Random(5)
    partial = refits = 0
    for number in range(4):
        prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 7, 8, 20]))) for _ in range(4)]
        requests = [GenRequest(index=i, tokens=prompts[i // 4], seed=rng.randrange(2**60)) for i in range(12)]
        sampling = SamplingConfig(max_response_length=20, min_response_length=rng.choice([0, 12]), repetition_penalty=1.2)
        decoder = Versioned()
        switches = Switches(decoder.take, at=sorted(rng.sample(range(1, 30), 3)))
        generation = generation_of(
            decoder,
            max_batch_size=rng.choice([3, 6, 16]),
            kv_cache_tokens=rng.choice([0, 48, 64]),
            prefill_chunk_tokens=rng.choice([5, 100]),
            steps_ahead=number % 3,
            pauses=switches,
            recompute=recompute,
        )
        results = [result for part in generation.run(ListedWork(requests), sampling, 0) for result in part]
        assert sorted(result.index for result in results) == list(range(12))
        for result in results:
            assert [start for start, _ in result.versions] == sorted({start for start, _ in result.versions})
            assert not result.versions or (result.versions[0][0], result.versions[-1][1]) == (0, result.weight_version)
            assert (list(result.tokens), list(result.logprobs)) == expected(requests[result.index], result, sampling)
            routes = result.extras["routes"].flatten().tolist()[len(requests[result.index].tokens) - 1 :]  # of the tokens before these
            assert routes == [version_at(result, number) for number in range(len(result.tokens))]
            partial += bool(result.versions)
        refits += generation.counters.refits
    assert refits >= 10 and partial > 12  # and prompts of before were not shared with responses of after: `expected` has no such thing


@pytest.mark.cpu
def test_the_last_version_is_known_where_nothing_runs():
    decoder = Versioned()
    switches = Switches(decoder.take, at=[1])
    generation = generation_of(decoder, pauses=switches)
    request = GenRequest(index=0, tokens=(5, 6), seed=1)
    (result,) = [result for part in generation.run(ListedWork([request]), SamplingConfig(max_response_length=6), 0) for result in part]
    assert (result.weight_version, result.versions) == (1, ())


class Model:
    """A random policy and copies of its weights before and after an update; `logprobs(version, ...)` are the trainer's own."""

    def __init__(self, make_model, **fields) -> None:
        self.policy = make_model("policy", optimizer=OptimizerConfig(lr=3e-2, min_lr=3e-2, warmup_steps=0), **fields)
        self.weights = [self._copy()]
        tokens = torch.arange(3, 27).view(2, 12)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[:, :4] = False
        self.policy.train_step(LabeledBatch(tokens=tokens, lengths=torch.tensor([12, 12]), loss_mask=mask), sft_loss)
        self.weights.append(self._copy())

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.policy.module.parameters()]

    @torch.no_grad()
    def take(self, version: int) -> None:
        for parameter, saved in zip(self.policy.module.parameters(), self.weights[version], strict=True):
            parameter.copy_(saved)

    def logprobs(self, version: int, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Of the responses under this version."""
        from aligner.data.collate import rollout_batch

        self.take(version)
        batch = rollout_batch(rollouts, 0)
        found = self.policy.logprobs(batch)
        return [row[mask].tolist() for row, mask in zip(found, batch.loss_mask, strict=True)]


class Interrupted:
    """An engine on a model, refitted from another thread's point of view: before step `at` of the generation, by its own gate."""

    def __init__(self, model: Model, *, at: int, recompute: bool) -> None:
        from aligner.rollout.create import create_engine

        config = RolloutConfig(
            sampling=SamplingConfig(max_response_length=10, min_response_length=10),
            max_batch_size=6,
            asynchronous=AsynchronousConfig(max_staleness=1, recompute=recompute),
        )
        model.take(0)
        self.engine = create_engine(model.policy, config, eos_id=EOS)
        gate = self.engine.gate
        stand = gate.between_steps
        steps = 0

        def between_steps(settle: Callable[[], None]) -> int | None:
            nonlocal steps
            steps += 1
            if steps != at:
                return stand(settle)
            settle()
            model.take(1)
            self.engine.engine.refit(1)  # what `PhasedEngine.refit` does while the gate holds this thread
            return 1

        gate.between_steps = between_steps

    def rollouts(self) -> list[Rollout]:
        prompts = [Prompt(id=i, tokens=tokens, source="") for i, tokens in enumerate([(5, 9, 11), (40,), (7, 8, 9, 10, 3)])]
        return sampled(self.engine, [p for p in prompts for _ in range(2)], [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_log_probs_of_both_stretches_are_those_of_their_versions(make_model, batch_invariant):
    """With keys and values computed again, both stretches are exactly what the trainer's versions give the whole response."""
    model = Model(make_model, config={"batch_invariant": batch_invariant})
    rollouts = Interrupted(model, at=6, recompute=True).rollouts()
    assert [(one.oldest_version, one.policy_version, len(one.response)) for one in rollouts] == [(0, 1, 10)] * 6
    old, new = model.logprobs(0, rollouts), model.logprobs(1, rollouts)
    # The prompts in one pass, then a token a step: five were drawn when the weights changed.
    for rollout, before, after in zip(rollouts, old, new, strict=True):
        assert list(rollout.logprobs) == pytest.approx(before[:5] + after[5:], abs=0 if batch_invariant else 2e-5)
        assert max(abs(x - y) for x, y in zip(before, after, strict=True)) > 0.05  # the versions do differ


def test_kept_keys_and_values_are_those_of_the_old_weights(make_model):
    """Against a decoder that is driven by hand: the first tokens go into its cache with the old weights, the others with the new ones."""
    from aligner.rollout.builtin.attention import DecodeBatch, PrefillChunk

    model = Model(make_model)
    interrupted = Interrupted(model, at=6, recompute=False)
    rollouts = interrupted.rollouts()
    exact = model.logprobs(1, rollouts)
    engine = interrupted.engine.engine
    decoder = engine.decoder
    differs = 0.0
    for rollout, recomputed in zip(rollouts, exact, strict=True):
        cache = decoder.new_cache(4)
        tokens, drawn = rollout.tokens, 5
        known = len(rollout.prompt.tokens) + drawn - 1  # the token drawn last is not in the cache yet
        model.take(0)
        engine.refit(0)
        decoder.prefill([PrefillChunk(tokens=tokens[:known], start=0, pages=[0, 1], wants_logits=True)], cache)
        model.take(1)
        engine.refit(1)
        for position in range(known, len(tokens) - 1):
            on = {"device": platform.device()}
            token, pages = torch.tensor([tokens[position]], **on), torch.tensor([[0, 1]], **on)
            batch = DecodeBatch(tokens=token, positions=torch.tensor([position], **on), pages=pages)
            logprobs = decoder.decode(batch, cache).log_softmax(-1)[0]
            number = position + 1 - len(rollout.prompt.tokens)
            assert rollout.logprobs[number] == pytest.approx(float(logprobs[tokens[position + 1]]), abs=2e-5)
            differs = max(differs, abs(rollout.logprobs[number] - recomputed[number]))
    assert differs > 1e-3  # which is what `recompute` is for


def test_a_snapshot_stays_as_it_is_while_the_policy_trains(make_model):
    from aligner.rollout.builtin.refit import SnapshotWeights
    from aligner.rollout.create import create_engine

    model = Model(make_model)
    model.take(0)
    config = RolloutConfig(sampling=SamplingConfig(max_response_length=6), asynchronous=AsynchronousConfig(max_staleness=2))
    engine = create_engine(model.policy, config, eos_id=EOS)
    assert isinstance(engine.engine.weights, SnapshotWeights)
    assert engine.refitted_bytes == sum(parameter.numel() * 4 for parameter in model.policy.module.parameters())

    def sample() -> list[Rollout]:
        return sampled(engine, [Prompt(id=0, tokens=(4, 5), source="")] * 3)

    before = sample()
    model.take(1)
    assert sample() == before
    engine.refit(1)
    assert sample() != before
    for rollout, logprobs in zip(sample(), model.logprobs(1, sample()), strict=True):
        assert list(rollout.logprobs) == pytest.approx(logprobs, abs=2e-5)
    engine.shutdown()


def test_what_cannot_be_asynchronous_is_refused():
    from aligner.errors import ConfigError

    ahead = AsynchronousConfig(max_staleness=1)
    for fields, message in (
        ({"engine": EngineKind.vllm}, "rollout.engine=vllm samples between training phases; allowed: megatron, or 0"),
        ({"engine": EngineKind.tensorrt_llm}, "rollout.engine=tensorrt_llm samples"),
        ({"offload": True}, "allowed: with rollout.offload=false, or 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            RolloutConfig(asynchronous=ahead, **fields)
    for fields, message in (
        ({"max_staleness": -1}, "max_staleness=-1: must not be negative"),
        ({"recompute": True, "partial": False}, "allowed: with partial=true"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            AsynchronousConfig(**fields)
