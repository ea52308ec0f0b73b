"""A component's plan: builds its shards, lays out their training state, measures its layers, and predicts memory and time from them.

`DistributedDataParallel` of Megatron-Core lays the parameters of one kind (dtype; dense or expert) into one flat buffer, in reverse order.
With the distributed optimizer each parameter starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(shards, 128);
every rank owns an equal slice of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby

from aligner.errors import ConfigError
from aligner.models.architecture.divisible import check_divisible, check_together
from aligner.models.config import Dtype, HFArchitecture, Layers
from aligner.models.families.own_modules import dense_twin
from aligner.models.training.optimizer import OptimizerKind
from aligner.planner import dry_run, layers
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.engine_memory import cache_tokens, kv_bytes_per_token, page_tokens, sequence_tokens
from aligner.planner.memory import (
    PhaseMemory,
    Sizes,
    disk_optimizer,
    free_at_start,
    host_memory,
    inference_micro_batches,
    phase_memory,
    train_micro_batches,
)
from aligner.planner.times import PhaseTime, phase_times
from aligner.planner.tower import features_seen, tower_of
from aligner.planner.workload import EIGHT_BIT_MOMENTS, GIB, BlockBytes, Component, MicroBatches, Parameter, StateBytes, Tower
from aligner.rollout.builtin.weights import is_quantized
from aligner.rollout.config import EngineKind, check_ahead, check_engine, check_precision
from aligner.servers.components import SERVERS, in_section


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentPlan:
    component: Component
    stage_parameters: tuple[int, ...]  # parameters of a rank of each stage
    model_parameters: int  # parameters of the whole model, vocabulary padding included
    sizes: Sizes
    memory: tuple[PhaseMemory, ...]
    host: dict[str, int]  # host memory of the fullest node, in bytes
    times: tuple[PhaseTime, ...]
    limit: int  # device memory of a rank
    disk: int = 0  # bytes on the disk of a node
    wanted_seconds: float = 0.0  # seconds of all phases with the cache that the config asks for, if the plan made it smaller

    @property
    def peak(self) -> PhaseMemory:
        return max(self.memory, key=lambda moment: moment.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit

    @property
    def seconds(self) -> float:
        """Seconds of all phases, one after the other."""
        return sum(time.total for time in self.times)


@contextmanager
def named(component: str, *, own_layout: bool = True) -> Iterator[None]:
    """Make a ConfigError from within name the component, and its settings as they are typed."""
    try:
        with in_section(component if component in SERVERS else "", own_layout=own_layout):
            yield
    except ConfigError as error:
        raise ConfigError(f"{component}: {error}") from error


def check(component: Component) -> None:
    """Raise ConfigError, naming the component, if the sizes do not divide or the layout does not fit the ranks."""
    engine, work = component.engine, component.work
    with named(component.name, own_layout=component.owns_layout):
        check_divisible(component.architecture, component.parallel)
        check_together(component.architecture, component.model, component.parallel)
        component.parallel.check_world(component.num_ranks)
        if engine is not None:
            check_engine(engine.settings, component.architecture, tp=engine.tp, world_size=engine.own_ranks or component.num_ranks)
            check_precision(engine.settings, component.model, component.parallel)
            if engine.on_gpu and not engine.own_ranks:
                check_ahead(engine.settings, tp=engine.tp)
        if component.optimizer is not None and work.update_rows // work.unit < component.dp:
            raise ConfigError(
                f"mini-batches of {work.update_rows // work.unit} are smaller than the {component.dp} data-parallel replicas; use fewer "
                f"ranks, or more of them for tp, pp or cp"
            )


def replication(component: Component, cluster: ClusterConfig, *, stage: int, chunk: int = 0) -> Replication:
    """Placement of a chunk's training state on this stage."""
    parallel, optimizer = component.parallel, component.optimizer
    if optimizer is None:
        raise ValueError(f"{component.name} is frozen: it has no training state")
    dense = component.dp * parallel.cp
    moments = EIGHT_BIT_MOMENTS if optimizer.kind is OptimizerKind.adam8bit else 4 if optimizer.precision_aware else 8
    # On GPUs the first stage reduces its gradients in buckets during the backward pass; elsewhere a buffer is one bucket.
    overlaps = cluster.device == Device.gpu and stage == 0 and chunk == 0
    return Replication(
        distributed=optimizer.distributed,
        dense_shards=dense,
        expert_shards=component.num_ranks // (parallel.pp * parallel.ep * parallel.etp),
        bucket_elements=max(40_000_000, 1_000_000 * dense) if overlaps else None,
        moment_bytes=moments + (4 if optimizer.ema_decay else 0),
        matrix_moment_bytes=4 if optimizer.kind is OptimizerKind.muon else None,
        # bfloat16 moments; of a bfloat16 weight the other half of the float32 one
        main_bytes=2 if optimizer.precision_aware and component.model.dtype is Dtype.bfloat16 else 4,
    )


