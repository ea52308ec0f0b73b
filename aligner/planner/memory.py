"""Device and host memory of a component in every phase, by pipeline stage. Pure arithmetic on measured sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aligner.models.config import SeeingArchitecture
from aligner.models.training.optimizer import OptimizerKind
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.engine_memory import cache_bytes, generation_parts, graph_bytes
from aligner.planner.workload import (
    EIGHT_BIT_MOMENTS,
    GIB,
    BlockBytes,
    Component,
    Head,
    MicroBatches,
    Phase,
    StateBytes,
    Tower,
    in_flight,
    micro_batches,
    padded_vocabulary,
    stage_layers,
)
from aligner.rollout.config import KEPT_FEATURES, EngineKind

_OVERLAP_BUFFERS = 8  # buffers of a micro-batch's hidden states that Transformer Engine exchanges around a layer's four matrix products
_HEAP_LOSS = 0.5  # part of the activations that is lost if micro-batches differ in length; measured: 0.3 to 0.8
_DISK_ELEMENT = 12  # bytes of a parameter of which a disk has the state
_HOST_ELEMENT = 16  # bytes of a parameter that the host updates
EXPORTED_FILE_BYTES = 5 * 2**30  # of an exported model: `aligner.models.weights.MAX_FILE_BYTES`
HOST_PROCESS_GIB = 3.0  # a rank's Python, torch and its libraries in host memory, beside a GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """Peak memory of a stage's rank in a phase: bytes by purpose."""

    phase: Phase
    stage: int
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    stages: tuple[StateBytes, ...]  # training state of a rank, by stage
    train: BlockBytes  # activations of the layers at the training pass's micro-batch
    inference: BlockBytes  # the same at the micro-batch of passes without gradient
    engine_weights: int  # weights of a rank of the rollout engine, in its own layout and the model's precision
    engine_rounded: int = 0  # those of them of which the engine keeps one byte a number
    adapters: int = 0  # of the whole model, if a refit sends these alone
    tower: Tower | None = None  # of a model that sees


def train_micro_batches(component: Component) -> MicroBatches:
    """The micro-batches of one optimizer update."""
    return micro_batches(component, component.work.update_rows)


def inference_micro_batches(component: Component) -> MicroBatches:
    """The micro-batches of one pass over a training step's sequences."""
    return micro_batches(component, component.work.rows)


def communicators(component: Component) -> int:
    """Number of a rank's process groups that carry tensors and have more than one rank, among tp, cp, pp, dp, dp x cp, ep and the world."""
    parallel, dp = component.parallel, component.dp
    sizes = (component.num_ranks, parallel.tp, parallel.cp, parallel.pp, dp, dp * parallel.cp if parallel.cp > 1 else 1, parallel.ep)
    return sum(size > 1 for size in sizes)


def phase_memory(component: Component, sizes: Sizes, cluster: ClusterConfig, stages: Iterable[int]) -> list[PhaseMemory]:
    return [
        PhaseMemory(phase=phase, stage=stage, parts=_parts(component, sizes, cluster, phase, stage))
        for stage in stages
        for phase in component.work.phases
    ]


