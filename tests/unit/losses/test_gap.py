"""The gap between engine and trainer: its distribution, KL both ways, the weights; all by hand."""

from __future__ import annotations

import math

import pytest
import torch

from aligner.losses.correction import Correction, CorrectionConfig, Level, correction_weights, gap_metrics, with_gap
from aligner.losses.sft import sft_loss
from aligner.telemetry.metrics import values
from aligner.types import LabeledBatch, LossOutput, TokenOutputs

MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
GAPS = (0.1, -0.2, 0.0, 0.4, 0.0)  # trainer's minus engine's


def on_tokens(numbers) -> torch.Tensor:
    """Elsewhere what must not count."""
    return torch.full((2, 5), 7.0).masked_scatter(MASK, torch.as_tensor(numbers, dtype=torch.float32))


OLD = on_tokens([-1.0, -2.0, -0.5, -3.0, -1.5])
ENGINE = OLD - torch.zeros(2, 5).masked_scatter(MASK, torch.tensor([3.0, 0.25, 1.5, 1.0, 1.0]).log())  # weights 3, 1/4 | 3/2, 1, 1


def reported(gaps=GAPS, mask=MASK) -> dict[str, float]:
    return values(gap_metrics(OLD, OLD - torch.zeros(2, 5).masked_scatter(MASK, torch.tensor(gaps)), mask))


def test_distribution_and_kl_by_hand() -> None:
    got = reported()
    assert got["rollout/logprob_gap"] == pytest.approx(0.7 / 5, abs=1e-6)
    assert got["rollout/logprob_gap_max"] == pytest.approx(0.4, abs=1e-6)
    # sorted: 0, 0, 0.1, 0.2, 0.4
    assert got["rollout/logprob_gap_p50"] == pytest.approx(0.1, rel=0.016)
    assert got["rollout/logprob_gap_p90"] == got["rollout/logprob_gap_p999"] == pytest.approx(0.4, rel=0.016)
    forward = sum(math.exp(g) - 1 - g for g in GAPS) / 5
    reverse = sum(math.exp(g) * g - math.exp(g) + 1 for g in GAPS) / 5
    assert got["rollout/logprob_kl"] == pytest.approx(forward, abs=1e-6)
    assert got["rollout/logprob_kl_reverse"] == pytest.approx(reverse, abs=1e-6)


def test_weights_by_hand() -> None:
    """Weights 1, 2, 1/2, 4, 1/2: sum 8, squares 21.5."""
    got = reported([math.log(w) for w in (1.0, 2.0, 0.5, 4.0, 0.5)])
    assert got["rollout/importance_weight"] == pytest.approx(8 / 5)
    assert (got["rollout/importance_weight_max"], got["rollout/importance_weight_min"]) == (pytest.approx(4.0), pytest.approx(0.5))
    assert got["rollout/effective_sample_size"] == pytest.approx(64 / 21.5 / 5)


def test_a_gap_that_is_not_a_number_is_seen() -> None:
    got = reported([0.1, float("nan"), 0.0, 0.4, 0.0])
    assert math.isnan(got["rollout/logprob_gap"]) and math.isnan(got["rollout/logprob_gap_max"])
    assert got["rollout/logprob_gap_p999"] == math.inf and got["rollout/logprob_gap_p50"] == pytest.approx(0.1, rel=0.016)


def test_a_correction_reports_the_weights_of_its_level() -> None:
    """The product of a sequence's weights: 1 * 2 and 1/2 * 4 * 1/2; each token has its sequence's: 2, 2, 1, 1, 1."""
    log_weights = on_tokens([math.log(w) for w in (1.0, 2.0, 0.5, 4.0, 0.5)])
    config = CorrectionConfig(kind=Correction.tis, level=Level.sequence, high=1.5)
    got = values(correction_weights(log_weights, torch.zeros(2, 5), MASK, config)[1])
    assert got["rollout/importance_weight"] == pytest.approx(7 / 5)
    assert got["rollout/effective_sample_size"] == pytest.approx(49 / 11 / 5)
    assert got["rollout/corrected_fraction"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("kind", "level", "factors", "corrected"),
    [
        (Correction.none, Level.token, [1, 1, 1, 1, 1], 0),
        (Correction.tis, Level.token, [2, 0.25, 1.5, 1, 1], 1),
        (Correction.icepop, Level.token, [0, 0, 1.5, 1, 1], 2),
        (Correction.mis, Level.token, [0, 0, 1, 1, 1], 2),
        (Correction.tis, Level.sequence, [0.75, 0.75, 1.5, 1.5, 1.5], 0),
        (Correction.icepop, Level.sequence_mean, [0.75**0.5] * 2 + [1.5 ** (1 / 3)] * 3, 0),
    ],
)
def test_correction_by_hand(kind, level, factors, corrected):
    got, metrics = correction_weights(OLD, ENGINE, MASK, CorrectionConfig(kind=kind, level=level))
    assert got[MASK].tolist() == pytest.approx(factors)
    assert metrics["rollout/corrected_fraction"].value() == pytest.approx(corrected / 5)
    if level is Level.token:
        assert metrics["rollout/importance_weight"].value() == pytest.approx(6.75 / 5)
        assert metrics["rollout/importance_weight_max"].value() == pytest.approx(3.0)


@pytest.mark.parametrize("kind", list(Correction))
def test_the_correction_has_no_gradient(kind):
    """It weighs what was sampled; through w = exp(old - engine) the policy would learn to move the weights instead."""
    old = OLD.clone().requires_grad_()
    factors, metrics = correction_weights(old, ENGINE, MASK, CorrectionConfig(kind=kind))
    assert not factors.requires_grad and not any(getattr(metric, "total", OLD).requires_grad for metric in metrics.values())


def test_a_loss_with_the_gap_of_rows_that_were_sampled():
    tokens, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[False, True, True]])
    rows = {"tokens": tokens, "lengths": torch.tensor([3]), "loss_mask": mask}
    outputs = TokenOutputs(logprobs=torch.tensor([[0.0, -1.0, -3.0]]))
    watched = with_gap(sft_loss)(outputs, LabeledBatch(**rows, rollout_logprobs=torch.tensor([[0.0, -1.5, -2.0]])))
    assert watched.total == 4 and watched.count == 2
    assert values(watched.metrics)["rollout/logprob_gap"] == pytest.approx(0.75)  # (0.5 + 1) / 2
    assert "rollout/logprob_gap" not in with_gap(sft_loss)(outputs, LabeledBatch(**rows)).metrics
    without = with_gap(lambda *_: LossOutput(total=torch.zeros(()), count=torch.tensor(1), metrics={}))
    with pytest.raises(ValueError, match="TokenOutputs.logprobs is needed"):
        without(TokenOutputs(), LabeledBatch(**rows, rollout_logprobs=torch.zeros(1, 3)))
