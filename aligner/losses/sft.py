"""Supervised losses: token cross-entropy, and that of SteerLM 2, weighted by response.

SteerLM 2 (2406.08673): the policy Q(y|a,x) is brought towards the distribution of responses that have the attributes a.

Of n responses to each pair of a prompt x and attributes a, sampled from a proposal Q',

    w = softmax_i(log P(a|x,y_i) + log P(y_i|x) - log Q'(y_i|a,x))    the aim: by the attribute model and a policy without attributes
    b = softmax_i(log Q(y_i|a,x) - log Q'(y_i|a,x))                  where the policy is, without gradient
    loss = sum_i (w_i - b_i) * (-log Q(y_i|a,x)) / (mean response tokens of the n)

which has the gradient of KL(w || b) / (mean response tokens). w and b need all n responses of a group, wherever they are computed, so they
are made before the training pass and travel as a number per row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aligner.losses.aggregation import masked, require
from aligner.telemetry.metrics import Mean, Metric
from aligner.types import LabeledBatch, LossOutput, TokenOutputs


def sft_loss(outputs: TokenOutputs, batch: LabeledBatch) -> LossOutput:
    """Negative log-likelihood summed over masked tokens; count: those tokens. Metric: sft/loss. Raises ValueError without logprobs."""
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), batch.loss_mask)
    total, count = -logprobs.sum(), batch.loss_mask.sum()
    return LossOutput(total=total, count=count, metrics={"sft/loss": Mean(total=total.detach(), count=count)})


def pretraining_loss(outputs: TokenOutputs, batch: LabeledBatch) -> LossOutput:
    """`sft_loss` of the text that PPO-ptx holds on to. Metrics: policy/pretraining_loss, in nats per token."""
    result = sft_loss(outputs, batch)
    return replace(result, metrics={"policy/pretraining_loss": result.metrics["sft/loss"]})


def importance_weights(target: Tensor, proposal: Tensor, *, group_size: int) -> Tensor:
    """softmax over each group of `group_size` neighbours of target - proposal: log-probs of whole responses, [B] each. Returns [B].

    With target = log P(a|x,y) + log P(y|x) it gives w; with target = log Q(y|a,x), b.
    """
    if target.shape != proposal.shape or target.dim() != 1:
        raise ValueError(f"target is {tuple(target.shape)} and proposal {tuple(proposal.shape)}, expected one number per response, [B]")
    if group_size < 2 or target.shape[0] % group_size:
        raise ValueError(f"group_size is {group_size} for {target.shape[0]} responses, expected at least 2 and a divisor of them")
    return torch.softmax((target - proposal).view(-1, group_size), dim=1).flatten()


def response_coefficients(aim: Tensor, policy: Tensor, lengths: Tensor, *, group_size: int) -> Tensor:
    """The factor of each response's negative log-likelihood in `steerlm_loss`: n (w - b) / (mean tokens of its group), float32 [B].

    `aim` is w and `policy` b, both [B]; `lengths` int64 [B] counts response tokens. The factor n makes a mean over rows one over groups.
    """
    mean_tokens = lengths.view(-1, group_size).to(aim.dtype).mean(dim=1).repeat_interleave(group_size)
    return (group_size * (aim - policy) / mean_tokens.clamp(min=1)).float()


def steerlm_loss(outputs: TokenOutputs, batch: LabeledBatch) -> LossOutput:
    """Sum over rows of coefficient * (negative log-likelihood of the response); count: rows.

    Reads outputs.logprobs [B, S] and batch.labels [B, 1], which `response_coefficients` made. A row with an empty loss_mask is filler and
    counts nothing. Raises ValueError for log-probs or labels that are missing or of another shape.
    Metrics: steerlm/loss (0 if the policy is what is aimed at, but elsewhere too), steerlm/distance (mean |coefficient|: 0 only there),
    steerlm/nll per token.
    """
    logprobs = masked(require(outputs.logprobs, "TokenOutputs.logprobs"), batch.loss_mask)
    labels = require(batch.labels, "LabeledBatch.labels", (len(logprobs), 1), "one coefficient per response")
    real = batch.loss_mask.any(dim=1)
    coefficients = masked(labels[:, 0], real).to(logprobs.dtype)
    total, count = -(coefficients * logprobs.sum(dim=1)).sum(), real.sum()
    metrics: dict[str, Metric] = {
        "steerlm/loss": Mean(total=total.detach(), count=count),
        "steerlm/nll": Mean(total=-logprobs.detach().sum(), count=batch.loss_mask.sum()),
        "steerlm/distance": Mean(total=coefficients.abs().sum(), count=count),
    }
    return LossOutput(total=total, count=count, metrics=metrics)