def stage_state(component: Component, chunks: Sequence[Sequence[Parameter]], cluster: ClusterConfig, *, stage: int) -> StateBytes:
    """Training state of the fullest rank of a stage; a frozen model's weights."""
    if component.optimizer is None:
        return frozen_bytes([parameter for chunk in chunks for parameter in chunk])
    total = StateBytes(weights=0, gradients=0, optimizer=0)
    for number, chunk in enumerate(chunks):
        total += state_bytes(chunk, replication(component, cluster, stage=stage, chunk=number))
    return total


def whole_parameters(component: Component, shards: Sequence[Sequence[Sequence[Parameter]]]) -> int:
    """Parameters of the whole model from its stages' shards: split ones times their ranks, a tied embedding once."""
    parallel, total = component.parallel, 0
    for stage, chunks in enumerate(shards):
        for parameter in (p for chunk in chunks for p in chunk):
            if stage and parameter.own_bucket:
                continue
            tensor = parallel.etp if parameter.is_expert else parallel.tp
            total += parameter.numel * (tensor if parameter.is_split else 1) * (parallel.ep if parameter.is_expert else 1)
    return total


def engine_weight_bytes(component: Component, shards: Sequence[Sequence[Sequence[Parameter]]], *, only_rounded: bool = False) -> int:
    """Weights of one rank of the rollout engine: every split tensor over its tp ranks, the rest whole. `only_rounded`: those that
    `rollout.precision` rounds, in the model's precision; 0 without."""
    if component.engine is None or (only_rounded and not component.engine.settings.precision.is_on):
        return 0
    split = whole = 0
    for stage, chunks in enumerate(shards):
        for p in (p for chunk in chunks for p in chunk):
            if p.is_adapter or (stage and p.own_bucket) or (only_rounded and not is_quantized(p.name)):
                continue
            size = p.numel * p.itemsize * (component.parallel.ep if p.is_expert else 1)
            tensor = component.parallel.etp if p.is_expert else component.parallel.tp
            if p.is_split or p.is_expert:
                split += size * (tensor if p.is_split else 1)
            else:
                whole += size
    return whole + split // component.engine.tp


def engine_sizes(component: Component, shards: Sequence[Sequence[Sequence[Parameter]]]) -> dict[str, int]:
    """The fields of `Sizes` about the rollout engine."""
    weights, rounded = engine_weight_bytes(component, shards), engine_weight_bytes(component, shards, only_rounded=True)
    engine, adapters = component.engine, 0
    if engine is not None and not engine.settings.reason_to_merge(component.architecture, component.model.lora):
        pairs = [[[p for p in chunk if p.is_adapter] for chunk in chunks] for chunks in shards]
        adapters = component.dtype_bytes * whole_parameters(component, pairs)
    return {"engine_weights": weights, "engine_rounded": rounded, "adapters": adapters}


class Scales:
    """Measures layers and caches the results: the components and candidates of a search share most layers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[str, BlockBytes] = {}
        self._shards: dict[str, list[tuple[Parameter, ...]]] = {}
        self._towers: dict[str, Tower | None] = {}

    def block(self, component: Component, passes: MicroBatches) -> BlockBytes:
        """The activations of the component's layers at these micro-batches: measured, or listed for Transformer Engine's modules."""
        if isinstance(component.architecture, HFArchitecture):  # not its own modules: nothing is built of them
            model = replace(component.model, layers=Layers.torch)
            component = replace(component, architecture=dense_twin(component.architecture), model=model)
        if self.device == Device.gpu and layers.uses_transformer_engine(component):
            return layers.block_bytes(component, passes.rows, passes.length)
        p, model = component.parallel, component.model
        split = (p.tp, p.sequence_parallel, p.cp)
        kind = (model.recompute, model.dtype, model.lora, model.quantization, model.double_quantization, model.batch_invariant)
        key = repr((component.architecture, *split, *kind, passes.rows, passes.length))
        if key not in self._known:
            found = dry_run.measure_block(component, passes.rows, passes.length, self.device)
            self._known[key] = replace(found, layer=found.layer + dry_run.expert_extra_bytes(component, passes.tokens))
        return self._known[key]

    def tower(self, component: Component) -> Tower | None:
        """What the model's vision tower costs; None if it has none that is counted."""
        model = component.model
        of_model = (model.dtype, model.images, model.lora, model.freeze, model.recompute, component.optimizer is None)
        key = repr((component.architecture, *of_model, features_seen(component)))
        if key not in self._towers:
            self._towers[key] = tower_of(component)
        return self._towers[key]

    def shards(self, component: Component, stage: int) -> list[tuple[Parameter, ...]]:
        """The parameters of every chunk on a rank of this stage; the number of replicas makes no difference."""
        model = component.model
        packed = (model.quantization, model.double_quantization)
        of_model = (model.dtype, model.lora, *packed, model.freeze, model.make_vocab_divisible_by)
        key = repr((component.architecture, component.head, component.has_values, *of_model, component.parallel, stage))
        if key not in self._shards:
            self._shards[key] = dry_run.shard_parameters(component, stage)
        return self._shards[key]

    def scaled_block(self, component: Component, passes: MicroBatches) -> BlockBytes:
        """As `block`, scaled from one row: activations are proportional to rows."""
        one = self.block(component, replace(passes, rows=1))
        return BlockBytes(**{name: size * passes.rows for name, size in asdict(one).items()})


