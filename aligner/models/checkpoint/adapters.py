"""The content of a checkpoint of a model with adapters: adapters, any head, and the location of the base weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aligner.errors import CheckpointError
from aligner.hub.names import parse
from aligner.models.checkpoint.files import MARKER
from aligner.models.config import LoraConfig, LoraTarget
from aligner.models.families.mapping import ADAPTER
from aligner.models.modules.build import Transformer
from aligner.models.modules.initialise import global_name
from aligner.models.modules.lora import Adapter, named_adapters
from aligner.models.modules.scalar_head import HEAD
from aligner.parallel.mcore import ShardedTensor, parallel_state

LORA = "lora"  # key of a marker
_LOOKED_AT = 65536  # bytes at the beginning, the middle and the end of a file


def whole_state(chunk: Transformer) -> dict[str, Any]:
    """All parameters of a chunk but adapters', with their place in the whole model."""
    return {name: shard for name, shard in chunk.sharded_state_dict().items() if ADAPTER not in name}


def saved_state(chunk: Transformer) -> dict[str, Any]:
    """The part of this chunk that a checkpoint holds: the trained parameters."""
    return head_state(chunk) | adapter_state(chunk, dict(named_adapters(chunk))) if chunk.lora.is_on else whole_state(chunk)


def head_state(chunk: Transformer) -> dict[str, Any]:
    """The head's parameters of a value or reward model's last chunk; empty for other chunks."""
    return {name: shard for name, shard in chunk.sharded_state_dict().items() if name.startswith(HEAD)}


def adapter_state(chunk: Transformer, adapters: Mapping[str, Adapter]) -> dict[str, ShardedTensor]:
    """Parameters of adapters, by their names in the chunk, with their place in the whole model; `adapters` by their layer's name there."""
    found = {}
    for layer, adapter in adapters.items():
        if adapter.pairs.is_expert:
            replica = parallel_state.get_expert_data_parallel_rank()
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        rank, size = adapter.group.rank(), adapter.group.size()
        for own, parameter in adapter.named_parameters():
            name, dim = f"{layer}{ADAPTER}{own}", parameter.partition_dim
            offsets = [(dim, rank, size)] if dim >= 0 else []
            same = (0, 0 if dim >= 0 else rank, replica)
            found[name] = ShardedTensor.from_rank_offsets(global_name(chunk, name), parameter, *offsets, replica_id=same)
    return found


def weights_digest(source: Path) -> str:
    """A digest of the weights in a directory, independent of its path. It reads little, however large they are.

    For a checkpoint, the digest of its marker, which covers every file; for Hugging Face files, of their sizes and of some places.
    """
    if (source / MARKER).exists():
        return hashlib.sha256((source / MARKER).read_bytes()).hexdigest()
    content = hashlib.sha256()
    for path in sorted(source.glob("*.safetensors")):
        size = path.stat().st_size
        content.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - _LOOKED_AT)):
                file.seek(place)
                content.update(file.read(_LOOKED_AT))
    return content.hexdigest()


def to_marker(chunk: Transformer) -> dict[str, Any]:
    """The adapters' entry in a checkpoint's marker; empty if the model has none."""
    lora = chunk.lora
    if not lora.is_on:
        return {}
    described = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "targets": [target.value for target in lora.targets]}
    return {LORA: described, "base": chunk.base, "base_digest": chunk.base_digest}


def check_same(marker: Mapping[str, Any], chunk: Transformer, directory: Path) -> None:
    """Raise CheckpointError unless the checkpoint is of a model with the same adapters on the same weights, or both have none."""
    here, there = to_marker(chunk).get(LORA), marker.get(LORA)
    if here != there:
        raise CheckpointError(
            f"{directory}: was saved with {there or 'no adapters'}, the model has {here or 'none'} (model.lora): it cannot be continued so"
        )
    if here and marker["base_digest"] != chunk.base_digest:
        ours, theirs = chunk.base or "random ones of this run.seed", marker["base"] or "random ones of another run.seed"
        raise CheckpointError(
            f"{directory}: its adapters belong to other weights ({theirs}) than this run's ({ours}): they have been replaced"
        )


def saved_lora(marker: Mapping[str, Any]) -> LoraConfig:
    """The adapters that a marker describes."""
    described = marker[LORA]
    return LoraConfig(**{**described, "targets": [LoraTarget(target) for target in described["targets"]]})


def base_of(marker: Mapping[str, Any], directory: Path) -> Path:
    """The directory of the base weights of a checkpoint's adapters; those of the Hub are downloaded where its cache lacks them.

    Raises CheckpointError if they are missing or have changed, and as `aligner.hub.download.fetch` does.
    """
    base = marker["base"]
    if not base:
        raise CheckpointError(f"{directory}: its adapters belong to random weights that are in no file; start such runs from model.path")
    if (name := parse(base)) is not None:
        from aligner.hub.download import Wanted, fetch  # huggingface_hub, which other checkpoints do not need

        base = str(fetch(Wanted(key=f"base of {directory}", name=name), print).directory)
    if not Path(base).is_dir():
        raise CheckpointError(f"{directory}: its adapters belong to the model in {base}, which is not there; a link to it there is enough")
    if weights_digest(Path(base)) != marker["base_digest"]:
        raise CheckpointError(f"{directory}: its adapters belong to the model that was in {base}; other weights are there now")
    return Path(base)


@torch.no_grad()
def merge(chunk: Transformer, adapters: Mapping[str, Adapter], loaded: Mapping[str, Any]) -> None:
    """Merge adapters into a chunk's weights. `loaded`: the adapters' parameters, and any head's, by their names in the chunk."""
    chunk.load_state_dict({name: tensor for name, tensor in loaded.items() if name.startswith(HEAD)}, strict=False)
    for layer, adapter in adapters.items():
        for own, parameter in adapter.named_parameters():
            parameter.copy_(loaded[f"{layer}{ADAPTER}{own}"])
        weight = chunk.get_submodule(layer).weight
        weight.copy_(adapter.merged(weight))
