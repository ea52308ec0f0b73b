"""Log-probabilities and entropy of tokens under a vocabulary-parallel output layer, without a full logits tensor.

The output projection is part of the function: hidden states are projected chunk by chunk of tokens, reduced to one number per token, and
projected again in the backward pass. At most `[chunk, V / tp]` float32 logits exist at a time (a `[B, S, V]` float32 tensor for 4 x 8192
tokens and 128k words would be 16 GiB).

With z = h W^T / temperature:  log pi(y) = z[y] - logsumexp(z),  H = logsumexp(z) - sum_j p_j z_j;
d log pi(y) / dz_j = 1[j = y] - p_j,  dH / dz_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError
from aligner.types.rows import upload

ROWS_AT_A_TIME = 64
COLUMNS_AT_A_TIME = 1024  # of a factor in 16 bits that a CPU converts
_LEAVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # products of 16-bit numbers, on a GPU; torch 2.8 and newer


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """The forward pass's matrix product and sums. `aligner.parallel.exact` has a batch-invariant version."""

    project: Callable[[Tensor, Tensor], Tensor]  # hidden [N, H], weight [V, H] -> [N, V]
    add_up: Callable[[Tensor], Tensor]  # [N, V] numbers from 0 to 1 -> [N]
    again: Callable[[Tensor, Tensor], Tensor] | None = None  # the product in a backward pass; None: the same


