"""Attention over packed rows that share their prompts (`aligner.models.shared_prompts`): every segment attends causally to itself and,
where it goes on from a prompt, to all of that.

The CPU's kernel gives each part's output and log-sum-exp; they are put together as in ring attention (Liu et al. 2023, 2310.01889), and
with the whole's output and log-sum-exp the kernel's backward pass over a part gives that part's share of the gradients. Elsewhere a
segment's keys are the prompt's and its own, one after the other, and the causal mask is aligned with their ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Segments = Sequence[tuple[int, int, int]]  # (first slot, one beyond the last, index of the segment that it goes on from or -1)

# Grouped queries are the kernel's own business: it takes fewer keys than queries, forward and backward.
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def shared_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Causal attention within each segment and to the prompt that it goes on from: [T, heads, D] from query [T, heads, D] and key, value
    [T, groups, D]. `segments` cover all T slots; those that go on from a prompt lie right behind it."""
    if query.is_cuda:
        return torch.cat([_one_segment(query, key, value, segments, number, scale) for number in range(len(segments))])
    return _SharedAttention.apply(query, key, value, segments, scale)


def _one_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, number: int, scale: float) -> Tensor:
    start, stop, prefix = segments[number]
    k, v = key[start:stop], value[start:stop]
    if prefix >= 0:
        first, last, _ = segments[prefix]
        k, v = torch.cat([key[first:last], k]), torch.cat([value[first:last], v])
    q, k, v = (x.transpose(0, 1)[None] for x in (query[start:stop], k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for block in _blocks(segments):
            part, part_lse = _kernel(*(block.of(x) for x in (q, k, v)), 0.0, True, scale=scale)
            block.of(out).copy_(part)
            block.of(lse).copy_(part_lse)
        for prompt, rest in _by_prompt(segments):
            early, early_lse = (
                x[0].transpose(0, 1) for x in _kernel(_rows(q[rest]), _rows(k[prompt]), _rows(v[prompt]), 0.0, False, scale=scale)
            )
            late, late_lse = out[rest], lse[rest]
            whole = torch.logaddexp(early_lse, late_lse)
            late.mul_((late_lse - whole).exp_()[..., None]).add_(early * (early_lse - whole).exp_()[..., None])
            late_lse.copy_(whole)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for block in _blocks(ctx.segments):
            parts = _kernel_backward(*(block.of(x) for x in (grad, q, k, v, out, lse)), 0.0, True, scale=ctx.scale)
            for total, part in zip(grads, parts, strict=True):
                block.of(total).copy_(part)
        for prompt, rest in _by_prompt(ctx.segments):
            tensors = (grad[rest], q[rest], k[prompt], v[prompt], out[rest], lse[rest])
            parts = _kernel_backward(*(_rows(x) for x in tensors), 0.0, False, scale=ctx.scale)
            for total, slots, part in zip(grads, (rest, prompt, prompt), parts, strict=True):
                total[slots].add_(part[0].transpose(0, 1))
        return *grads, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring segments of the same size: one call of the kernel, and no copy of what goes into it."""

    start: int
    count: int
    size: int

    def of(self, x: Tensor) -> Tensor:
        """[count, heads, size, ...] of x [T, heads, ...], a view."""
        return x[self.start : self.start + self.count * self.size].unflatten(0, (self.count, self.size)).transpose(1, 2)


def _blocks(segments: Segments) -> list[_Block]:
    blocks: list[_Block] = []
    for start, stop, _ in segments:
        if blocks and blocks[-1].size == stop - start:
            blocks[-1] = _Block(blocks[-1].start, blocks[-1].count + 1, stop - start)
        else:
            blocks.append(_Block(start, 1, stop - start))
    return blocks


def _by_prompt(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(slots of a prompt, slots of all that goes on from it: they lie together, right after it)."""
    ends = {prefix: stop for _, stop, prefix in segments if prefix >= 0}
    for number, end in ends.items():
        start, stop, _ = segments[number]
        yield slice(start, stop), slice(stop, end)


def _rows(x: Tensor) -> Tensor:
    """[1, heads, L, ...] of [L, heads, ...], a view."""
    return x.transpose(0, 1)[None]
