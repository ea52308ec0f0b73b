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
from aligner.planner.workload import BlockBytes, Component, ResponseLengths, micro_batches

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Costs in seconds on one rank of `cluster`, for numbers of `itemsize` bytes. With `fp8` matrix products use 8 bits."""

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
        """Scores of each of `tokens` with `keys` keys, and the sum of their values; `width` is a head's queries and values together."""
        return 2.0 * tokens * keys * heads * width / (self.cluster.bf16_tflops * TERA * self.cluster.achievable_attention)

    def moving(self, size: float) -> float:
        """`size` bytes read from device memory or written to it."""
        return size / (self.cluster.hbm_gb_per_second * GIGA * self.cluster.achievable_bandwidth)

    def launching(self, layers: float) -> float:
        """The host's time to start the kernels of `layers` layers, one by one, in a forward pass."""
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
        """A collective's latency, which grows with the nodes that it crosses."""
        nodes = math.ceil(span / self.cluster.gpus_per_node)
        hops = math.ceil(math.log2(nodes)) if nodes > 1 else 0
        return (self.cluster.collective_microseconds + hops * self.cluster.network_microseconds) * MICRO

    def all_gather(self, size: float, ranks: int, span: int) -> float:
        """Time until every rank, starting from its share, has all `size` bytes; a reduce-scatter takes as long."""
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
        """Each rank's `size` bytes in equal parts to all, and to other nodes through its own port."""
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
CHUNK = 64  # tokens: `aligner.models.modules.gated_delta_net`


def kernels(component: Component, cluster: ClusterConfig) -> Kernels:
    """Costs on the component's ranks."""
    return Kernels(cluster=cluster, itemsize=component.dtype_bytes, fp8=component.model.fp8)


def layer_flops(component: Component, length: float) -> tuple[float, float]:
    """(matrix products, attention's quadratic part) of one token in a layer's forward pass: half of a causal square of `length`; the mean
    of all layers if some are delta nets."""
    a = component.architecture
    with_keys = a.key_value_layers / a.num_layers
    attention = sum(2 * inputs * outputs for inputs, outputs in _projections(a))
    if with_keys < 1:
        delta = sum(2 * inputs * outputs for inputs, outputs in _delta_projections(a)) + _delta_rule_flops(a)
        attention = with_keys * attention + (1 - with_keys) * delta
    feed_forward = 2 * a.hidden_size * a.token_ffn_size * (3 if a.gated_mlp else 2)
    router = 2 * a.hidden_size * a.num_experts
    return float(attention + feed_forward + router), with_keys * a.num_attention_heads * attention_width(a) * length


def attention_width(a: Architecture) -> int:
    """Dimensions of a head's queries and values together."""
    return a.head_dim + (a.value_head_dim if a.latent_size else a.head_dim)


def _projections(a: Architecture, tp: int = 1) -> tuple[tuple[float, float], ...]:
    """(inputs, outputs) of a rank's projections before and after attention."""
    heads = a.num_attention_heads
    if a.latent_size:
        read, plain = a.query_latent_size or a.hidden_size, a.head_dim - a.rotated
        latents = (a.hidden_size, a.query_latent_size + a.latent_size + a.rotated)
        of_heads = (read, heads * a.head_dim / tp), (a.latent_size, heads * (plain + a.value_head_dim) / tp)
        return latents, *of_heads, (heads * a.value_head_dim / tp, a.hidden_size)
    outputs = (heads * (1 + a.attention_gate) + 2 * a.num_key_value_heads) * a.head_dim / tp
    return (a.hidden_size, outputs), (heads * a.head_dim / tp, a.hidden_size)


def _delta_projections(a: Architecture, tp: int = 1) -> tuple[tuple[float, float], ...]:
    """(inputs, outputs) of a rank's projections before and after a gated delta net."""
    keys, values = a.linear_key_heads * a.linear_key_head_dim, a.linear_value_heads * a.linear_value_head_dim
    return (a.hidden_size, (2 * keys + 2 * values + 2 * a.linear_value_heads) / tp), (values / tp, a.hidden_size)


