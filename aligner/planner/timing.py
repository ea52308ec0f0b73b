"""How long a phase takes, from FLOPs, bytes and the cluster's published rates. A model, in this one pure file. Assumptions:

* Every sequence has its full length, or responses those of `Work.lengths`: then the engine's queue is followed event by event, and all else
  computes with the mean. Data-parallel replicas have equal work; experts are equally loaded.
* Matrix products run at `achievable_flops` of the peak, memory and links at `achievable_bandwidth` of theirs.
* Tensor-, context- and expert-parallel collectives and pipeline sends wait for each other and for the computation (no overlap); of the
  gradient's reduce-scatter and the weights' all-gather half is hidden behind it (`DATA_PARALLEL_OVERLAP`).
* A group whose ranks fit on a node talks over NVLink, any other over the network.
* A backward pass costs two forward passes, of frozen weights under adapters one; full recomputation adds one, selective the attention's
  quadratic part. The adapters' own computation and communication are ignored.
* Decoding reads the engine's weights and the cache once per token, and no layer takes less than `launch_microseconds`. All sequences of a
  batch run to their full length.
* Components that share GPUs move their weights to host memory and back at the host link's rate, and do nothing meanwhile.
* Host work, data loading, checkpoints and stragglers are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from aligner.models.config import Architecture, Recompute
from aligner.planner.config import ClusterConfig
from aligner.planner.memory import (
    Sizes,
    decode_batch,
    feed_forward_size,
    inference_micro_batches,
    kv_bytes_per_token,
    padded_vocabulary,
    state_bytes,
    train_micro_batches,
    trained_bytes,
)
from aligner.planner.sampling import decode_seconds, slowest_replica
from aligner.planner.schedule import MicroBatches, pipeline_slots, stage_layers
from aligner.planner.workload import Component, Engine, Head, Phase

CHUNK = 64  # tokens: `aligner.models.delta_rule`
DATA_PARALLEL_OVERLAP = 0.5
GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Seconds of one phase of a training step, by cause."""

    phase: Phase
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phase_times(component: Component, sizes: Sizes, cluster: ClusterConfig) -> list[PhaseTime]:
    """Every phase of the component's training step."""
    sampled, found = component, []
    component = replace(component, work=component.work.expected())
    for phase in component.work.phases:
        if phase == Phase.train:
            parts = _training(component, sizes, cluster)
        elif phase == Phase.generate and component.engine is not None:
            parts = _generation(sampled, component.engine, sizes, cluster)
        else:
            parts = _inference(component, cluster)
        if phase in component.turns:
            parts["turns on the GPUs"] = _turn(component, sizes, cluster, phase)
        found.append(PhaseTime(phase=phase, parts=parts))
    return found


def _turn(component: Component, sizes: Sizes, cluster: ClusterConfig, phase: Phase) -> float:
    """Weights to host memory and back, in training the optimizer's state too."""
    fullest = max(sizes.stages, key=lambda state: state.weights + state.optimizer)
    moved = fullest.weights + (fullest.optimizer if phase == Phase.train else 0)
    return 2 * moved / (cluster.host_gb_per_second * GIGA * cluster.achievable_bandwidth)


def step_seconds(times: Mapping[str, Mapping[Phase, float]], *, take_turns: bool = False) -> float:
    """A training step of the whole job, from the phases' seconds by component.

    Servers score while the actor generates, and the critic trains while the actor does; the slower one determines the time. Where the
    components `take_turns`, all phases follow each other.
    """
    if take_turns:
        return sum(sum(phases.values()) for phases in times.values())
    main = next(iter(times.values()))
    servers = [phases for phases in times.values() if phases is not main]
    scoring = max((sum(t for phase, t in own.items() if phase != Phase.train) for own in servers), default=0.0)
    training = max((own.get(Phase.train, 0.0) for own in servers), default=0.0)
    others = sum(t for phase, t in main.items() if phase not in (Phase.generate, Phase.train))
    return max(main.get(Phase.generate, 0.0), scoring) + others + max(main.get(Phase.train, 0.0), training)


def layer_flops(component: Component, length: int) -> tuple[float, float]:
    """(matrix products, attention's quadratic part) of one token through one layer, forward; half of a causal square of `length`.

    Of a model some of whose layers are delta nets: the mean of all layers.
    """
    a = component.architecture
    own, plain = len(a.linear_attention_layers) / a.num_layers, a.key_value_layers / a.num_layers
    attention, values = 2 * a.hidden_size * a.head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads), a.head_dim
    if a.latent_size:
        values, read, plain = a.value_head_dim, a.query_latent_size or a.hidden_size, a.head_dim - a.rotated
        of_heads = read * a.head_dim + a.latent_size * (plain + values) + values * a.hidden_size
        attention = 2 * (a.num_attention_heads * of_heads + a.hidden_size * (a.query_latent_size + a.latent_size + a.rotated))
    attention += 2 * a.hidden_size * a.head_dim * a.num_attention_heads * a.attention_gate
    feed_forward = 2 * a.hidden_size * feed_forward_size(component) * (3 if a.gated_mlp else 2)
    router = 2 * a.hidden_size * a.num_experts
    products = plain * attention + own * delta_flops(a) + feed_forward + router
    return float(products), plain * a.num_attention_heads * (a.head_dim + values) * length