def _parts(component: Component, sizes: Sizes, cluster: ClusterConfig, phase: Phase, stage: int) -> dict[str, int]:
    state, optimizer = sizes.stages[stage], component.optimizer
    parts = {"weights": state.weights, "weights in 8 bits": copies_in_8_bits(component, state.weights, stage)}
    if optimizer is not None and (phase == Phase.train or not optimizer.offload):
        parts |= {"gradients": state.gradients, "optimizer": device_optimizer(component, state)}
    engine = component.engine if component.engine is None or not component.engine.own_ranks else None
    if engine is not None and (phase == Phase.generate or not engine.offload):
        parts["engine weights"] = engine_bytes(component, sizes)
    if engine is not None and phase == Phase.generate:
        parts |= generation_parts(component, engine)
        if component.engine_holds_weights:  # what is rounded arrives a layer at a time
            parts["layer in transfer"] = sizes.engine_rounded // component.architecture.num_layers
        if component.engine_holds_weights and engine.offload:
            parts = _fullest_moment(component, state, parts)
    elif phase == Phase.train:
        parts |= _training(component, sizes, stage)
    else:
        parts |= _inference(component, sizes, stage)
        if phase == Phase.ref_logprobs:
            parts["reference"] = trained_bytes(component, state)
    if sizes.tower is not None:
        parts["vision tower"] = _tower(component, sizes, sizes.tower, phase, stage, parts)
    if cluster.device == Device.cpu:
        parts |= _resident(component, state)
    if engine is not None and engine.asynchronous:
        parts |= generation_parts(component, engine)
    elif engine is not None and cluster.device == Device.gpu and phase != Phase.generate:
        if engine.keeps_cache:
            parts["KV cache"] = cache_bytes(component, engine)
        if engine.keeps_graphs:
            parts["graph buffers"] = graph_bytes(component, engine, with_logits=True)
    parts["gather buffer"] = max(sizes.train.kept, sizes.inference.kept)
    if component.parallel.tp_comm_overlap:
        parts["exchange buffers"] = (
            _OVERLAP_BUFFERS * boundary_bytes(component, train_micro_batches(component)) * component.parallel.tp // 2
        )
    parts["lost between blocks"] = lost_bytes(component, parts, cluster)
    parts["context and communicators"] = context_bytes(component, cluster)
    if engine is not None and engine.settings.engine == EngineKind.tensorrt_llm:  # it computes in processes of its own, which stay
        parts["context and communicators"] += int(cluster.reserved_gib * GIB)
    parts["other components"] = component.beside_bytes
    return {name: size for name, size in parts.items() if size}


def _resident(component: Component, state: StateBytes) -> dict[str, int]:
    """What waits in host memory between phases; on the CPU the phases use that memory too."""
    found = {"reference": trained_bytes(component, state)} if component.has_reference else {}
    copies = 0
    if component.optimizer is not None and component.optimizer.offload:
        copies += device_optimizer(component, state)
    copies += host_optimizer(component, state)
    if component.turns or (component.engine is not None and component.engine.offload and component.engine_holds_weights):
        copies += state.weights
    return found | {"host copies": copies}


def lost_bytes(component: Component, parts: Mapping[str, int], cluster: ClusterConfig) -> int:
    """What the allocator keeps between the blocks of a phase's `parts`. On the CPU the C library's heap reuses a block only for one of the
    same size: micro-batches of data differ in length, but micro-batches of samples, which end at the longest, mostly do not."""
    lost = sum(parts.values()) * cluster.fragmentation
    if cluster.device == Device.cpu and component.engine is None and component.optimizer is not None:
        lost += parts.get("activations", 0) * _HEAP_LOSS
    return int(lost)


def context_bytes(component: Component, cluster: ClusterConfig) -> int:
    """Device memory that a rank's process always holds."""
    return int((cluster.reserved_gib + cluster.communicator_gib * communicators(component)) * GIB)


def resting_bytes(component: Component, sizes: Sizes) -> int:
    """Device memory of a model's fullest rank, and of its engine, while another model of its process computes."""
    if component.rests_on_host:
        return 0
    away = component.optimizer is None or component.optimizer.offload
    held = [state.weights + copies_in_8_bits(component, state.weights, stage) for stage, state in enumerate(sizes.stages)]
    return _resting_engine(component, sizes) + max(
        own + (0 if away else state.gradients + device_optimizer(component, state)) for own, state in zip(held, sizes.stages, strict=True)
    )


def _resting_engine(component: Component, sizes: Sizes) -> int:
    """What the engine holds on the component's devices outside of its own phase."""
    engine = component.engine
    if engine is None or engine.own_ranks:
        return 0
    held = 0 if engine.offload else engine_bytes(component, sizes)
    if engine.asynchronous:
        return held + sum(generation_parts(component, engine).values())
    held += cache_bytes(component, engine) if engine.on_gpu and engine.keeps_cache else 0
    return held + (graph_bytes(component, engine, with_logits=True) if engine.keeps_graphs else 0)


