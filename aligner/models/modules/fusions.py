"""Whose modules a model's layers are made of, and which kernels they fuse: each only where what it needs can be imported.

`model.layers` chooses the modules. The fusions follow from them, from the architecture and from what is installed; none of
them has a setting. `table` lists in the log which are on, and why the others are off.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import torch_layers_reason
from aligner.models.config import Activation, Architecture, Layers, ModelConfig, PositionEmbedding, SeeingArchitecture
from aligner.parallel import mcore


class Kernel(str, Enum):
    """What can be one kernel instead of several, as the table names it."""

    attention = "attention over packed rows"
    norm = "norm with the product behind it"
    rope = "rotary embedding"
    swiglu = "SwiGLU"
    residual = "bias and residual addition"
    experts = "experts in one product"
    permutation = "tokens to experts and back"
    weight_gradients = "weight gradients into float32 buffers"
    adam = "Adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """What does it, or why it is off (empty where it is on)."""

    by: str
    off: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusions:
    """A model's layers and their fusions on this machine."""

    transformer_engine: bool  # whose modules the layers are made of; else torch's and Megatron-Core's own
    reason: str  # why those
    kernels: Mapping[Kernel, Fusion]

    def on(self, kernel: Kernel) -> bool:
        return not self.kernels[kernel].off


def fusions(architecture: Architecture, model: ModelConfig, dtype: torch.dtype) -> Fusions:
    """What a model of these settings and this `dtype` gets here. Raises ConfigError where its settings ask for what cannot be used."""
    uses_te, reason = choose_layers(architecture, model, dtype)
    importable = mcore.importable_kernels()

    def fusion(by: str, *reasons: str, needs: str = "", version: str = "") -> Fusion:
        lacks = f"needs {version}" if needs and needs not in importable else ""
        return Fusion(by=by, off=next((why for why in (*reasons, lacks) if why), ""))

    te, torch_layers = "Transformer Engine", "" if uses_te else "the layers are torch's"
    compiled = torch_layers or ("" if importlib.util.find_spec("triton") else "triton is not installed")
    no_experts = "" if architecture.num_experts else "the model has no experts"
    adapters = "model.lora.rank > 0: an adapter reads the input of each product" if model.lora.is_on else ""
    swiglu = architecture.gated_mlp and architecture.activation is Activation.silu
    apex = "" if "weight_gradients" in importable else "Apex's fused_weight_gradient_mlp_cuda does not import"
    kernels = {
        Kernel.attention: fusion(te, torch_layers, "model.share_prompts=true: torch's" if model.share_prompts else ""),
        Kernel.norm: fusion(te, torch_layers, adapters),
        Kernel.rope: fusion(
            te,
            torch_layers,
            "" if architecture.position_embedding is PositionEmbedding.rope else "positions are learned",
            "images have positions on three axes" if isinstance(architecture, SeeingArchitecture) else "",
            needs="rope",
            version="transformer-engine 1.4 or newer",
        ),
        Kernel.swiglu: fusion("torch.compile", compiled, "" if swiglu else "the activation is another"),
        Kernel.residual: fusion("torch.compile", compiled),
        Kernel.experts: fusion(
            te,
            no_experts,
            torch_layers,
            adapters,
            "experts have biases" if architecture.linear_bias else "",
            needs="experts",
            version="transformer-engine 1.9 or newer",
        ),
        Kernel.permutation: fusion(te, no_experts, torch_layers, needs="permutation", version="transformer-engine 2.1 or newer"),
        Kernel.weight_gradients: fusion(te) if uses_te else fusion("Apex", apex if torch.cuda.is_available() else "there is no GPU"),
        Kernel.adam: fusion(mcore.fused_adam(), "" if mcore.fused_adam() else "neither Transformer Engine's nor Apex's imports"),
    }
    return Fusions(transformer_engine=uses_te, reason=reason, kernels=kernels)


def choose_layers(architecture: Architecture, model: ModelConfig, dtype: torch.dtype) -> tuple[bool, str]:
    """(whether the layers are Transformer Engine's, why). Raises ConfigError where they must be and cannot."""
    missing = mcore.transformer_engine_problem()
    if model.layers is Layers.transformer_engine and missing:
        raise ConfigError(f"model.layers=transformer_engine: {missing}; allowed: auto, torch")
    if model.fp8 and missing:
        raise ConfigError(f"model.fp8=true: needs Transformer Engine's layers: {missing}")
    own = torch_layers_reason(architecture)
    if own and (model.fp8 or model.layers is Layers.transformer_engine):
        setting = "fp8=true" if model.fp8 else "layers=transformer_engine"
        raise ConfigError(f"model.{setting}: needs Transformer Engine's layers: {own}; allowed: {'false' if model.fp8 else 'auto, torch'}")
    if model.layers is not Layers.auto:
        return model.layers is Layers.transformer_engine, f"model.layers={model.layers.value}"
    if missing:
        return False, missing
    if own:
        return False, own
    if model.batch_invariant:
        return False, "model.batch_invariant=true"
    if model.quantization.is_on:
        return False, f"model.quantization={model.quantization.value}"
    if dtype == torch.float32 and not model.fp8:
        return False, "Transformer Engine's attention over packed rows is of 16 bits, the model of float32"
    return True, f"transformer-engine {mcore.transformer_engine_version()}"


def table(found: Fusions) -> str:
    """Lines for the log: whose layers, and each fusion with what does it or why it is off."""
    whose = "Transformer Engine's" if found.transformer_engine else "torch's"
    width = max(len(kernel.value) for kernel in found.kernels)
    lines = [f"  {kernel.value:<{width}}  {f'off: {one.off}' if one.off else f'on: {one.by}'}" for kernel, one in found.kernels.items()]
    return "\n".join([f"layers are {whose} ({found.reason}); fused kernels:", *lines])


_said: set[str] = set()


def say_once(found: Fusions, *, rank: int) -> None:
    """Print the table on rank 0 of a GPU component, once for all of a process's models that share it."""
    if torch.cuda.is_available():
        note_once(table(found), rank=rank)


def note_once(text: str, *, rank: int) -> None:
    """Print on rank 0, once for all of a process's models."""
    if rank == 0 and text not in _said:
        _said.add(text)
        print(text, flush=True)
