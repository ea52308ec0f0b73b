"""How long the phases of a training step take on the ranks of one component, from its shapes and the cluster's rates (`kernels`). Pure.

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

from collections.abc import Mapping
from dataclasses import dataclass

from aligner.models.config import Recompute
from aligner.planner.config import ClusterConfig
from aligner.planner.decoding import LOGIT_PASSES, MILLI, generation
from aligner.planner.kernels import GIGA, Kernels
from aligner.planner.layers import LayerSeconds, Passes, kernels, launched_layers, layer_flops, layer_seconds, passes
from aligner.planner.memory import Sizes, trained_bytes
from aligner.planner.schedule import pipeline_slots, stage_layers
from aligner.planner.workload import Component, Head, Phase, device_optimizer, host_optimizer, padded_vocabulary

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
    """Every phase of the component's training step."""
    found = []
    for phase in component.work.phases:
        if phase == Phase.train:
            parts = _training(component, sizes, cluster)
        elif phase == Phase.generate and component.engine is not None:
            parts = generation(component, component.engine, sizes, cluster)
        else:
            parts = _inference(component, cluster)
        if phase in component.turns:
            parts["turns on the GPUs"] = turn_seconds(component, sizes, cluster, phase)
        if cluster.phase_seconds:
            parts["changes of phase"] = cluster.phase_seconds
        found.append(PhaseTime(phase=phase, parts={name: seconds for name, seconds in parts.items() if seconds}))
    return found


def turn_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig, phase: Phase) -> float:
    """Weights to host memory and back, in training the optimizer's state too."""
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
    """Matrix products, in forward passes, that a backward pass saves: the gradients of frozen weights under adapters."""
    return 1.0 if component.model.lora.is_on else 0.0


def _head(component: Component, selected: float, k: Kernels) -> tuple[float, float]:
    """(product with the output layer, what moves its float32 logits) of a forward pass."""
    if component.head != Head.language:
        return 0.0, 0.0
    vocabulary = padded_vocabulary(component) / component.parallel.tp
    return k.product(selected, component.architecture.hidden_size, vocabulary), k.moving(LOGIT_PASSES * selected * vocabulary * 4)


def _training(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    shape = passes(component, component.work.update_rows)
    parts = _through_pipeline(component, shape, cluster, trains=True)
    parts |= _update(component, sizes, cluster)
    found = {name: seconds * component.work.num_updates for name, seconds in parts.items()}
    found["optimizer to host memory and back"] = optimizer_away_seconds(component, sizes, cluster)
    return found | {"optimizer on the host": host_update_seconds(component, sizes, cluster)}


def optimizer_away_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> float:
    """`optimizer.offload`: its state from host memory before training, and back. Components that take turns move it anyway."""
    if component.optimizer is None or not component.optimizer.offload or Phase.train in component.turns:
        return 0.0
    moved = 2 * max(device_optimizer(component, state) for state in sizes.stages)
    return moved / kernels(component, cluster).host_rate


def host_update_seconds(component: Component, sizes: Sizes, cluster: ClusterConfig) -> float:
    """`optimizer.cpu_offload`, in all updates of a step: gradients come and weights go as float32, while the node's cores read all four
    numbers of each parameter and write three."""
    held = max(host_optimizer(component, state) for state in sizes.stages)
    ranks = min(cluster.gpus_per_node, component.num_ranks)
    computing = held * 28 / 16 * ranks / (cluster.host_memory_gb_per_second * GIGA)
    return component.work.num_updates * max(computing, held / 2 / kernels(component, cluster).host_rate)


def _inference(component: Component, cluster: ClusterConfig) -> dict[str, float]:
    return _through_pipeline(component, passes(component, component.work.rows), cluster, trains=False)


def _through_pipeline(component: Component, shape: Passes, cluster: ClusterConfig, *, trains: bool) -> dict[str, float]:
    """All micro-batches of a replica through the slowest stage, and the bubble."""
    p, k, model = component.parallel, kernels(component, cluster), component.model
    layers = max(stage_layers(component.architecture.num_layers, p))
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
    parts = {
        "layers": layers * layer.products * products,
        "attention": layers * layer.attention * squares,
        "small kernels": layers * layer.small * moves,
        "logits": head if p.pp == 1 else max(0.0, head - _slack(component, layer, products)),
        "tensor parallel": layers * layer.tensor * exchanges,
        "context parallel": layers * layer.context * exchanges,
        "expert parallel": layers * layer.experts * exchanges,
        "pipeline sends": exchanges * p.vpp * _send(component, shape, k) if p.pp > 1 else 0.0,
    }
    gpu = sum(parts.values())
    started = (k.launching(launched_layers(component, layers)) + cluster.host_pass_milliseconds * MILLI) * launches
    parts["waiting for the host"] = k.together(gpu, started) - gpu
    one = sum(parts.values())
    slots = pipeline_slots(p, shape.count, forward_only=not trains)
    found = {name: seconds * shape.count for name, seconds in parts.items()}
    found["pipeline bubble"] = one * (slots - shape.count)
    if component.dp > 1:
        found["stragglers"] = sum(found.values()) * cluster.straggling
    return found


def _slack(component: Component, layer: LayerSeconds, products: float) -> float:
    """Seconds by which the last stage's layers are done before the fullest one's, where stages are uneven."""
    counts = stage_layers(component.architecture.num_layers, component.parallel)
    return (max(counts) - counts[-1]) * layer.products * products


def _send(component: Component, shape: Passes, k: Kernels) -> float:
    p = component.parallel
    hidden = shape.tokens / p.cp * component.architecture.hidden_size * component.dtype_bytes
    return k.send(hidden / (p.tp if p.sequence_parallel else 1), component.num_ranks)


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
    """What `optimizer.offload` and `optimizer.cpu_offload` add to a step's training; the second one takes something off, too."""
    fullest = max(sizes.stages, key=lambda state: state.gradients)
    spared = 2 * (fullest.optimizer - device_optimizer(component, fullest)) * component.work.num_updates
    added = optimizer_away_seconds(component, sizes, cluster) + host_update_seconds(component, sizes, cluster)
    return added - kernels(component, cluster).moving(spared)
