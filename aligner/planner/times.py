"""How long the phases of a training step take on the ranks of one component, from its shapes and the cluster's rates. Pure.

Assumptions:

* Data-parallel replicas take sequences of the lengths that `Work` has; the one with most tokens determines the time. Rows are packed as the
  run packs them. The most loaded rank of an expert-parallel group has `cluster.expert_imbalance` times the mean.
* Tensor-, context- and expert-parallel collectives and pipeline sends wait for each other and for the computation (no overlap); of the
  gradient's reduce-scatter and the weights' all-gather half is hidden behind it (`DATA_PARALLEL_OVERLAP`).
* A backward pass costs two forward passes of matrix products (of frozen weights under adapters one), and two and a half of attention,
  whose scores are computed again (Dao 2023, 2307.08691); full recomputation adds one forward pass, selective the attention's.
* A GPU that computes for less time than the host needs to start its kernels waits for the host.
* Decoding reads the engine's weights and the cache once per step; of experts those that its tokens choose.
* The host updates at the rate at which a node's cores stream its memory, whichever is longer, that or the transfers.
* Components that share GPUs move their weights to host memory and back at the host link's rate, and do nothing meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from aligner.models.config import Recompute
from aligner.parallel.topology import ParallelConfig
from aligner.planner import memory
from aligner.planner.config import ClusterConfig, Device, PlanConfig
from aligner.planner.engine_memory import cache_tokens, kv_bytes_per_token, replicas_of, state_bytes
from aligner.planner.layers import (
    GIGA,
    HIDDEN_PASSES,
    MICRO,
    TERA,
    Kernels,
    Passes,
    attention_width,
    kernels,
    launched_layers,
    layer_flops,
    layer_seconds,
    passes,
)
from aligner.planner.memory import Sizes, device_optimizer, host_elements, trained_bytes
from aligner.planner.workload import GIB, Component, Engine, Head, Phase, Tower, padded_vocabulary, stage_layers

DATA_PARALLEL_OVERLAP = 0.5
BACKWARD_PRODUCTS, BACKWARD_ATTENTION, BACKWARD_LAUNCHES = 2.0, 2.5, 1.5  # in forward passes


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Seconds of one phase of a training step, by cause."""

    phase: Phase
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def phase_times(component: Component, sizes: Sizes, cluster: ClusterConfig) -> list[PhaseTime]:
    found = []
    for phase in component.work.phases:
        if phase == Phase.train:
            parts = _training(component, sizes, cluster)
        elif phase == Phase.generate and component.engine is not None:
            parts = generation(component, component.engine, sizes, cluster)
        else:
            parts = _through_pipeline(component, passes(component, component.work.rows), cluster, sizes.tower, trains=False)
        if phase in component.turns:
            parts["turns on the GPUs"] = turn_seconds(component, sizes, cluster, phase)
        if cluster.phase_seconds:
            parts["changes of phase"] = cluster.phase_seconds
        found.append(PhaseTime(phase=phase, parts={name: seconds for name, seconds in parts.items() if seconds}))
    return found


def phase_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[Phase, float]:
    """The totals of `phase_times`."""
    return {time.phase: time.total for time in phase_times(component, sizes, cluster)}


def turn_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig, phase: Phase) -> float:
    """Moving weights to host memory and back, in training the optimizer's state too."""
    fullest = max(sizes.stages, key=lambda state: state.weights + state.optimizer)
    moved = fullest.weights + (device_optimizer(component, fullest) if phase == Phase.train else 0)
    return 2 * moved / kernels(component, cluster).host_rate


def model_flops(component: Component, tokens: float, length: float) -> float:
    """Useful FLOPs of one training pass over `tokens` tokens (forward and backward, no recomputation): what MFU counts."""
    linear, quadratic = layer_flops(component, length)
    head = 2 * component.architecture.hidden_size * padded_vocabulary(component) if component.head == Head.language else 0
    products = 3.0 - _frozen(component)
    return tokens * ((products * linear + 3.0 * quadratic) * component.architecture.num_layers + products * head)


