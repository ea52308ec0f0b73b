"""Divergences between teacher and student against numbers worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from aligner.losses.distillation import Divergence, distillation_loss
from aligner.telemetry.metrics import values

# On two tokens: the teacher's (4/5, 1/5), the student's (1/2, 1/2), as log-probs of a larger vocabulary: scaled down by constants.
TEACHER, STUDENT = tensor([0.8, 0.2], dtype=torch.float64), tensor([0.5, 0.5], dtype=torch.float64)
EXPECTED = [
    ("forward_kl", 0.5, 0.8 * math.log(1.6) + 0.2 * math.log(0.4)),
    ("backward_kl", 0.5, 0.5 * math.log(0.625) + 0.5 * math.log(2.5)),
    # M = (0.65, 0.35)
    ("jsd", 0.5, 0.5 * (0.8 * math.log(0.8 / 0.65) + 0.2 * math.log(0.2 / 0.35)) + 0.25 * (math.log(0.5 / 0.65) + math.log(0.5 / 0.35))),
    # M = 0.2 T + 0.8 S = (0.56, 0.44)
    ("jsd", 0.2, 0.2 * (0.8 * math.log(0.8 / 0.56) + 0.2 * math.log(0.2 / 0.44)) + 0.4 * (math.log(0.5 / 0.56) + math.log(0.5 / 0.44))),
]


def given(probabilities, share):
    """[1, 3, 2]: at positions 1 and 2; position 0 holds what must not matter."""
    row = torch.stack([torch.full((2,), float("nan"), dtype=torch.float64), *[(share * probabilities).log()] * 2])
    return row[None].clone()


MASK = tensor([[False, True, True]])


@pytest.mark.parametrize(("divergence", "weight", "expected"), EXPECTED)
def test_by_hand(divergence, weight, expected):
    """Both are renormalised over the K tokens: the shares 0.9 and 0.3 of the whole vocabulary fall out."""
    student = given(STUDENT, 0.3).requires_grad_()
    result = distillation_loss(student, given(TEACHER, 0.9), MASK, divergence=Divergence(divergence), teacher_weight=weight)
    result.total.backward()
    assert result.total.item() == pytest.approx(2 * expected) and result.count.item() == 2
    assert student.grad.isfinite().all() and not student.grad[0, 0].any()
    assert values(result.metrics) == pytest.approx({"distillation/loss": expected, "distillation/agreement": 1.0})


@pytest.mark.parametrize("divergence", list(Divergence))
def test_the_teacher_is_not_taught(divergence):
    """A teacher with a gradient (an ensemble's member, the student's own average) would come to meet the student."""
    student, teacher = given(STUDENT, 0.3).requires_grad_(), given(TEACHER, 0.9).requires_grad_()
    distillation_loss(student, teacher, MASK, divergence=divergence).total.backward()
    assert teacher.grad is None and student.grad.any()


@pytest.mark.parametrize("divergence", ["forward_kl", "backward_kl"])
def test_the_tail_bucket_by_hand(divergence):
    """The teacher has (0.72, 0.18 | 0.1), the student (0.15, 0.15 | 0.7): the mass outside counts as a third outcome."""
    student = given(STUDENT, 0.3).requires_grad_()
    result = distillation_loss(student, given(TEACHER, 0.9), MASK, divergence=Divergence(divergence), tail_bucket=True)
    result.total.backward()
    pairs = [(0.72, 0.15), (0.18, 0.15), (0.1, 0.7)]
    ways = {"forward_kl": [t * math.log(t / s) for t, s in pairs], "backward_kl": [s * math.log(s / t) for t, s in pairs]}
    assert result.total.item() == pytest.approx(2 * sum(ways[divergence]))
    assert student.grad.isfinite().all() and not student.grad[0, 0].any()


def test_a_tail_that_rounds_to_nothing_is_finite():
    sure = tensor([1.0, 1e-12]).log()[None, None].expand(1, 3, 2)
    student = sure.clone().requires_grad_()
    result = distillation_loss(student, sure, MASK, tail_bucket=True)
    result.total.backward()
    assert result.total.item() == pytest.approx(0, abs=1e-6) and student.grad.isfinite().all()


def test_temperature_divides_both():
    """At 1/2 probabilities are squared: (16/17, 1/17) and (1/2, 1/2). Logits are as good as log-probs."""
    result = distillation_loss(given(STUDENT, 1.0), given(TEACHER, 50.0), MASK, temperature=0.5)
    assert result.total.item() == pytest.approx(2 * (16 / 17 * math.log(32 / 17) + 1 / 17 * math.log(2 / 17)))


@pytest.mark.parametrize("tail_bucket", [False, True])
@pytest.mark.parametrize("divergence", list(Divergence))
def test_gradcheck_and_zero_where_equal(divergence, tail_bucket):
    generator = torch.Generator().manual_seed(1)
    wide = (torch.randn(2, 3, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    teacher, student = (logits.log_softmax(dim=-1)[..., :4] for logits in wide)
    mask = tensor([[False, True, True], [False, True, False]])
    options = {"divergence": divergence, "teacher_weight": 0.3, "temperature": 1.7, "tail_bucket": tail_bucket}
    assert torch.autograd.gradcheck(lambda x: distillation_loss(x, teacher, mask, **options).total, (student.clone().requires_grad_(),))
    same = teacher.clone().requires_grad_()
    result = distillation_loss(same, teacher, mask, **options)
    result.total.backward()
    assert abs(result.total.item()) < 1e-12 and same.grad.abs().max() < 1e-12
    assert distillation_loss(student, teacher, mask, **options).total > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"divergence": Divergence.jsd, "teacher_weight": 1.0}, "teacher_weight is 1.0, expected a number between 0 and 1"),
    ],
)
def test_refusals(options, named):
    with pytest.raises(ValueError, match=named):
        distillation_loss(given(STUDENT, 1.0), given(TEACHER, 1.0), MASK, **options)


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"student \(1, 3, 2\), teacher \(1, 3, 1\)"):
        distillation_loss(given(STUDENT, 1.0), given(TEACHER, 1.0)[..., :1], MASK)
