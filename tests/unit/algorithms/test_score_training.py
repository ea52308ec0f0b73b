"""Regression and process reward models: learning by a real model, validation by hand, and what packing must not change."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from aligner.algorithms.process_reward_model import ProcessRewardModelConfig, ProcessRewardModelTraining, process_loss
from aligner.algorithms.regression_reward_model import RegressionConfig, RegressionTraining, TrainRegressionRewardModel, correlation
from aligner.algorithms.reward_model import RewardModelConfig
from aligner.data.collate import SupervisedExample
from aligner.data.judged import LabelledExample, SteppedExample, labelled_batch, step_batch
from aligner.data.labelled import MISSING
from aligner.errors import ConfigError
from aligner.loop.loop import Clock
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.models.training.optimizer import OptimizerConfig

NAMES = ("good", "long")
PACKED = {"micro_batch_tokens": 40, "packing": True}


def rows(count: int, seed: int = 0) -> list[SupervisedExample]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=draw).tolist()
    tokens = [tuple(torch.randint(1, 60, (length,), generator=draw).tolist()) for length in lengths]
    return [SupervisedExample(tokens=row, loss_mask=(False, *[True] * (len(row) - 1)), source=f"d:{i}") for i, row in enumerate(tokens)]


def labelled(count: int) -> list[LabelledExample]:
    """The first label is of the last token, the second of the first one, and missing in every third row."""
    return [
        LabelledExample(row=row, labels=(row.tokens[-1] / 30 - 1, MISSING if i % 3 == 0 else row.tokens[0] / 30 - 1))
        for i, row in enumerate(rows(count))
    ]


def stepped(count: int) -> list[SteppedExample]:
    """A step ends at every third token; it is good where that token is odd."""
    found = []
    for row in rows(count):
        mask = tuple(i % 3 == 2 for i in range(len(row.tokens)))
        labels = tuple(float(token % 2) for token, ends in zip(row.tokens, mask, strict=True) if ends)
        found.append(SteppedExample(row=SupervisedExample(tokens=row.tokens, loss_mask=mask, source=row.source), labels=labels))
    return found


def adam() -> OptimizerConfig:
    return OptimizerConfig(lr=3e-3, warmup_steps=0, weight_decay=0.0)


def model(make_model, pooling=Pooling.last, outputs=NAMES, **training):
    return make_model(
        "reward", optimizer=adam(), training={"total_steps": 100} | training, head=ScalarHead(outputs=outputs, pooling=pooling)
    )


@pytest.mark.parametrize("pooling", [Pooling.last, Pooling.mean])
def test_regression_does_not_depend_on_packing_or_micro_batches(pooling, make_model):
    batch = labelled_batch(labelled(8), 0)
    results = []
    for training in ({"micro_batch_size": 8}, {"micro_batch_size": 3}, PACKED):
        reward = model(make_model, pooling, **training)
        scores = reward.scores(batch)
        algorithm = RegressionTraining(
            RegressionConfig(pooling=pooling), reward, attributes=NAMES, train=labelled(8), validation=[], pad_id=0, seed=1
        )
        metrics = {name: metric.value() for name, metric in reward.train_step(batch, algorithm.loss).items()}
        results.append((scores, metrics, reward.model.module.score_head.weight.clone()))
    (scores, metrics, weight), *others = results
    hidden_rows = make_model("reward", head=ScalarHead(outputs=NAMES, pooling=pooling))
    alone = torch.cat([hidden_rows.scores(labelled_batch([example], 0)) for example in labelled(8)])
    torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
    there = batch.labels != MISSING
    assert metrics["reward/loss"] == pytest.approx((scores - batch.labels)[there].square().mean().item(), rel=1e-5)
    for other_scores, other_metrics, other_weight in others:
        torch.testing.assert_close(other_scores, scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(other_weight, weight, rtol=0, atol=1e-5)
        assert other_metrics == pytest.approx(metrics, rel=1e-4)


def test_mean_pooling_is_the_mean_of_the_scores_of_all_tokens(make_model):
    """Of a causal model: the scores of all beginnings of a row, by the same head on their last tokens."""
    mean, last = (make_model("reward", head=ScalarHead(pooling=pooling)) for pooling in (Pooling.mean, Pooling.last))
    with torch.no_grad():
        last.model.module.score_head.weight.copy_(mean.model.module.score_head.weight)
        mean.model.module.score_head.bias.fill_(0.5)
    (row,) = rows(1)
    example = LabelledExample(row=row, labels=(0.0,))
    starts = [
        LabelledExample(row=SupervisedExample(tokens=row.tokens[:n], loss_mask=row.loss_mask[:n], source=""), labels=(0.0,))
        for n in range(1, len(row.tokens) + 1)
    ]
    expected = last.scores(labelled_batch(starts, 0)).mean() + 0.5
    torch.testing.assert_close(mean.scores(labelled_batch([example], 0))[0, 0], expected, rtol=0, atol=1e-5)


def test_a_regression_learns_and_its_validation_is_that_of_its_scores(make_model):
    examples = labelled(24)
    reward = model(make_model, micro_batch_size=24)
    config = RegressionConfig(batch_size=24, validation_batch_size=7)
    algorithm = RegressionTraining(config, reward, attributes=NAMES, train=examples, validation=examples, pad_id=0, seed=1)
    before = algorithm.validate()
    for step in range(1, 26):
        metrics = algorithm.step(step, Clock()).metrics
    after = algorithm.validate()
    reported = TrainRegressionRewardModel.reports(SimpleNamespace(data=SimpleNamespace(attributes=NAMES)))
    assert set(after) == set(reported) and {"reward/mse_good", "reward/mse_long"} <= set(metrics)
    assert after["validation/mse"] < 0.2 * before["validation/mse"]
    scores = reward.scores(labelled_batch(examples, 0))
    labels = labelled_batch(examples, 0).labels
    there = labels[:, 1] != MISSING
    assert after["validation/mse_good"] == pytest.approx((scores - labels)[:, 0].square().mean().item(), rel=1e-4)
    expected = torch.corrcoef(torch.stack([scores[there, 1], labels[there, 1]]))[0, 1].item()
    assert after["validation/correlation_long"] == pytest.approx(expected, rel=1e-4)


def test_correlation():
    one = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert correlation(one, -2 * one + 3) == pytest.approx(-1)
    assert correlation(one, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)) == pytest.approx(-2 / math.sqrt(7))
    assert math.isnan(correlation(one, torch.ones(3, dtype=torch.float64))) and math.isnan(correlation(one[:1], one[:1]))


def test_steps_are_scored_where_they_end_whatever_the_batch(make_model):
    """The score of a step is that of the row cut behind it; the steps behind it do not matter."""
    examples = stepped(6)
    batch = step_batch(examples, 0)
    results = []
    for training in ({"micro_batch_size": 6}, {"micro_batch_size": 2}, PACKED):
        prm = model(make_model, Pooling.tokens, ("step",), **training)
        scores = prm.step_scores(batch)
        metrics = {name: metric.value() for name, metric in prm.train_step(batch, process_loss).items()}
        results.append((scores, metrics, prm.model.module.score_head.weight.clone()))
    (scores, metrics, weight), *others = results
    assert not scores[~batch.loss_mask].any()
    whole = make_model("reward", head=ScalarHead(outputs=("step",), pooling=Pooling.tokens))
    for row, example in enumerate(examples):
        for stop in (i for i, ends in enumerate(example.row.loss_mask) if ends):
            cut = SupervisedExample(tokens=example.row.tokens[: stop + 1], loss_mask=(False,) * stop + (True,), source="")
            expected = whole.scores(labelled_batch([LabelledExample(row=cut, labels=(0.0,))], 0))[0, 0]
            torch.testing.assert_close(scores[row, stop], expected, rtol=0, atol=1e-5)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores[batch.loss_mask], batch.step_labels[batch.loss_mask])
    assert metrics["reward/loss"] == pytest.approx(expected.item(), rel=1e-5)
    for other_scores, other_metrics, other_weight in others:
        torch.testing.assert_close(other_scores, scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(other_weight, weight, rtol=0, atol=1e-5)
        assert other_metrics == pytest.approx(metrics, rel=1e-4)


def test_a_process_reward_model_learns(make_model):
    examples = stepped(16)
    prm = model(make_model, Pooling.tokens, ("step",), micro_batch_size=16)
    config = ProcessRewardModelConfig(batch_size=16, validation_batch_size=5)
    algorithm = ProcessRewardModelTraining(config, prm, train=examples, validation=examples, pad_id=0, seed=1)
    for step in range(1, 26):
        algorithm.step(step, Clock())
    found = algorithm.validate()
    assert found["validation/accuracy"] > 0.95 and found["validation/first_error_accuracy"] > 0.8 and found["validation/loss"] < 0.3


def test_the_first_error_of_a_response():
    class Scores:
        def step_scores(self, batch):
            return torch.tensor([[0.0, 2.0, -1.0, 3.0], [0.0, 1.0, 1.0, 1.0], [0.0, -1.0, 1.0, 1.0]])

    row = SupervisedExample(tokens=(1, 2, 3, 4), loss_mask=(False, True, True, True), source="")
    examples = [SteppedExample(row=row, labels=labels) for labels in ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 0.0, 1.0))]
    algorithm = ProcessRewardModelTraining(ProcessRewardModelConfig(), Scores(), train=examples, validation=examples, pad_id=0, seed=1)
    found = algorithm.validate()
    assert found["validation/first_error_accuracy"] == pytest.approx(2 / 3)  # the third is found a step too early
    assert found["validation/accuracy"] == pytest.approx(6 / 9)  # wrong: the third step of the first, the first two of the third


def test_settings():
    for make in (RegressionConfig, RewardModelConfig):
        with pytest.raises(ConfigError, match="allowed: last, mean"):
            make(pooling=Pooling.tokens)
    for make in (RegressionConfig, ProcessRewardModelConfig):
        with pytest.raises(ConfigError, match="must be at least 1"):
            make(batch_size=0)
