"""KTO on fakes: what a step asks of its parts, the KL of the whole batch, validation by hand, and the config's checks."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.algorithms.kto import KTO, KTOConfig, balance
from aligner.data.collate import SupervisedExample
from aligner.data.judged import UnpairedExample
from aligner.errors import DataError
from aligner.loop.loop import Clock
from aligner.losses.preference import UnpairedLoss
from aligner.types import LabeledBatch


def example(prompt: int, *response: int, desirable: bool) -> UnpairedExample:
    row = SupervisedExample(tokens=(prompt, *response), loss_mask=(False, *[True] * len(response)), source="test:1")
    return UnpairedExample(row=row, desirable=desirable)


EXAMPLES = [example(1, 5, desirable=True), example(2, 6, 6, desirable=False), example(3, 20, desirable=False)]


class FakeReference:
    """Log-probs are `level` on every masked token, or -token / 10 where that is None."""

    def __init__(self, level: float | None = -1.5) -> None:
        self.level = level
        self.asked: list[LabeledBatch] = []

    def logprobs_of(self, batches: list[LabeledBatch]) -> list[torch.Tensor]:
        self.asked += batches
        return [(-batch.tokens / 10 if self.level is None else self.level) * batch.loss_mask for batch in batches]


def kto(fakes, log=None, *, policy=None, reference=None, validation=(), max_length=8, **config) -> KTO:
    log = [] if log is None else log
    return KTO(
        KTOConfig(**({"batch_size": 3, "validation_batch_size": 2} | config)),
        policy or fakes.FakePolicy(log),
        reference or FakeReference(),
        train=EXAMPLES,
        validation=validation,
        max_length=max_length,
        pad_id=0,
        seed=1,
    )


def test_a_step(fakes) -> None:
    """The reference sees both kinds of rows, the policy the mismatched ones without gradient, then an update."""
    log: list[str] = []
    reference = FakeReference(None)
    algorithm = kto(fakes, log, reference=reference)
    metrics = algorithm.step(1, Clock()).metrics
    assert log == ["logprobs", "update"]
    matched, mismatched = reference.asked
    (batch,) = algorithm.policy.trained
    assert torch.equal(matched.tokens, batch.tokens) and torch.equal(mismatched.tokens[:, 0], prompts := batch.tokens[:, 0])
    assert torch.equal(mismatched.tokens[:, 1:], batch.tokens[:, 1:].roll(1, dims=0))
    torch.testing.assert_close(batch.ref_logprobs, -batch.tokens / 10 * batch.loss_mask)
    assert batch.labels[:, 0].tolist() == [1.0 if prompt == 1 else -1.0 for prompt in prompts.tolist()]
    assert metrics["optim/steps"] == 1 and metrics["data/epoch"] == 1.0 and metrics["data/tokens_per_second"] > 0


def test_the_data_of_a_step_depend_on_its_number_alone(fakes) -> None:
    """So that a resumed run needs no position in the data."""
    one, other = kto(fakes, batch_size=2), kto(fakes, batch_size=2)
    for step in (1, 2, 3):
        one.step(step, Clock())
    other.step(3, Clock())
    assert torch.equal(one.policy.trained[2].tokens, other.policy.trained[0].tokens)
    assert one.state() == {}


def test_the_kl_reaches_the_loss_and_belongs_to_the_whole_batch(fakes) -> None:
    """The policy's level is -1, the reference's -1.5: 0.5 for each token of responses of 1, 2 and 1 tokens, so z = 2 / 3.

    With -token / 10 for the reference, tokens 5, 6, 6 and 20 give -0.5, -0.8 and 1 in the mean below 0.
    """
    seen = {}
    algorithm = kto(fakes)
    algorithm.policy.train_step = lambda batch, loss: seen.update(loss.keywords) or {}
    algorithm.step(1, Clock())
    assert seen["kl"] == pytest.approx(2 / 3) and seen["beta"] == 0.1
    below = kto(fakes, reference=FakeReference(None))
    below.policy.train_step = lambda batch, loss: seen.update(loss.keywords) or {}
    below.step(1, Clock())
    assert seen["kl"] == 0.0


def test_the_kl_is_averaged_over_tokens_where_log_ratios_are(fakes) -> None:
    """0.5 for each token of each response, and so for each mean."""
    seen = {}
    algorithm = kto(fakes, average_logprobs=True)
    algorithm.policy.train_step = lambda batch, loss: seen.update(loss.keywords) or {}
    algorithm.step(1, Clock())
    assert seen["kl"] == pytest.approx(0.5) and seen["average_logprobs"] is True


class PairPolicy:
    """The log-prob of a response token is -(the prompt's token) * (its own) / 100: it depends on which prompt a response stands behind."""

    def logprobs(self, batch: LabeledBatch) -> torch.Tensor:
        return -batch.tokens * batch.tokens[:, :1] / 100 * batch.loss_mask


def test_the_kl_is_of_the_mismatched_rows(fakes) -> None:
    """Reference 0.5 below 0 per token, whatever stands before it. Behind their own prompts the responses give
    0.5 - 0.05, 1 - 0.24 and 0.5 - 0.6: mean 1.11 / 3. Moved on by one, (1, 20), (2, 5), (3, 6, 6): 0.5 - 0.2, 0.5 - 0.1 and 1 - 0.36.
    """
    algorithm = kto(fakes, policy=PairPolicy(), reference=FakeReference(-0.5), validation=EXAMPLES, validation_batch_size=3)
    assert algorithm.validate()["validation/kl"] == pytest.approx((0.3 + 0.4 + 0.64) / 3)
    seen = {}
    algorithm.policy.train_step = lambda batch, loss: seen.update(kl=loss.keywords["kl"], prompts=batch.tokens[:, 0].tolist()) or {}
    algorithm.step(1, Clock())
    order = [prompt - 1 for prompt in seen["prompts"]]
    responses = [EXAMPLES[order[index - 1]].response for index in range(3)]  # each prompt's, in the order of this step's batch
    ratios = [sum(0.5 - (row + 1) * token / 100 for token in response) for row, response in zip(order, responses, strict=True)]
    assert seen["kl"] == pytest.approx(sum(ratios) / 3)


def test_apo_zero_makes_no_pass_for_a_kl(fakes) -> None:
    log: list[str] = []
    reference = FakeReference()
    kto(fakes, log, reference=reference, loss=UnpairedLoss.apo_zero).step(1, Clock())
    assert log == ["update"] and len(reference.asked) == 1


def test_validation_by_hand(fakes) -> None:
    """d = 1.0 | 1.8 | -0.5. Mismatched: (1, 20), (2, 5), (3, 6, 6): -0.5, 1, 1.8, so z = 2.3 / 3, of all batches together."""
    policy, reference = fakes.TokenPolicy(), FakeReference()
    algorithm = kto(fakes, policy=policy, reference=reference, validation=EXAMPLES, beta=0.5, undesirable_weight=2.0)
    found, z = algorithm.validate(), 2.3 / 3
    sigma = [1 / (1 + math.exp(x)) for x in (0.5 * (1.0 - z), 0.5 * (z - 1.8), 0.5 * (z + 0.5))]
    assert found["validation/kl"] == pytest.approx(z)
    assert found["validation/loss"] == pytest.approx((sigma[0] + 2 * sigma[1] + 2 * sigma[2]) / 3)
    assert found["validation/accuracy"] == pytest.approx(2 / 3)
    assert found["validation/desirable_reward"] == pytest.approx(0.5)
    assert found["validation/undesirable_reward"] == pytest.approx(0.5 * 1.3 / 2)
    assert found.keys() == set(algorithm.config.reports)
    assert algorithm.validate() == found and len(reference.asked) == 4  # two batches of each kind, once
    assert kto(fakes).validate() == {}


def test_the_kl_cannot_be_estimated_on_one_validation_example(fakes) -> None:
    with pytest.raises(DataError, match=r"data\.validation has one usable response"):
        kto(fakes, validation=EXAMPLES[:1])
    assert (
        kto(fakes, policy=fakes.TokenPolicy(), validation=EXAMPLES[:1], loss=UnpairedLoss.apo_zero).validate()["validation/accuracy"] == 1.0
    )


def test_the_balance_of_the_two_kinds() -> None:
    """One to two: the single good response is advised to weigh 2 to 8/3."""
    counts = "1 desirable and 2 undesirable responses"
    advice = f"{counts}, of weight 0.5 to 1 in all; advised is 1 to 4/3: algorithm.desirable_weight=2 to 2.67"
    assert balance(EXAMPLES, KTOConfig()) == advice
    assert balance(EXAMPLES, KTOConfig(desirable_weight=2.0)) == counts
    assert balance(EXAMPLES[1:], KTOConfig()) == "0 desirable and 2 undesirable responses"
