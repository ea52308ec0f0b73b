"""Quick estimates of a component in other layouts, from one built layer each, and the single settings that lower a peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import uneven_stages
from aligner.models.config import Recompute
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run
from aligner.planner.buffers import Parameter, StateBytes, approximate_state_bytes, frozen_bytes
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import Scales, check, engine_weight_bytes, replication
from aligner.planner.memory import (
    Sizes,
    cache_tokens,
    decode_batch,
    inference_micro_batches,
    page_tokens,
    phase_memory,
    sequence_tokens,
    train_micro_batches,
)
from aligner.planner.schedule import stage_layers
from aligner.planner.workload import Component, Engine, Head

NOTICEABLE = 0.98  # of the peak: what lowers it less is no help
NOTHING = dry_run.BlockBytes(layer=0, ends=0, backward=0, forward=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pieces:
    """The parameters of a rank's embedding, of one layer, and of the modules after the last one."""

    embedding: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    end: tuple[Parameter, ...]


class Estimator:
    """Quick estimates: parameters from a model of one layer, activations from one row, each measured once per way to split it."""

    def __init__(self, cluster: ClusterConfig, scales: Scales) -> None:
        self.cluster = cluster
        self.scales = scales
        self._pieces: dict[str, _Pieces] = {}

    def peak(self, component: Component) -> int:
        """Estimated peak, even if it does not fit."""
        return self.peak_of(component, self.measured(component, self.sizes(component)))

    def peak_of(self, component: Component, sizes: Sizes) -> int:
        """Estimated peak at these sizes: of the first stage, which has most in flight, the second, which may have more layers, and the last
        with the logits."""
        last = component.parallel.pp - 1
        return max(moment.total for moment in phase_memory(component, sizes, self.cluster, {0, min(1, last), last}))

    def sizes(self, component: Component) -> Sizes:
        """Weights and training state; no activations, which `measured` adds and times do not depend on."""
        return Sizes(stages=self._states(component), train=NOTHING, inference=NOTHING, engine_weights=self._engine_weights(component))

    def measured(self, component: Component, sizes: Sizes) -> Sizes:
        """The sizes with the activations of the component's micro-batches."""
        inference = self.scales.scaled_block(component, inference_micro_batches(component))
        train = inference if component.optimizer is None else self.scales.scaled_block(component, train_micro_batches(component))
        return replace(sizes, train=train, inference=inference)

    def _states(self, component: Component) -> tuple[StateBytes, ...]:
        pieces, layers = self._pieces_of(component), stage_layers(component.architecture.num_layers, component.parallel)
        last, layer = component.parallel.pp - 1, self._state(component, pieces.layer)
        found = []
        for stage, count in enumerate(layers):
            state = _times(layer, count)
            if stage == 0:
                state += self._state(component, pieces.embedding)
            if stage == last:
                state += self._state(component, pieces.end)
            if stage == last and last and component.architecture.tied_embeddings and component.head == Head.language:
                state += self._state(component, pieces.embedding[:1])  # the output layer's copy
            found.append(state)
        return tuple(found)

    def _state(self, component: Component, parameters: Sequence[Parameter]) -> StateBytes:
        if component.optimizer is None:
            return frozen_bytes(parameters)
        return approximate_state_bytes(parameters, replication(component, self.cluster, stage=1))

    def _engine_weights(self, component: Component) -> int:
        pieces = self._pieces_of(component)
        layers = [pieces.layer] * component.architecture.num_layers
        return engine_weight_bytes(component, [[pieces.embedding, *layers, pieces.end]]) if component.engine is not None else 0

    def _pieces_of(self, component: Component) -> _Pieces:
        p = component.parallel
        key = repr(
            (component.architecture, component.head, p.tp, p.sequence_parallel, p.ep, p.etp, component.model.dtype, component.model.lora)
        )
        if key not in self._pieces:
            split = ParallelConfig(tp=p.tp, sequence_parallel=p.sequence_parallel, ep=p.ep, etp=p.etp)
            one = replace(component, parallel=split, architecture=component.architecture.with_layers(1))
            (chunk,) = dry_run.shard_parameters(one, 0)
            names = ("embedding.", "decoder.layers.")
            embedding, layer = (tuple(q for q in chunk if q.name.startswith(name)) for name in names)
            end = tuple(q for q in chunk if not q.name.startswith(names))
            self._pieces[key] = _Pieces(embedding=embedding, layer=layer, end=end)
        return self._pieces[key]


