"""Wraps an inference package's engine for the lifecycle: the policy's weights are streamed into it, and checked on the way.

The stream is collective over the component. If an engine fails on one rank, that rank follows the stream to its end without loading, so
that no other rank waits for it; then all abort the refit.

The weights have Hugging Face names and travel as full tensors in buckets. Engines fuse q, k and v, gate and up, and a layer's experts into
one tensor each, and some need all parts of a fused tensor at once: such a group is never cut, even if it alone exceeds a bucket's size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import groupby

import torch
from torch import Tensor

from aligner.errors import AlignerError, ConfigError, EngineError
from aligner.models.families.own_modules import layer_of
from aligner.models.training.offload import HostMemory
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects, together
from aligner.protocols import Replica
from aligner.rollout.engine import ALL_MEMORY, ForeignEngine, GenResult, Memory, Receiver, Work
from aligner.rollout.engine.manifest import Manifest, Receipt, checksum, magnitudes, named_few
from aligner.types import SamplingConfig

Bucket = list[tuple[str, Tensor]]

# Fused tensors: the part of the name for the group, and the part that distinguishes its members.
_GROUPS = (
    re.compile(r"(.*\.experts)\.\d+\..*"),
    re.compile(r"(.*)\.(?:q|k|v)_proj\.(?:weight|bias)"),
    re.compile(r"(.*)\.(?:gate|up)_proj\.(?:weight|bias)"),
    re.compile(r"(.*)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight"),
)


def fusion_group(name: str) -> str:
    """A common key of all tensors that an engine may fuse with this one (Hugging Face name); its own name if there are none."""
    for kind, pattern in enumerate(_GROUPS):
        if found := pattern.fullmatch(name):
            return f"{found[1]}/{kind}"
    return name


def kept_together(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `transformers`' own modules, which come layer by layer, with those of a fusion group one behind the other."""
    for _, layer in groupby(named, key=lambda one: layer_of(one[0])):
        groups: dict[str, Bucket] = {}
        for name, tensor in layer:
            groups.setdefault(fusion_group(name), []).append((name, tensor))
        for group in groups.values():
            yield from group


def weight_buckets(named: Iterator[tuple[str, Tensor]], *, bucket_bytes: int, manifest: Manifest) -> Iterator[Bucket]:
    """Collect the full tensors of a model, in `manifest`'s order, into buckets of at most `bucket_bytes`, whole fusion groups each.

    A larger group gets a bucket of its own. The tensors are the stream's own, made contiguous; contiguous ones are not copied, so the
    buckets must be used before the weights change. The next tensor is requested after a bucket has been used, so a caller that drops each
    bucket never holds more than one, besides what the stream needs for the next tensor.

    Raises EngineError if the stream does not keep a group together. `Receipt` finds extra and missing tensors.
    """
    ends = _last_names(manifest, bucket_bytes)
    bucket: Bucket = []
    for name, tensor in _kept_together(named):
        bucket.append((name, tensor.contiguous()))
        del tensor
        if name in ends:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _last_names(manifest: Manifest, bucket_bytes: int) -> frozenset[str]:
    ends: list[str] = []
    size, last = 0, ""
    for _, group in groupby(manifest.tensors.items(), key=lambda item: fusion_group(item[0])):
        members = list(group)
        group_size = sum(spec.num_bytes for _, spec in members)
        if last and size + group_size > bucket_bytes:
            ends.append(last)
            size = 0
        size, last = size + group_size, members[-1][0]
    return frozenset(ends)


