"""Micro-batches as the run deals them out, and what a layer's forward pass over one costs, from its shapes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from aligner.models.config import Architecture
from aligner.parallel.micro_batches import MicroBatching, plan
from aligner.planner.config import ClusterConfig
from aligner.planner.kernels import MICRO, Kernels
from aligner.planner.sampling import ResponseLengths
from aligner.planner.schedule import micro_batches
from aligner.planner.workload import Component

HIDDEN_PASSES, INNER_PASSES = 16, 5  # how often a layer's small kernels read or write a hidden state, or a feed-forward layer's inside
ROUTED_PASSES = 6  # and a token on its way to an expert and back
CHUNK = 64  # tokens: `aligner.models.modules.delta_rule`


def kernels(component: Component, cluster: ClusterConfig) -> Kernels:
    """Costs on the component's ranks."""
    return Kernels(cluster=cluster, itemsize=component.dtype_bytes, fp8=component.model.fp8)


def layer_flops(component: Component, length: float) -> tuple[float, float]:
    """(matrix products, attention's quadratic part) of one token through one layer, forward; half of a causal square of `length`.

    Where some layers are delta nets: the mean of all layers.
    """
    a = component.architecture
    with_keys = a.key_value_layers / a.num_layers
    attention, values = 2 * a.hidden_size * a.head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads), a.head_dim
    if a.latent_size:
        values, read, plain = a.value_head_dim, a.query_latent_size or a.hidden_size, a.head_dim - a.rotated
        of_heads = read * a.head_dim + a.latent_size * (plain + values) + values * a.hidden_size
        attention = 2 * (a.num_attention_heads * of_heads + a.hidden_size * (a.query_latent_size + a.latent_size + a.rotated))
    attention += 2 * a.hidden_size * a.head_dim * a.num_attention_heads * a.attention_gate
    if with_keys < 1:
        delta = sum(2 * inputs * outputs for inputs, outputs in _delta_projections(a)) + _delta_rule_flops(a)
        attention = with_keys * attention + (1 - with_keys) * delta
    feed_forward = 2 * a.hidden_size * a.token_ffn_size * (3 if a.gated_mlp else 2)
    router = 2 * a.hidden_size * a.num_experts
    return float(attention + feed_forward + router), with_keys * a.num_attention_heads * (a.head_dim + values) * length


def _delta_projections(a: Architecture) -> tuple[tuple[int, int], tuple[int, int]]:
    """(inputs, outputs) of what is in front of a gated delta net, and of what is behind it."""
    keys, values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
    return (a.hidden_size, 2 * keys + 2 * values + 2 * a.linear_value_heads), (values, a.hidden_size)


