"""Batch-invariant arithmetic: a row's result does not depend on the other rows of the same call.

A library's matrix product sums in an order that follows the shape of the whole call. Here sums are exact: terms are rounded to integers
with few enough bits that every partial sum fits into float64's 53 (Ozaki et al. 2012; Demmel and Nguyen 2013), in units that are powers of
two and depend on the row alone. So any kernel, number of threads or ranks, and order of reduction gives the same bits. Float32 models keep
about float32's accuracy: with 512 terms, 22 bits below each row's largest.

`check_arithmetic` tests that torch computes elementwise functions alike at every position of a tensor. (Not `silu`, `gelu` and `sigmoid`,
whose vector loop and scalar tail differ: here other functions compose them.)

`None` as a group means this rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError
from aligner.parallel.logprobs import ROUNDED, Arithmetic

MANTISSA_BITS = 53
KEYS_AT_A_TIME = 1024  # keys whose weighted values are summed exactly; such sums are added up in the order of positions
QUERIES_AT_A_TIME = 128
_LEAST_EXPONENT = -900  # of a row's largest entry, far below float32's; rows of zeros have it
WEIGHT_BITS = 33  # of a number from 0 to 1; sums of 2^20 of them are exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """A matrix [..., R, K] as integers in float64, times a power of two for each row, `unit` float64 [..., R, 1]."""

    numbers: Tensor
    unit: Tensor


def term_bits(num_terms: int) -> tuple[int, int]:
    """The number of bits that each of the two factors may have in a sum of `num_terms` products."""
    both = MANTISSA_BITS - math.ceil(math.log2(max(num_terms, 1)))
    return both - both // 2, both // 2


def round_rows(x: Tensor, bits: int, group: dist.ProcessGroup | None = None) -> Rounded:
    """`x` [..., R, K] with `bits` bits below each row's largest entry; collective over `group`, whose ranks hold parts of the rows."""
    peak = x.abs().amax(dim=-1, keepdim=True).double()
    if group is not None and group.size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    # |x| < 2 ** exponent, out of the number's bits (`frexp` and `pow` are slow, and `pow` need not be exact).
    exponent = ((peak.view(torch.int64) >> 52) - 1022).clamp_(min=_LEAST_EXPONENT)
    return Rounded(numbers=x.double().mul(_power_of_two(bits - exponent)).round_(), unit=_power_of_two(exponent - bits))


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def round_weight(weight: Tensor, group: dist.ProcessGroup | None = None) -> Rounded:
    """A weight matrix [out, in] rounded for `product`; `group` splits its inputs. Reusable until the weight changes."""
    return round_rows(weight, term_bits(weight.shape[1] * _size(group))[1], group)


