"""The tensors of a whole model, derived from its architecture alone, and checks that a refit delivered exactly these, finite and unchanged.

Engines of other packages are filled with Hugging Face names and shapes (`hf_manifest`), the built-in engine with global Megatron names
(`global_manifest`). A manifest is made without any tensor, so the expected weights do not depend on the actual ones.

A checksum is a sum over a tensor's bit patterns, modulo 2^64, each times an odd number for its place along the split dimension. So the
checksum of a whole is the sum of its parts' checksums for any split, and a part in the wrong place is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.errors import EngineError
from aligner.models.config import Architecture
from aligner.models.families import weight_names
from aligner.models.families.mapping import hf_shapes
from aligner.models.families.own_modules import outline
from aligner.models.families.wrappers import TOWER
from aligner.models.modules.linear import LinearWeight

_SHOWN = 3  # names in a message
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a model: its full shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Every tensor of a model once, by name, in the order of Hugging Face's model; a tied output layer is left out."""

    tensors: Mapping[str, TensorSpec]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors.values())


def global_manifest(architecture: Architecture, dtype: torch.dtype) -> Manifest:
    """Full tensors under Megatron's names with global layer and expert numbers; the vocabulary without padding."""
    names = weight_names(architecture).names(architecture)
    return Manifest(tensors={name: TensorSpec(shape=_full_shape(name, architecture), dtype=_dtype(name, dtype)) for name in names})


def hf_manifest(architecture: Architecture, dtype: torch.dtype) -> Manifest:
    """Full tensors under Hugging Face's names, as `Policy.export_weights` streams them."""
    table, tensors = weight_names(architecture), {}
    for name in table.names(architecture):
        rule = table.find(name)
        shapes = hf_shapes(rule, _full_shape(name, architecture), architecture)
        own = _dtype(name, dtype)
        tensors |= {hf: TensorSpec(shape=shape, dtype=own) for hf, shape in zip(rule.hf_names, shapes, strict=True)}
    return Manifest(tensors=tensors)


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Of tensors that a model itself names, in their order."""
    return Manifest(tensors={name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors})


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for the biases by which experts are chosen, since their updates are small."""
    return torch.float32 if name.endswith(".expert_bias") else dtype


def _full_shape(name: str, architecture: Architecture) -> tuple[int, ...]:
    a = architecture
    if name.startswith(TOWER):
        return tuple(outline(architecture).model.get_parameter(name).shape)
    inner = a.ffn_hidden_size
    if ".local_experts." in name or ".shared_experts." in name:
        inner = a.expert_ffn_hidden_size if ".local_experts." in name else a.shared_ffn_hidden_size
    queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    delta_keys, delta_values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
    shapes = {
        "word_embeddings": (a.vocab_size, a.vocabulary_width),
        "output_layer": (a.vocab_size, a.vocabulary_width),
        "projection": (a.hidden_size, a.vocabulary_width),
        "output_projection": (a.vocabulary_width, a.hidden_size),
        "position_embeddings": (a.max_position_embeddings + a.position_offset, a.hidden_size),
        "linear_qkv": (queries * (1 + a.attention_gate) + 2 * keys, a.hidden_size),
        "linear_qkvz": (2 * delta_keys + 2 * delta_values, a.hidden_size),
        "linear_ba": (2 * a.linear_value_heads, a.hidden_size),
        "linear_out": (a.hidden_size, delta_values),
        "out_norm": (a.linear_value_head_dim,),
        "linear_proj": (a.hidden_size, a.num_attention_heads * a.value_head_dim if a.latent_size else queries),
        "linear_q_proj": (queries, a.hidden_size),
        "linear_q_down_proj": (a.query_latent_size, a.hidden_size),
        "linear_q_up_proj": (queries, a.query_latent_size),
        "linear_kv_down_proj": (a.latent_size + a.rotated, a.hidden_size),
        "linear_kv_up_proj": (a.num_attention_heads * (a.head_dim - a.rotated + a.value_head_dim), a.latent_size),
        "kv_layernorm": (a.latent_size,),
        "core_attention": (a.num_attention_heads,),
        "linear_fc1": (inner * (1 + a.gated_mlp), a.hidden_size),
        "linear_fc2": (a.hidden_size, inner),
        "router": (a.num_experts, a.hidden_size),
        "q_layernorm": (a.query_latent_size or (queries if a.qk_norm_of_heads else a.head_dim),),
        "k_layernorm": (keys if a.qk_norm_of_heads else a.head_dim,),
        "input_layernorm": (a.hidden_size,),
        "post_attention_layernorm": (a.hidden_size,),
        "pre_mlp_layernorm": (a.hidden_size,),
        "post_mlp_layernorm": (a.hidden_size,),
        "final_layernorm": (a.hidden_size,),
    }
    module, kind = name.split(".")[-2:]
    own = {"gate_weight": (1, a.hidden_size), "conv_weight": (2 * delta_keys + delta_values, 1, a.linear_conv_size)}
    own |= dict.fromkeys(("A_log", "dt_bias"), (a.linear_value_heads,))
    if kind in own:
        return own[kind]
    return shapes[module][:1] if kind.endswith("bias") else shapes[module]


