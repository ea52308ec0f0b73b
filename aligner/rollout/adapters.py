"""A policy's adapters as what a refit sends, behind its frozen weights that an engine has from before (`rollout.refit`).

The weights under the adapters are dense: of a packed model what training unpacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aligner.models.config import Family, LoraTarget, SeeingArchitecture
from aligner.models.families.mapping import ADAPTER
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.peft import export_adapters, pair_names, projections
from aligner.rollout.config import EngineKind
from aligner.rollout.engine.foreign import Adapters
from aligner.rollout.engine.manifest import Manifest, TensorSpec, checksum


def reason_to_merge(chunk: Chunk, engine: str) -> str:
    """Why a refit of this engine sends whole weights; empty: the adapters alone will do, as far as is known before it has started."""
    lora = chunk.lora
    if not lora.is_on:
        return "the policy has no adapters (model.lora.rank=0)"
    if engine != EngineKind.vllm:
        return f"rollout.engine={engine} gets whole weights here"
    if lora.dora:
        return "model.lora.dora=true: vLLM has no DoRA"
    if LoraTarget.experts in lora.targets:
        return "model.lora.targets: adapters of experts have not run in vLLM"
    if isinstance(chunk.architecture, SeeingArchitecture):
        return "adapters of a model of images have not run in vLLM"
    if chunk.architecture.latent_size:
        return "vLLM loads no weights under adapters of latent attention"
    if chunk.architecture.family is Family.gpt2:
        return "GPT-2's matrices are transposed in its files"
    return ""


def adapters_alone(chunks: Sequence[Chunk], weights: Manifest) -> Adapters:
    """The adapters of a policy whose exported tensors are those of `weights`."""
    chunk, tensors = chunks[0], dict[str, TensorSpec]()
    lora, dtype = chunk.lora, chunk.config.params_dtype
    for one in projections(chunk.architecture, lora):
        outputs, inputs = weights.tensors[f"{one.name}.weight"].shape
        for name, shape in zip(pair_names(chunk, one.name), ((lora.plain.rank, inputs), (outputs, lora.plain.rank)), strict=True):
            tensors[name] = TensorSpec(shape=shape, dtype=dtype)

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in export_adapters(chunks):
            yield name, tensor.detach() * lora.scaling if ".lora_B." in name else tensor.detach()

    def digest() -> list[int]:
        own = (linear_weight(p) for chunk in chunks for name, p in chunk.named_parameters() if ADAPTER not in name)
        return torch.stack([checksum(tensor) for weight in own for tensor in weight.storage]).tolist()

    return Adapters(export=export, manifest=Manifest(tensors=tensors), digest=digest)
