"""Distillation losses: the divergence between teacher and student on the teacher's K likeliest tokens of each position.

Both distributions are renormalised over these K tokens, so that log-probs and logits are equally good: they differ by a constant. What the
student does outside the K is then free. With a tail bucket all other tokens together are one more outcome, which log-probs have and
logits do not.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from aligner.losses.aggregation import masked, masked_mean
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import LossOutput

MIN_TAIL = 1e-6  # probability of the tail bucket, at least: float32 log-probs of K tokens sum to 1 within about this much


class Divergence(str, Enum):
    """Of the teacher's distribution T and the student's S. NeMo-Aligner names the first two the other way round."""

    forward_kl = "forward_kl"  # KL(T || S): the student covers all that the teacher does (Hinton et al. 2015, 1503.02531)
    backward_kl = "backward_kl"  # KL(S || T): the student does nothing that the teacher does not (MiniLLM, 2306.08543)
    jsd = "jsd"  # w KL(T || M) + (1 - w) KL(S || M), M = w T + (1 - w) S (GKD, 2306.13649)


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = Divergence.forward_kl,
    teacher_weight: float = 0.5,
    temperature: float = 1.0,
    tail_bucket: bool = False,
) -> LossOutput:
    """Sum of the divergence over masked tokens; count: those tokens.

    `student` and `teacher` float [B, S, K] are log-probs (or logits) of the same K tokens as the token at t, of which the student's have a
    gradient; `mask` bool [B, S]. Both are divided by `temperature` first; `teacher_weight` is jsd's w. At the ends of its range the
    (scaled) jsd turns into the forward (0) and the backward (1) KL. `tail_bucket`: compare the K + 1 outcomes; needs log-probs over the
    whole vocabulary. At temperature 1 the divergence is then, by the data processing inequality, a lower bound of that over all tokens.
    Raises ValueError for shapes that differ, a teacher_weight not between 0 and 1, or a temperature that is not above 0.
    Metrics over tokens: distillation/loss, distillation/agreement (how often both have the same token first).
    """
    if student.shape != teacher.shape or student.shape[:-1] != mask.shape:
        shapes = f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}, mask {tuple(mask.shape)}"
        raise ValueError(f"{shapes}: expected [B, S, K] twice and [B, S]")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, expected a number > 0")
    outcomes = (masked(x, mask[..., None]) for x in (student, teacher.detach()))
    ours, theirs = (torch.log_softmax((with_tail(x) if tail_bucket else x) / temperature, dim=-1) for x in outcomes)
    per_token = masked(token_divergence(theirs, ours, divergence, teacher_weight), mask)
    total, count = per_token.sum(), mask.sum()
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).to(ours.dtype)
    metrics: dict[str, Metric] = {
        "distillation/loss": Mean(total=total.detach(), count=count),
        "distillation/agreement": masked_mean(same, mask),
    }
    return LossOutput(total=total, count=count, metrics=metrics)


def token_divergence(teacher: Tensor, student: Tensor, divergence: Divergence, teacher_weight: float = 0.5) -> Tensor:
    """The divergence of distributions given by normalised log-probs [..., K]: [...]."""
    if divergence is Divergence.forward_kl:
        return _kl(teacher, student)
    if divergence is Divergence.backward_kl:
        return _kl(student, teacher)
    if not 0 < teacher_weight < 1:
        raise ValueError(f"teacher_weight is {teacher_weight}, expected a number between 0 and 1")
    weights = torch.tensor([teacher_weight, 1 - teacher_weight], dtype=student.dtype, device=student.device).log()
    middle = torch.logaddexp(teacher + weights[0], student + weights[1])
    return teacher_weight * _kl(teacher, middle) + (1 - teacher_weight) * _kl(student, middle)


def with_tail(logprobs: Tensor) -> Tensor:
    """Log-probs of some tokens [..., K] and of all others together: [..., K + 1]; the last at least log `MIN_TAIL`."""
    rest = -torch.expm1(logprobs.logsumexp(dim=-1, keepdim=True))
    return torch.cat([logprobs, rest.clamp(min=MIN_TAIL).log()], dim=-1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(dim=-1)
