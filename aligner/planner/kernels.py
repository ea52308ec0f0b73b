"""What computing and communicating cost on one GPU, as functions of shape: matrix products, attention, what only moves memory,
collectives. Pure.

A kernel takes the time of its FLOPs at the rate that large ones reach, and the time to move its operands through device memory. Small
products, few tokens for each expert and decoding are slow by the second term alone, so no efficiency is a table of sizes.

Collectives cost a latency, and their bytes at the slowest link on the way (rings; Thakur et al. 2005): NVLink inside a node; between nodes
a network port for each GPU (rails), and less where groups leave one leaf of an oversubscribed network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aligner.planner.config import ClusterConfig, Device

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