def _frozen(component: Component) -> float:
    """Matrix products that a backward pass saves, in forward passes: the gradients of frozen weights under adapters."""
    return 1.0 if component.model.lora.is_on else 0.0


def _head(component: Component, selected: float, k: Kernels) -> tuple[float, float]:
    """Seconds of a forward pass: (product with the output layer, moving its float32 logits)."""
    if component.head != Head.language:
        return 0.0, 0.0
    vocabulary = padded_vocabulary(component) / component.parallel.tp
    return k.product(selected, component.architecture.hidden_size, vocabulary), k.moving(LOGIT_PASSES * selected * vocabulary * 4)


def _training(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    shape = passes(component, component.work.update_rows)
    parts = _through_pipeline(component, shape, cluster, sizes.tower, trains=True)
    parts |= _update(component, sizes, cluster)
    found = {name: seconds * component.work.num_updates for name, seconds in parts.items()}
    found["optimizer to host memory and back"] = optimizer_away_seconds(component, sizes, cluster)
    return found | {"optimizer on the host": host_update_seconds(component, sizes, cluster)}


def optimizer_away_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> float:
    """Moves the optimizer's state from host memory and back (`optimizer.offload`); components that take turns do so anyway."""
    if component.optimizer is None or not component.optimizer.offload or Phase.train in component.turns:
        return 0.0
    moved = 2 * max(device_optimizer(component, state) for state in sizes.stages)
    return moved / kernels(component, cluster).host_rate


def host_update_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> float:
    """All updates of a step on the host (`optimizer.cpu_offload`): gradients come and weights go as float32, while the node's cores read
    all four numbers of each parameter and write three. With `optimizer.nvme_path` its disk reads and writes three of them meanwhile."""
    elements = max(host_elements(component, state) for state in sizes.stages)
    ranks = min(cluster.gpus_per_node, component.num_ranks)
    computing = elements * 28 * ranks / (cluster.host_memory_gb_per_second * GIGA)
    streaming = 2 * memory.disk_optimizer(component, sizes, cluster) / (cluster.nvme_gb_per_second * GIGA)
    return component.work.num_updates * max(computing, streaming, elements * 8 / kernels(component, cluster).host_rate)


def tower_seconds(component: Component, tower: Tower | None, sequences: float, k: Kernels, *, trains: bool = False) -> float:
    """The vision tower of a rank, with one image in each of these sequences."""
    if tower is None:
        return 0.0
    work = component.work
    features = min(component.seen_tokens, work.mean_prompt or work.mean_length())
    patches, passed = sequences * features * tower.patches, tower.trained_flops / tower.flops if trains else 1.0
    keys = (tower.depth - tower.windowed) * features * tower.patches + tower.windowed * min(tower.window, features * tower.patches)
    computing = sequences * features * tower.flops / k.product_rate + k.attention(patches, keys, 1, 2 * tower.width)
    moved = HIDDEN_PASSES * patches * tower.width * component.dtype_bytes * tower.depth
    return passed * (computing + k.moving(moved))


def _through_pipeline(
    component: Component, shape: Passes, cluster: ClusterConfig, tower: Tower | None, *, trains: bool
) -> dict[str, float]:
    """All micro-batches of a replica through the slowest stage, and the bubble."""
    p, k, model = component.parallel, kernels(component, cluster), component.model
    counts = stage_layers(component.architecture.num_layers, p)
    layers = max(counts)
    layer, frozen = layer_seconds(component, shape, cluster, p.tp), _frozen(component)
    again = 1.0 if trains and model.recompute == Recompute.full else 0.0
    products = 1.0 + (BACKWARD_PRODUCTS - frozen if trains else 0.0) + again
    squares = 1.0 + (BACKWARD_ATTENTION + (model.recompute == Recompute.selective) if trains else 0.0) + again
    moves = 1.0 + (2.0 if trains else 0.0) + again  # of collectives: the backward pass moves what the forward pass does
    exchanges = 1.0 + (1.0 if trains else 0.0) + again
    launches = 1.0 + (BACKWARD_LAUNCHES if trains else 0.0) + again
    product, logits = _head(component, shape.selected / p.cp, k)
    # The loss projects again in its backward pass, chunk by chunk (`aligner.parallel.logprobs`).
    head = product * (4.0 - frozen if trains else 1.0) + logits * (3.0 if trains else 1.0)
    slack = (layers - counts[-1]) * layer.products * products  # by which uneven stages let the last one's layers end early
    hidden = shape.tokens / p.cp * component.architecture.hidden_size * component.dtype_bytes
    sending = k.send(hidden / (p.tp if p.sequence_parallel else 1), component.num_ranks)
    parts = {
        "layers": layers * layer.products * products,
        "attention": layers * layer.attention * squares,
        "small kernels": layers * layer.small * moves,
        "logits": head if p.pp == 1 else max(0.0, head - slack),
        "tensor parallel": layers * layer.tensor * exchanges,
        "context parallel": layers * layer.context * exchanges,
        "expert parallel": layers * layer.experts * exchanges,
        "pipeline sends": exchanges * p.vpp * sending if p.pp > 1 else 0.0,
    }
    seeing = tower_seconds(component, tower, shape.tokens / component.work.mean_length(), k, trains=trains)
    # The first stage's; the head is the last one's, and the slowest stage has one of them.
    parts["vision tower"] = seeing if p.pp == 1 else max(0.0, seeing - (layers - counts[0]) * layer.products * products - parts["logits"])
    gpu = sum(parts.values())
    started = (
        k.launching(launched_layers(component, layers) + (tower.depth if tower else 0)) + cluster.host_pass_milliseconds * MILLI
    ) * launches
    parts["waiting for the host"] = k.together(gpu, started) - gpu
    one = sum(parts.values())
    found = {name: seconds * shape.count for name, seconds in parts.items()}
    # All slots less those that compute, in this order: rounding depends on it.
    found["pipeline bubble"] = one * (shape.count + (p.pp - 1) / (p.vpp if trains else 1) - shape.count)
    if component.dp > 1:
        found["stragglers"] = sum(found.values()) * cluster.straggling
    return found


def _update(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    """Gradients reduced, weights updated and gathered: once per optimizer update."""
    p, ranks, k = component.parallel, component.dp * component.parallel.cp, kernels(component, cluster)
    fullest = max(sizes.stages, key=lambda state: state.gradients)
    span = p.tp * ranks
    weights = trained_bytes(component, fullest)
    exchange = k.all_gather(fullest.gradients, ranks, span) + k.all_gather(weights, ranks, span)
    return {
        "data parallel": exchange * (1 - DATA_PARALLEL_OVERLAP),
        "optimizer": k.moving(2 * device_optimizer(component, fullest) + fullest.gradients + weights),
    }


def relief_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> float:
    """What `optimizer.offload` and `optimizer.cpu_offload` add to a step's training, less the updates that the host takes over."""
    fullest = max(sizes.stages, key=lambda state: state.gradients)
    spared = 2 * (fullest.optimizer - device_optimizer(component, fullest)) * component.work.num_updates
    added = optimizer_away_seconds(component, sizes, cluster) + host_update_seconds(component, sizes, cluster)
    return added - kernels(component, cluster).moving(spared)


LOGIT_PASSES = 6  # how often float32 logits are read or written, in the log-probs of one pass or a draw
MAX_REPLICAS = 32  # replicas of the engine that are followed
OWN_SHARE = 0.88  # part of a GPU's memory that an engine uses if it is alone there
MILLI = 1e-3


def replica(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig, *, static: bool = False) -> ReplicaQueue:
    """A replica of the engine, idle."""
    step = decode_step(component, engine, sizes, cluster)
    a, work = component.architecture, component.work
    prompt = max(1.0, work.mean_prompt)
    whole = Passes(count=1, tokens=max(prompt, engine.prefill_chunk_tokens), selected=1, length=prompt)
    flat = replace(component, parallel=ParallelConfig(tp=engine.tp, etp=engine.tp))
    layer = layer_seconds(flat, whole, cluster, engine.tp)
    per_token = a.num_layers * (layer.products + layer.attention + layer.small + layer.tensor) / whole.tokens

    once = min(1.0, work.prompts / work.rows) if work.prompts else 1.0  # a group's prompt is seen once
    seeing = tower_seconds(component, sizes.tower, once, kernels(component, cluster))

    def prefill(tokens: float) -> float:
        return tokens * per_token + a.num_layers * cluster.launch_microseconds * MICRO

    return ReplicaQueue(
        seats=engine.max_batch_size,
        capacity=_capacity(component, engine, sizes, cluster),
        step=step,
        prefill=prefill,
        seating=cluster.engine_request_microseconds * MICRO + seeing,
        static=static,
    )


def _capacity(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """Tokens in a replica's cache: the run's, or what the weights leave on GPUs of the engine's own."""
    if not engine.own_ranks or engine.kv_cache_tokens:
        return cache_tokens(component, engine)
    left = cluster.gpu_memory_gib * GIB * OWN_SHARE - sizes.engine_weights - engine.max_batch_size * state_bytes(component, engine)
    return max(component.work.length, left / max(1, kv_bytes_per_token(component, engine)))


def decode_step(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> Callable[[int, float], float]:
    """A function of (active, cached): seconds in which each of `active` sequences gets a token, with `cached` tokens in the cache."""
    a, k, tp = component.architecture, kernels(component, cluster), engine.tp
    linear, _ = layer_flops(component, 1)
    vocabulary = padded_vocabulary(component) / tp
    kv, state = kv_bytes_per_token(component, engine), 2 * state_bytes(component, engine)  # read and written
    attention = 2.0 * a.num_attention_heads / tp * attention_width(a) * a.key_value_layers
    of_experts = expert_bytes(component, sizes.engine_weights, tp)
    # Graphs on a GPU, compiled kernels on a CPU.
    is_one_by_one = cluster.device == Device.gpu and (not engine.uses_graphs or bool(a.linear_attention_layers))
    each = cluster.host_layer_microseconds if is_one_by_one else cluster.launch_microseconds
    floor = launched_layers(component, a.num_layers) * each * MICRO

    @cache
    def batch(active: int) -> float:
        chosen = 1 - (1 - a.experts_per_token / a.num_experts) ** active if a.num_experts else 1.0
        weights = sizes.engine_weights - of_experts + of_experts * chosen / cluster.achievable_experts
        products = active * (a.num_layers * linear + 2 * a.hidden_size * padded_vocabulary(component)) / tp / k.product_rate
        computing = k.moving(weights + active * state) + products + k.moving(LOGIT_PASSES * active * vocabulary * 4)
        exchange = 2 * a.num_layers * k.all_reduce(active * a.hidden_size * component.dtype_bytes, tp, tp)
        host = cluster.engine_step_milliseconds * MILLI + active * cluster.engine_sequence_microseconds * MICRO
        return k.together(computing, floor) + exchange + host

    def step(active: int, cached: float) -> float:
        return batch(active) + k.moving(cached * kv) + cached * attention / (k.cluster.bf16_tflops * TERA * cluster.achievable_attention)

    return step


def expert_bytes(component: Component, weights: int, tp: int) -> float:
    """Bytes of `weights` that belong to experts, of which a token passes only some."""
    a = component.architecture
    if not a.num_experts:
        return 0.0
    mixtures = sum(a.has_experts(layer) for layer in range(a.num_layers))
    matrices = 3 if a.gated_mlp else 2
    return min(float(weights), mixtures * a.num_experts * matrices * a.hidden_size * a.expert_ffn_hidden_size * component.dtype_bytes / tp)


def refit_seconds(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """New weights for the engine: copied, or gathered first if the layout differs. Other packages' receive whole tensors, or adapters."""
    if not component.engine_holds_weights:
        return 0.0
    k = kernels(component, cluster)
    copied = k.moving(2 * (sizes.adapters or sizes.engine_weights))
    if engine.is_foreign or engine.own_ranks:
        return copied + (sizes.adapters or sizes.engine_weights * engine.tp) / k.link(component.num_ranks + engine.own_ranks)
    return copied + (sizes.engine_weights / k.link(component.num_ranks) if component.engine_reshards else 0.0)


def policy_away_seconds(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """`rollout.offload` moves the policy's weights to host memory before sampling, and back. Components that take turns always do."""
    if not engine.offload or not component.engine_holds_weights or component.turns:
        return 0.0
    return 2 * max(state.weights for state in sizes.stages) / kernels(component, cluster).host_rate


def generation(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    """The slowest replica's queue, with each response sampled in one turn."""
    responses = component.work.responses(component.work.rows + component.work.extra_rows)
    slowest = max(queue.now for queue, _, _ in sampled(component, engine, sizes, cluster, responses))
    away = policy_away_seconds(component, engine, sizes, cluster)
    return {"sampling": slowest, "refit": refit_seconds(component, engine, sizes, cluster), "policy to host memory and back": away}


def sampled(
    component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig, lengths: Sequence[int], assumed: PlanConfig | None = None
) -> list[tuple[ReplicaQueue, Sequence[int], list[tuple[float, int]]]]:
    """The replicas that are followed after sampling their shares of these responses; each with (when, number) of every end."""
    found, assumed = [], assumed or PlanConfig()
    for own in followed(lengths, replicas_of(component, engine)):
        queue = replica(component, engine, sizes, cluster, static=assumed.static_batches)
        for request, length in enumerate(own):
            queue.add(request, turns_of(length, assumed.turns, request), component.work.mean_prompt)
        found.append((queue, own, queue.until(pause=assumed.environment_seconds)))
    return found


def followed(lengths: Sequence[int], replicas: int) -> list[Sequence[int]]:
    """The responses of each replica that may be the slowest (longest response, most tokens); one if all lengths are equal."""
    every = shares(lengths, replicas)
    if lengths[0] == lengths[-1] == max(lengths) == min(lengths):
        return every[:1]
    if len(every) <= MAX_REPLICAS:
        return every
    chosen = sorted(every, key=max)[-MAX_REPLICAS // 2 :] + sorted(every, key=sum)[-MAX_REPLICAS // 2 :]
    return list({id(own): own for own in chosen}.values())


Step = Callable[[int, float], float]  # (active, cached): seconds of a decode step of `active` sequences with `cached` tokens in the cache


@dataclass(slots=True)
class _Request:
    number: int
    turns: list[int]  # tokens to sample in each turn that is left
    held: float  # tokens that are computed when it gets a seat: its prompt and its earlier tokens
    seated: int = 0  # decode step


class ReplicaQueue:
    """One replica of an engine with continuous batching: `seats` sequences at a time, whose keys and values share `capacity` tokens.

    Requests are seated in order of arrival. If the cache runs out, the sequence that was seated last loses its seat, and its tokens are
    computed again when it gets another (as in `aligner.rollout.builtin.scheduler`). Between two events the batch does not change and its
    cache grows evenly, so these decode steps are taken at once. With `static` a batch is seated only when all of the one before have ended.
    """

    def __init__(
        self, *, seats: int, capacity: float, step: Step, prefill: Callable[[float], float], seating: float = 0.0, static: bool = False
    ) -> None:
        self.seats, self.capacity, self.static = seats, capacity, static
        self._seating = seating  # seconds besides its tokens, each time a request gets a seat
        self._step, self._prefill = step, prefill
        self.now = 0.0  # seconds
        self.preempted = 0
        self._later: list[tuple[float, int, _Request]] = []  # when it comes, order
        self._waiting: deque[_Request] = deque()
        self._active: dict[int, _Request] = {}
        self._ends: list[tuple[int, int]] = []  # (decode step, number)
        self._steps = self._added = 0
        self._cached = 0.0

    @property
    def idle(self) -> bool:
        return not self._active and not self._waiting and not self._later

    def add(self, number: int, turns: Sequence[int], prompt: float, *, release: float = 0.0) -> None:
        """An episode that arrives at `release`; `turns` are the tokens that each of its turns samples (one turn: a response)."""
        self._come(_Request(number, list(turns), prompt), release)

    def _come(self, request: _Request, moment: float) -> None:
        self._added += 1
        heapq.heappush(self._later, (moment, self._added, request))

    def recompute(self) -> None:
        """Keys and values of the running responses are computed anew."""
        if self._active:
            self.now += self._prefill(self._cached)

    def until(self, limit: float = math.inf, *, pause: float = 0.0) -> list[tuple[float, int]]:
        """Sample until `limit` (or the first event after it) or until nothing is left. Returns (when, number) of each end, by time.
        `pause`: seconds between two turns of an episode, without a seat."""
        ended: list[tuple[float, int]] = []
        while not self.idle and self.now < limit:
            if not self._active and not self._waiting:
                if self._later[0][0] >= limit:
                    break
                self.now = max(self.now, self._later[0][0])
            self._seat()
            if steps := self._steps_to_next_event(limit):
                active = len(self._active)
                self.now += steps * self._step(active, self._cached + active * steps / 2)
                self._steps += steps
                self._cached += steps * active
                ended += self._end(pause)
            else:
                self._preempt()
        return ended

    def _steps_to_next_event(self, limit: float) -> int:
        """Decode steps until the batch changes; 0 if the cache has no room for one."""
        active, steps = len(self._active), self._ends[0][0] - self._steps
        if active > 1:
            steps = min(steps, int((self.capacity - self._cached) / active))
        stop = min(limit, self._later[0][0]) if self._later and active < self.seats and not self.static else limit
        if steps > 1 and stop < math.inf:
            steps = min(steps, max(1, math.ceil((stop - self.now) / self._step(active, self._cached))))
        return steps

    def _seat(self) -> None:
        while self._later and self._later[0][0] <= self.now:
            self._waiting.append(heapq.heappop(self._later)[2])
        computed = 0.0
        while self._waiting and len(self._active) < self.seats and not (self.static and self._active and not computed):
            request = self._waiting[0]
            # Also one token of each in the next step: else it would lose its seat at once.
            if self._active and self._cached + request.held + len(self._active) + 1 > self.capacity:
                break
            self._waiting.popleft()
            request.seated = self._steps
            self._active[request.number] = request
            heapq.heappush(self._ends, (self._steps + request.turns[0], request.number))
            self._cached += request.held
            computed += request.held
            self.now += self._seating
        if computed:
            self.now += self._prefill(computed)

    def _end(self, pause: float) -> list[tuple[float, int]]:
        ended = []
        while self._ends and self._ends[0][0] == self._steps:
            request = self._active.pop(heapq.heappop(self._ends)[1])
            request.held += self._steps - request.seated
            self._cached -= request.held
            del request.turns[0]
            if request.turns:
                self._come(request, self.now + pause)
            else:
                ended.append((self.now, request.number))
        return ended

    def _preempt(self) -> None:
        last = self._active.pop(next(reversed(self._active)))
        self._ends.remove((last.seated + last.turns[0], last.number))
        heapq.heapify(self._ends)
        done = self._steps - last.seated
        last.turns[0] -= done
        last.held += done
        self._cached -= last.held
        self._waiting.appendleft(last)
        self.preempted += 1


def turns_of(length: int, turns: float, number: int) -> list[int]:
    """The tokens of an episode over its turns, whose mean number is `turns`: some have one more than others."""
    count = min(length, math.floor(turns) + (number * 0.6180339887 % 1 < turns % 1))
    share, rest = divmod(length, count)
    return [share + (place < rest) for place in range(count)]


def shares(lengths: Sequence[int], replicas: int) -> list[Sequence[int]]:
    """The responses of each replica, dealt out in turn."""
    return [lengths[number::replicas] for number in range(min(replicas, len(lengths)))]