def product(x: Tensor, weight: Rounded, group: dist.ProcessGroup | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in] transposed, in `x`'s precision; summed over the ranks of a `group` (collective)."""
    rows = x.reshape(-1, x.shape[-1])
    left = round_rows(rows, term_bits(rows.shape[1] * _size(group))[0], group)
    total = left.numbers @ weight.numbers.t()
    if group is not None and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.mul_(left.unit).mul_(weight.unit.t()).to(x.dtype).view(*x.shape[:-1], total.shape[1])


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`product` with a plain weight, without a gradient."""
    return product(x, round_weight(weight, group), group)


def row_totals(x: Tensor) -> Tensor:
    """Sums over the last dimension, float64 [..., 1]."""
    rounded = round_rows(x, term_bits(x.shape[-1])[0] + term_bits(x.shape[-1])[1])
    return rounded.numbers.sum(dim=-1, keepdim=True) * rounded.unit


def weight_totals(weights: Tensor) -> Tensor:
    """Sums over the last dimension of numbers from 0 to 1, float64 [...]. Sums of parts add up to the sum of the whole."""
    unit = 2.0**-WEIGHT_BITS
    return (weights.double() * (1 / unit)).round_().sum(dim=-1) * unit


EXACT = Arithmetic(project=linear, add_up=weight_totals, again=ROUNDED.project)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    mean_square = row_totals(wide.square()) / x.shape[-1]
    return (wide / (mean_square + eps).sqrt()).to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.double()
    wide = wide - row_totals(wide) / x.shape[-1]
    variance = row_totals(wide.square()) / x.shape[-1]
    return (wide / (variance + eps).sqrt()).to(x.dtype) * weight + bias


def silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (1 + (-wide).exp())).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    wide = x.float()
    return (0.5 * wide * (1 + ((wide + 0.044715 * (wide * wide * wide)) * math.sqrt(2 / math.pi)).tanh())).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head, as many as the tables have, rounding as Megatron-Core: product, product, sum."""
    rotated = cos.shape[-1]
    first, rest = x[..., :rotated], x[..., rotated:]
    return torch.cat([first * cos + first.roll(rotated // 2, -1) * sin, rest], dim=-1)


def attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of queries [B, G, R, D] to keys and values [B, G, T, D] where `visible` (bool, broadcast to [B, G, R, T]) is True. Each
    query sees at least one key, and at most 2^20. Hidden keys may hold any finite values, in any number."""
    dim_bits, key_bits = term_bits(queries.shape[-1]), term_bits(KEYS_AT_A_TIME)
    q, k, v = round_rows(queries, dim_bits[0]), round_rows(keys, dim_bits[1]), round_rows(values, key_bits[1])
    scores = (q.numbers @ k.numbers.mT).mul_(q.unit).mul_(k.unit.mT).mul_(scale).masked_fill_(~visible, -torch.inf)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).float().exp_()
    total = weight_totals(weights)[..., None]
    shares = round_rows(weights.double().mul_(v.unit.mT), key_bits[0])
    parts = zip(shares.numbers.split(KEYS_AT_A_TIME, dim=-1), v.numbers.split(KEYS_AT_A_TIME, dim=-2), strict=True)
    out = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    for share, part in parts:
        out += share @ part
    return out.mul_(shares.unit).div_(total).to(queries.dtype)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Queries [B, heads, L, D] at the positions of the last L of keys and values [B, groups, T, D]: [B, heads, L, D]."""
    batch, heads, length, dim = queries.shape
    groups, past = keys.shape[1], keys.shape[2] - length
    place = torch.arange(keys.shape[2], device=queries.device)
    outs = []
    for start in range(0, length, QUERIES_AT_A_TIME):
        rows = queries[:, :, start : start + QUERIES_AT_A_TIME]
        end = past + start + rows.shape[2]
        visible = (place[past + start : end, None] >= place[:end]).repeat(heads // groups, 1)
        grouped = rows.reshape(batch, groups, -1, dim)
        outs.append(attention(grouped, keys[:, :, :end], values[:, :, :end], visible, scale).view(rows.shape))
    return torch.cat(outs, dim=2)


class _Substituted(torch.autograd.Function):
    """The value of one function with the gradient of another that differs only by rounding."""

    @staticmethod
    def forward(ctx, value: Callable[..., Tensor], differentiable: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.differentiable = differentiable
        ctx.save_for_backward(*inputs)
        return value(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.differentiable(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
        return (None, None, *(next(found) if need else None for need in needed))


def with_gradient(value: Callable[..., Tensor], differentiable: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`value(*inputs)`; its gradient is `differentiable`'s, computed again in the backward pass."""
    return _Substituted.apply(value, differentiable, *inputs)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None, scatter: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gathered_by = group if scatter else None
        out = linear(x, weight, group)
        return out.chunk(group.size())[group.rank()].contiguous() if scatter else out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.gathered_by is not None:
            parts = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(ctx.gathered_by.size())]
            dist.all_gather(parts, grad.contiguous(), group=ctx.gathered_by)
            grad = torch.cat(parts)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, None, None


def linear_with_gradient(x: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None, *, scatter: bool = False) -> Tensor:
    """`linear`. With a `group`, whose ranks hold parts of the inputs, the gradient of the output must be the same on all its ranks;
    `scatter` keeps each rank's share of the first dimension (sequence parallelism)."""
    return _Product.apply(x, weight, group, scatter)


def check_arithmetic(device: torch.device) -> None:
    """Raise ConfigError unless this machine's torch computes as the mode requires: float64 sums that are exact while they fit, and
    elementwise functions that are the same at every position of a tensor."""
    generator = torch.Generator().manual_seed(0)
    sample = (torch.randn(4099, generator=generator) * 20).to(device)
    for name in ("exp", "log", "sin", "cos", "tanh", "erf", "sqrt"):
        for x in (sample, sample.double()):
            x = x.abs() if name in ("log", "sqrt") else x
            function: Callable[[Tensor], Tensor] = torch.__dict__[name]
            whole = function(x)
            parts = torch.cat([function(part) for part in (x[:1], x[1:18], x[18:1029], x[1029:])])
            if not (torch.equal(whole, parts) and torch.equal(whole[::3], function(x[::3]))):
                raise ConfigError(f"model.batch_invariant=true: torch.{name} on this {device.type} depends on the place in the tensor")
    left, right = (torch.randint(-(2**22), 2**22 + 1, (33, 512), generator=generator) for _ in range(2))
    if not torch.equal((left.double().to(device) @ right.double().to(device).t()).long().cpu(), left @ right.t()):
        raise ConfigError(f"model.batch_invariant=true: products of integers in float64 are not exact on this {device.type}")
