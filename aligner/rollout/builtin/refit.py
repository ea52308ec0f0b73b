"""The built-in engine's weights between training and generation: their source, and when they are filled and released.

`TrainingWeights` are the policy's parameters themselves (packed ones with the adapters beside them), `SnapshotWeights` a copy for an
engine that samples while the policy trains.
`OwnWeights` are in the rollout layout, refilled from the training shards in buckets. With `rollout.offload` only one set is on the device:
the engine's weights release their memory while the policy trains (as copies they need not be kept), and the policy's wait in host memory
while the engine samples.

Every refit checks the training shards on all ranks before any of them moves, and the received tensors for numbers that are not finite;
`rollout.verify_refit=checksum` also compares checksums of sent and received tensors. Weights that are read in place are only checked with
that setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError, EngineError
from aligner.models.modules.build import LanguageModel
from aligner.models.modules.linear import linear_weight, weight_storage
from aligner.models.modules.lora import MergedWeights
from aligner.models.training.offload import HostMemory
from aligner.parallel import platform
from aligner.parallel.collectives import together
from aligner.parallel.reshard import Move, Sharding, pieces, plan
from aligner.parallel.transfer import Lanes, Refill, block_group, sum_over_holders
from aligner.rollout.builtin.decode import Shards
from aligner.rollout.builtin.weights import (
    ModelWeights,
    QuantizedWeight,
    adapters_of,
    by_role,
    moves,
    named_parameters,
    quantized_room,
    usable_in_place,
    with_adapters,
)
from aligner.rollout.config import LORA_LAYOUT, Precision, RolloutConfig, VerifyRefit, check_splits
from aligner.rollout.engine.manifest import Manifest, Receipt, TensorSpec, along, global_manifest, named_few, refuse_not_finite

MIB = 2**20
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


class Releasable:
    """Weights whose memory can be released and allocated again, with any contents."""

    def __init__(self, weights: Iterable[Tensor | QuantizedWeight]) -> None:
        own = [tensor for one in weights for tensor in (one.own if isinstance(one, QuantizedWeight) else (one,))]
        storages = (tensor.untyped_storage() for tensor in own)
        self._storages = {storage._cdata: (storage, storage.nbytes()) for storage in storages}  # experts may share one

    def allocate(self) -> None:
        for storage, size in self._storages.values():
            storage.resize_(size)

    def release(self) -> None:
        for storage, _ in self._storages.values():
            storage.resize_(0)


class TrainingWeights(Releasable):
    """The training parameters, read in place: a refit moves nothing. With `rollout.precision` rounded copies of the linear layers', which
    alone are released."""

    def __init__(self, chunk: LanguageModel, *, checked: bool, precision: Precision) -> None:
        groups = chunk.pg_collection
        self._chunk, self.named = chunk, named_parameters([chunk])  # all weights by their global names
        self._checked = checked
        self.shards = Shards(index=groups.tp.rank(), count=groups.tp.size(), group=groups.tp)
        self._rounded = quantized_room(self.named, precision, chunk.config.params_dtype, self.shards.group, adapters_of(chunk))
        super().__init__(self._rounded.values())
        self.model: ModelWeights = by_role(with_adapters(chunk, self.named) | self._rounded, chunk.architecture)

    def fill(self) -> int:
        """Returns the bytes of the rounded copies. Raises EngineError for numbers that are not finite, if `checked`."""
        if self._checked:
            own = ((name, linear_weight(parameter).storage[-1]) for name, parameter in self._chunk.named_parameters())
            refuse_not_finite(dict(own))  # of packed ones the scales
        return _round(self._rounded, self.named)


class SnapshotWeights(TrainingWeights):
    """A copy of the training parameters in their own layout: a refit copies them on each rank. The constructor is collective."""

    def __init__(self, chunk: LanguageModel, *, checked: bool, precision: Precision) -> None:
        super().__init__(chunk, checked=checked, precision=precision)
        self._trained = self.named
        specs = {name: TensorSpec(shape=tuple(p.shape), dtype=p.dtype) for name, p in self.named.items() if name not in self._rounded}
        self.named = allocated(specs, stacked=_stacks())
        # A group of their own: in training's the collectives of the two threads would meet.
        self.shards = replace(self.shards, group=block_group(self.shards.count))
        self._rounded = {name: replace(one, group=one.group and self.shards.group) for name, one in self._rounded.items()}
        self.model = by_role(self.named | self._rounded, chunk.architecture)

    @torch.no_grad()
    def fill(self) -> int:
        """Copy the policy's weights; returns the copied bytes. Raises EngineError naming weights that are not finite."""
        torch._foreach_copy_(list(self.named.values()), [self._trained[name].detach() for name in self.named])
        refuse_not_finite(self._trained)
        rounded = _round(self._rounded, self._trained)
        differs = [name for name, copy in self.named.items() if self._checked and not torch.equal(copy, self._trained[name])]
        if differs:
            raise EngineError(f"{named_few(differs)} of {len(self.named)} tensors are not what training holds")
        return rounded + sum(tensor.nbytes for tensor in self.named.values())