def _delta_rule_flops(a: Architecture) -> int:
    """FLOPs of one token, forward: the convolution, three products with the state, four inside a chunk."""
    key, value, heads = a.linear_key_head_dim, a.linear_value_head_dim, a.linear_value_heads
    convolved = a.linear_conv_size * (2 * a.linear_key_heads * key + heads * value)
    return 2 * (convolved + heads * (3 * key * value + CHUNK * (2 * key + (key + value) // 2 + value)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """`count` micro-batches of one replica, on average."""

    count: int
    tokens: float
    selected: float  # tokens with log-probs
    length: float  # the mean over tokens of their sequence's length


def passes(component: Component, rows: int) -> Passes:
    """The passes over `rows` sequences of the replica that has most to compute: dealt out and cut as in the run."""
    work, model, parallel = component.work, component.model, component.parallel
    if work.lengths is None:
        cut = micro_batches(component, rows)
        return Passes(count=cut.count, tokens=cut.tokens, selected=cut.rows * min(work.response_length, cut.length), length=cut.length)
    batching = MicroBatching(rows=model.micro_batch_size, tokens=model.micro_batch_tokens, packed=model.packing)
    sizes = (rows, work.length, work.response_length)
    tokens, length, largest, count = _dealt(work.lengths, sizes, batching, component.dp, work.unit, component.length_multiple)
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
    mixtures = _mixtures(a)
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
    plain = sum(k.product(tokens, *sizes) for sizes in _projections(a, tp))
    if not a.linear_attention_layers:
        return plain
    delta = sum(k.product(tokens, *sizes) for sizes in _delta_projections(a, tp)) + tokens * _delta_rule_flops(a) / tp / k.product_rate
    return (a.key_value_layers * plain + len(a.linear_attention_layers) * delta) / a.num_layers


def _mean_attention(component: Component, tokens: float, length: float, k: Kernels) -> float:
    """The quadratic part of an average layer, all heads."""
    a = component.architecture
    keys = 0.0
    for layer in (layer for layer in range(a.num_layers) if not a.is_linear(layer)):
        window = a.window_of(layer)
        keys += length / 2 if not window or window >= length else window * (1 - window / (2 * length))
    return k.attention(tokens, keys / a.num_layers, a.num_attention_heads, attention_width(a))


def launched_layers(component: Component, layers: int) -> float:
    """The number of dense layers that have as many kernels as these: a mixture counts twice."""
    return layers * (1 + _mixtures(component.architecture))


def _mixtures(a: Architecture) -> float:
    """The part of the layers that have experts."""
    return sum(a.has_experts(layer) for layer in range(a.num_layers)) / a.num_layers


_FLOAT32 = 4


def uses_transformer_engine(component: Component) -> bool:
    """Whether a run on GPUs that has Transformer Engine builds its layers from it: what `aligner.models.modules.fusions` chooses."""
    model, architecture = component.model, component.architecture
    if model.layers is not Layers.auto:
        return model.layers is Layers.transformer_engine
    if torch_layers_reason(architecture) or model.batch_invariant or model.quantization.is_on:
        return False
    return model.fp8 or model.dtype is not Dtype.float32


def block_bytes(component: Component, rows: int, length: int) -> BlockBytes:
    """The sizes of `aligner.planner.dry_run.measure_block`, with the experts' tensors, for `rows` sequences of `length` tokens."""
    fused = FusedLayer(component, rows * length)
    tensors, hidden = fused.kept(), fused.hidden
    layer, again = sum(tensors.values()), 0
    if component.model.recompute == Recompute.full:
        layer, again = hidden, layer - hidden
    elif component.model.recompute == Recompute.selective:  # the core attention alone: what it has to compute again is its output
        again = tensors["log-sum-exp"] + tensors["attention's output"]
        layer -= tensors["log-sum-exp"]
    # A block's ends are its input and output; the final norm keeps the output and its statistics.
    return BlockBytes(layer=layer, ends=2 * hidden + fused.own * _FLOAT32, backward=again + fused.backward(), forward=fused.forward())


class FusedLayer:
    """A layer of Transformer Engine's modules on a rank, for `tokens` tokens of a micro-batch. Sizes are bytes."""

    def __init__(self, component: Component, tokens: int) -> None:
        self.component, self.item = component, component.dtype_bytes
        self.a = a = component.architecture
        p = component.parallel
        self.own, self.here = tokens // component.shards_sequences, tokens // p.cp  # tokens between the layers, and inside
        self.heads, self.groups = a.num_attention_heads // p.tp, math.ceil(a.num_key_value_heads / p.tp)
        self.kept_item = 1 if component.model.fp8 else self.item  # of a number that a product keeps
        self.rows, self.width = self.here, a.ffn_hidden_size // p.tp  # of the feed-forward layer
        if a.num_experts:  # pairs of a token and an expert that the rank computes, all experts equally loaded
            self.rows, self.width = self.own * a.experts_per_token * p.etp, a.expert_ffn_hidden_size // p.etp
        self.hidden = self.own * a.hidden_size * self.item

    def kept(self) -> dict[str, int]:
        """Bytes of every tensor that waits for the backward pass, by name, without recomputation."""
        a, rows, width, item = self.a, self.rows, self.width, self.item
        found = self._norm("first norm", self.kept_item) | self._attention()
        if a.num_experts:  # router and permutation keep the norm's output once
            found |= self._norm("second norm", item)
            found["router's logits and probabilities"] = self.own * a.num_experts * 2 * _FLOAT32
            found["routes and places of rows"] = self.own * a.num_experts * (1 + _FLOAT32)
            found["permuted tokens"] = rows * a.hidden_size * self.kept_item
            found["permuted probabilities"] = rows * _FLOAT32
        else:
            found |= self._norm("second norm", self.kept_item)
        found["first product's output"] = rows * (2 if a.gated_mlp else 1) * width * item
        found["second product's input"] = rows * width * self.kept_item
        if a.gated_mlp and a.activation is not Activation.silu:
            found["activated half"] = rows * width * item
        return found

    def _norm(self, name: str, item: int) -> dict[str, int]:
        """What a norm keeps whose output has numbers of `item` bytes."""
        statistics = 1 if self.a.normalization is Normalization.rms_norm else 2
        output, numbers = self.own * self.a.hidden_size * item, self.own * statistics * _FLOAT32
        return {f"{name}'s input": self.hidden, f"{name}'s output": output, f"{name}'s statistics": numbers}

    def _attention(self) -> dict[str, int]:
        width, here, work, model = self.a.head_dim, self.here, self.component.work, self.component.model
        # With shared prompts every run of responses has its own copy of its prompt's keys and values
        # (`aligner.models.modules.attention.all_runs`).
        attended = here * work.length // max(1, work.response_length) if model.share_prompts else here
        found = {}
        if self.a.qk_norm:
            found["queries and keys before their norms"] = here * (self.heads + self.groups) * (width * self.item + _FLOAT32)
        found |= {
            "queries": here * self.heads * width * self.item,
            "keys": attended * self.groups * width * self.item,
            "values": attended * self.groups * width * self.item,
            "log-sum-exp": here * self.heads * _FLOAT32,
            "attention's output": here * self.heads * width * self.item,
        }
        return found | ({"projection's input": here * self.heads * width} if model.fp8 else {})

    def _moments(self) -> tuple[int, int, int, int, int]:
        """A product's whole input, the feed-forward layer's first output, its activated part, queries to values, hidden states."""
        active, size = self.rows * self.width * self.item, self.a.hidden_size * self.item
        projected = self.here * (self.heads + 2 * self.groups) * self.a.head_dim * self.item
        return self.rows * size, active * (2 if self.a.gated_mlp else 1), active, projected, self.here * size

    def forward(self) -> int:
        """Most that a pass without gradient holds: around the first product, the activation, or the queries."""
        gathered, first, active, projected, whole = self._moments()
        return 2 * self.hidden + max(gathered + first, first + active, active + gathered, whole + 2 * projected)

    def backward(self) -> int:
        """Most that the backward pass holds besides what is kept: the gradients around the activation, around the first product (whose
        input is gathered again while what the second one kept is free), or around attention."""
        gathered, first, active, projected, whole = self._moments()
        return 2 * self.hidden + max(gathered + active, active + first, 2 * gathered - active, 2 * projected + whole)
