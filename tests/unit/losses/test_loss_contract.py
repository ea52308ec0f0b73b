"""What every loss owes: padding changes nothing, an empty mask is a finite zero, and any split into micro-batches gives the same sums."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from aligner.algorithms.distill import distillation_terms
from aligner.algorithms.process_reward_model import process_loss
from aligner.losses.correction import Correction, CorrectionConfig
from aligner.losses.distillation import Divergence
from aligner.losses.policy import Aggregation, Objective, policy_loss
from aligner.losses.preference import DPOVariant, dpo_loss, kto_loss
from aligner.losses.reward import MISSING_LABEL, BradleyTerry, bradley_terry_loss, regression_loss
from aligner.losses.sft import sft_loss, steerlm_loss
from aligner.losses.value import value_loss
from aligner.telemetry.metrics import merge, values
from aligner.types import DistillationBatch, LabeledBatch, PolicyBatch, PreferenceBatch, StepBatch, TokenOutputs, ValueBatch
from aligner.types.batches import tensors_of
from aligner.types.rows import take_rows

B, S, K = 6, 7, 3
PPO = partial(policy_loss, clip_eps_low=0.2, clip_eps_high=0.3, aggregation_constant=5, dual_clip=3.0, entropy_coef=0.1, kl_coef=0.2)
BAND = CorrectionConfig(kind=Correction.icepop)
LOSSES = {
    **{f"ppo_{a.value}": (partial(PPO, aggregation=a), PolicyBatch) for a in Aggregation},
    **{
        o.value: (partial(PPO, aggregation=Aggregation.sequence_mean, objective=o, correction=BAND), PolicyBatch)
        for o in Objective
        if o is not Objective.ppo
    },
    "value": (partial(value_loss, clip=0.2), ValueBatch),
    **{f"bt_{v.value}": (partial(bradley_terry_loss, variant=v, centre_coef=0.1), PreferenceBatch) for v in BradleyTerry},
    **{
        f"dpo_{v.value}": (partial(dpo_loss, beta=0.3, variant=v, sft_coef=0.2, label_smoothing=0.1 * v.takes_smoothing), PreferenceBatch)
        for v in DPOVariant
    },
    "sft": (sft_loss, LabeledBatch),
    "kto": (partial(kto_loss, kl=0.3, beta=0.4, undesirable_weight=1.5, sft_coef=0.2), LabeledBatch),
    "kto_averaged": (partial(kto_loss, kl=0.3, beta=0.4, average_logprobs=True), LabeledBatch),
    "regression": (partial(regression_loss, attributes=["help"]), LabeledBatch),
    "steerlm": (steerlm_loss, LabeledBatch),
    "steps": (process_loss, StepBatch),
    **{f"distill_{d.value}": (partial(distillation_terms, divergence=d, ce_coef=0.2), DistillationBatch) for d in Divergence},
}
TENSORS = {
    PolicyBatch: "old_logprobs advantages ref_logprobs rollout_logprobs",
    ValueBatch: "old_values returns",
    PreferenceBatch: "ref_logprobs",
    LabeledBatch: "ref_logprobs",
    StepBatch: "step_labels",
    DistillationBatch: "teacher_logprobs",
}
PER_TOKEN = ("logprobs", "entropy", "values", "step_scores", "topk_logprobs")


def make(kind, seed=0, empty=False, has_missing=False):
    """A random batch of `kind` and outputs with gradient; row 5 (for pairs, rows 4 and 5) is filler with an empty mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, S, generator=generator) < 0.6
    mask[:, 1] = True
    mask[:, 0] = False
    mask[-2 if kind is PreferenceBatch else -1 :] = False
    parts = {"tokens": torch.zeros(B, S, dtype=torch.int64), "lengths": torch.full((B,), S), "loss_mask": mask & (not empty)}
    shape = (B, S, K) if kind is DistillationBatch else (B, S)
    parts |= {name: torch.randn(shape, generator=generator) for name in TENSORS.get(kind, "").split()}
    if kind is PreferenceBatch:
        parts["margins"] = torch.randn(B // 2, generator=generator)
    if kind is LabeledBatch:
        parts["labels"] = torch.randn(B, 1, generator=generator).sign()
        if has_missing:
            parts["labels"][3] = MISSING_LABEL
    if kind is DistillationBatch:
        parts["teacher_tokens"] = torch.zeros(shape, dtype=torch.int64)
    outputs = {name: torch.randn(B, S, generator=generator) for name in PER_TOKEN[:-1]}
    outputs["topk_logprobs"] = torch.randn(B, S, K, generator=generator)
    outputs["scores"] = torch.randn(B, 1, generator=generator)
    return kind(**parts), {name: x.requires_grad_() for name, x in outputs.items()}


def gradients(outputs):
    return {name: x.grad for name, x in outputs.items() if x.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_nothing(name):
    loss, kind = LOSSES[name]
    batch, outputs = make(kind)
    padding = ~batch.loss_mask
    expected = loss(TokenOutputs(**outputs), batch)
    expected.total.backward()
    for garbage in (100.0, float("nan"), float("-inf")):
        parts = {name: x.clone() for name, x in tensors_of(batch).items()}
        for part in TENSORS.get(kind, "").split():
            parts[part][padding] = garbage
        spoiled = {key: x.detach().clone() for key, x in outputs.items()}
        for key in PER_TOKEN:
            spoiled[key][padding] = garbage
        filler = padding.all(dim=1)
        spoiled["scores"][filler] = garbage
        spoiled = {key: x.requires_grad_() for key, x in spoiled.items()}
        result = loss(TokenOutputs(**spoiled), replace(batch, **parts))
        result.total.backward()
        assert result.total.item() == expected.total.item() and result.count.item() == expected.count.item()
        assert values(result.metrics) == values(expected.metrics)
        assert gradients(spoiled).keys() == gradients(outputs).keys()
        for key, gradient in gradients(spoiled).items():
            assert torch.equal(gradient, gradients(outputs)[key])


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_mask_is_a_finite_zero(name):
    loss, kind = LOSSES[name]
    batch, outputs = make(kind, empty=True)
    result = loss(TokenOutputs(**outputs), batch)
    result.total.backward()
    assert result.total.item() == 0.0 and result.count.item() == 0
    assert gradients(outputs)
    assert all(not gradient.any() for gradient in gradients(outputs).values())  # NaN would count as true


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 2, 6), (0, 4, 6)])
def test_any_split_into_micro_batches_gives_the_same_sums(name, cuts):
    loss, kind = LOSSES[name]
    batch, outputs = make(kind, has_missing=name == "regression")
    whole = loss(TokenOutputs(**outputs), batch)
    whole.total.backward()
    parts, split = [], {key: x.detach().clone().requires_grad_() for key, x in outputs.items()}
    for start, stop in zip(cuts, cuts[1:], strict=False):
        parts.append(loss(TokenOutputs(**{key: x[start:stop] for key, x in split.items()}), take_rows(batch, slice(start, stop))))
        parts[-1].total.backward()
    assert sum(part.count for part in parts).item() == whole.count.item() > 0
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    merged, expected = values(merge(part.metrics for part in parts)), values(whole.metrics)
    assert merged == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for key, gradient in gradients(split).items():
        torch.testing.assert_close(gradient, gradients(outputs)[key])


@pytest.mark.parametrize("which", ["new", "old"])
@pytest.mark.parametrize("objective", list(Objective))
def test_a_log_prob_of_minus_infinity_shows(objective, which):
    """A sampled token that one of the two policies thinks impossible: the loss stays usable or is not finite, but never silently so."""
    batch, outputs = make(PolicyBatch)
    (batch.old_logprobs if which == "old" else outputs["logprobs"].data)[0, 1] = float("-inf")
    settings = {"clip_eps_low": 0.2, "clip_eps_high": 0.3, "aggregation": Aggregation.sequence_mean, "objective": objective}
    result = policy_loss(TokenOutputs(**outputs), batch, **settings)
    assert not math.isfinite(values(result.metrics)["policy/approx_kl"])


def test_a_reference_that_gives_a_token_no_probability_is_not_finite():
    batch, outputs = make(PolicyBatch)
    batch.ref_logprobs[0, 1] = float("-inf")
    assert not PPO(TokenOutputs(**outputs), batch, aggregation=Aggregation.token_mean).total.isfinite()
