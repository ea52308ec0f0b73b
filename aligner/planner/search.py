"""What a search may choose for one component, quick estimates of the choices, and the single settings that lower a peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import TypeVar

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import uneven_stages
from aligner.models.config import ModelConfig, Recompute
from aligner.models.training.optimizer import OptimizerConfig, OptimizerKind
from aligner.parallel.topology import ParallelConfig
from aligner.planner import dry_run, engine_memory, memory
from aligner.planner.config import ClusterConfig
from aligner.planner.estimate import approximate_state_bytes, check, engine_sizes, frozen_bytes, replication, scales_of
from aligner.planner.workload import BlockBytes, Component, Engine, Head, Parameter, Phase, StateBytes, stage_layers

NOTICEABLE = 0.98  # part of the peak: a change that leaves more is not offered
NOTHING = BlockBytes(layer=0, ends=0, backward=0, forward=0)
MAX_VPP = 4
MIN_CHUNK_TOKENS = 512  # tokens of a context-parallel rank: shorter chunks only add communication
ROWS_PER_MICRO_BATCH = (1, 2, 4, 8)
ENGINE_BATCHES = 5  # sizes of a replica's batch, each half of the one before
LARGEST_ENGINE_BATCH = 1024
T = TypeVar("T")


class Estimator:
    """Quick estimates: parameters from a model of one layer, activations from one row, each measured once per way to split it."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self.scales = scales_of(cluster.device)
        self._pieces: dict[str, tuple[list[Parameter], list[Parameter], list[Parameter]]] = {}

    def peak(self, component: Component) -> int:
        """Estimated peak, even if it does not fit."""
        return self.peak_of(component, self.measured(component, self.sizes(component)))

    def peak_of(self, component: Component, sizes: memory.Sizes) -> int:
        """Estimated peak of the first stage (most in flight), the second (maybe more layers) and the last (with the logits)."""
        last = component.parallel.pp - 1
        return max(moment.total for moment in memory.phase_memory(component, sizes, self.cluster, {0, min(1, last), last}))

    def sizes(self, component: Component) -> memory.Sizes:
        """Weights and training state; no activations, which `measured` adds and times do not depend on."""
        return memory.Sizes(stages=self._states(component), train=NOTHING, inference=NOTHING, **self._engine_sizes(component))

    def measured(self, component: Component, sizes: memory.Sizes) -> memory.Sizes:
        """The sizes with the activations of the component's micro-batches."""
        inference = self.scales.scaled_block(component, memory.inference_micro_batches(component))
        train = inference if component.optimizer is None else self.scales.scaled_block(component, memory.train_micro_batches(component))
        return replace(sizes, train=train, inference=inference)

    def _states(self, component: Component) -> tuple[StateBytes, ...]:
        (embedding, *others), layers = self._pieces_of(component), stage_layers(component.architecture.num_layers, component.parallel)
        last, (layer, end) = component.parallel.pp - 1, (self._state(component, parameters) for parameters in others)
        found = []
        for stage, count in enumerate(layers):
            state = layer * count
            if stage == 0:
                state += self._state(component, embedding)
            if stage == last:
                state += end
            if stage == last and last and component.architecture.tied_embeddings and component.head == Head.language:
                state += self._state(component, embedding[:1])  # the output layer's copy
            found.append(state)
        return tuple(found)

    def _state(self, component: Component, parameters: Sequence[Parameter]) -> StateBytes:
        if component.optimizer is None:
            return frozen_bytes(parameters)
        return approximate_state_bytes(parameters, replication(component, self.cluster, stage=1))

    def _engine_sizes(self, component: Component) -> dict[str, int]:
        embedding, layer, end = self._pieces_of(component)
        return engine_sizes(component, [[embedding, *[layer] * component.architecture.num_layers, end]])

    def _pieces_of(self, component: Component) -> tuple[list[Parameter], list[Parameter], list[Parameter]]:
        """The parameters of a rank's embedding, of one layer, and of the modules after the last one."""
        p, model = component.parallel, component.model
        layout, kind = (p.tp, p.sequence_parallel, p.ep, p.etp), (model.dtype, model.lora, model.quantization, model.double_quantization)
        key = repr((component.architecture, component.head, component.has_values, *layout, *kind))
        if key not in self._pieces:
            split = ParallelConfig(tp=p.tp, sequence_parallel=p.sequence_parallel, ep=p.ep, etp=p.etp)
            one = replace(component, parallel=split, architecture=component.architecture.with_layers(1))
            (chunk,) = dry_run.shard_parameters(one, 0)
            names = ("embedding.", "decoder.layers.")
            embedding, layer = ([q for q in chunk if q.name.startswith(name)] for name in names)
            self._pieces[key] = embedding, layer, [q for q in chunk if not q.name.startswith(names)]
        return self._pieces[key]