def float32_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """[N, K] and [K, M] -> [N, M], in `out` if given: float32 for factors in 16 bits, without rounding of sums; else in their type.

    A torch older than 2.8 rounds on a GPU. A CPU converts the factors, `right` some columns at a time, which then fit its caches.
    """
    if left.dtype.itemsize > 2 or (left.is_cuda and not _LEAVES_FLOAT32):
        return left @ right if out is None else out.copy_(left @ right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    out = torch.empty(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device) if out is None else out
    left = left.float()
    for part, columns in zip(out.split(COLUMNS_AT_A_TIME, dim=1), right.split(COLUMNS_AT_A_TIME, dim=1), strict=True):
        torch.mm(left, columns.float(), out=part)
    return out


def log_normalizer(peak: Tensor, total: Tensor) -> Tensor:
    """Log-sum-exp float32 [N] of rows with maximum `peak` and `total` = sum of exp(row - maximum), for sampler and trainer."""
    return (peak + total.log()).float()


def row_sums(weights: Tensor) -> Tensor:
    """[N] sums of [N, V]."""
    return weights.sum(dim=-1)


FAST = Arithmetic(project=lambda hidden, weight: float32_product(hidden, weight.t()), add_up=row_sums)
ROUNDED = Arithmetic(project=lambda hidden, weight: hidden @ weight.t(), add_up=row_sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The path from hidden states to log-probs. Raises ConfigError for a temperature that is not positive."""

    vocab_start: int = 0  # global id of the first row in this rank's part of the output layer
    group: dist.ProcessGroup | None = None  # tensor-parallel ranks, over which everything is collective; None for a single rank
    temperature: float = 1.0  # the sampling temperature, which divides the logits
    chunk_size: int = 1024  # tokens projected at a time
    scale: float = 1.0  # the model's own factor on logits
    softcap: float = 0.0  # if not 0, the model's logits are cap * tanh(logit / cap)
    arithmetic: Arithmetic = FAST
    parameter: Tensor | None = None  # the weight is its first rows; its `main_grad`, if any, takes the gradient in float32

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature}: log-probabilities need a positive temperature")

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """float32 [N, V_local]."""
        return self._divided(self.arithmetic.project(hidden, weight))

    def again(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`logits` in a backward pass."""
        return self._divided((self.arithmetic.again or self.arithmetic.project)(hidden, weight))

    def slope_(self, grad: Tensor, z: Tensor) -> Tensor:
        """Turn the gradient [N, V_local] of `z` = `logits` in place into that of the products, except for the temperature."""
        if self.softcap:  # d/dx of cap tanh(x / cap) is 1 - tanh^2
            grad.mul_(1 - (z * (self.temperature / self.softcap)).square())
        return grad if self.scale == 1.0 else grad.mul_(self.scale)

    def _divided(self, products: Tensor) -> Tensor:
        z = shaped(products.float(), scale=self.scale, softcap=self.softcap)
        return z if self.temperature == 1.0 else z / self.temperature

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """The rows of each projection."""
        return (slice(start, start + self.chunk_size) for start in range(0, num_rows, self.chunk_size))


def shaped(logits: Tensor, *, scale: float, softcap: float) -> Tensor:
    """The model's logits from the output layer's float32 products."""
    if scale != 1.0:
        logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


WHOLE = Projection()


def linear_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, projection: Projection = WHOLE) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, float32 [N], of each position's target, a global token id; the same on every rank of the group.

    `hidden` [N, H] are the same on every rank; their gradient is this rank's part of a sum over the group. `weight` [V_local, H] are this
    rank's rows of the output layer, vocabulary padding removed (a rank may be left with none).
    """
    return _LinearLogprobs.apply(hidden, weight, targets, projection)


def linear_logprobs_of(hidden: Tensor, weight: Tensor, targets: Tensor, projection: Projection = WHOLE) -> Tensor:
    """Log-probabilities float32 [N, M] of `targets` int64 [N, M]: the first may equal another. Else like `linear_logprobs`."""
    return _LinearLogprobsOf.apply(hidden, weight, targets, projection)


@torch.no_grad()
def linear_topk(hidden: Tensor, weight: Tensor, k: int, projection: Projection = WHOLE, *, below: int) -> tuple[Tensor, Tensor]:
    """The `k` likeliest tokens of each position, int64 [N, k], likeliest first, and their log-probs, float32 [N, k]. No gradient.

    Arguments as for `linear_logprobs`. Only ids less than `below` are candidates (embeddings may have more rows than tokens), but all count
    in the normaliser. Every rank finds its own `k` best, which include the best of all. Raises ConfigError for fewer than `k` candidates.
    """
    group, start_id = projection.group, projection.vocab_start
    tokens = torch.empty(hidden.shape[0], k, dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty(hidden.shape[0], k, dtype=torch.float32, device=hidden.device)
    size = max(0, min(weight.shape[0], below - start_id))
    whole = int(_reduce(upload(torch.tensor(size), hidden.device), dist.ReduceOp.SUM, group))
    if not 1 <= k <= whole:
        raise ConfigError(f"top_k={k}: must be at least 1 and at most the {whole} words of the vocabulary")
    for rows in projection.chunks(hidden.shape[0]):
        z = projection.logits(hidden[rows], weight)
        peak, total = _normaliser(z, projection)
        best, places = z[:, :size].topk(min(k, size), dim=1)
        missing = (0, k - best.shape[1])  # every rank sends as many
        best = torch.nn.functional.pad(best, missing, value=-torch.inf)
        places = torch.nn.functional.pad(places + start_id, missing)
        order = beside(best, group).sort(dim=1, descending=True, stable=True)
        logprobs[rows] = order.values[:, :k].float() - log_normalizer(peak, total)[:, None]
        tokens[rows] = beside(places, group).gather(1, order.indices[:, :k])
    return tokens, logprobs


def _normaliser(z: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """(maximum, sum of exp(z - maximum)) of each row [N] over the whole vocabulary."""
    group = projection.group
    peak = _reduce(_row_maxima(z), dist.ReduceOp.MAX, group)
    return peak, _reduce(projection.arithmetic.add_up((z - peak[:, None]).exp_()), dist.ReduceOp.SUM, group)


def beside(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's [N, M] side by side, [N, ranks * M]. `group` None: there is one rank."""
    if group is None or group.size() == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _reduce(x: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, projection):
        logprobs, entropy, logsumexp = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
        kept: Tensor | None = None  # a batch of one chunk keeps its logits, so that its backward pass need not project again
        for rows in projection.chunks(hidden.shape[0]):
            z = projection.logits(hidden[rows], weight)
            peak = _reduce(_row_maxima(z), dist.ReduceOp.MAX, projection.group)
            p = (z - peak[:, None]).exp_()
            local, owned = _local_targets(targets[rows], projection.vocab_start, weight.shape[0])
            target_z = torch.where(owned, z.gather(1, local[:, None])[:, 0], 0.0) if z.shape[1] else torch.zeros_like(peak)
            total = projection.arithmetic.add_up(p)
            sums = _reduce(
                torch.stack([total, _row_dots(p, z).to(total.dtype), target_z.to(total.dtype)]), dist.ReduceOp.SUM, projection.group
            )
            logsumexp[rows] = log_normalizer(peak, sums[0])
            logprobs[rows] = sums[2].float() - logsumexp[rows]
            entropy[rows] = logsumexp[rows] - sums[1] / sums[0]
            kept = z if hidden.shape[0] <= projection.chunk_size else None
            del z, p  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, targets, logsumexp, entropy, kept)
        ctx.projection = projection
        ctx.set_materialize_grads(False)  # of an entropy that only a metric reads the gradient is None, not zeros
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, logsumexp, entropy, kept = ctx.saved_tensors
        if grad_logprobs is None:  # an objective of the entropy alone
            grad_logprobs = torch.zeros_like(logsumexp)
        slopes = None if grad_entropy is None else (grad_entropy, entropy)
        return _backward(ctx, (hidden, weight, targets[:, None], logsumexp), grad_logprobs[:, None], slopes, kept)