def engine_bytes(component: Component, sizes: Sizes) -> int:
    """The engine's weights on a rank beside the policy's: none if it reads these in place, but for rounded copies."""
    codes = sizes.engine_rounded // component.dtype_bytes
    return codes + (sizes.engine_weights - sizes.engine_rounded if component.engine_holds_weights else 0)


def trained_bytes(component: Component, state: StateBytes) -> int:
    """A rank's trained weights: only the adapters if there are any, whose gradients take 4 bytes an element."""
    return state.gradients * component.dtype_bytes // 4 if component.model.lora.is_on else state.weights


def _training(component: Component, sizes: Sizes, stage: int) -> dict[str, int]:
    parallel, passes = component.parallel, train_micro_batches(component)
    layers = stage_layers(component.architecture.num_layers, parallel)[stage] // parallel.vpp  # of one chunk
    held = in_flight(parallel, stage, passes.count)
    waiting = held * (layers * sizes.train.layer + boundary_bytes(component, passes))
    parts = {"activations": waiting, "backward workspace": sizes.train.backward}
    if stage == parallel.pp - 1:
        head = head_bytes(component, passes, training=True)
        parts["activations"] += max(0, sizes.train.ends - boundary_bytes(component, passes))  # the final norm's
        parts["logits"] = head
        parts["backward workspace"] = max(0, sizes.train.backward - head)  # the layers' turn comes when the head's memory is free again
    return parts


def _tower(component: Component, sizes: Sizes, tower: Tower, phase: Phase, stage: int, parts: Mapping[str, int]) -> int:
    """The vision tower on a first stage, or in the engine: what waits, and by how much its own fullest moment, at the ends of a micro-batch
    or before a prompt's prefill, is above what `parts` then do not need."""
    if phase == Phase.generate:
        return _engines_tower(component, tower, parts)
    if stage:
        return 0
    if phase == Phase.train:
        passes, parallel = train_micro_batches(component), component.parallel
        seen = passes.rows * component.seen_tokens
        layers = stage_layers(component.architecture.num_layers, parallel)[0] // parallel.vpp
        behind = parts["backward workspace"] + parts.get("logits", 0)  # that begin when what is held is gone
        own = max(seen * tower.held, seen * tower.working + tower.fixed - layers * sizes.train.layer)
        waiting = in_flight(parallel, 0, math.ceil(passes.count / parallel.vpp)) * seen * tower.kept
        return int(waiting + max(0.0, own - behind))
    seen = inference_micro_batches(component).rows * component.seen_tokens
    return int(max(0.0, seen * tower.forward - parts["activations"] - parts.get("logits", 0)))