def _kept_together(named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    current, closed = "", set()
    for name, tensor in named:
        group = fusion_group(name)
        if group != current:
            closed.add(current)
            current = group
        if group in closed:
            raise EngineError(f"refit: {name} came apart from the tensors that it is fused with")
        yield name, tensor
        del tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """What an engine that has a policy's frozen weights gets instead of them at each refit."""

    export: Callable[[], Iterator[tuple[str, Tensor]]]  # collective
    manifest: Manifest
    digest: Callable[[], list[int]]  # of this rank's frozen weights: others are sent again


@dataclass(eq=False)
class StreamedEngine:
    """`aligner.rollout.engine.Engine` around a `ForeignEngine`, which it starts. Collective over the component.

    With `adapters`, `export` has the weights under them.
    """

    foreign: ForeignEngine
    export: Callable[[], Iterator[tuple[str, Tensor]]]  # `Policy.export_weights`
    manifest: Manifest
    replica: Replica
    _: KW_ONLY
    bucket_bytes: int
    verified: bool = False  # whether the engine's weights are compared with those sent
    adapters: Adapters | None = None  # of an engine whose `adapters` take them
    policy: HostMemory | None = None  # holds the policy's weights while the engine is awake; None: they stay, the engine never sleeps
    at_end: Callable[[], None] = lambda: None  # called at shutdown

    def __post_init__(self) -> None:
        self._sent: list[list[int]] | None = None  # digests of the frozen weights that the engine has, by rank
        platform.release_cached()  # left from building the policy: the package allocates without torch
        engine = self.foreign
        self.capabilities, self.max_sequence_length = engine.capabilities, engine.max_sequence_length
        try:
            together(engine.start, f"starting {engine.capabilities.name}", error=EngineError)
            if self.policy is not None:
                together(lambda: engine.sleep(ALL_MEMORY), f"putting {engine.capabilities.name} to sleep", error=EngineError)
        except AlignerError:
            self.shutdown()  # it may have started here
            raise

    def refit(self, version: int) -> int:
        """Stream the policy's current weights into the engine, or its adapters alone. Raises EngineError on every rank if it failed on any,
        also if it should be verified and the engine cannot read its weights back."""
        sent = 0
        digests = None if self.adapters is None else gather_objects(self.adapters.digest())
        if digests is None or digests != self._sent:
            self._sent = None
            sent += self._deliver(_Delivery(self, self.foreign, self.export, self.manifest), version)
            self._sent = digests
        if self.adapters is not None:
            receiver: Receiver = self.foreign.adapters  # type: ignore[attr-defined]
            sent += self._deliver(_Delivery(self, receiver, self.adapters.export, self.adapters.manifest), version)
        if self.policy is not None:
            self.policy.move_out()
        platform.synchronize()
        return sent

    def _deliver(self, delivery: _Delivery, version: int) -> int:
        try:
            together(delivery.run, "streaming the weights", error=EngineError)
            together(lambda: delivery.receiver.finish_refit(version), "finishing the refit", error=EngineError)
        except EngineError:
            delivery.receiver.abort_refit()
            raise
        if self.verified:
            together(delivery.compare, "verifying the refit", error=EngineError)
        return delivery.manifest.num_bytes

    def wake(self, memory: frozenset[Memory]) -> None:
        """Releases first the memory that torch still keeps from training."""
        platform.release_cached()
        self.foreign.wake(memory)

    def sleep(self, memory: frozenset[Memory]) -> None:
        self.foreign.sleep(memory)
        if self.policy is not None and Memory.weights in memory:
            self.policy.move_in()

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        return self.foreign.generate(work, sampling)

    def shutdown(self) -> None:
        self.foreign.shutdown()
        self.at_end()


class _Delivery:
    """One stream of a refit on this rank, its receipt, and its failure."""

    def __init__(
        self, engine: StreamedEngine, receiver: Receiver, export: Callable[[], Iterator[tuple[str, Tensor]]], manifest: Manifest
    ) -> None:
        self.receiver, self.manifest, self._export, self._receipt = receiver, manifest, export, Receipt(manifest)
        self._bucket_bytes, self._verified, self._name = engine.bucket_bytes, engine.verified, engine.capabilities.name
        self._largest: dict[str, Tensor] = {}  # a scalar on the device for each tensor, finite if the whole tensor is
        self._sent: dict[str, Tensor] = {}  # checksums

    def run(self) -> None:
        """Load the whole stream; every rank follows it to its end, also after a failure."""
        failure: Exception | None = None
        try:
            self.receiver.begin_refit(self.manifest)
        except Exception as failed:  # raised at the end of the stream
            failure = failed
        for bucket in weight_buckets(self._export(), bucket_bytes=self._bucket_bytes, manifest=self.manifest):
            if failure is None:
                try:
                    self._load(bucket)
                except Exception as failed:
                    failure = failed
            del bucket  # before the next one is made
        if failure is not None:
            raise failure
        self._receipt.complete()
        self._refuse_not_finite()

    def compare(self) -> None:
        names = list(self._sent)
        held = {name: tensor for name in names if (tensor := self.receiver.read_back(name)) is not None}
        if not held:
            raise ConfigError(f"rollout.verify_refit=checksum: {self._name} cannot read its weights back; allowed: none")
        shapes = {name: self.manifest.tensors[name].shape for name in held}
        differs = [name for name, own in held.items() if tuple(own.shape) != shapes[name] or int(checksum(own)) != int(self._sent[name])]
        if differs:
            raise EngineError(f"{named_few(differs)} of {len(held)} tensors that were read back are not what was sent")

    def _load(self, bucket: Bucket) -> None:
        self._receipt.take(bucket)
        names, tensors = [name for name, _ in bucket], [tensor for _, tensor in bucket]
        self._largest |= zip(names, magnitudes(tensors), strict=True)
        if self._verified:
            self._sent |= {name: checksum(tensor) for name, tensor in bucket}
        self.receiver.load(bucket)

    def _refuse_not_finite(self) -> None:
        finite = torch.stack([largest.isfinite() for largest in self._largest.values()]).tolist()
        if bad := [name for name, good in zip(self._largest, finite, strict=True) if not good]:
            raise EngineError(f"the weights are not finite: {named_few(bad)} of {len(finite)} tensors")
