"""Modules that Megatron-Core's local layer specification lacks: norms that work with sequence parallelism, layers with other sums and
norms, rotated neighbours, biases on some linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.config import Architecture, Normalization, ParallelResidual
from aligner.models.modules.attention import CoreAttention, split_for_checkpoint
from aligner.parallel.mcore import (
    ColumnParallelLinear,
    ModuleSpec,
    PackedSeqParams,
    RowParallelLinear,
    SelfAttention,
    TransformerConfig,
    TransformerLayer,
    build_module,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """LayerNorm that multiplies by 1 + weight (Nemotron's `LayerNorm1P`)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma's)."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input.float(), self.normalized_shape, self.weight.float() + 1.0, self.eps).to(input.dtype)


class LayerNormWithoutBias(torch.nn.LayerNorm):
    """LayerNorm that adds nothing (Cohere's)."""

    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__(hidden_size, bias=False, **options)


class UnitNorm(torch.nn.Module):
    """RMSNorm without weights, in float32. A head's mean square is the same before and after it is rotated: it may as well be set first."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> the same shape."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Norm:
    """RMSNorm or LayerNorm whose weights are marked if their gradients must be summed over the tensor-parallel ranks."""

    rms_norm: type[torch.nn.Module] = torch.nn.RMSNorm
    layer_norm: type[torch.nn.Module] = torch.nn.LayerNorm
    layer_norm_1p: type[torch.nn.Module] = ZeroCenteredLayerNorm
    rms_norm_1p: type[torch.nn.Module] = ZeroCenteredRMSNorm
    layer_norm_no_bias: type[torch.nn.Module] = LayerNormWithoutBias

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, kind: Normalization, **_: Any) -> torch.nn.Module:
        # None is torch's default device: the CPU, or the meta device while a plan is made.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = getattr(cls, kind.value)(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def needs_own_layer(architecture: Architecture) -> bool:
    """Whether a layer of this architecture is an `OwnLayer`."""
    kinds = architecture.post_norms, architecture.residual_norms, architecture.rope_local_theta
    return architecture.parallel_residual != ParallelResidual.none or any(kinds)


class OwnLayer(TransformerLayer):
    """A dense layer without dropout. With two rotary bases its angles come side by side, those of layers without a window first."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, architecture: Architecture, norm: ModuleSpec, **options: Any
    ):
        super().__init__(config, submodules, *args, **options)
        self.parallel = architecture.parallel_residual
        self.angles = None
        if architecture.rope_local_theta:
            self.angles = int(architecture.window_of(self.layer_number - 1) > 0)
        self.post_attention_layernorm = self.post_mlp_layernorm = torch.nn.Identity()
        self.norms_sums = architecture.residual_norms
        if architecture.post_norms or architecture.residual_norms:
            sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.post_attention_layernorm, self.post_mlp_layernorm = (build_module(norm, config=config, **sizes) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> the same shape, and no context."""
        if rotary_pos_emb is not None and self.angles is not None:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[self.angles]
        normed = self.input_layernorm(hidden_states)
        attended = _sum(
            self.self_attention(normed, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params)
        )
        if self.parallel != ParallelResidual.none:
            read = normed if self.parallel is ParallelResidual.shared_norm else self.pre_mlp_layernorm(hidden_states)
            return hidden_states + attended + _sum(self.mlp(read)), None
        if self.norms_sums:
            hidden_states = self.post_attention_layernorm(hidden_states + attended)
            return self.post_mlp_layernorm(hidden_states + _sum(self.mlp(self.pre_mlp_layernorm(hidden_states)))), None
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_mlp_layernorm(_sum(self.mlp(self.pre_mlp_layernorm(hidden_states)))), None


def needs_own_rotation(architecture: Architecture) -> bool:
    """Whether attention of this architecture is an `OwnRotation`."""
    factored = architecture.rope_attention_factor != rope.factor_of_scores(architecture)
    return not architecture.latent_size and (architecture.rotary_interleaved or factored)


class OwnRotation(SelfAttention):
    """Rotates neighbouring dimensions together: they are put half of the rotated ones apart, where Megatron-Core rotates them. Queries and
    keys are reordered in the same way, so scores do not change. In heads rotated in part, that part is multiplied by its factor."""

    def __init__(self, *args: Any, architecture: Architecture, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotated = architecture.rotated
        self.interleaved = architecture.rotary_interleaved and architecture.rotates(self.layer_number - 1)
        self.factor = architecture.rope_attention_factor / rope.factor_of_scores(architecture)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        """Megatron-Core's, with the first dimensions of queries and keys reordered and scaled."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **options)
        return self._before_rotation(query), self._before_rotation(key), *rest

    def _before_rotation(self, x: Tensor) -> Tensor:
        x = rope.neighbours_apart(x, self.rotated) if self.interleaved else x
        if self.factor == 1:
            return x
        return torch.cat([x[..., : self.rotated] * self.factor, x[..., self.rotated :]], dim=-1)


def _sum(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """A linear layer's output and the bias that it leaves to its caller."""
    return output[0] if output[1] is None else output[0] + output[1]


class NormOfHeads(torch.nn.Module):
    """What norms of the queries, or of the keys, share whose weights are of all heads side by side. Each tensor-parallel rank has its
    heads'."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, **_: Any) -> None:
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        self.ranks = config.tensor_model_parallel_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(self.size // self.ranks, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """For checkpoints: the weight by its rank's share."""
        return split_for_checkpoint({"weight": self.weight}, prefix, sharded_offsets)


class WholeNorm(NormOfHeads):
    """RMSNorm over the heads of the queries, or of the keys, together (OLMo 2, 2501.00656)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] of this rank."""
        flat = x.flatten(-2).float()
        squares = flat.square().sum(dim=-1, keepdim=True)
        if self.ranks > 1:  # every rank's output depends on the sum of all: it is summed forward, and its gradient backward
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normed.to(x.dtype) * self.weight).view(x.shape)


class HeadNorm(NormOfHeads):
    """LayerNorm without biases over each head, which has weights of its own (Cohere's Command R+)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads, D] of this rank."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModules:
    """What the local specification's layers are made of."""

    norm: type[Norm] = Norm
    core_attention: type[CoreAttention] = CoreAttention
    column_linear: type[ColumnParallelLinear] = ColumnParallelLinear
    row_linear: type[RowParallelLinear] = RowParallelLinear


ORDINARY = LayerModules()


@cache
def biased(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The same with a bias, where `TransformerConfig` would give all linear layers one or none."""

    def init(self: torch.nn.Module, *args: Any, bias: bool, **options: Any) -> None:
        linear.__init__(self, *args, bias=True, **options)

    return type(f"Biased{linear.__name__}", (linear,), {"__init__": init})


class BiasedExpertOut(RowParallelLinear):
    """An expert's second matrix with a bias. Of ranks that share the expert, whose outputs are summed, the first one adds it."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)
        self.bias.sequence_parallel = False  # its ranks see all tokens of the expert: their gradients are the same, not parts
        set_tensor_model_parallel_attributes(self.bias, self.tp_group.size() == 1, -1, 1)  # then other ranks have other experts

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        """The product and the bias: one without value, but with its gradient, where another rank adds it."""
        out, bias = super().forward(input_)
        # A copy: Megatron-Core adds to the product in place, which a view of an autograd function does not allow.
        return out.clone(), bias if self.tp_group.rank() == 0 else bias - bias.detach()