class OwnWeights(Releasable):
    """A copy split over blocks of `tp` consecutive ranks; filled on demand. Construction and filling are collective over the component.

    `apart`: sampling runs in another thread than training, in groups of its own. Weights that are rounded arrive in the model's precision,
    a layer at a time.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModel],
        *,
        tp: int,
        bucket_bytes: int,
        verified: bool,
        takes_turns: bool,
        apart: bool = False,
        precision: Precision = Precision.model,
    ) -> None:
        groups, architecture = chunks[0].pg_collection, chunks[0].architecture
        # If the block has as many ranks as a tensor-parallel group, the two are equal.
        group = groups.tp if groups.tp.size() == tp and not apart else block_group(tp)
        self.shards = Shards(index=dist.get_rank() % tp, count=tp, group=group)
        self._lanes = Lanes(pp=groups.pp, ep=groups.ep, tp=groups.tp, expert_tp=groups.expt_tp)
        self._chunks = chunks
        self._moves = moves(chunks, tp=tp)
        check_moves(self._moves, chunks)
        self._verified = verified
        # The first rank's vocabulary rows: the last rank may have fewer, but all must hold equally many.
        self._specs = {move.name: TensorSpec(shape=move.target_shape(0), dtype=move.dtype) for move in self._moves}
        self._rounded = quantized_room(self._specs, precision, chunks[0].config.params_dtype, self.shards.group)
        self.named = allocated({name: spec for name, spec in self._specs.items() if name not in self._rounded}, stacked=_stacks())
        parts: dict[str, list[Move]] = {}
        for move in self._moves:  # those that are rounded layer by layer, decoder.layers.NUMBER
            parts.setdefault(".".join(move.name.split(".")[:3]) if move.name in self._rounded else "", []).append(move)
        self._parts = [
            (part, Refill(plan(part, bucket_bytes=bucket_bytes), lanes=self._lanes, index=self.shards.index)) for part in parts.values()
        ]
        super().__init__([*self.named.values(), *self._rounded.values()])
        self._training = HostMemory(kept=lambda: weight_storage(chunks)) if takes_turns else None
        self.model: ModelWeights = by_role(self.named | self._rounded, architecture)

    def release(self) -> None:
        """Release the memory, and move the policy's weights back if the two alternate."""
        super().release()
        if self._training is not None:
            self._training.move_in()

    def fill(self) -> int:
        """Copy the policy's current weights, which then leave the device if the two alternate; returns the bytes copied here.

        Raises EngineError, on every rank, naming a training shard that is missing, extra or has the wrong shape or dtype (nothing has
        moved then), and numbers that are not finite or differ from those sent.
        """
        sources = named_parameters(self._chunks)
        together(lambda: check_sources(self._moves, sources, self._lanes), "checking the weights to send", error=EngineError)
        merged, num_bytes = MergedWeights(sources, self._chunks), 0
        for part, refill in self._parts:
            num_bytes += self._fill_part(part, refill, merged)
        if self._training is not None:
            self._training.move_out()
        return num_bytes

    def _fill_part(self, part: Sequence[Move], refill: Refill, merged: Mapping[str, Tensor]) -> int:
        rounded = {move.name: self._rounded[move.name] for move in part if move.name in self._rounded}
        arrived = self.named | allocated({name: self._specs[name] for name in rounded}, stacked=False)
        refill.run(merged, arrived)
        held = {move.name: arrived[move.name].narrow(move.dim, 0, move.target.size(self.shards.index)) for move in part}
        wanted = expected(part, merged, self._lanes) if self._verified else None
        together(lambda: self._check_arrived(part, held, wanted), "checking the weights that arrived", error=EngineError)
        _round(rounded, arrived)
        return refill.bytes_per_run

    def _check_arrived(self, part: Sequence[Move], held: Mapping[str, Tensor], wanted: Tensor | None) -> None:
        refuse_not_finite(held)
        if wanted is None:
            return
        differs = wanted[:, self.shards.index] != found(part, held, self.shards.index)
        if names := [move.name for move, bad in zip(part, differs.tolist(), strict=True) if bad]:
            raise EngineError(f"{named_few(names)} of {len(self._moves)} tensors arrived with a different checksum")


def _round(rounded: Mapping[str, QuantizedWeight], sources: Mapping[str, Tensor]) -> int:
    """Give them these numbers; returns their bytes."""
    for name, weight in rounded.items():
        weight.take(sources[name])
    return sum(tensor.nbytes for weight in rounded.values() for tensor in weight.own)


def _stacks() -> bool:
    return platform.device().type == "cuda"