class _LinearLogprobsOf(torch.autograd.Function):
    """Several targets per row; their gradients are summed."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, projection):
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        logsumexp = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for rows in projection.chunks(hidden.shape[0]):
            z = projection.logits(hidden[rows], weight)
            peak, total = _normaliser(z, projection)
            local, owned = _local_targets(targets[rows], projection.vocab_start, weight.shape[0])
            own = torch.where(owned, z.gather(1, local), 0.0) if z.shape[1] else z.new_zeros(local.shape)
            logsumexp[rows] = log_normalizer(peak, total)
            logprobs[rows] = _reduce(own, dist.ReduceOp.SUM, projection.group).float() - logsumexp[rows, None]
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.projection = projection
        return logprobs

    @staticmethod
    def backward(ctx, grad_logprobs):
        return _backward(ctx, ctx.saved_tensors, grad_logprobs)


def _backward(
    ctx,
    saved: tuple[Tensor, ...],
    grad_logprobs: Tensor,
    slopes: tuple[Tensor, Tensor] | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, None, None]:
    """The gradients of both functions: `saved` are hidden states, weight, targets [N, M] and normalisers; `slopes` the entropy's gradient
    and value; `kept` the logits, if the forward pass kept them."""
    hidden, weight, targets, logsumexp = saved
    projection = ctx.projection
    grad_hidden = torch.empty_like(hidden)
    grad_weight = _weight_gradient(ctx, weight)
    for rows in projection.chunks(hidden.shape[0]):
        z = kept if kept is not None else projection.again(hidden[rows], weight)
        scale = grad_logprobs[rows] / projection.temperature
        total = scale.sum(dim=1, keepdim=True) if scale.shape[1] > 1 else scale
        grad = z - logsumexp[rows, None]  # in place from here on: a new [chunk, V] tensor costs as much as the arithmetic on it
        if slopes is not None:
            slope = slopes[0][rows, None] / projection.temperature
            grad = grad.exp().mul_((grad + slopes[1][rows, None]).mul_(slope).add_(total)).neg_()
        else:
            grad = grad.exp_().mul_(-total)
        local, owned = _local_targets(targets[rows], projection.vocab_start, weight.shape[0])
        own = torch.where(owned, scale, 0.0)
        for column in (slice(0, 1), slice(1, None)) if z.shape[1] else ():  # in one call two additions to one place would race on a GPU
            grad.scatter_add_(1, local[:, column], own[:, column])
        grad = projection.slope_(grad, z).to(hidden.dtype)
        grad_hidden[rows] = grad @ weight
        if grad_weight is not None:
            grad_weight += float32_product(grad.t(), hidden[rows])
    return grad_hidden, _left_over(ctx, weight, grad_weight), None, None


def _weight_gradient(ctx, weight: Tensor) -> Tensor | None:
    """The accumulator, float32 [V_local, H]: for a parameter in 16 bits its sum over micro-batches, else zeros; None if the weight, the
    second argument, is frozen. float32 sums keep the last bits that autograd gives them."""
    if not ctx.needs_input_grad[1]:
        return None
    total = getattr(ctx.projection.parameter, "main_grad", None) if weight.dtype.itemsize <= 2 else None
    ctx.is_added = total is not None
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if total is None else total[: weight.shape[0]]


def _left_over(ctx, weight: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient for autograd, after `_weight_gradient`: zeros without memory if the parameter already has it. Replicas exchange the
    parameter's when autograd arrives; Megatron-Core then adds only a tied embedding's (`zero_out_wgrad`)."""
    if gradient is None or not ctx.is_added:
        return None if gradient is None else gradient.to(weight.dtype)
    ctx.projection.parameter.grad_added_to_main_grad = True
    return weight.new_zeros(()).expand(weight.shape)


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """[N] dot products of the rows of [N, V] tensors, a few rows at a time, which avoids a third tensor of that size."""
    return torch.cat([torch.linalg.vecdot(x, y) for x, y in zip(a.split(ROWS_AT_A_TIME), b.split(ROWS_AT_A_TIME), strict=True)])


def _row_maxima(z: Tensor) -> Tensor:
    """[N] from [N, V_local]. With a small vocabulary a rank may hold only padding, and so no column."""
    return z.amax(dim=-1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)


def _local_targets(targets: Tensor, vocab_start: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(row of this rank's weight, whether this rank owns it); the row is 0 if it does not."""
    local = targets - vocab_start
    owned = (local >= 0) & (local < vocab_size)
    return torch.where(owned, local, 0), owned
