"""Device and host memory of a component in every phase, by pipeline stage. Pure arithmetic on measured sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aligner.models.config import SeeingArchitecture
from aligner.models.training.optimizer import OptimizerKind
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.workload import (
    EIGHT_BIT_MOMENTS,
    GIB,
    BlockBytes,
    Component,
    Engine,
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
from aligner.rollout.config import KEPT_FEATURES, PAGE_SIZE, EngineKind, Kernels, graph_rows
from aligner.types import route_dtype

_OVERLAP_BUFFERS = 8  # buffers of a micro-batch's hidden states that Transformer Engine exchanges around a layer's four matrix products
_KERNEL_PAGE = 256  # tokens of a page of the engine's cache if attention kernels are used: 16-bit numbers on a GPU
_VLLM_PAGE = 128  # tokens to which the wrapper rounds a sequence, and of the page that vLLM keeps for itself
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
        parts |= _generation(component, engine)
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
        parts |= _generation(component, engine)
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
        return held + sum(_generation(component, engine).values())
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
        free = layers * sizes.train.layer + parts["backward workspace"] + parts.get("logits", 0)
        waiting = in_flight(parallel, 0, math.ceil(passes.count / parallel.vpp)) * seen * tower.kept
        return int(waiting + max(0.0, seen * tower.working + tower.fixed - free))
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


def kv_bytes_per_token(component: Component, engine: Engine) -> int:
    """Keys and values of one token on one rank of the engine, over all layers that have them and this rank's heads."""
    numbers, rows = kv_numbers_per_token(component, engine)
    if engine.settings.cache_precision.is_on:
        return numbers + rows * component.dtype_bytes  # a byte each, and a scale for each head's key and value
    return numbers * component.dtype_bytes


def kv_numbers_per_token(component: Component, engine: Engine) -> tuple[int, int]:
    """(numbers, keys and values of a head that they are) of that."""
    architecture = component.architecture
    if architecture.latent_size:  # the same for all heads
        rows = 2 * architecture.num_layers
        return rows * (architecture.latent_size + architecture.rotated), rows
    rows = 2 * architecture.key_value_layers * math.ceil(architecture.num_key_value_heads / engine.tp)
    return rows * architecture.head_dim, rows


def state_bytes(component: Component, engine: Engine) -> int:
    """What delta nets keep of one sequence on one rank of the engine: states in float32, and the ends of the convolution's windows."""
    a = component.architecture
    keys, values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
    window = (a.linear_conv_size - 1) * (2 * keys + values) * component.dtype_bytes
    return len(a.linear_attention_layers) * (4 * a.linear_key_head_dim * values + window) // engine.tp