@cache
def scales_of(device: Device) -> Scales:
    """What this process has measured for a kind of device, so far."""
    return Scales(device)


def plan_component(component: Component, cluster: ClusterConfig) -> ComponentPlan:
    """Build one rank of every distinct stage, run its layers, and predict. Raises ConfigError if the sizes do not divide."""
    check(component)
    scales, last = scales_of(cluster.device), component.parallel.pp - 1
    like = [stage if stage in (0, last) else 1 for stage in range(last + 1)]  # those in between have equal shards
    built = {stage: scales.shards(component, stage) for stage in sorted(set(like))}
    shards = [built[stage] for stage in like]
    states = {stage: stage_state(component, chunks, cluster, stage=stage) for stage, chunks in built.items()}
    inference = scales.block(component, inference_micro_batches(component))
    sizes = Sizes(
        stages=tuple(states[stage] for stage in like),
        train=inference if component.optimizer is None else scales.block(component, train_micro_batches(component)),
        inference=inference,
        **engine_sizes(component, shards),
        tower=scales.tower(component),
    )
    counts = tuple(sum(p.numel for chunk in chunks for p in chunk) for chunks in shards)
    return predict(component, cluster, sizes, stage_parameters=counts, model_parameters=whole_parameters(component, shards))


def again(plan: ComponentPlan, cluster: ClusterConfig, component: Component) -> ComponentPlan:
    """The plan of the same model if the component changes only around it."""
    counts = {"stage_parameters": plan.stage_parameters, "model_parameters": plan.model_parameters}
    return predict(component, cluster, plan.sizes, **counts)


