"""Log-probabilities and entropy of tokens under a vocabulary-parallel output layer, without a full logits tensor.

The output projection is part of the function: hidden states are projected chunk by chunk of tokens, reduced to one number per token, and
projected again in the backward pass. At most `[chunk, V / tp]` float32 logits exist at a time (a `[B, S, V]` float32 tensor for 4 x 8192
tokens and 128k words would be 16 GiB).

With z = h W^T / temperature:  log pi(y) = z[y] - logsumexp(z),  H = logsumexp(z) - sum_j p_j z_j;
d log pi(y) / dz_j = 1[j = y] - p_j,  dH / dz_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError

ROWS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """How the forward pass multiplies and adds: `aligner.parallel.exact` has one whose results do not depend on the batch."""

    project: Callable[[Tensor, Tensor], Tensor]  # hidden [N, H], weight [V, H] -> [N, V]
    add_up: Callable[[Tensor], Tensor]  # [N, V] numbers from 0 to 1 -> [N]


def log_normalizer(peak: Tensor, total: Tensor) -> Tensor:
    """Log-sum-exp float32 [N] of rows with maximum `peak` and `total` = sum of exp(row - maximum). The sampler's and the trainer's."""
    return (peak + total.log()).float()


def row_sums(weights: Tensor) -> Tensor:
    """[N] sums of [N, V]."""
    return weights.sum(dim=-1)


FAST = Arithmetic(project=lambda hidden, weight: hidden @ weight.t(), add_up=row_sums)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    arithmetic: Arithmetic = FAST,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each position's target token.

    Args:
        hidden: [N, H] hidden states, the same on every rank of `group`; their gradient is this rank's part of a sum over the group.
        weight: [V_local, H], this rank's rows of the output layer, vocabulary padding removed (a rank may be left with none).
        targets: int64 [N], global token ids.
        vocab_start: the global id of `weight`'s first row.
        group: tensor-parallel group, None for one rank. Collective over it.
        temperature: the sampling temperature, which divides the logits.
        chunk_size: tokens projected at a time.

    Returns:
        (logprobs, entropy), float32 [N], the same on every rank of `group`.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature}: log-probabilities need a positive temperature")
    return _LinearLogprobs.apply(hidden, weight, targets, vocab_start, group, temperature, chunk_size, arithmetic)


def _reduce(x: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_start, group, temperature, chunk_size, arithmetic):
        logprobs, entropy, logsumexp = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
        kept: Tensor | None = None  # a batch of one chunk keeps its logits, so that its backward pass need not project again
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            z = _scaled(arithmetic.project(hidden[rows], weight), temperature)
            peak = _reduce(_row_maxima(z), dist.ReduceOp.MAX, group)
            p = (z - peak[:, None]).exp_()
            local, owned = _local_targets(targets[rows], vocab_start, weight.shape[0])
            target_z = torch.where(owned, z.gather(1, local[:, None])[:, 0], 0.0) if z.shape[1] else torch.zeros_like(peak)
            total = arithmetic.add_up(p)
            sums = _reduce(torch.stack([total, _row_dots(p, z).to(total.dtype), target_z.to(total.dtype)]), dist.ReduceOp.SUM, group)
            logsumexp[rows] = log_normalizer(peak, sums[0])
            logprobs[rows] = sums[2].float() - logsumexp[rows]
            entropy[rows] = logsumexp[rows] - sums[1] / sums[0]
            kept = z if hidden.shape[0] <= chunk_size else None
            del z, p  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy, kept)
        ctx.vocab_start, ctx.temperature, ctx.chunk_size = vocab_start, temperature, chunk_size
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, logsumexp, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        wants_entropy = bool(grad_entropy.any())
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            z = kept if kept is not None else _scaled(hidden[rows] @ weight.t(), ctx.temperature)
            scale = grad_logprobs[rows] / ctx.temperature
            grad = z - logsumexp[rows, None]  # in place from here on: a new [chunk, V] tensor costs as much as the arithmetic on it
            if wants_entropy:
                slope = grad_entropy[rows, None] / ctx.temperature
                grad = grad.exp().mul_((grad + entropy[rows, None]).mul_(slope).add_(scale[:, None])).neg_()
            else:
                grad = grad.exp_().mul_(-scale[:, None])
            local, owned = _local_targets(targets[rows], ctx.vocab_start, weight.shape[0])
            if z.shape[1]:
                grad.scatter_add_(1, local[:, None], torch.where(owned, scale, 0.0)[:, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1.0 else z / temperature


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """[N] dot products of the rows of [N, V] tensors, a few rows at a time: a third tensor of that size would hold the products else."""
    return torch.cat([torch.linalg.vecdot(x, y) for x, y in zip(a.split(ROWS_AT_A_TIME), b.split(ROWS_AT_A_TIME), strict=True)])


def _row_maxima(z: Tensor) -> Tensor:
    """[N] from [N, V_local]. With a small vocabulary a rank may hold nothing but padding, so that no column is left of it."""
    return z.amax(dim=-1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)


def _local_targets(targets: Tensor, vocab_start: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(row of this rank's weight, whether this rank owns it); the row is 0 where it does not."""
    local = targets - vocab_start
    owned = (local >= 0) & (local < vocab_size)
    return torch.where(owned, local, 0), owned