def decode_batch(component: Component, engine: Engine) -> int:
    """Sequences that a replica of the engine decodes at a time."""
    replicas = max(1, (engine.own_ranks or component.num_ranks) // engine.tp)
    return max(1, min(engine.max_batch_size, math.ceil((component.work.rows + component.work.extra_rows) / replicas)))


def page_tokens(component: Component, engine: Engine) -> int:
    """Tokens of a page of the engine's cache."""
    if engine.settings.engine == EngineKind.vllm:
        return _VLLM_PAGE
    has_kernels = engine.settings.kernels == Kernels.auto and not engine.settings.cache_precision.is_on
    return _KERNEL_PAGE if component.dtype_bytes == 2 and has_kernels else PAGE_SIZE


def sequence_tokens(component: Component, engine: Engine) -> int:
    """Tokens of the cache's pages that the longest sequence fills; its last token is never attended to."""
    page = page_tokens(component, engine)
    return math.ceil((component.work.length - 1) / page) * page


def cache_tokens(component: Component, engine: Engine) -> int:
    """Tokens that the paged cache of a replica has room for: in the built-in engine whole pages, and a spare one for each sequence that it
    decodes at a time. The wrappers of other packages ask for room for `rollout.max_batch_size` sequences as long as the context."""
    page, context = page_tokens(component, engine), max(component.work.length, component.model.seq_length)
    if engine.settings.engine == EngineKind.vllm:
        return (engine.kv_cache_tokens or math.ceil(context / page) * page * engine.max_batch_size) + page
    if engine.settings.engine == EngineKind.tensorrt_llm:
        return engine.kv_cache_tokens or context * engine.max_batch_size
    return engine.kv_cache_tokens or decode_batch(component, engine) * (sequence_tokens(component, engine) + page)


def seats(component: Component, engine: Engine) -> int:
    """Sequences of full length that a replica decodes at a time: as many as its cache has room for, from 1 to `decode_batch`."""
    return max(1, min(decode_batch(component, engine), cache_tokens(component, engine) // sequence_tokens(component, engine)))


def _generation(component: Component, engine: Engine) -> dict[str, int]:
    """The built-in engine: its paged cache, one layer of a chunk of prompts or of a decode step, logits and the draw from them."""
    architecture, cache = component.architecture, cache_bytes(component, engine)
    states = decode_batch(component, engine) * state_bytes(component, engine)
    # A decode step may copy a layer's pages, or its states and the new ones; so does a chunk that continues a prompt, for that one alone.
    pages = cache - states
    if engine.settings.cache_precision.is_on:  # the copy is of numbers
        pages += cache_tokens(component, engine) * kv_numbers_per_token(component, engine)[0] * component.dtype_bytes
    copied = pages // max(1, architecture.key_value_layers), 2 * states // max(1, len(architecture.linear_attention_layers))
    step = max(prefill_bytes(component, engine), *copied)
    logits = decode_batch(component, engine) * padded_vocabulary(component) * logit_bytes(component, engine)
    parts = {"KV cache": cache, "prefill and sampling": step + logits}
    unpacks = component.model.quantization.is_on and not component.engine_holds_weights
    if unpacks or engine.settings.precision.is_on:
        parts["unpacked weight"] = unpacked_bytes(component, engine)
    if engine.records_graphs:
        parts["graph buffers"] = graph_bytes(component, engine, with_logits=False)
    if component.engine_reshards or (component.model.lora.is_on and component.engine_holds_weights) or engine.is_foreign:
        parts["refit buckets"] = 2 * engine.bucket_bytes
    return parts


def unpacked_bytes(component: Component, engine: Engine) -> int:
    """The largest weight of a packed policy or a rounded copy, dense while the engine computes with it."""
    a = component.architecture
    widths = [a.ffn_hidden_size] if not a.num_experts or a.dense_layers else [a.expert_ffn_hidden_size, a.shared_ffn_hidden_size]
    item = 2 * 4 if engine.settings.precision.is_on else component.dtype_bytes  # codes, and their products with scales, in float32
    return a.hidden_size * max(widths) * (1 + a.gated_mlp) * item // engine.tp


def cache_bytes(component: Component, engine: Engine) -> int:
    """The paged cache on one rank of the engine, with the recorded routes of its tokens if any, and delta nets' states."""
    architecture, routes = component.architecture, 0
    if engine.settings.records_routes:
        routes = architecture.num_layers * architecture.experts_per_token * route_dtype(architecture.num_experts).itemsize
    pages = cache_tokens(component, engine) * (kv_bytes_per_token(component, engine) + routes)
    return pages + decode_batch(component, engine) * state_bytes(component, engine)


def logit_bytes(component: Component, engine: Engine) -> int:
    """Device memory per row and token of the vocabulary in a decode step: the product with the output layer, and in float32 the logits (all
    graphs share them), their exponentials and these in blocks. Depending on the settings also the logits divided by the temperature, masks,
    counts and the exponentials after them, and the ranks' parts before they are put together."""
    sampling = engine.settings.sampling
    heated = 4 * (sampling.temperature not in (0.0, 1.0))
    reshaped = 8 * bool(sampling.reshaping())
    return _product_bytes(component, engine) + 3 * 4 + heated + reshaped + 8 * (engine.tp > 1)


def _product_bytes(component: Component, engine: Engine) -> int:
    """Bytes of one output of the output layer besides its float32 logit; 0 if the product writes that."""
    a, item = component.architecture, component.dtype_bytes
    if item == 4 or not component.model.float32_logits:
        return item
    return 4 * bool(a.logits_softcap or a.logits_scale != 1 or engine.tp > 1)


def free_at_start(component: Component, sizes: Sizes, cluster: ClusterConfig) -> int:
    """Bytes that TensorRT-LLM's cache may use: its part of what the new policy and the gradients' buffers leave free."""
    state = max(sizes.stages, key=lambda one: one.weights + one.gradients)
    taken = state.weights + state.gradients + sizes.engine_weights + context_bytes(component, cluster) + int(cluster.reserved_gib * GIB)
    part = component.engine.settings.tensorrt_llm.kv_memory_fraction if component.engine is not None else 0.0
    return max(0, int(part * (cluster.gpu_memory_gib * GIB - taken)))


def graph_bytes(component: Component, engine: Engine, *, with_logits: bool) -> int:
    """Memory of the CUDA graphs of decode steps, which all share one pool: a layer's intermediate numbers for the largest batch. With the
    logits: also the product with the output layer in the pool, and the float32 logits outside of it, which every graph writes. The driver's
    own memory for the graphs is not counted."""
    rows = graph_rows(decode_batch(component, engine))
    layer = (3 * component.architecture.hidden_size + 3 * component.architecture.token_ffn_size // engine.tp) * component.dtype_bytes
    return rows * (layer + (padded_vocabulary(component) * (_product_bytes(component, engine) + 4) if with_logits else 0))


def prefill_bytes(component: Component, engine: Engine) -> int:
    """One layer's pass over a chunk of prompts: hidden states, the feed-forward layer, and, if prompts are longer than a chunk, the earlier
    keys and values and a mask over them (boolean and numeric)."""
    architecture, work, item = component.architecture, component.work, component.dtype_bytes
    prompt = max(1, work.length - work.response_length)
    chunk = min(engine.prefill_chunk_tokens, decode_batch(component, engine) * prompt)
    size = chunk * (3 * architecture.hidden_size + 3 * architecture.token_ffn_size // engine.tp) * item
    if prompt > chunk:
        size += prompt * kv_bytes_per_token(component, engine) // max(1, architecture.key_value_layers) + chunk * prompt * (1 + item)
    return size


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
