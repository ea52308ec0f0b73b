"""What one transformer layer costs and keeps, from its shapes: seconds of kernels and collectives, and the tensors that modules of
Transformer Engine keep for the backward pass. Pure.

A kernel takes the time of its FLOPs at the rate that large ones reach, plus the time to move its operands through device memory. The second
term alone makes small products, few tokens per expert and decoding slow, so no efficiency is a table of sizes.

Collectives cost a latency, and their bytes at the slowest link on the way (rings; Thakur et al. 2005): NVLink inside a node; between nodes
a network port per GPU (rails), and less where groups leave one leaf of an oversubscribed network.

A planning machine need not have Transformer Engine, whose modules do not run without a GPU, so their tensors are listed instead of
measured. What each module saves was read in Transformer Engine 2.9 and Megatron-Core 0.19:

* a norm that is fused with the product behind it keeps its input, its output and a float32 number a row (LayerNorm two); with sequence
  parallelism the rank's part of both: the backward pass gathers again
* flash attention keeps queries, keys and values (rotated, in memory of their own), its output, which the projection keeps too, and the
  log-sum-exp of each row and head
* fused SwiGLU keeps its input; so does any activation. A gated one that is not fused also keeps the activated half
* nothing is dropped, so there are no masks; additions keep nothing

For a layer of GPT that is 32 s b h / t bytes with sequence parallelism: 34 (Korthikanti et al. 2022, 2205.05198, equation 4, without the
part of the attention scores) less the two of the masks. Without sequence parallelism it is s b h (8 + 24 / t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from aligner.models.architecture.divisible import torch_layers_reason
from aligner.models.config import Activation, Architecture, Dtype, Layers, Normalization, Recompute
from aligner.parallel.micro_batches import MicroBatching, plan
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.dry_run import BlockBytes
from aligner.planner.workload import Component, ResponseLengths, micro_batches

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Costs in seconds on one rank of `cluster`, of numbers of `itemsize` bytes. With `fp8` matrix products are of 8 bits."""

    cluster: ClusterConfig
    itemsize: int
    fp8: bool = False

    def product(self, rows: float, inner: float, outer: float, *, matrices: float = 1.0) -> float:
        """`matrices` products `[rows, inner] x [inner, outer]`."""
        flops = 2.0 * rows * inner * outer * matrices
        moved = (rows * inner + inner * outer + rows * outer) * matrices * self.itemsize
        return flops / self.product_rate + self.moving(moved)

    @property
    def product_rate(self) -> float:
        """FLOP/s of large matrix products."""
        peak = self.cluster.fp8_tflops if self.fp8 else self.cluster.bf16_tflops
        return peak * TERA * self.cluster.achievable_flops

    def attention(self, tokens: float, keys: float, heads: float, width: float) -> float:
        """Scores of each of `tokens` with `keys` keys, and the sum of their values; `width`: of a head's queries and values together."""
        return 2.0 * tokens * keys * heads * width / (self.cluster.bf16_tflops * TERA * self.cluster.achievable_attention)

    def moving(self, size: float) -> float:
        """`size` bytes read from device memory or written to it."""
        return size / (self.cluster.hbm_gb_per_second * GIGA * self.cluster.achievable_bandwidth)

    def launching(self, layers: float) -> float:
        """The host's time to start the kernels of so many layers, one by one, in a forward pass."""
        return layers * self.cluster.host_layer_microseconds * MICRO

    def together(self, computing: float, launching: float) -> float:
        """A GPU computes while the host starts what follows; a CPU does one after the other."""
        return max(computing, launching) if self.cluster.device == Device.gpu else computing + launching

    @property
    def host_rate(self) -> float:
        """Bytes per second to host memory."""
        return self.cluster.host_gb_per_second * GIGA * self.cluster.achievable_link

    def link(self, span: int) -> float:
        """Bytes per second of a rank in a group whose furthest ranks are `span` apart."""
        cluster = self.cluster
        if span <= cluster.gpus_per_node:
            return cluster.nvlink_gb_per_second * GIGA * cluster.achievable_link
        rate = cluster.network_gb_per_second * GIGA * cluster.achievable_link
        return rate / cluster.oversubscription if cluster.leaf_nodes and span > cluster.leaf_nodes * cluster.gpus_per_node else rate

    def latency(self, span: int) -> float:
        """Of a collective, which takes more steps the more nodes it crosses."""
        nodes = math.ceil(span / self.cluster.gpus_per_node)
        hops = math.ceil(math.log2(nodes)) if nodes > 1 else 0
        return (self.cluster.collective_microseconds + hops * self.cluster.network_microseconds) * MICRO

    def all_gather(self, size: float, ranks: int, span: int) -> float:
        """Until every rank has all `size` bytes, each starting from its share; a reduce-scatter takes as long."""
        if ranks <= 1:
            return 0.0
        inside = min(ranks, max(1, self.cluster.gpus_per_node * ranks // span)) if span > self.cluster.gpus_per_node else ranks
        # Between nodes every rail carries its own share of a node's part (2-level rings), then NVLink spreads what arrived.
        if inside == ranks:
            return size * (ranks - 1) / ranks / self.link(span) + self.latency(span)
        nodes = ranks / inside
        return size / inside * (nodes - 1) / nodes / self.link(span) + size * (inside - 1) / inside / self.link(1) + self.latency(span)

    def all_reduce(self, size: float, ranks: int, span: int) -> float:
        """A reduce-scatter and an all-gather of the same tensor."""
        return 2 * self.all_gather(size, ranks, span)

    def all_to_all(self, size: float, ranks: int, span: int) -> float:
        """Each rank's `size` bytes, in equal parts to all: those to other nodes through its own port."""
        if ranks <= 1:
            return 0.0
        outside = max(0.0, 1 - self.cluster.gpus_per_node / span)
        inside = (ranks - 1) / ranks - outside
        through_network = size * outside / self.link(span) if outside else 0.0
        return through_network + size * inside / self.link(1) + self.latency(span)

    def send(self, size: float, span: int) -> float:
        """From one rank to another."""
        return size / self.link(span) + self.latency(span)


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


_FLOAT32 = 4


def uses_transformer_engine(component: Component) -> bool:
    """Whether a run on GPUs that has Transformer Engine makes the layers of its modules: what `aligner.models.modules.fusions` chooses."""
    model, architecture = component.model, component.architecture
    if model.layers is not Layers.auto:
        return model.layers is Layers.transformer_engine
    return not torch_layers_reason(architecture) and not model.batch_invariant and (model.fp8 or model.dtype is not Dtype.float32)


def kept_tensors(component: Component, tokens: int) -> dict[str, int]:
    """Bytes of every tensor that one layer keeps for `tokens` tokens of a micro-batch, by name, without recomputation."""
    return _attention(component, tokens) | (_experts if component.architecture.num_experts else _feed_forward)(component, tokens)


def block_bytes(component: Component, rows: int, length: int) -> BlockBytes:
    """The sizes of `aligner.planner.dry_run.measure_block`, with the experts' tensors, of `rows` sequences of `length` tokens."""
    tokens = rows * length
    tensors = kept_tensors(component, tokens)
    whole, hidden = sum(tensors.values()), _own(component, tokens) * component.architecture.hidden_size * component.dtype_bytes
    layer, again = whole, 0
    if component.model.recompute == Recompute.full:
        layer, again = hidden, whole - hidden
    elif component.model.recompute == Recompute.selective:  # the core attention alone: what it has to compute again is its output
        layer = whole - tensors["log-sum-exp"]
        again = tensors["log-sum-exp"] + tensors["attention's output"]
    statistics = _own(component, tokens) * _FLOAT32
    return BlockBytes(
        layer=layer,
        ends=2 * hidden + statistics,  # input and output; the final norm keeps the output and its statistics
        backward=again + _backward(component, tokens),
        forward=_forward(component, tokens),
    )


def _own(component: Component, tokens: int) -> int:
    """Tokens of a rank between the layers."""
    return tokens // component.shards_sequences


def _between(component: Component, tokens: int, name: str, *, product: bool = True) -> dict[str, int]:
    """A norm before a product: its input, its output and its statistics. `product`: the output is only that product's input."""
    a, own = component.architecture, _own(component, tokens)
    statistics = 1 if a.normalization is Normalization.rms_norm else 2
    item = _product_item(component) if product else component.dtype_bytes
    return {
        f"{name}'s input": own * a.hidden_size * component.dtype_bytes,
        f"{name}'s output": own * a.hidden_size * item,
        f"{name}'s statistics": own * statistics * _FLOAT32,
    }


def _product_item(component: Component) -> int:
    """Bytes of a number that a product keeps."""
    return 1 if component.model.fp8 else component.dtype_bytes


def _heads(component: Component) -> tuple[int, int]:
    """Query heads and key-value heads of a rank."""
    a, tp = component.architecture, component.parallel.tp
    return a.num_attention_heads // tp, math.ceil(a.num_key_value_heads / tp)


def _attention(component: Component, tokens: int) -> dict[str, int]:
    a, item = component.architecture, component.dtype_bytes
    here = tokens // component.parallel.cp
    heads, groups = _heads(component)
    # With shared prompts every run of responses has its own copy of its prompt's keys and values
    # (`aligner.models.modules.attention.all_runs`).
    attended = here * component.work.length // max(1, component.work.response_length) if component.model.share_prompts else here
    found = _between(component, tokens, "first norm")
    if a.qk_norm:
        found["queries and keys before their norms"] = here * (heads + groups) * (a.head_dim * item + _FLOAT32)
    found |= {
        "queries": here * heads * a.head_dim * item,
        "keys": attended * groups * a.head_dim * item,
        "values": attended * groups * a.head_dim * item,
        "log-sum-exp": here * heads * _FLOAT32,
        "attention's output": here * heads * a.head_dim * item,
    }
    if component.model.fp8:
        found["projection's input"] = here * heads * a.head_dim
    return found


def _feed_forward(component: Component, tokens: int) -> dict[str, int]:
    a, width = component.architecture, component.architecture.ffn_hidden_size // component.parallel.tp
    return _between(component, tokens, "second norm") | _activated(component, tokens // component.parallel.cp, a.gated_mlp, width)


def _activated(component: Component, rows: int, gated: bool, width: int) -> dict[str, int]:
    """What the activation and the product behind it keep."""
    item = component.dtype_bytes
    found = {
        "first product's output": rows * (2 if gated else 1) * width * item,
        "second product's input": rows * width * _product_item(component),
    }
    if gated and component.architecture.activation is not Activation.silu:
        found["activated half"] = rows * width * item
    return found


def routed_tokens(component: Component, tokens: int) -> int:
    """Pairs of a token and an expert that a rank computes, all experts equally loaded."""
    return _own(component, tokens) * component.architecture.experts_per_token * component.parallel.etp


def _experts(component: Component, tokens: int) -> dict[str, int]:
    """The norm's output, which router and permutation keep once; the router's numbers; the grouped products' inputs and outputs."""
    a, own, routed = component.architecture, _own(component, tokens), routed_tokens(component, tokens)
    return {
        **_between(component, tokens, "second norm", product=False),
        "router's logits and probabilities": own * a.num_experts * 2 * _FLOAT32,
        "routes and places of rows": own * a.num_experts * (1 + _FLOAT32),
        "permuted tokens": routed * a.hidden_size * _product_item(component),
        "permuted probabilities": routed * _FLOAT32,
        **_activated(component, routed, a.gated_mlp, a.expert_ffn_hidden_size // component.parallel.etp),
    }


def _widths(component: Component, tokens: int) -> tuple[int, int, int, int]:
    """Bytes of the residual on a rank, of a product's whole input, of the feed-forward layer's first output, and of its activated part."""
    a, item = component.architecture, component.dtype_bytes
    if a.num_experts:
        rows = routed_tokens(component, tokens)
        width, gathered = a.expert_ffn_hidden_size // component.parallel.etp, rows * a.hidden_size * item
    else:
        rows = tokens // component.parallel.cp
        width, gathered = a.ffn_hidden_size // component.parallel.tp, rows * a.hidden_size * item
    return _own(component, tokens) * a.hidden_size * item, gathered, rows * (2 if a.gated_mlp else 1) * width * item, rows * width * item


def _projected(component: Component, tokens: int) -> int:
    """Bytes of queries, keys and values."""
    heads, groups = _heads(component)
    return tokens // component.parallel.cp * (heads + 2 * groups) * component.architecture.head_dim * component.dtype_bytes


def _forward(component: Component, tokens: int) -> int:
    """Most that a layer holds in a pass without gradient: around the first product, the activation, or the queries."""
    residual, gathered, first, active = _widths(component, tokens)
    heads = tokens // component.parallel.cp * component.architecture.hidden_size * component.dtype_bytes
    return 2 * residual + max(gathered + first, first + active, active + gathered, heads + 2 * _projected(component, tokens))


def _backward(component: Component, tokens: int) -> int:
    """Most that a layer's backward pass holds besides what is kept: the gradients around the activation, around the first product, whose
    input is gathered again while what the second one kept is free, or around attention."""
    residual, gathered, first, active = _widths(component, tokens)
    whole = tokens // component.parallel.cp * component.architecture.hidden_size * component.dtype_bytes
    moments = (gathered + active, active + first, 2 * gathered - active, 2 * _projected(component, tokens) + whole)
    return 2 * residual + max(moments)