def _engines_tower(component: Component, tower: Tower, parts: Mapping[str, int]) -> int:
    """The built-in engine computes a prompt's images before its prefill and keeps features; vLLM those of a chunk of prompts."""
    engine, seen = component.engine, component.seen_tokens
    if engine is None or (engine.own_ranks and not engine.asynchronous):
        return 0
    if engine.settings.engine == EngineKind.vllm:
        seen = max(seen, engine.prefill_chunk_tokens)
    a, kept = component.architecture, 0
    if isinstance(a, SeeingArchitecture) and not engine.is_foreign:
        prompts = math.ceil((component.work.prompts or component.work.rows) / max(1, component.num_ranks // engine.tp))
        kept = min(KEPT_FEATURES, prompts * seen * (1 + a.deep_layers) * a.hidden_size * component.dtype_bytes)
    return kept + int(max(0.0, seen * tower.forward - parts.get("prefill and sampling", 0)))


def boundary_bytes(component: Component, passes: MicroBatches) -> int:
    """A chunk's input and output, for one micro-batch."""
    return 2 * passes.tokens // component.shards_sequences * component.architecture.hidden_size * component.dtype_bytes


def head_bytes(component: Component, passes: MicroBatches, *, training: bool) -> int:
    """Projection onto the vocabulary, chunk by chunk of tokens (`aligner.parallel.logprobs`), at its fullest moment.

    Without gradient: a chunk's float32 logits and their exponentials. Training: besides the (selected) hidden states and their gradient,
    the loss's backward pass holds the chunk's logits, their gradient in float32 and in the model's dtype, and one product of the weight's
    gradient in float32, with a sum of these if the model is in float32. A batch of one chunk keeps its logits in between.
    """
    architecture, work, item = component.architecture, component.work, component.dtype_bytes
    split = component.parallel.sequence_parallel  # whole sequences are put together first
    gathered = passes.tokens // component.parallel.cp * architecture.hidden_size * item if split else 0
    if component.head == Head.scalar:
        return 2 * passes.tokens // component.parallel.cp * architecture.hidden_size * 4  # the head is in float32
    tokens = passes.rows * min(work.response_length, passes.length)
    tokens = math.ceil(tokens / component.parallel.cp)
    vocabulary = padded_vocabulary(component) // component.parallel.tp
    chunk = min(component.model.logits_chunk_size, tokens)
    selected = tokens * architecture.hidden_size * item
    if component.has_values:  # whose head reads sequences that are put together for it, in float32
        gathered += gathered + tokens * architecture.hidden_size * (8 if training else 4)
    if not training:
        return gathered + selected + chunk * vocabulary * 8
    narrow = item if item < 4 else 0
    weight_gradient = 0 if component.model.lora.is_on else vocabulary * architecture.hidden_size * (8 if item == 4 else 4)
    return gathered + 3 * selected + chunk * vocabulary * (8 + narrow) + weight_gradient


def _inference(component: Component, sizes: Sizes, stage: int) -> dict[str, int]:
    passes = inference_micro_batches(component)
    parts = {"activations": sizes.inference.forward + boundary_bytes(component, passes)}
    if stage == component.parallel.pp - 1:
        head = head_bytes(component, passes, training=False)
        parts["logits"] = head
        parts["activations"] -= min(head, sizes.inference.forward)  # the layers' memory is free again when the head computes
    return parts


def free_at_start(component: Component, sizes: Sizes, cluster: ClusterConfig) -> int:
    """Bytes that TensorRT-LLM's cache may use: its part of what the new policy and the gradients' buffers leave free."""
    state = max(sizes.stages, key=lambda one: one.weights + one.gradients)
    taken = state.weights + state.gradients + sizes.engine_weights + context_bytes(component, cluster) + int(cluster.reserved_gib * GIB)
    part = component.engine.settings.tensorrt_llm.kv_memory_fraction if component.engine is not None else 0.0
    return max(0, int(part * (cluster.gpu_memory_gib * GIB - taken)))


def _fullest_moment(component: Component, state: StateBytes, parts: dict[str, int]) -> dict[str, int]:
    """With `rollout.offload` the policy's weights are first copied into the engine's, then offloaded before sampling. vLLM starts beside
    the new policy: its wrapper requires free memory for weights and cache while the gradients' buffers are allocated."""
    copying = {name: size for name, size in parts.items() if name not in ("KV cache", "prefill and sampling")}
    sampling = {name: size for name, size in parts.items() if name not in ("weights", "refit buckets")}
    moments = [copying, sampling]
    if component.engine is not None and component.engine.settings.engine == EngineKind.vllm:
        beside = {"weights": state.weights, "gradients": state.gradients}
        moments.append(beside | {name: parts[name] for name in ("engine weights", "KV cache")})
    return max(moments, key=lambda moment: sum(moment.values()))


def host_memory(component: Component, sizes: Sizes, cluster: ClusterConfig) -> dict[str, int]:
    """Host memory of the fullest node, in bytes by purpose."""
    ranks = min(cluster.gpus_per_node, component.num_ranks)
    fullest = max(sizes.stages, key=lambda state: state.weights + state.optimizer)
    parts = {}
    if cluster.device == Device.cpu:
        peaks = (moment.total - component.beside_bytes for moment in phase_memory(component, sizes, cluster, range(component.parallel.pp)))
        parts["ranks at their fullest"] = ranks * max(peaks)
    else:
        parts |= _beside_devices(component, fullest, ranks)
    if component.optimizer is not None:
        # A resume reads the whole state into host memory first; a save that training waits for copies at most that, file by file.
        copied = trained_bytes(component, fullest) // component.dp if component.saves_asynchronously else 0
        main = 4 if component.dtype_bytes == 2 else 0
        dense = (8 + main) / (EIGHT_BIT_MOMENTS + main) if component.optimizer.kind is OptimizerKind.adam8bit else 1
        parts["checkpoint being read or written"] = ranks * int(fullest.optimizer * dense + copied)
        # The first rank of all collects a file of the exported model.
        dense = component.dtype_bytes / (component.model.quantization.num_bytes or component.dtype_bytes)
        exported = int(sum(state.weights for state in sizes.stages) * component.parallel.tp * dense)
        parts["file of the export"] = min(EXPORTED_FILE_BYTES, exported)
    return parts


def _beside_devices(component: Component, fullest: StateBytes, ranks: int) -> dict[str, int]:
    parts = {} if component.within else {"processes": int(HOST_PROCESS_GIB * GIB) * ranks}
    if component.has_reference:
        parts["reference"] = ranks * trained_bytes(component, fullest)
    if component.optimizer is not None and component.optimizer.offload:
        parts["optimizer (between training phases)"] = ranks * device_optimizer(component, fullest)
    parts["optimizer (updated by the host)"] = ranks * host_optimizer(component, fullest)
    if component.turns:
        parts["weights (while others have the GPUs)"] = ranks * fullest.weights
    if component.engine is not None and component.engine.offload and component.engine_holds_weights:
        parts["policy weights (while sampling)"] = ranks * fullest.weights
    return {name: size for name, size in parts.items() if size}


def copies_in_8_bits(component: Component, weights: int, stage: int) -> int:
    """Bytes of the 8-bit copies that modules keep of a stage's `weights` (bytes): by rows, and for training by columns."""
    if not component.model.fp8:
        return 0
    a, pp = component.architecture, component.parallel.pp
    has_output = stage == pp - 1 and component.head == Head.language and (pp > 1 or not a.tied_embeddings)
    tables = ((stage == 0) + has_output) * padded_vocabulary(component) // component.parallel.tp * a.vocabulary_width
    return (2 if component.optimizer is not None else 1) * max(0, weights // component.dtype_bytes - tables)


def _host_fraction(component: Component) -> float:
    optimizer = component.optimizer
    return optimizer.cpu_offload_fraction if optimizer is not None and optimizer.cpu_offload else 0.0


def device_optimizer(component: Component, state: StateBytes) -> int:
    """The optimizer's state that `optimizer.cpu_offload` leaves on the device."""
    return int(state.optimizer * (1 - _host_fraction(component)))


def host_elements(component: Component, state: StateBytes) -> float:
    """Parameters of a rank that `optimizer.cpu_offload` updates."""
    return _host_fraction(component) * state.optimizer / (12 if component.dtype_bytes == 2 else 8)


def host_optimizer(component: Component, state: StateBytes) -> int:
    """Host memory of a rank's `optimizer.cpu_offload`: float32 weights, two moments, and the gradients that it computes with; with
    `optimizer.nvme_path` two buffers for these of the largest parameter, the embedding."""
    elements = host_elements(component, state)
    if component.optimizer is not None and component.optimizer.nvme_path:
        embedding = padded_vocabulary(component) * component.architecture.vocabulary_width // component.parallel.tp
        return int(2 * _HOST_ELEMENT * min(elements, embedding))
    return int(_HOST_ELEMENT * elements)


def disk_optimizer(component: Component, sizes: Sizes, cluster: ClusterConfig) -> int:
    """Bytes that the ranks of a node keep on its disk (`optimizer.nvme_path`): float32 weights and two moments."""
    if component.optimizer is None or not component.optimizer.nvme_path:
        return 0
    ranks = min(cluster.gpus_per_node, component.num_ranks)
    return int(ranks * _DISK_ELEMENT * max(host_elements(component, state) for state in sizes.stages))