def _times(state: StateBytes, count: int) -> StateBytes:
    return StateBytes(weights=state.weights * count, gradients=state.gradients * count, optimizer=state.optimizer * count)


def _engine(component: Component, parallel: ParallelConfig) -> Engine | None:
    """The engine keeps its own size, and follows the training layout if both were equal."""
    engine = component.engine
    return engine if engine is None or engine.tp != component.parallel.tp else replace(engine, tp=parallel.tp)


def advice(component: Component, cluster: ClusterConfig, scales: Scales) -> list[tuple[str, int]]:
    """Single settings that lower the peak, each with the estimated peak in bytes, lowest first."""
    estimator = Estimator(cluster, scales)
    now = estimator.peak(component)
    found = []
    for setting, changed in _changes(component, cluster):
        try:
            check(changed)
        except ConfigError:
            continue
        peak = estimator.peak(changed)
        if peak < now * NOTICEABLE:
            found.append((setting, peak))
    return sorted(found, key=lambda change: change[1])


def _changes(component: Component, cluster: ClusterConfig) -> Iterator[tuple[str, Component]]:
    prefix = "" if component.name in ("actor", "trainer") else f"{component.name}."
    parallel, model, optimizer, engine = component.parallel, component.model, component.optimizer, component.engine
    for name, factors in (("tp", (2, 4, 8)), ("pp", (2, 4, 8)), ("cp", (2,)), ("ep", (2, 4, 8))):
        for factor in factors:
            size = getattr(parallel, name) * factor
            if name == "tp" and size > cluster.gpus_per_node:
                continue
            # With tensor parallelism the planner always means sequence parallelism too.
            also: dict[str, int] = {"sequence_parallel": True} if name == "tp" and not parallel.sequence_parallel else {}
            if name == "pp" and parallel.vpp == 1:
                stages = {"first_stage_layers": 0, "last_stage_layers": 0} | uneven_stages(component.architecture.num_layers, size)
                also |= {key: value for key, value in stages.items() if value != getattr(parallel, key)}
            changed = replace(component, parallel=replace(parallel, **{name: size}, **also))
            typed = (f"{prefix}parallel.{key}={str(value).lower()}" for key, value in ({name: size} | also).items())
            yield " ".join(typed), replace(changed, engine=_engine(component, changed.parallel))
    for recompute in Recompute:
        yield f"{prefix}model.recompute={recompute.value}", replace(component, model=replace(model, recompute=recompute))
    if model.micro_batch_tokens:
        yield (
            f"{prefix}model.micro_batch_tokens={component.work.length}",
            replace(component, model=replace(model, micro_batch_tokens=component.work.length)),
        )
    else:
        yield f"{prefix}model.micro_batch_size=1", replace(component, model=replace(model, micro_batch_size=1))
    if optimizer is not None:
        names = ("distributed", "offload", *(["cpu_offload"] if optimizer.distributed and not optimizer.precision_aware else []))
        for name in names:
            yield f"{prefix}optimizer.{name}=true", replace(component, optimizer=replace(optimizer, **{name: True}))
    if engine is not None:
        if not engine.asynchronous:
            yield "rollout.offload=true", replace(component, engine=replace(engine, offload=True))
        for tokens in sorted({cache_tokens(component, engine) // share for share in (2, 4, 8)}):
            whole = tokens // page_tokens(component, engine) * page_tokens(component, engine)
            if whole >= sequence_tokens(component, engine):
                yield f"rollout.kv_cache_tokens={whole}", replace(component, engine=replace(engine, kv_cache_tokens=whole))
        for size in sorted({max(1, decode_batch(component, engine) // share) for share in (2, 4, 8, 32)}):
            yield f"rollout.max_batch_size={size}", replace(component, engine=replace(engine, max_batch_size=size))