def mismatch(name: str, tensor: Tensor | LinearWeight, spec: TensorSpec) -> str:
    """A message about a tensor's wrong shape or dtype; empty if both are right."""
    if tuple(tensor.shape) != spec.shape:
        return f"{name} has the shape {list(tensor.shape)}, the model's config requires {list(spec.shape)}"
    if tensor.dtype != spec.dtype:
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, the model is {str(spec.dtype).removeprefix('torch.')}"
    return ""


class Receipt:
    """Checks tensors against the manifest: those that arrive in one refit, or (`where`) those of a list. Each check needs a new one."""

    def __init__(self, manifest: Manifest, where: str = "") -> None:
        self._manifest, self._where = manifest, where and f" in {where}"
        self._seen: set[str] = set()

    def take(self, named: Iterable[tuple[str, Tensor | LinearWeight]]) -> None:
        """Note tensors. Raises EngineError naming one that is extra, came before, or has the wrong shape or dtype."""
        for name, tensor in named:
            if name not in self._manifest.tensors:
                raise EngineError(f"refit: {name} is extra{self._where}: no weight of this model has that name")
            if name in self._seen:
                raise EngineError(f"refit: {name} came twice{self._where}")
            self._seen.add(name)
            if wrong := mismatch(name, tensor, self._manifest.tensors[name]):
                raise EngineError(f"refit: {wrong}")

    def complete(self) -> None:
        """Raises EngineError naming tensors that did not arrive."""
        if missing := [name for name in self._manifest.tensors if name not in self._seen]:
            raise EngineError(f"refit: {named_few(missing)} of {len(self._manifest.tensors)} tensors missing{self._where}")


def named_few(names: list[str]) -> str:
    """The first few names, and the number of the others."""
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise EngineError for tensors with a NaN or an infinity, with their numbers; one pass, and one wait for the device."""
    named = [(name, tensor.detach()) for name, tensor in tensors.items() if tensor.numel()]
    if not named:
        return
    finite = torch.stack([largest.isfinite() for largest in magnitudes([tensor for _, tensor in named])])
    bad = [pair for pair, good in zip(named, finite.tolist(), strict=True) if not good]
    if bad:
        counted = [f"{name} ({int((~tensor.isfinite()).sum())} of {tensor.numel()} elements)" for name, tensor in bad]
        raise EngineError(f"the weights are not finite: {named_few(counted)} of {len(tensors)} tensors")


def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A scalar for each tensor, finite if all of its elements are; allocates no other memory."""
    if tensors[0].is_cuda:
        return list(torch._foreach_norm(tensors, float("inf")))  # fused over all of them
    return [torch.maximum(low.abs(), high.abs()) for low, high in map(torch.aminmax, tensors)]  # ten times as fast as the norm


def along(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """The contribution of each index along `dim` to the checksum, int64 [size]; `indices` int64 [size] refer to the full tensor."""
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    others = [other for other in range(bits.dim()) if other != dim]
    sums = bits.sum(dim=others, dtype=torch.int64) if others else bits.long()
    return sums * (2 * indices + 1)


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a full tensor, an int64 scalar on its device."""
    return along(tensor, 0, torch.arange(tensor.shape[0], device=tensor.device)).sum()
