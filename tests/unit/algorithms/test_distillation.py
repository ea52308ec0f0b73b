"""Distillation: the loss by hand, on a real model against torch, on-policy on fakes, and the teacher's pass."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.distill import DistillationConfig, distillation_terms
from aligner.algorithms.online_distill import OnlineDistillation, OnlineDistillationConfig, Signal
from aligner.algorithms.teacher_logprobs import TeacherPass, TeacherPassConfig, TeacherSet
from aligner.data.collate import SupervisedExample
from aligner.data.distillation import Manifest
from aligner.errors import ConfigError
from aligner.loop.loop import Clock
from aligner.telemetry.metrics import values
from aligner.types import DistillationBatch, LabeledBatch, PolicyBatch, TokenOutputs

LENGTHS = [9, 5, 7, 4]


def batch_of(vocab: int, k: int = 3, seed: int = 0) -> DistillationBatch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    positions, lengths = torch.arange(shape[1]), torch.tensor(LENGTHS)
    mask = (positions >= 2) & (positions < lengths[:, None])
    named = torch.rand(*shape, vocab, generator=generator).argsort(dim=2)[..., :k]
    return DistillationBatch(
        tokens=torch.randint(vocab, shape, generator=generator) * (positions < lengths[:, None]),
        lengths=lengths,
        loss_mask=mask,
        teacher_tokens=torch.where(mask[..., None], named, 0),
        teacher_logprobs=torch.where(mask[..., None], -3 * torch.rand(*shape, k, generator=generator), 0.0),
    )


@pytest.mark.parametrize("packing", [False, True])
def test_a_real_model_gives_torchs_loss(make_model, packing: bool) -> None:
    """Its log-probs of the teacher's tokens are those of the full vocabulary, and a step on the loss lowers it."""
    from aligner.models.training.optimizer import OptimizerConfig

    optimizer = OptimizerConfig(lr=1e-2, min_lr=1e-2, warmup_steps=0)
    how = {"packing": True, "micro_batch_tokens": 16} if packing else {"micro_batch_size": 2}
    policy = make_model("policy", optimizer=optimizer, training=how)
    vocab = policy.module.architecture.vocab_size
    batch = batch_of(vocab)
    everything, logprobs = policy.topk(batch, vocab, below=vocab)
    by_token = torch.zeros(*batch.tokens.shape, vocab).scatter(2, everything, logprobs)
    outputs = policy.named_logprobs(batch)
    expected = by_token.gather(2, batch.teacher_tokens) * batch.loss_mask[..., None]
    torch.testing.assert_close(outputs.topk_logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.logprobs, policy.logprobs(batch), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_token.exp().sum(dim=2)[batch.loss_mask], torch.ones(int(batch.loss_mask.sum())))

    def loss(outputs, batch):
        return distillation_terms(outputs, batch, ce_coef=0.0)

    before = loss(outputs, batch)
    metrics = values(policy.train_step(batch, loss))
    assert metrics["distillation/loss"] == pytest.approx(before.total.item() / before.count.item(), rel=1e-5)
    for _ in range(3):
        policy.train_step(batch, loss)
    after = loss(policy.named_logprobs(batch), batch)
    assert after.total < 0.8 * before.total