def allocated(specs: Mapping[str, TensorSpec], *, stacked: bool) -> dict[str, Tensor]:
    """A tensor for each name, with any contents. `stacked`: the same matrix of all experts of a layer is one tensor, and each expert has a
    view of it, for kernels that multiply by all of them at once."""
    kinds: dict[str, dict[int, str]] = {}
    found: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if stacked and (expert := _EXPERT.search(name)):
            kinds.setdefault(_EXPERT.sub("*", name), {})[int(expert[0])] = name
        else:
            found[name] = torch.empty(spec.shape, dtype=spec.dtype, device=platform.device())
    for numbered in kinds.values():
        names = [numbered[number] for number in sorted(numbered)]
        spec = specs[names[0]]
        together = torch.empty(len(names), *spec.shape, dtype=spec.dtype, device=platform.device())
        found |= zip(names, together.unbind(0), strict=True)
    return {name: found[name] for name in specs}


def rollout_weights(chunks: Sequence[LanguageModel], config: RolloutConfig) -> TrainingWeights | OwnWeights:
    """The engine's weights, not filled yet. Collective. Raises ConfigError if `rollout.tp` ranks cannot share the model."""
    chunk, apart = chunks[0], config.asynchronous.max_staleness > 0
    tp = config.tp or chunk.pg_collection.tp.size()
    check_splits(chunk.architecture, tp=tp, world_size=dist.get_world_size())
    verified = config.verify_refit == VerifyRefit.checksum
    precision = config.precision
    if usable_in_place(chunk, tp=tp, rounds=precision.is_on) and not (apart and chunk.lora.is_on):  # a copy has its adapters merged
        return (SnapshotWeights if apart else TrainingWeights)(chunk, checked=verified, precision=precision)
    if precision.is_on and chunk.lora.is_on:
        raise ConfigError(f"rollout.precision={precision.value}: {LORA_LAYOUT}")
    bucket_bytes = config.refit_bucket_mib * MIB
    own = {"tp": tp, "bucket_bytes": bucket_bytes, "verified": verified, "precision": precision}
    return OwnWeights(chunks, **own, takes_turns=config.offload, apart=apart)


def check_moves(moved: Sequence[Move], chunks: Sequence[LanguageModel]) -> None:
    """Raise EngineError unless the moves cover the tensors of the architecture, each once and whole."""
    receipt = Receipt(global_manifest(chunks[0].architecture, chunks[0].config.params_dtype), "the plan of the refit")
    for move in moved:
        full = (*move.shape[: move.dim], move.target.extent, *move.shape[move.dim + 1 :])
        receipt.take([(move.name, torch.empty(full, dtype=move.dtype, device="meta"))])
    receipt.complete()


def check_sources(moved: Sequence[Move], sources: Mapping[str, Tensor], lanes: Lanes) -> None:
    """Raise EngineError unless this rank's training shards are the ones that the moves begin with."""
    held = {move.name: TensorSpec(shape=move.shape, dtype=move.dtype) for move in moved if lanes.holds(move)}
    receipt = Receipt(Manifest(tensors=held), "the training weights of this rank")
    receipt.take((name, linear_weight(parameter)) for name, parameter in sources.items())
    receipt.complete()


def expected(moves: Sequence[Move], sources: Mapping[str, Tensor], lanes: Lanes) -> Tensor:
    """Checksums of the parts that each rank of the new split must get, int64 [moves, ranks], from training's shards. Collective."""
    ranks = max(len(move.target.shards) for move in moves)
    device = next(iter(sources.values())).device
    sums = torch.zeros(len(moves), ranks, dtype=torch.int64, device=device)
    for row, move in zip(sums, moves, strict=True):
        group = lanes.tp if move.expert_rank is None else lanes.expert_tp
        if not lanes.holds(move) or (len(move.source.shards) == 1 and group.rank()):  # only the first of equal copies counts
            continue
        own = along(sources[move.name], move.dim, _indices(move.source, group.rank(), device))
        for rank in range(ranks):
            for piece in pieces(move.source, move.target, rank, peers=(group.rank(),)):
                row[rank] += own[piece.start : piece.start + piece.length].sum()
    is_expert = torch.tensor([move.expert_rank is not None for move in moves], device=device)
    return sum_over_holders(sums, is_expert, lanes)


def found(moves: Sequence[Move], targets: Mapping[str, Tensor], index: int) -> Tensor:
    """Checksums of the parts that this rank, `index` in the new split, holds: int64 [moves]."""
    sums = []
    for move in moves:
        target = targets[move.name].narrow(move.dim, 0, move.target.size(index))
        sums.append(along(target, move.dim, _indices(move.target, index, target.device)).sum())
    return torch.stack(sums)


def _indices(sharding: Sharding, index: int, device: torch.device) -> Tensor:
    """The indices of the full tensor in a shard, int64, in the shard's order."""
    held = [torch.arange(start, stop, device=device) for start, stop in sharding.held_by(index)]
    return torch.cat(held)


@contextmanager
def negated(chunks: Sequence[LanguageModel]) -> Iterator[None]:
    """In the block all parameters of the policy have the opposite sign: after a refit the engine must sample as this policy does."""
    parameters = {parameter.data_ptr(): parameter for chunk in chunks for parameter in chunk.parameters()}  # a tied one once
    for parameter in parameters.values():
        linear_weight(parameter).negate()
    try:
        yield
    finally:
        for parameter in parameters.values():
            linear_weight(parameter).negate()