def with_fitting_cache(plan: ComponentPlan, cluster: ClusterConfig) -> ComponentPlan:
    """The plan with a cache that the devices have room for, if only the cache does not fit and the config has no size for it: the engine
    then decodes fewer sequences at a time. TensorRT-LLM uses at most its part of what is free when it starts."""
    component, engine = plan.component, plan.component.engine
    if engine is None or engine.kv_cache_tokens:
        return plan
    wanted, least, page = cache_tokens(component, engine), sequence_tokens(component, engine), page_tokens(component, engine)
    if engine.settings.engine == EngineKind.tensorrt_llm:
        most = max(least, min(wanted, free_at_start(component, plan.sizes, cluster) // kv_bytes_per_token(component, engine)))
    else:
        most = wanted
    if plan.fits and most == wanted:
        return plan

    def sized(tokens: int) -> ComponentPlan:
        own = replace(engine, kv_cache_tokens=tokens, wanted_cache_tokens=wanted)
        return replace(again(plan, cluster, replace(component, engine=own)), wanted_seconds=plan.seconds)

    low, high = least // page, max(least, most) // page  # pages, between which the largest fitting cache is
    if (found := sized(high * page)).fits or not sized(low * page).fits:
        return found if found.fits else plan
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sized(middle * page).fits else (low, middle)
    return sized(low * page)


def predict(
    component: Component, cluster: ClusterConfig, sizes: Sizes, *, stage_parameters: tuple[int, ...], model_parameters: int
) -> ComponentPlan:
    return ComponentPlan(
        component=component,
        stage_parameters=stage_parameters,
        model_parameters=model_parameters,
        sizes=sizes,
        memory=tuple(phase_memory(component, sizes, cluster, range(component.parallel.pp))),
        host=host_memory(component, sizes, cluster),
        disk=disk_optimizer(component, sizes, cluster),
        times=tuple(phase_times(component, sizes, cluster)),
        limit=int(cluster.gpu_memory_gib * GIB),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One flat buffer: bounds of its parameters and of its buckets."""

    numel: int
    parameters: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    def owned(self, num_shards: int) -> list[int]:
        """Parameter elements (no padding) that each of the distributed optimizer's shards holds: an equal slice of every bucket."""
        held = [0] * num_shards
        places = iter(self.parameters)
        place = next(places, None)
        for start, stop in self.buckets:
            size = (stop - start) // num_shards
            while place is not None and place[0] < stop:
                begin, end = place[0] - start, place[1] - start
                for shard in range(begin // size, (end - 1) // size + 1):
                    held[shard] += min(end, (shard + 1) * size) - max(begin, shard * size)
                place = next(places, None)
        return held


@dataclass(frozen=True, kw_only=True, slots=True)
class Replication:
    """Placement of a rank's training state."""

    distributed: bool  # the distributed optimizer
    dense_shards: int  # dp x cp
    expert_shards: int  # replicas of an expert
    bucket_elements: int | None  # None: one bucket per buffer
    moment_bytes: float = 8  # both Adam moments of an element, and its average (optimizer.ema_decay)
    matrix_moment_bytes: float | None = None  # of a hidden matrix; None: the same
    main_bytes: int = 4  # float32 copy of a 2-byte weight

    def optimizer_bytes(self, p: Parameter) -> float:
        """Of all elements of a parameter, wherever they are held."""
        moments = self.moment_bytes if self.matrix_moment_bytes is None or not p.is_matrix else self.matrix_moment_bytes
        return p.numel * (moments + (self.main_bytes if p.itemsize == 2 else 0))


def lay_out(parameters: Sequence[Parameter], *, distributed: bool, shards: int, bucket_elements: int | None) -> Buffer:
    """The buffer of parameters of one kind, given in the module's order."""
    align = 64 if distributed else 1
    bucket_align = math.lcm(shards, 128) if distributed else 1
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    start = begin = 0  # of the open bucket, of the next parameter
    is_open = False

    def close(end: int) -> int:
        nonlocal start, is_open
        end = _up(end, bucket_align)
        buckets.append((start, end))
        start, is_open = end, False
        return end

    for parameter in reversed(parameters):
        begin = _up(begin, align)
        alone = parameter.own_bucket and distributed
        if alone and is_open:
            begin = close(begin)
        end = begin + parameter.numel
        places.append((begin, end))
        is_open = True
        full = bucket_elements is not None and end - start >= bucket_elements
        begin = close(end) if full or alone else end
    if is_open:
        close(begin)
    return Buffer(numel=start, parameters=tuple(places), buckets=tuple(buckets))


def state_bytes(parameters: Sequence[Parameter], replication: Replication, *, dp_rank: int | None = None) -> StateBytes:
    """A chunk's training state on data-parallel rank `dp_rank` (None: the fullest). Parameters in 4 bytes need no main weights."""
    total = frozen_bytes([p for p in parameters if p.is_frozen])
    trained = [p for p in parameters if not p.is_frozen]
    kinds = sorted(trained, key=lambda p: (p.is_expert, p.itemsize))  # stable: the module's order within a kind
    for (is_expert, itemsize), group in groupby(kinds, key=lambda p: (p.is_expert, p.itemsize)):
        own = list(group)
        shards = replication.expert_shards if is_expert else replication.dense_shards
        buffer = lay_out(own, distributed=replication.distributed, shards=shards, bucket_elements=replication.bucket_elements)
        elements = sum(p.numel for p in own)
        if replication.distributed:
            by_shard = buffer.owned(shards)
            held = max(by_shard) if dp_rank is None else by_shard[dp_rank % shards]
            weights = buffer.numel * itemsize
        else:
            held, weights = elements, elements * itemsize
        per_element = sum(map(replication.optimizer_bytes, own)) / elements
        total += StateBytes(weights=weights, gradients=buffer.numel * 4, optimizer=int(held * per_element))
    return total


def frozen_bytes(parameters: Sequence[Parameter]) -> StateBytes:
    """Bytes of a model that is not trained."""
    return StateBytes(weights=sum(p.nbytes for p in parameters), gradients=0, optimizer=0)


def approximate_state_bytes(parameters: Sequence[Parameter], replication: Replication) -> StateBytes:
    """As `state_bytes` without padding; the search compares thousands of layouts with it."""
    weights = gradients = optimizer = 0
    for p in parameters:
        shards = (replication.expert_shards if p.is_expert else replication.dense_shards) if replication.distributed else 1
        weights += p.nbytes
        if p.is_frozen:
            continue
        gradients += p.numel * 4
        optimizer += int(replication.optimizer_bytes(p)) // shards
    return StateBytes(weights=weights, gradients=gradients, optimizer=optimizer)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