class FakeTeacher:
    """Log-probs of -1.5 a token; names token 4 and 3 with 1/2 and 1/4 everywhere."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def logprobs(self, batch) -> torch.Tensor:
        self.log.append("teacher")
        return -1.5 * batch.loss_mask

    def topk(self, batch, k: int, *, below: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.log.append(f"teacher {k} below {below}")
        shape = (*batch.tokens.shape, 2)
        mask = batch.loss_mask[..., None]
        return torch.tensor([4, 3]).expand(shape) * mask, torch.tensor([0.5, 0.25]).log().expand(shape) * mask


def online(fakes, make_task, log: list[str], **settings) -> OnlineDistillation:
    config = OnlineDistillationConfig(**({"prompts_per_step": 2, "mini_batch_size": 2, "top_k": 2} | settings))
    return OnlineDistillation(config, fakes.FakePolicy(log), make_task(log, batch_size=2), FakeTeacher(log), below=7)


def test_an_online_step_on_the_teachers_tokens(fakes, make_task) -> None:
    log: list[str] = []
    algorithm = online(fakes, make_task, log)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["policy sleeps", "engine wakes", "generate", "engine sleeps", "teacher 2 below 7", "update", "policy sleeps", "refit 1"]
    (batch,) = algorithm.policy.trained
    assert batch.tokens.tolist() == [[1, 7, 0, 9], [2, 7, 7, 0]] and batch.teacher_tokens[0, 1].tolist() == [4, 3]
    assert torch.equal(batch.rollout_logprobs, -1.0 * batch.loss_mask)
    assert metrics["teacher/mass"] == pytest.approx(0.75)
    assert not any(name.startswith("rollout/reward") for name in metrics)


def test_an_online_step_on_sampled_tokens(fakes, make_task) -> None:
    """Student -1, teacher -1.5 a token: an advantage of -0.5, an estimated reverse KL of 0.5."""
    log: list[str] = []
    algorithm = online(fakes, make_task, log, signal=Signal.sampled)
    metrics = algorithm.step(1, Clock()).metrics
    (batch,) = algorithm.policy.trained
    assert isinstance(batch, PolicyBatch) and torch.equal(batch.advantages, -0.5 * batch.loss_mask)
    assert torch.equal(batch.old_logprobs, -1.0 * batch.loss_mask)
    assert metrics["distillation/reverse_kl"] == 0.5
    found = algorithm.sampled_loss(TokenOutputs(logprobs=-1.0 * batch.loss_mask), batch)
    assert found.total.item() / found.count.item() == pytest.approx(0.5)
    assert algorithm.validate() == {"validation/reverse_kl": 0.5, "validation/response_length": 2.5}


def test_bad_settings() -> None:
    for make, text in (
        (lambda: DistillationConfig(teacher_weight=1.0), "algorithm.teacher_weight=1.0: must be between 0 and 1"),
        (lambda: DistillationConfig(temperature=0), "algorithm.temperature=0: must be above 0"),
        (lambda: DistillationConfig(ce_coef=-1), "algorithm.ce_coef=-1: must not be negative"),
        (lambda: DistillationConfig(batch_size=0), "algorithm.batch_size=0"),
        (lambda: OnlineDistillationConfig(top_k=0), "algorithm.top_k=0: must be at least 1"),
        (lambda: OnlineDistillationConfig(signal=Signal.sampled, ce_coef=0.1), "algorithm.ce_coef=0.1: the text is the student's own"),
        (lambda: TeacherPassConfig(shard_size=0), "algorithm.shard_size=0: must be at least 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert text in str(caught.value)


def test_the_teachers_pass() -> None:
    """Files of two and one examples, then one of the second set: step 3 writes its first."""

    class Teacher:
        def topk(self, batch: LabeledBatch, k: int, *, below: int) -> tuple[torch.Tensor, torch.Tensor]:
            named = batch.tokens[..., None].expand(-1, -1, k).clone()
            return named * batch.loss_mask[..., None], torch.full(named.shape, math.log(0.25)) * batch.loss_mask[..., None]

    rows = [SupervisedExample(tokens=(1, 2 + row), loss_mask=(False, True), source=f"x:{row}") for row in range(4)]
    written: dict[tuple[str, int], list] = {}

    def one_set(name: str, examples: list) -> TeacherSet:
        manifest = Manifest(top_k=2, num_examples=len(examples), shard_size=2, data="", tokenizer="", model="", made_of="")
        return TeacherSet(examples=examples, manifest=manifest, write=lambda shard, found: written.update({(name, shard): found}))

    sets = [one_set("train", rows[:3]), one_set("validation", rows[3:])]
    work = TeacherPass(TeacherPassConfig(top_k=2, shard_size=2, batch_size=1), Teacher(), sets, pad_id=0, below=9)
    assert work.num_steps == 3
    metrics = [work.step(step, Clock()).metrics for step in (1, 2, 3)]
    assert metrics[0]["teacher/mass"] == pytest.approx(0.5)
    assert {key: [one.tokens for one in found] for key, found in written.items()} == {
        ("train", 0): [(1, 2), (1, 3)],
        ("train", 1): [(1, 4)],
        ("validation", 0): [(1, 5)],
    }
    assert written["train", 1][0].teacher_tokens.tolist() == [[4, 4]]
