"""The built-in rollout engine: samples from the policy's Megatron-Core weights in the training processes.

Every rank of the component generates, whatever its place in the training layout: blocks of `rollout.tp` ranks are the engine's replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from aligner.models.config import PositionEmbedding, SeeingArchitecture
from aligner.models.modules.build import LanguageModel
from aligner.parallel import platform
from aligner.protocols import Replica
from aligner.rollout.builtin.batch_invariant import BatchInvariantDecoder
from aligner.rollout.builtin.decode import Decoder
from aligner.rollout.builtin.generation import Generation
from aligner.rollout.builtin.refit import rollout_weights
from aligner.rollout.builtin.seeing import Eyes
from aligner.rollout.config import RolloutConfig
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
        self.generation.release()
        self.decoder.release()

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        return self.generation.run(work, sampling, self.version)