def advice(component: Component, cluster: ClusterConfig) -> list[tuple[str, int]]:
    """Single settings that lower the peak, each with the estimated peak in bytes, lowest first."""
    estimator = Estimator(cluster)
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
    prefix, parallel, model = component.prefix, component.parallel, component.model
    optimizer, engine = component.optimizer, component.engine
    for name, factors in (("tp", (2, 4, 8)), ("pp", (2, 4, 8)), ("cp", (2,)), ("ep", (2, 4, 8))):
        for factor in factors:
            size = getattr(parallel, name) * factor
            if name == "tp" and size > cluster.gpus_per_node:
                continue
            # The planner always adds sequence parallelism to tensor parallelism.
            also: dict[str, int] = {"sequence_parallel": True} if name == "tp" and not parallel.sequence_parallel else {}
            if name == "pp" and parallel.vpp == 1:
                stages = {"first_stage_layers": 0, "last_stage_layers": 0} | uneven_stages(component.architecture.num_layers, size)
                also |= {key: value for key, value in stages.items() if value != getattr(parallel, key)}
            # An engine with the size of the training layout follows it.
            follows = engine is not None and engine.tp == parallel.tp and name == "tp"
            changed = replace(engine, tp=size) if engine is not None and follows else engine
            typed = (f"{prefix}parallel.{key}={str(value).lower()}" for key, value in ({name: size} | also).items())
            yield " ".join(typed), replace(component, parallel=replace(parallel, **{name: size}, **also), engine=changed)
    for recompute in Recompute:
        yield f"{prefix}model.recompute={recompute.value}", replace(component, model=replace(model, recompute=recompute))
    smallest = {micro_batch_setting(model): component.work.length if model.micro_batch_tokens else 1}
    for name, size in smallest.items():
        yield f"{prefix}model.{name}={size}", replace(component, model=replace(model, **smallest))
    if optimizer is not None:
        names = [*(["distributed"] if optimizer.kind is not OptimizerKind.muon else []), "offload"]
        names += ["cpu_offload"] if optimizer.may_move_to_host else []
        for name in names:
            yield f"{prefix}optimizer.{name}=true", replace(component, optimizer=replace(optimizer, **{name: True}))
    if engine is not None:
        if not engine.asynchronous:
            yield "rollout.offload=true", replace(component, engine=replace(engine, offload=True))
        for tokens in sorted({engine_memory.cache_tokens(component, engine) // share for share in (2, 4, 8)}):
            whole = tokens // engine_memory.page_tokens(component, engine) * engine_memory.page_tokens(component, engine)
            if whole >= engine_memory.sequence_tokens(component, engine):
                yield f"rollout.kv_cache_tokens={whole}", replace(component, engine=replace(engine, kv_cache_tokens=whole))
        for size in sorted({max(1, engine_memory.decode_batch(component, engine) // share) for share in (2, 4, 8, 32)}):
            yield f"rollout.max_batch_size={size}", replace(component, engine=replace(engine, max_batch_size=size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Settings that were `typed` do not change; all others are free. `main` names the component whose settings have no section."""

    cluster: ClusterConfig
    main: str
    typed: frozenset[str] = frozenset()
    host_updates: bool = False  # whether `optimizer.cpu_offload` may be chosen

    def is_free(self, key: str) -> bool:
        return not any(key == name or key.startswith(f"{name}.") for name in self.typed)

    def key(self, component: Component, name: str) -> str:
        """A setting of a component as it is typed."""
        return name if component.name == self.main else f"{component.name}.{name}"

    def choose(self, key: str, now: T, options: Iterable[T]) -> list[T]:
        """The options if the setting is free, else its value now."""
        return list(options) if self.is_free(key) else [now]

    def _choose(self, component: Component, name: str, now: T, options: Iterable[T]) -> list[T]:
        return self.choose(self.key(component, name), now, options)

    def sizes(self, most: int) -> list[int]:
        """Numbers of ranks that are worth a try: powers of two and 3 x 2^k, up to a node of ranks, then of nodes."""
        node = self.cluster.gpus_per_node
        found = {1, node} | {factor * 2**k for factor in (1, 3) for k in range(most.bit_length())}
        whole = {size * node for size in found}
        rest = {most} if most % node == 0 or most < node else set()
        return sorted(size for size in {size for size in found if size < node} | whole | rest if 0 < size <= most)

    def ranks(self, component: Component, most: int) -> list[int]:
        return [n for n in self._choose(component, "num_processes", component.num_ranks, self.sizes(most)) if n <= most]

    def layouts(self, component: Component, ranks: int) -> Iterator[Component]:
        """The component on `ranks` ranks in every layout that divides: tensor parallelism inside a node, every pipeline, context and expert
        size; if the layers do not divide over the stages, the first and the last one are shorter."""
        p, architecture = component.parallel, component.architecture
        longest = max(1, component.work.length // (2 * MIN_CHUNK_TOKENS))
        tensor = self._choose(component, "parallel.tp", p.tp, powers(self.cluster.gpus_per_node))
        context = self._choose(component, "parallel.cp", p.cp, powers(longest))
        for tp, cp in product(tensor, context):
            stages = (n for n in range(1, architecture.num_layers + 1) if ranks % (tp * cp * n) == 0)
            for pp in self._choose(component, "parallel.pp", p.pp, stages):
                if ranks % (tp * cp * pp):
                    continue
                chunks = list(range(1, MAX_VPP + 1 if pp > 1 and component.optimizer is not None else 2))
                experts = powers(max(1, architecture.num_experts))
                for vpp, ep in product(
                    self._choose(component, "parallel.vpp", p.vpp, chunks), self._choose(component, "parallel.ep", p.ep, experts)
                ):
                    if (parallel := self._parallel(component, (tp, cp, pp, vpp, ep))) is not None:
                        found = replace(component, num_ranks=ranks, parallel=parallel, engine=None)
                        if is_possible(found):
                            yield found

    def _parallel(self, component: Component, sizes: tuple[int, int, int, int, int]) -> ParallelConfig | None:
        """None if the layers do not fit the stages."""
        (tp, cp, pp, vpp, ep), p, layers = sizes, component.parallel, component.architecture.num_layers
        ends = {name: getattr(p, name) for name in ("first_stage_layers", "last_stage_layers")}
        if all(self.is_free(self.key(component, f"parallel.{name}")) for name in ends):
            ends = dict(zip(ends, uneven(layers, pp) if layers % pp else (0, 0), strict=True))
            if layers % pp and (vpp > 1 or not ends["first_stage_layers"]):
                return None
        grouped = ep == 1 and component.architecture.num_experts  # Megatron-Core then splits experts like all other weights
        (etp,) = self._choose(component, "parallel.etp", p.etp, [tp if grouped else 1])
        (sequence,) = self._choose(component, "parallel.sequence_parallel", p.sequence_parallel, [tp > 1])
        try:
            return replace(p, tp=tp, sequence_parallel=sequence, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, **ends)
        except ConfigError:
            return None

    def models(self, component: Component) -> Iterator[ModelConfig]:
        """Micro-batches and recomputations; a micro-batch for which a replica has too few rows is the same as a smaller one."""
        model, trains, row = component.model, component.optimizer is not None, component.work.length * component.work.unit
        recompute = self._choose(component, "model.recompute", model.recompute, list(Recompute) if trains else [model.recompute])
        name = micro_batch_setting(model)
        if not self.is_free(self.key(component, f"model.{name}")):
            yield from (replace(model, recompute=one) for one in recompute)
            return
        passes = memory.train_micro_batches if trains and Phase.train in component.work.phases else memory.inference_micro_batches
        for rows, one in product(ROWS_PER_MICRO_BATCH, recompute):
            changed = replace(model, recompute=one, **{name: rows * row if name == "micro_batch_tokens" else rows})
            is_filled = passes(replace(component, model=changed)).rows == rows * component.work.unit
            if is_filled or (rows == 1 and passes is memory.inference_micro_batches):
                yield changed

    def engines(self, component: Component, engine: Engine, ranks: int) -> list[Engine]:
        """Replicas inside a node that divide the ranks, each with batches from its whole share downwards."""
        found = []
        for tp in self._choose(component, "rollout.tp", engine.tp, powers(self.cluster.gpus_per_node)):
            changed = replace(engine, tp=tp)
            if not is_possible(replace(component, num_ranks=ranks, parallel=ParallelConfig(), engine=changed), rows=False):
                continue
            share = math.ceil((component.work.rows + component.work.extra_rows) / (ranks // tp))
            batches = sorted({max(1, -(-min(share, LARGEST_ENGINE_BATCH) // 2**k)) for k in range(ENGINE_BATCHES)}, reverse=True)
            batches = self._choose(component, "rollout.max_batch_size", engine.max_batch_size, batches)
            found += [replace(changed, max_batch_size=batch) for batch in batches]
        return found

    def reliefs(self, component: Component) -> list[Callable[[Component], Component]]:
        """Ways to move state to host memory, from nothing to all that may move. Components that take turns already move theirs."""
        engine, optimizer = component.engine, component.optimizer
        engines, optimizers = [engine], [optimizer]
        if engine is not None and not engine.asynchronous and not component.turns and self.is_free("rollout.offload"):
            engines = [replace(engine, offload=offload) for offload in (False, True)]
        if optimizer is not None and not component.turns:
            states = self._choose(component, "optimizer.offload", optimizer.offload, [False, True])
            can = optimizer.cpu_offload or (self.host_updates and optimizer.may_move_to_host)
            hosts = self._choose(component, "optimizer.cpu_offload", optimizer.cpu_offload, sorted({optimizer.cpu_offload, can}))
            optimizers = [replace(optimizer, offload=offload, cpu_offload=host) for host, offload in product(hosts, states)]

        def relieved(optimizer: OptimizerConfig | None, engine: Engine | None) -> Callable[[Component], Component]:
            return lambda other: replace(
                other,
                optimizer=optimizer,
                engine=other.engine if other.engine is None or engine is None else replace(other.engine, offload=engine.offload),
            )

        return [relieved(optimizer, engine) for optimizer, engine in product(optimizers, engines)]

    def settings(self, component: Component) -> dict[str, str]:
        """The settings that choose this component as it is."""
        p, model, optimizer, engine = component.parallel, component.model, component.optimizer, component.engine
        names = ["tp", "sequence_parallel", "pp", "vpp", "first_stage_layers", "last_stage_layers", "cp", "ep"]
        names += ["etp"] if component.architecture.num_experts else []
        found: dict[str, object] = {"num_processes": component.num_ranks}
        found |= {f"parallel.{name}": getattr(p, name) for name in names}
        found |= {f"model.{micro_batch_setting(model)}": getattr(model, micro_batch_setting(model))}
        if optimizer is not None:
            found["model.recompute"] = model.recompute
            if not component.turns:
                found["optimizer.offload"] = optimizer.offload
                found |= {"optimizer.cpu_offload": True} if optimizer.cpu_offload else {}
        chosen = {self.key(component, name): value for name, value in found.items()}
        if engine is not None:
            chosen |= {"rollout.tp": engine.tp, "rollout.max_batch_size": engine.max_batch_size}
            chosen |= {} if component.turns else {"rollout.offload": engine.offload}
        return {name: written(value) for name, value in chosen.items() if self.is_free(name)}

    def guest_settings(self, guest: Component) -> dict[str, str]:
        """The settings of a model in another component's processes, whose layout it has."""
        name = micro_batch_setting(guest.model)
        key = self.key(guest, f"model.{name}")
        return {key: written(getattr(guest.model, name))} if self.is_free(key) else {}


def written(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def micro_batch_setting(model: ModelConfig) -> str:
    """The field that limits one pass."""
    return "micro_batch_tokens" if model.micro_batch_tokens else "micro_batch_size"


def powers(largest: int) -> list[int]:
    return [2**n for n in range(largest.bit_length()) if 2**n <= largest]


def uneven(layers: int, pp: int) -> tuple[int, int]:
    """Layers of the first and the last of `pp` stages if all others have as many as the longest must; (0, 0): one would be empty."""
    each = -(-layers // pp)
    rest = layers - each * (pp - 2)
    return (-(-rest // 2), rest // 2) if rest >= 2 else (0, 0)


def is_possible(component: Component, *, rows: bool = True) -> bool:
    """Whether its sizes divide and, with `rows`, every replica has something to train on."""
    try:
        check(component if rows else replace(component, optimizer=None))
    except ConfigError:
        return False
    return True
