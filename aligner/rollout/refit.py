"""The engine's weights between training and generation: where they come from, and when they are filled and given back.

`TrainingWeights` are the policy's parameters themselves. `OwnWeights` are in the rollout layout, refilled from the training shards in
buckets. With `rollout.offload` only one of the two sets is on the device at a time: the engine's weights give their memory back while the
policy trains (what was in them is the policy's, so nothing needs to be kept), the policy's wait in host memory while the engine samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from aligner.models.build import LanguageModel
from aligner.models.offload import HostMemory
from aligner.parallel import platform
from aligner.parallel.reshard import plan
from aligner.parallel.transfer import Lanes, block_group, refill
from aligner.rollout.config import check_splits
from aligner.rollout.decode import Shards
from aligner.rollout.weights import ModelWeights, by_role, moves, named_parameters, usable_in_place

MIB = 2**20


class TrainingWeights:
    """The training parameters, read in place."""

    def __init__(self, chunk: LanguageModel) -> None:
        groups = chunk.pg_collection
        self.model: ModelWeights = by_role(named_parameters([chunk]), chunk.architecture)
        self.shards = Shards(index=groups.tp.rank(), count=groups.tp.size(), group=groups.tp)

    def fill(self) -> None:
        """They are always the policy's."""

    def swap_in(self) -> None:
        """They are where they are needed."""

    def swap_out(self) -> None:
        """They are not the engine's to give back."""


class OwnWeights:
    """A copy split over blocks of `tp` consecutive ranks; filled on demand. Construction and filling are collective over the component."""

    def __init__(self, chunks: Sequence[LanguageModel], *, tp: int, bucket_bytes: int) -> None:
        groups, architecture = chunks[0].pg_collection, chunks[0].architecture
        # Blocks of as many consecutive ranks as train together are the tensor-parallel groups: those exist.
        group = groups.tp if groups.tp.size() == tp else block_group(tp)
        self.shards = Shards(index=dist.get_rank() % tp, count=tp, group=group)
        self._lanes = Lanes(pp=groups.pp, ep=groups.ep, tp=groups.tp, expert_tp=groups.expt_tp)
        self._chunks = chunks
        whole = moves(chunks, tp=tp)
        self._buckets = plan(whole, bucket_bytes=bucket_bytes)
        self._tensors = {
            # The first rank's vocabulary rows: the last ones may be fewer, but all ranks must hold equally many.
            move.name: torch.empty(move.target_shape(0), dtype=move.dtype, device=platform.device())
            for move in whole
        }
        self._sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in self._tensors.items()}
        self._training = HostMemory(kept=lambda: (p.data for chunk in chunks for p in chunk.parameters()))
        self.model: ModelWeights = by_role(self._tensors, architecture)

    def fill(self) -> None:
        """Copy the policy's current weights."""
        for name, tensor in self._tensors.items():
            tensor.untyped_storage().resize_(self._sizes[name])
        refill(self._buckets, named_parameters(self._chunks), self._tensors, lanes=self._lanes, index=self.shards.index)

    def swap_in(self) -> None:
        """Copy the policy's current weights; its own then wait in host memory."""
        self.fill()
        self._training.move_out()

    def swap_out(self) -> None:
        """Give the memory back, and the policy its weights."""
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(0)
        self._training.move_in()


def rollout_weights(chunks: Sequence[LanguageModel], *, tp: int, bucket_bytes: int) -> TrainingWeights | OwnWeights:
    """The policy's weights for `tp` ranks that share the model in generation (0: as many as in training), not filled yet. Collective.

    Raises ConfigError where `tp` ranks cannot share the model.
    """
    chunk = chunks[0]
    tp = tp or chunk.pg_collection.tp.size()
    check_splits(chunk.architecture, tp=tp, world_size=dist.get_world_size())
    if usable_in_place(chunk, tp=tp):
        return TrainingWeights(chunk)
    return OwnWeights(chunks, tp=tp, bucket_bytes=bucket_bytes)
