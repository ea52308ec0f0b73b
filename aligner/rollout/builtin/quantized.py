"""Numbers of the built-in engine in 8 bits: weights (`rollout.precision`), keys and values (`rollout.cache_precision`).

A row of numbers is kept as codes of one byte each and a scale, its largest magnitude / the largest code (448 in FP8 e4m3, 127 in INT8).
A row is one output's weights, one token's input of a layer, or one head's key or value of a token: the channel-wise weights and dynamic
scales by token of compressed-tensors' FP8_DYNAMIC, and its W8A16 for INT8, whose inputs stay as they are.

Rows that the ranks of a replica share have one scale, from the largest number on any of them, so a replica of several ranks has the codes
of one. On a GPU that multiplies FP8 (compute capability 8.9) in bfloat16 the product is `torch._scaled_mm`. Elsewhere it is emulated: the
same codes, multiplied in float32. Adapters are computed beside the codes, in their own precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from aligner.models.modules.layers import SPLIT_INPUTS
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.packed import LINEARS
from aligner.parallel import platform
from aligner.rollout.config import Precision

if TYPE_CHECKING:
    from aligner.models.modules.lora import Adapter

CODES = {Precision.fp8: torch.float8_e4m3fn, Precision.int8: torch.int8}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_MULTIPLE = 16  # of both sizes of a matrix, for `torch._scaled_mm`


def scales_of(rows: Tensor, codes: torch.dtype, *, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None) -> Tensor:
    """[..., 1] for rows [..., N]; 1 for a row of zeros. `group`: the ranks that have parts of the same rows."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scales = (largest / _LARGEST[codes]).to(dtype)
    return torch.where(scales > 0, scales, 1.0)


def encoded(rows: Tensor, scales: Tensor, codes: torch.dtype) -> Tensor:
    """The nearest codes; of two equally near ones the even one."""
    largest = _LARGEST[codes]
    ratios = (rows.float() / scales.float()).clamp_(-largest, largest)
    return (ratios.round_() if codes == torch.int8 else ratios).to(codes)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers, in the dtype of their scales."""
    return codes.to(scales.dtype) * scales


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """This rank's share of a linear layer's weight as codes [rows, inputs], with the layer's adapter (if any) beside it."""

    codes: Tensor
    scales: Tensor  # float32 [rows, 1]
    dtype: torch.dtype  # of the numbers
    group: dist.ProcessGroup | None  # the ranks that have the other inputs; None: all are here
    adapter: Adapter | None = None

    @torch.no_grad()
    def take(self, numbers: Tensor) -> None:
        """Become these numbers [rows, inputs]. Collective over the group."""
        self.scales.copy_(scales_of(numbers.detach(), self.codes.dtype, group=self.group))
        self.codes.copy_(encoded(numbers.detach(), self.scales, self.codes.dtype))

    def product(self, x: Tensor) -> Tensor:
        """As `F.linear`, of [N, inputs]. Collective over the group in FP8."""
        out = F.linear(x, self._dense()) if self.codes.dtype == torch.int8 else self._fp8_product(x)
        return out if self.adapter is None else out + self.adapter.share(x)

    def numbers(self) -> Tensor:
        """All of it, dense, with the adapter added up."""
        return self._dense() if self.adapter is None else self.adapter.merged(linear_weight(self._dense()))

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """The tensors that only the engine has."""
        return self.codes, self.scales

    @property
    def storage(self) -> tuple[Tensor, ...]:
        """All tensors of it."""
        return (*self.own, *(() if self.adapter is None else self.adapter.parameters()))

    def _dense(self) -> Tensor:
        return decoded(self.codes, self.scales).to(self.dtype)

    def _fp8_product(self, x: Tensor) -> Tensor:
        scales = scales_of(x, self.codes.dtype, group=self.group)
        codes = encoded(x, scales, self.codes.dtype)
        if multiplies_fp8(x, self.codes):
            return torch._scaled_mm(codes, self.codes.t(), scales, self.scales.t(), out_dtype=x.dtype)
        return (F.linear(codes.float(), self.codes.float()) * scales * self.scales.t()).to(x.dtype)


def multiplies_fp8(x: Tensor, codes: Tensor) -> bool:
    """Whether the device has a kernel for the product of rows like `x` with a weight of these codes."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or any(size % _MULTIPLE for size in codes.shape):
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def is_quantized(name: str) -> bool:
    """Whether `rollout.precision` is about the tensor with this global name: weights of the layers' linear layers; not embeddings, the
    output layer, norms, routers, projections onto latents, nor a vision tower."""
    layer, _, kind = name.rpartition(".")
    return name.startswith("decoder.layers.") and kind == "weight" and layer.rsplit(".", 1)[-1] in LINEARS


def quantized_room(
    shapes: Mapping[str, torch.Size],
    precision: Precision,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    adapters: Mapping[str, Adapter] | None = None,
) -> dict[str, QuantizedWeight]:
    """Room for those of the named weights that are quantized, of any contents; none with `model`. `group`: the ranks of a replica."""
    if precision is Precision.model:
        return {}
    found, device = {}, platform.device()
    for name, shape in shapes.items():
        if is_quantized(name):
            codes, scales = torch.empty(shape, dtype=CODES[precision], device=device), torch.ones(shape[0], 1, device=device)
            splits_inputs = name.split(".")[-2] in SPLIT_INPUTS
            found[name] = QuantizedWeight(codes, scales, dtype, group if splits_inputs else None, (adapters or {}).get(name))
    return found
