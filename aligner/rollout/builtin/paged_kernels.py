"""Kernels that attend over pages where they lie, and the choice between them. None gathers pages or needs masks.

FlashAttention-3 (package `flash_attn_interface`, Shah et al. 2024, Hopper) accepts pages of any size, FlashAttention-2 (`flash_attn`, Dao
2023) multiples of 256 tokens. Torch has FlashAttention-2 built in (`torch.nn.attention.varlen`; paged in newer versions, at least 2.13),
and then no package is needed. All accept float16 and bfloat16 and heads of up to 256 dimensions, and can be recorded in a graph, since
lengths and page tables stay on the device. (FlashInfer's wrappers plan each step on the host, from lengths there.)

Each is tried on a few tokens first; one that fails, or differs from the reference, is not used.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.rollout.builtin.attention import Continued, DecodeBatch, DecodePlan, GatheredAttention, PagedKV, plan_decode

_log = logging.getLogger(__name__)

MOST_DIMENSIONS = 256
HOPPER = 9
TOLERANCE = 3e-2  # of outputs of the size 1, in bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A module with paged attention, its name for the page table, and its preferred page size."""

    module: str
    table: str
    page_size: int


FLASH_3 = Package(module="flash_attn_interface", table="page_table", page_size=128)
FLASH_2 = Package(module="flash_attn", table="block_table", page_size=256)
TORCH = Package(module="torch.nn.attention.varlen", table="block_table", page_size=256)


class FlashAttention(GatheredAttention):
    """Attention by a package's `flash_attn_with_kvcache`, over the pages where they lie."""

    def __init__(self, package: Package, function: Callable[..., Tensor]) -> None:
        super().__init__(package.page_size)
        self.name = package.module
        self._table = package.table
        self._function = function

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        return self._attend(queries[:, None], cache, layer, plan)[:, 0]

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        return self._attend(queries[None], cache, layer, part)[0]

    def _attend(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan | Continued) -> Tensor:
        """[B, S, groups, queries per group, D]: the last S tokens of the sequences attend to all before them."""
        out = self._function(
            queries.flatten(2, 3),
            cache.keys[layer],
            cache.values[layer],
            cache_seqlens=plan.lengths,
            causal=True,
            **{self._table: plan.pages},
        )
        return out.view(queries.shape)


class TorchFlashAttention(FlashAttention):
    """Attention by torch's `varlen_attn`, whose queries lie one sequence after the other."""

    def _attend(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan | Continued) -> Tensor:
        out = self._function(
            queries.flatten(2, 3).flatten(0, 1),
            cache.keys[layer],
            cache.values[layer],
            *plan.bounds,
            queries.shape[1],
            plan.pages.shape[1] * self.page_size,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
            seqused_k=plan.lengths,
            block_table=plan.pages,
        )
        return out.view(queries.shape)


def load(package: Package) -> FlashAttention | None:
    """The package's attention; None if it is not installed or its function lacks a parameter (logged), as in versions without pages."""
    is_torch, name, used = package is TORCH, "flash_attn_with_kvcache", {"cache_seqlens", "causal"}
    if is_torch:
        name, used = "varlen_attn", {"window_size", "enable_gqa", "seqused_k"}
    try:
        function = getattr(importlib.import_module(package.module), name)
    except (ImportError, AttributeError):
        return None
    if missing := (used | {package.table}) - set(inspect.signature(function).parameters):
        if not is_torch:
            _log.warning("rollouts attend without %s, whose %s has no %s", package.module, name, ", ".join(sorted(missing)))
        return None
    return (TorchFlashAttention if is_torch else FlashAttention)(package, function)


def flash_attention(weight: Tensor, heads: tuple[int, int, int]) -> FlashAttention | None:
    """The fastest kernel that works for this weight, or None. `heads`: this rank's key-value groups, queries per group, dimensions."""
    dimensions = heads[2]
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16) or dimensions > MOST_DIMENSIONS or dimensions % 8:
        return None
    is_hopper = torch.cuda.get_device_capability(weight.device)[0] == HOPPER
    for candidate in (load(FLASH_3) if is_hopper else None, load(FLASH_2), load(TORCH)):
        if candidate is not None and attends_right(candidate, weight, heads):
            return candidate
    return None


@torch.no_grad()
def attends_right(attention: FlashAttention, weight: Tensor, heads: tuple[int, int, int]) -> bool:
    """Whether the kernel agrees with the reference on two short sequences; if not, that is logged."""
    groups, share, dimensions = heads
    size, generator = attention.page_size, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight)

    cache = PagedKV(keys=random(1, 4, size, groups, dimensions), values=random(1, 4, size, groups, dimensions))
    positions = torch.tensor([size + 4, 6], device=weight.device)
    pages = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32, device=weight.device)
    plan = plan_decode(DecodeBatch(tokens=torch.zeros_like(positions), positions=positions, pages=pages), size)
    queries = random(2, groups, share, dimensions)
    try:
        found = attention.decode(queries, cache, 0, plan)
        worst = float((found - GatheredAttention(size).decode(queries, cache, 0, plan)).abs().max())
    except Exception as error:  # of any kind: the reference works without it
        _log.warning("rollouts attend without %s, which failed: %s: %s", attention.name, type(error).__name__, error)
        return False
    if not worst <= TOLERANCE:
        _log.warning("rollouts attend without %s, which is off by %.2g on two short sequences", attention.name, worst)
    return worst <= TOLERANCE
