"""The size of a component's checkpoint: exact once it is planned, estimated from the model's parameters before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aligner.errors import ConfigError
from aligner.models.checkpoint.async_save import PlannedDirectory
from aligner.models.checkpoint.disk_space import free_bytes, size_text
from aligner.models.training.trainable import TrainableModel
from aligner.parallel.collectives import from_rank_0, gather_objects

OVERHEAD = 1.02  # of file formats, and small files
MAIN_COPY_BYTES = 4  # per parameter: the optimizer's float32 weights
ALWAYS_ROOM_FOR = 2  # checkpoints, where a run keeps all of them


def planned_bytes(planned: Sequence[PlannedDirectory]) -> int:
    """Bytes that all ranks together will write. Collective."""
    own = 0
    for part in planned:
        for _, _, (objects, tensors) in part.buckets:
            own += sum(buffer.getbuffer().nbytes for _, buffer in objects) + sum(tensor.nbytes for _, tensor in tensors)
    return int(sum(gather_objects(own)) * OVERHEAD)


def estimated_bytes(model: TrainableModel) -> int:
    """Estimated bytes of a checkpoint of the model, from its parameters. Collective."""
    topology, config = model.topology, model.config
    dense_copies = topology.world_size // (topology.tp_size * topology.pp_size)
    expert_copies = topology.world_size // (config.expert_model_parallel_size * config.expert_tensor_parallel_size * topology.pp_size)
    own = 0.0
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if chunk.lora.is_on and not parameter.requires_grad:  # of a model with adapters, they are saved alone
                continue
            copies = expert_copies if ".experts." in name else dense_copies
            own += parameter.numel() * (parameter.element_size() + _optimizer_bytes(model)) / copies
    return int(sum(gather_objects(own)) * OVERHEAD)


def shortage(model: TrainableModel, directory: Path, *, keep: int) -> str:
    """A warning if fewer checkpoints fit than the run keeps at a time; empty if there is room. Collective.

    `keep`: how many stay; 0 keeps all. An older checkpoint is removed once the new one is complete. Raises ConfigError if not one fits.
    """
    size, wanted = estimated_bytes(model), keep + 1 if keep else ALWAYS_ROOM_FOR
    free = from_rank_0(lambda: free_bytes(directory))
    if free >= size * wanted:
        return ""
    if free < size:
        raise ConfigError(
            f"run.directory: {directory}: a checkpoint takes about {size_text(size)} and {size_text(free)} are free: not even one fits; "
            "make room there, or name another directory"
        )
    return (
        f"warning: {directory}: a checkpoint takes about {size_text(size)} and {size_text(free)} are free: "
        f"room for {free // max(size, 1)}, the run wants {wanted} at a time (checkpoint.keep={keep})"
    )


def _optimizer_bytes(model: TrainableModel) -> int:
    if model.optimizer is None:
        return 0
    part = model.optimizer.chained_optimizers[0]
    moments = 2 * (part.config.exp_avg_dtype.itemsize if part.config.use_precision_aware_optimizer else torch.float32.itemsize)
    return MAIN_COPY_BYTES + moments
