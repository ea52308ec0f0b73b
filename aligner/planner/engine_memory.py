"""Memory of a rank of the rollout engine: cache, prefill, sampling and graphs, in bytes."""

from __future__ import annotations

import math

from aligner.planner.workload import Component, Engine, padded_vocabulary
from aligner.rollout.config import PAGE_SIZE, EngineKind, Kernels, graph_rows
from aligner.types import route_dtype

_KERNEL_PAGE = 256  # tokens of a page of the engine's cache if attention kernels are used: 16-bit numbers on a GPU
_VLLM_PAGE = 128  # tokens to which the wrapper rounds a sequence, and of the page that vLLM keeps for itself


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


def replicas_of(component: Component, engine: Engine) -> int:
    """Replicas of the engine, on the component's ranks or on its own."""
    return max(1, (engine.own_ranks or component.num_ranks) // engine.tp)


def decode_batch(component: Component, engine: Engine) -> int:
    """Sequences that a replica of the engine decodes at a time."""
    share = math.ceil((component.work.rows + component.work.extra_rows) / replicas_of(component, engine))
    return max(1, min(engine.max_batch_size, share))


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


def generation_parts(component: Component, engine: Engine) -> dict[str, int]:
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
