"""The built-in rollout engine: samples from the policy's Megatron-Core weights in the training processes.

Every rank of the component generates, whatever its place in the training layout: blocks of `rollout.tp` ranks are the engine's replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.models.config import Architecture, Normalization, PositionEmbedding, SeeingArchitecture
from aligner.models.modules.batch_invariant import ACTIVATIONS
from aligner.models.modules.build import LanguageModel
from aligner.parallel import exact, platform
from aligner.protocols import Replica
from aligner.rollout.builtin.attention import DecodePlan, GatheredAttention, PagedKV, PrefillChunk, gathered
from aligner.rollout.builtin.decode import Decoder, Shards
from aligner.rollout.builtin.generation import Generation
from aligner.rollout.builtin.refit import rollout_weights
from aligner.rollout.builtin.seeing import Eyes
from aligner.rollout.builtin.weights import Affine, ModelWeights
from aligner.rollout.config import Kernels, RolloutConfig
from aligner.rollout.engine import Capabilities, GenResult, Memory, Work
from aligner.rollout.engine.gate import Gate
from aligner.types import LogprobKind, SamplingConfig


class MegatronEngine:
    """`aligner.rollout.engine.Engine` over the policy's chunks. Constructing it is collective over the component.

    Its weights are not filled yet, and with `rollout.offload` asleep. With `rollout.asynchronous` the engine has weights and process groups
    of its own in every layout, and generates while another thread trains; `pauses` lets that thread change the weights between two steps.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModel],
        config: RolloutConfig,
        *,
        eos_id: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        pauses: Gate | None = None,
    ) -> None:
        self.version = 0
        self._chunks = chunks
        self.weights = rollout_weights(chunks, config)
        if config.offload:
            self.weights.release()
        self.shards, chunk = self.weights.shards, chunks[0]
        self.max_sequence_length = chunk.max_sequence_length
        make_decoder = BatchInvariantDecoder if chunk.batch_invariant else Decoder
        self.decoder = make_decoder(
            self.weights.model,
            chunk.architecture,
            self.shards,
            max_sequence_length=self.max_sequence_length,
            frequencies=chunk.rotary_pos_emb.inv_freq if chunk.architecture.position_embedding == PositionEmbedding.rope else None,
            kernels=config.kernels,
            cuda_graphs=config.cuda_graphs and (self.shards.count == 1 or dist.get_backend(self.shards.group) == "nccl"),  # gloo: none
            records_routes=config.records_routes,
            float32_logits=chunk.float32_logits,
            cache_precision=config.cache_precision,
        )
        self.eyes: Eyes | None = None
        if isinstance(chunk.architecture, SeeingArchitecture):
            self.eyes = Eyes(chunk, self.weights.named, apart=config.asynchronous.max_staleness > 0)
        self.generation = Generation(
            decoder=self.decoder,
            eyes=self.eyes,
            max_batch_size=config.max_batch_size,
            kv_cache_tokens=config.kv_cache_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            eos_id=eos_id,
            decode=decode,
            steps_ahead=int(platform.device().type == "cuda"),
            pauses=pauses,
            recompute=config.asynchronous.recompute,
        )
        # The blocks are of consecutive ranks in training's tensor-parallel groups too, which vary fastest.
        count = self.shards.count
        self.replica = Replica(index=dist.get_rank() // count, count=dist.get_world_size() // count, is_leader=self.shards.index == 0)
        self.capabilities = Capabilities(name="megatron", logprobs=LogprobKind.sampled, sees=True, serves=True)  # or refuses images itself

    def refit(self, version: int) -> int:
        """Take the policy's current weights. Raises EngineError, on every rank, if some are missing, damaged or not what was sent."""
        for chunk in self._chunks:
            chunk.settle()
        num_bytes = self.weights.fill()
        self.decoder.refitted()
        if self.eyes is not None:
            self.eyes.forget()
        self.version = version
        platform.synchronize()
        return num_bytes

    def wake(self, memory: frozenset[Memory]) -> None:
        """Allocate the engine's own weights. The cache is made when something is generated, as large as the requests need."""
        if Memory.weights in memory:
            self.weights.allocate()

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release the engine's own weights, after which the policy's come back; a kept cache, and the graphs that refer to it."""
        if Memory.kv_cache in memory:
            self.generation.release()
            self.decoder.release()
        if Memory.weights in memory:
            self.weights.release()

    def shutdown(self) -> None:
        """Release what was kept for the next generation."""
        self.sleep(frozenset({Memory.kv_cache}))

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        return self.generation.run(work, sampling, self.version)


class ExactAttention(GatheredAttention):
    """Attention whose sums are exact."""

    def __init__(self, page_size: int, scale: float) -> None:
        super().__init__(page_size)
        self._scale = scale

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exact.causal_attention(q, k, v, self._scale)

    def decode(self, queries: Tensor, cache: PagedKV, layer: int, plan: DecodePlan) -> Tensor:
        return exact.attention(queries, *gathered(cache, layer, plan), plan.visible, self._scale)


class BatchInvariantDecoder(Decoder):
    """`Decoder` for dense models under `model.batch_invariant`: bit for bit the policy's hidden states and logits, for any batch, prefill
    chunks, page tables and number of ranks.

    It computes with `aligner.parallel.exact` in the policy's order of operations, and in torch only: other kernels have another arithmetic.
    Weights are rounded once after each prefill pass and each refit, for the decode steps that follow.
    """

    add_up = staticmethod(exact.weight_totals)
    _rotate = staticmethod(exact.rotate)

    def __init__(self, weights: ModelWeights, architecture: Architecture, shards: Shards, **options: Any) -> None:
        super().__init__(weights, architecture, shards, **(options | {"kernels": Kernels.torch, "cuda_graphs": False}))
        self.norm = self._norm_of_heads = _norm(architecture)
        self.activate = _activation(architecture)
        self._attentions = [ExactAttention(self.page_size, 1.0 / math.sqrt(architecture.head_dim))] * len(weights.layers)
        self._rounded: dict[tuple, exact.Rounded] = {}

    def prefill(self, chunks: Sequence[PrefillChunk], cache: PagedKV) -> Tensor:
        self._rounded.clear()
        return super().prefill(chunks, cache)

    def refitted(self) -> None:
        self._rounded.clear()

    def _linear(self, x: Tensor, weights: Affine) -> Tensor:
        out = exact.product(x, self._rounded_weight(weights.weight, None))
        return out if weights.bias is None else out + weights.bias

    def _project(self, x: Tensor, weights: Affine) -> Tensor:
        group = self.shards.group if self.shards.count > 1 else None
        out = exact.product(x, self._rounded_weight(weights.weight, group), group)
        return out if weights.bias is None else out + weights.bias

    def _logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        own = self._rounded_weight(self.weights.output[: self.architecture.vocab_size], None)
        return self._gather(exact.product(hidden, own).float())

    def _rounded_weight(self, weight: Tensor, group: torch.distributed.ProcessGroup | None) -> exact.Rounded:
        key = (weight.data_ptr(), weight.shape)
        if key not in self._rounded:
            self._rounded[key] = exact.round_weight(weight, group)
        return self._rounded[key]


def _activation(architecture: Architecture) -> Callable[[Tensor], Tensor]:
    function = ACTIVATIONS[architecture.activation]

    def gated(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return function(gate) * up

    return gated if architecture.gated_mlp else function


def _norm(architecture: Architecture) -> Callable[[Tensor, Affine], Tensor]:
    eps = architecture.norm_eps
    if architecture.normalization == Normalization.rms_norm:
        return lambda x, affine: exact.rms_norm(x, affine.weight, eps)
    if architecture.normalization == Normalization.layer_norm:
        return lambda x, affine: exact.layer_norm(x, affine.weight, affine.bias, eps)
    return lambda x, affine: exact.layer_norm(x, affine.weight + 1.0, affine.bias, eps)
