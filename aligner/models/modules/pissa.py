"""PiSSA (Meng et al. 2024, 2404.02948): adapters begin with the largest singular values and vectors of the weights under them.

With W = U S V', A = sqrt(S_r / scaling) V_r' and B = U_r sqrt(S_r / scaling). The paper puts the residual W - scaling B A in W's place.
Here W stays, and the layer subtracts the product of the frozen first pair: the same function and gradients, nothing is rounded away, and
the export is an adapter of the original weights, of twice the rank, as PEFT makes it of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.config import Family, LoraConfig
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.lora import named_adapters
from aligner.models.modules.peft import fill_adapters, pair_names, projections
from aligner.models.weights import export_hf
from aligner.parallel.collectives import gather_objects


@torch.no_grad()
def start_from_weights(chunks: Sequence[Chunk]) -> None:
    """Fill new adapters, which add nothing yet, from the chunks' own weights. Collective.

    Every rank decomposes its share of the matrices, each of them whole: every layout starts from the same adapters.
    """
    chunk, rank, size = chunks[0], dist.get_rank(), dist.get_world_size()
    transposed = chunk.architecture.family is Family.gpt2
    names = {f"{one.name}.weight" for one in projections(chunk.architecture, chunk.lora)}
    found: dict[str, Tensor] = {}
    own: tuple[str, Tensor] | None = None
    wanted = ((name, weight) for name, weight in export_hf(chunks) if name in names)
    for number, (name, weight) in enumerate(wanted, start=1):
        names.remove(name)
        if chunk.lora.rank > min(weight.shape):
            raise ConfigError(f"model.lora.rank={chunk.lora.rank}: {name} has {min(weight.shape)} singular values (model.lora.init=pissa)")
        if number % size == rank:
            own = name, (weight.t() if transposed else weight).float().clone()
        if own is not None and (number % size == 0 or not names):  # every rank has one: all of them compute at the same time
            found |= zip(pair_names(chunk, own[0].removesuffix(".weight")), pair_of(*own, chunk.lora), strict=True)
            own = None
    if names:
        raise ConfigError(f"model.lora.init=pissa: {min(names)} is no matrix of its own in the model's files; allowed: uniform")
    fill_adapters(chunks, {name: tensor for part in gather_objects(found) for name, tensor in part.items()}, "model.lora.init=pissa")
    for chunk in chunks:
        for _, adapter in named_adapters(chunk):
            adapter.freeze_start()


def pair_of(name: str, weight: Tensor, lora: LoraConfig) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and B [outputs, rank] of a float32 matrix, on the CPU."""
    if lora.pissa_iterations:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(zlib.crc32(name.encode()))
            left, values, right = torch.svd_lowrank(weight, lora.rank, niter=lora.pissa_iterations)
            right = right.t()
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[: lora.rank] / lora.scaling).sqrt()
    return (roots[:, None] * right[: lora.rank]).cpu(), (left[:, : lora.rank] * roots).cpu()
