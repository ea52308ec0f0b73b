"""Paged attention of the flash-attn packages, if one of them and a GPU that it runs on are there.

FlashAttention-2 (package `flash_attn`, Dao 2023) takes pages of multiples of 256 tokens; FlashAttention-3 (`flash_attn_interface`, Shah et
al. 2024, Hopper) of any size. Both take float16 and bfloat16 and heads of up to 256 dimensions.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.rollout.attention import Continued, DecodePlan, PagedKV

MOST_DIMENSIONS = 256
HOPPER = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A module with `flash_attn_with_kvcache`, what it calls the page table, and the pages that it likes."""

    module: str
    table: str
    page_size: int


FLASH_3 = Package(module="flash_attn_interface", table="page_table", page_size=128)
FLASH_2 = Package(module="flash_attn", table="block_table", page_size=256)


class FlashAttention:
    """`PagedAttention` by a package's `flash_attn_with_kvcache`: neither gathers pages nor needs masks."""

    def __init__(self, package: Package, function: Callable[..., Tensor]) -> None:
        self.page_size = package.page_size
        self._table = package.table
        self._function = function

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        rows, groups, share, size = queries.shape
        out = self._attend(queries.reshape(rows, 1, groups * share, size), cache, layer, plan.lengths, plan.pages)
        return out.view(rows, groups, share, size)

    def prefill(self, queries: Tensor, cache: PagedKV, layer: int, part: Continued) -> Tensor:
        tokens, groups, share, size = queries.shape
        out = self._attend(queries.reshape(1, tokens, groups * share, size), cache, layer, part.length, part.pages)
        return out.view(tokens, groups, share, size)

    def _attend(self, queries: Tensor, cache: PagedKV, layer: int, lengths: Tensor, pages: Tensor) -> Tensor:
        """[B, S, heads, D]: the last S of `lengths` [B] int32 tokens, in `pages` [B, P] int32, look back."""
        return self._function(queries, cache.keys[layer], cache.values[layer], cache_seqlens=lengths, causal=True, **{self._table: pages})


def load(package: Package) -> FlashAttention | None:
    """The package's attention, or None if it is not installed or is one that this was not written for: a log line then says so."""
    try:
        function = importlib.import_module(package.module).flash_attn_with_kvcache
    except (ImportError, AttributeError):
        return None
    missing = {"cache_seqlens", "causal", package.table} - set(inspect.signature(function).parameters)
    if missing:
        logging.getLogger(__name__).warning(
            "rollouts attend without %s, whose flash_attn_with_kvcache has no %s", package.module, ", ".join(sorted(missing))
        )
        return None
    return FlashAttention(package, function)


def flash_attention(weight: Tensor, head_dim: int) -> FlashAttention | None:
    """The fastest one for a model with this weight's dtype and device, or None."""
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16) or head_dim > MOST_DIMENSIONS or head_dim % 8:
        return None
    is_hopper = torch.cuda.get_device_capability(weight.device)[0] == HOPPER
    return (load(FLASH_3) if is_hopper else None) or load(FLASH_2)