def delta_flops(a: Architecture) -> int:
    """Of one token through a gated delta net, forward: its projections, the convolution, three products with the state, and those within a
    chunk (two of keys, the triangular system, one of values)."""
    keys, values, heads = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim, a.linear_value_heads
    projections = a.hidden_size * (2 * keys + 2 * values + 2 * heads) + values * a.hidden_size
    key, value = a.linear_key_head_dim, a.linear_value_head_dim
    rule = heads * (3 * key * value + CHUNK * (2 * key + (key + value) // 2 + value))
    return 2 * (projections + a.linear_conv_size * (2 * keys + values) + rule)


def model_flops(component: Component, tokens: int, length: int) -> float:
    """Useful FLOPs of one training pass over `tokens` tokens (forward and backward, no recomputation): what MFU counts."""
    linear, quadratic = layer_flops(component, length)
    head = 2 * component.architecture.hidden_size * padded_vocabulary(component) if component.head == Head.language else 0
    products = 3.0 - _frozen(component)
    return tokens * ((products * linear + 3.0 * quadratic) * component.architecture.num_layers + products * head)


def _frozen(component: Component) -> float:
    """Matrix products, in forward passes, that a backward pass saves: the gradients of frozen weights under adapters."""
    return 1.0 if component.model.lora.is_on else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """Seconds of the slowest stage for one micro-batch, by cause."""

    compute: float
    logits: float
    tensor: float
    context: float
    experts: float
    sends: float

    @property
    def total(self) -> float:
        return self.compute + self.logits + self.tensor + self.context + self.experts + self.sends


def _training(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    passes, updates = train_micro_batches(component), component.work.num_updates
    forward = 3.0 + (1.0 if component.model.recompute == Recompute.full else 0.0)
    again = 1.0 if component.model.recompute == Recompute.selective else 0.0
    one = _one_pass(component, passes, cluster, times=forward, extra_attention=again)
    parts = _through_pipeline(component, passes, one, forward_only=False)
    parts |= _update(component, sizes, cluster)
    return {name: seconds * updates for name, seconds in parts.items() if seconds}


def _inference(component: Component, cluster: ClusterConfig) -> dict[str, float]:
    passes = inference_micro_batches(component)
    one = _one_pass(component, passes, cluster, times=1.0, extra_attention=0.0)
    return {name: seconds for name, seconds in _through_pipeline(component, passes, one, forward_only=True).items() if seconds}


def _through_pipeline(component: Component, passes: MicroBatches, one: _Pass, *, forward_only: bool) -> dict[str, float]:
    slots = pipeline_slots(component.parallel, passes.count, forward_only=forward_only)
    return {
        "layers": one.compute * passes.count,
        "logits": one.logits * passes.count,
        "tensor parallel": one.tensor * passes.count,
        "context parallel": one.context * passes.count,
        "expert parallel": one.experts * passes.count,
        "pipeline sends": one.sends * passes.count,
        "pipeline bubble": one.total * (slots - passes.count),
    }


def _one_pass(component: Component, passes: MicroBatches, cluster: ClusterConfig, *, times: float, extra_attention: float) -> _Pass:
    """`times` counts forward passes (3: forward and backward)."""
    a, p = component.architecture, component.parallel
    layers = max(stage_layers(a.num_layers, p))
    tokens = passes.tokens / p.cp
    rate = peak_flops(component, cluster)
    linear, quadratic = layer_flops(component, passes.length)
    frozen = _frozen(component) if times > 1.0 else 0.0
    flops = layers * tokens * (linear * (times - frozen) + quadratic * (times + extra_attention)) / p.tp
    logits = 0.0
    if component.head == Head.language:
        selected = passes.rows * min(component.work.response_length, passes.length) / p.cp
        projections = 1.0 if times == 1.0 else 4.0 - frozen  # the backward pass projects again
        logits = 2 * selected * a.hidden_size * padded_vocabulary(component) / p.tp * projections / rate
    collectives = 1.0 if times == 1.0 else times - 1.0  # a backward pass moves what one forward pass moves
    hidden = tokens * a.hidden_size * component.dtype_bytes
    return _Pass(
        compute=flops / rate,
        logits=logits,
        tensor=collectives * layers * 2 * all_reduce(hidden, p.tp, p.tp, cluster),
        context=collectives * layers * _exchange_context(component, passes, cluster),
        experts=collectives * layers * _exchange_experts(component, hidden, cluster),
        sends=min(times, 2.0) * p.vpp * _send(component, hidden, cluster) if p.pp > 1 else 0.0,
    )


def peak_flops(component: Component, cluster: ClusterConfig) -> float:
    """FLOP/s that a GPU's matrix products reach."""
    return (cluster.fp8_tflops if component.model.fp8 else cluster.bf16_tflops) * TERA * cluster.achievable_flops


def link(span: int, cluster: ClusterConfig) -> float:
    """Bytes per second in a group whose furthest ranks are `span` apart."""
    rate = cluster.nvlink_gb_per_second if span <= cluster.gpus_per_node else cluster.network_gb_per_second
    return rate * GIGA * cluster.achievable_bandwidth


def all_reduce(size: float, ranks: int, span: int, cluster: ClusterConfig) -> float:
    """Seconds of a ring all-reduce: a reduce-scatter plus an all-gather of the same tensor."""
    return 2 * all_gather(size, ranks, span, cluster)


def all_gather(size: float, ranks: int, span: int, cluster: ClusterConfig) -> float:
    """Seconds until every rank has all `size` bytes, starting from its share (or the reverse, a reduce-scatter)."""
    if ranks == 1:
        return 0.0
    return size * (ranks - 1) / ranks / link(span, cluster) + cluster.collective_microseconds * MICRO


def _exchange_context(component: Component, passes: MicroBatches, cluster: ClusterConfig) -> float:
    """Keys and values of the whole sequence to every rank of the context-parallel group, in one layer."""
    a, p = component.architecture, component.parallel
    size = 2 * passes.tokens * math.ceil(a.num_key_value_heads / p.tp) * a.head_dim * component.dtype_bytes
    return all_gather(size, p.cp, p.tp * p.cp, cluster)


def _exchange_experts(component: Component, hidden: float, cluster: ClusterConfig) -> float:
    """Tokens to their experts and back, in one layer: two all-to-alls."""
    a, p = component.architecture, component.parallel
    if not a.num_experts or p.ep == 1:
        return 0.0
    size = hidden / (p.tp if p.sequence_parallel else 1) * a.experts_per_token
    return 2 * (size * (p.ep - 1) / p.ep / link(p.etp * p.ep, cluster) + cluster.collective_microseconds * MICRO)


def _send(component: Component, hidden: float, cluster: ClusterConfig) -> float:
    split = component.parallel.tp if component.parallel.sequence_parallel else 1
    return hidden / split / link(component.num_ranks, cluster) + cluster.collective_microseconds * MICRO


def _update(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    """Gradients reduced, weights updated and gathered: once per optimizer update."""
    p, ranks = component.parallel, component.dp * component.parallel.cp
    fullest = max(sizes.stages, key=lambda state: state.gradients)
    span = p.tp * ranks
    weights = trained_bytes(component, fullest)
    exchange = all_gather(fullest.gradients, ranks, span, cluster) + all_gather(weights, ranks, span, cluster)
    memory = 2 * fullest.optimizer + fullest.gradients + weights
    return {
        "data parallel": exchange * (1 - DATA_PARALLEL_OVERLAP),
        "optimizer": memory / (cluster.hbm_gb_per_second * GIGA * cluster.achievable_bandwidth),
    }


def _generation(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    """Prefill at matrix-product speed, then one token at a time at memory speed."""
    a, work = component.architecture, component.work
    replicas = max(1, component.num_ranks // engine.tp)
    rows = math.ceil((work.rows + work.extra_rows) / replicas)
    batch = decode_batch(component, engine)
    waves = math.ceil(rows / batch)
    prompt = max(1, work.length - work.response_length)
    linear, quadratic = layer_flops(component, prompt)
    rate = peak_flops(component, cluster)
    prefill = a.num_layers * rows * prompt * (linear + quadratic) / engine.tp / rate

    def decode(active: int, cached: float) -> float:
        of_states = 2 * active * state_bytes(component, engine)  # read and written
        bytes_read = sizes.engine_weights + cached * kv_bytes_per_token(component, engine) + of_states
        memory = bytes_read / (cluster.hbm_gb_per_second * GIGA * cluster.achievable_bandwidth)
        products = a.num_layers * active * linear / engine.tp / rate
        return max(memory, products, a.num_layers * cluster.launch_microseconds * MICRO)

    def reduce(active: int, _: float) -> float:
        return 2 * a.num_layers * all_reduce(active * a.hidden_size * component.dtype_bytes, engine.tp, engine.tp, cluster)

    def sampled(step: Callable[[int, float], float]) -> float:
        if work.lengths is None:
            return waves * work.response_length * step(batch, batch * (prompt + work.response_length / 2))
        lengths = work.lengths.drawn(work.rows + work.extra_rows, work.response_length)
        return slowest_replica(lengths, replicas, lambda own: decode_seconds(own, engine.max_batch_size, prompt, step))

    parts = {"prefill": prefill, "decoding": sampled(decode), "tensor parallel": sampled(reduce)}
    if component.engine_reshards:
        parts["refit"] = sizes.engine_weights * 2 / link(component.num_ranks, cluster)
    return {name: seconds for name, seconds in parts.items() if seconds}
