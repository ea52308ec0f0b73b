"""A policy's adapters as what a refit sends, behind its frozen weights that an engine has from before (`rollout.refit`).

The weights under the adapters are dense: of a packed model what training unpacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aligner.models.families.mapping import ADAPTER
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.linear import linear_weight
from aligner.models.modules.peft import export_adapters, pair_names, projections
from aligner.rollout.engine.foreign import Adapters
from aligner.rollout.engine.manifest import Manifest, TensorSpec, checksum


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
