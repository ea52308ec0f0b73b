"""Megatron-Core's local modules on exact arithmetic: a token's hidden state has the same bits whatever else is in the batch.

With `model.batch_invariant` they replace the ordinary modules in the layer specification (`aligner.models.modules.layers`). Values come
from `aligner.parallel.exact`; gradients are the ordinary ones of the same functions, so only forward passes are invariant.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.config import Activation
from aligner.models.modules.attention import CoreAttention, by_segment
from aligner.models.modules.layers import LayerModules, Norm, ZeroCenteredLayerNorm
from aligner.models.modules.shared_prompts import SegmentedPackedSeqParams
from aligner.parallel import exact, mcore

ACTIVATIONS = {
    Activation.silu: exact.silu,
    Activation.gelu: exact.gelu,
    Activation.gelu_tanh: exact.gelu_tanh,
    Activation.squared_relu: exact.squared_relu,
}


class InvariantColumnLinear(mcore.ColumnParallelLinear):
    """A linear layer whose outputs are split over the tensor-parallel ranks."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup,
        **_: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = mcore.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = mcore.copy_to_tensor_model_parallel_region(input, group=tp_group)
        out = exact.linear_with_gradient(input, weight)
        return out if bias is None else out + bias


class InvariantRowLinear(mcore.RowParallelLinear):
    """A linear layer whose inputs are split over the tensor-parallel ranks: the sum over them is exact too."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        out = exact.linear_with_gradient(input_, self.weight, self.tp_group, scatter=self.sequence_parallel)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None


class InvariantRMSNorm(torch.nn.RMSNorm):
    def forward(self, input: Tensor) -> Tensor:
        return exact.with_gradient(
            lambda x, weight: exact.rms_norm(x, weight, self.eps),
            lambda x, weight: F.rms_norm(x, weight.shape, weight, self.eps),
            input,
            self.weight,
        )


class InvariantLayerNorm(torch.nn.LayerNorm):
    around = 0.0  # added to the weights

    def forward(self, input: Tensor) -> Tensor:
        return exact.with_gradient(
            lambda x, weight, bias: exact.layer_norm(x, weight + self.around, bias, self.eps),
            lambda x, weight, bias: F.layer_norm(x, self.normalized_shape, weight + self.around, bias, self.eps),
            input,
            self.weight,
            self.bias,
        )


class InvariantZeroCenteredLayerNorm(InvariantLayerNorm, ZeroCenteredLayerNorm):
    around = 1.0


class InvariantNorm(Norm):
    rms_norm = InvariantRMSNorm
    layer_norm = InvariantLayerNorm
    layer_norm_1p = InvariantZeroCenteredLayerNorm


class InvariantAttention(CoreAttention):
    """Core attention, each query by itself."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: mcore.PackedSeqParams | None = None, **options: Any
    ) -> Tensor:
        if not isinstance(packed_seq_params, SegmentedPackedSeqParams) or self.cp_group.size() > 1:
            return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **options)
        return by_segment(query, key, value, packed_seq_params.segments, self._attend).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exact.with_gradient(partial(exact.causal_attention, scale=self.scale), super()._attend, q, k, v)


INVARIANT = LayerModules(
    norm=InvariantNorm, core_attention=InvariantAttention, column_linear=InvariantColumnLinear, row_linear=InvariantRowLinear
)