def _delta_rule_flops(a: Architecture) -> int:
    """Of one token, forward: the convolution, three products with the state, and those within a chunk (two of keys, the triangular system,
    one of values)."""
    key, value, heads = a.linear_key_head_dim, a.linear_value_head_dim, a.linear_value_heads
    convolved = a.linear_conv_size * (2 * a.linear_key_heads * key + heads * value)
    return 2 * (convolved + heads * (3 * key * value + CHUNK * (2 * key + (key + value) // 2 + value)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Micro-batches of one replica, on average: how many, and of each its tokens and those with log-probs; keys that a token attends to."""

    count: int
    tokens: float
    selected: float
    length: float  # the mean over tokens of their sequence's length


def passes(component: Component, rows: int) -> Passes:
    """Those of one pass over `rows` sequences, of the replica that has most to compute: dealt out and cut as in the run."""
    work, model, parallel = component.work, component.model, component.parallel
    if work.lengths is None:
        cut = micro_batches(component, rows)
        return Passes(count=cut.count, tokens=cut.tokens, selected=cut.rows * min(work.response_length, cut.length), length=cut.length)
    batching = MicroBatching(rows=model.micro_batch_size, tokens=model.micro_batch_tokens, packed=model.packing)
    multiple = math.lcm(2 * parallel.cp if parallel.cp > 1 else 1, component.shards_sequences)
    found = _dealt(work.lengths, (rows, work.length, work.response_length), batching, component.dp, work.unit, multiple)
    tokens, length, largest, count = found
    if parallel.pp > 1:  # stages send each other tensors of one shape
        tokens = largest * count
    if parallel.vpp > 1:
        count = math.ceil(count / parallel.pp) * parallel.pp
    share = min(1.0, work.lengths.mean / work.mean_length())
    return Passes(count=count, tokens=tokens / count, selected=tokens / count * share, length=length)


@lru_cache(maxsize=4096)
def _dealt(
    lengths: ResponseLengths, sizes: tuple[int, int, int], batching: MicroBatching, replicas: int, unit: int, multiple: int
) -> tuple[float, float, float, int]:
    """(tokens, their sequences' mean length, tokens of the largest micro-batch, micro-batches) of the fullest replica."""
    rows, longest, response = sizes
    prompt = round(lengths.prompt) or longest - response
    whole = [prompt + length for length in lengths.drawn(math.ceil(rows / unit) * unit, response)]
    found: list[tuple[float, float, float, int]] = []
    for replica_batches in plan(whole, batching, num_replicas=replicas, unit=unit, multiple=multiple):
        own = [[whole[row] for row in batch] for batch in replica_batches]
        padded = [batch if batching.packed else [max(batch)] * len(batch) for batch in own if batch]
        tokens = sum(sum(batch) for batch in padded)
        squares = sum(length**2 for batch in padded for length in batch)
        found.append((tokens, squares / max(1, tokens), max((sum(batch) for batch in padded), default=0), len(padded)))
    return max(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSeconds:
    """Seconds of an average layer's forward pass over a micro-batch, by cause; `attention` is the quadratic part."""

    products: float
    attention: float
    small: float
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0


def layer_seconds(component: Component, shape: Passes, cluster: ClusterConfig, tp: int) -> LayerSeconds:
    a, p, k = component.architecture, component.parallel, kernels(component, cluster)
    tokens = shape.tokens / p.cp
    mixtures = sum(a.has_experts(layer) for layer in range(a.num_layers)) / a.num_layers
    hidden = tokens * a.hidden_size * component.dtype_bytes
    split = tp if p.sequence_parallel else 1
    products = _attention_products(component, tokens, k, tp)
    small = HIDDEN_PASSES * hidden / split
    experts = 0.0
    matrices = 3 if a.gated_mlp else 2
    if mixtures < 1:
        products += (1 - mixtures) * k.product(tokens, a.hidden_size, a.ffn_hidden_size / tp, matrices=matrices)
        small += (1 - mixtures) * INNER_PASSES * tokens * a.ffn_hidden_size / tp * component.dtype_bytes
    if mixtures:
        routed = tokens * a.experts_per_token * (cluster.expert_imbalance if p.ep > 1 else 1.0)
        own = a.num_experts / p.ep  # experts of a rank, which get the tokens of ep ranks
        etp = max(1, p.etp if p.ep > 1 or p.etp > 1 else tp)
        of_expert = k.product(routed / own * (etp / tp), a.hidden_size, a.expert_ffn_hidden_size / etp, matrices=matrices * own)
        shared = k.product(tokens, a.hidden_size, a.shared_ffn_hidden_size / tp, matrices=matrices) if a.shared_ffn_hidden_size else 0.0
        router = k.product(tokens / split, a.hidden_size, a.num_experts)
        products += mixtures * (of_expert / cluster.achievable_experts + shared + router)
        moved = ROUTED_PASSES * routed / tp * a.hidden_size + INNER_PASSES * routed / tp * a.expert_ffn_hidden_size
        small += mixtures * moved * component.dtype_bytes
        size = hidden / split * a.experts_per_token
        experts = mixtures * 2 * k.all_to_all(size, p.ep, etp * p.ep) * (cluster.expert_imbalance if p.ep > 1 else 1.0)
    kv = 2 * shape.tokens * math.ceil(a.num_key_value_heads / tp) * a.head_dim * component.dtype_bytes
    return LayerSeconds(
        products=products,
        attention=_mean_attention(component, tokens, shape.length, k) / tp,
        small=k.moving(small) + tokens / split * cluster.layer_token_microseconds * MICRO,
        tensor=2 * k.all_reduce(hidden, tp, tp),
        context=k.all_gather(kv, p.cp, tp * p.cp),
        experts=experts,
    )


def _attention_products(component: Component, tokens: float, k: Kernels, tp: int) -> float:
    """Queries, keys, values and output of an average layer, and what a delta net computes between them."""
    a = component.architecture
    heads = a.num_attention_heads
    if a.latent_size:
        whole = a.query_latent_size + a.latent_size + a.rotated
        read, plain = a.query_latent_size or a.hidden_size, a.head_dim - a.rotated
        parts = ((a.hidden_size, whole), (read, heads * a.head_dim / tp), (a.latent_size, heads * (plain + a.value_head_dim) / tp))
        return sum(k.product(tokens, *part) for part in (*parts, (heads * a.value_head_dim / tp, a.hidden_size)))
    outer = (heads * (1 + a.attention_gate) + 2 * a.num_key_value_heads) * a.head_dim / tp
    plain = k.product(tokens, a.hidden_size, outer) + k.product(tokens, heads * a.head_dim / tp, a.hidden_size)
    if not a.linear_attention_layers:
        return plain
    (hidden, rows), (values, out) = _delta_projections(a)
    delta = k.product(tokens, hidden, rows / tp) + k.product(tokens, values / tp, out) + tokens * _delta_rule_flops(a) / tp / k.product_rate
    return (a.key_value_layers * plain + len(a.linear_attention_layers) * delta) / a.num_layers


def _mean_attention(component: Component, tokens: float, length: float, k: Kernels) -> float:
    """The quadratic part of an average layer, all heads."""
    a = component.architecture
    width = a.head_dim + (a.value_head_dim if a.latent_size else a.head_dim)
    keys = 0.0
    for layer in (layer for layer in range(a.num_layers) if not a.is_linear(layer)):
        window = a.window_of(layer)
        keys += length / 2 if not window or window >= length else window * (1 - window / (2 * length))
    return k.attention(tokens, keys / a.num_layers, a.num_attention_heads, width)


def launched_layers(component: Component, layers: int) -> float:
    """So many dense layers have as many kernels as these: a mixture counts twice."""
    a = component.architecture
    return layers * (1 + sum(a.has_experts(layer) for layer in range(a.num_layers)) / a.num_layers)
