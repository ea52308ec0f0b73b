"""The built-in rollout engine: samples from the policy's Megatron-Core weights in the training processes.

Every rank of the component generates, whatever its place in the training layout: blocks of `rollout.tp` ranks are the engine's replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import EngineError
from aligner.models.build import LanguageModel
from aligner.models.config import PositionEmbedding
from aligner.parallel import platform
from aligner.protocols import Replica
from aligner.rollout.config import RolloutConfig
from aligner.rollout.decode import Decoder, KVCache
from aligner.rollout.refit import MIB, rollout_weights
from aligner.rollout.sampling import sample, uniforms
from aligner.types import FinishReason, Prompt, Rollout, SamplingConfig


class MegatronEngine:
    """`aligner.protocols.RolloutEngine` over the policy's chunks. Collective: constructing it and `refit`, `sleep` and `wake` over the
    component, `generate` over a replica."""

    def __init__(self, chunks: Sequence[LanguageModel], config: RolloutConfig, *, eos_id: int) -> None:
        self.sampling = config.sampling
        self.max_batch_size = config.max_batch_size
        self.eos_id = eos_id
        self.version = 0
        self._weights = rollout_weights(chunks, tp=config.tp, bucket_bytes=config.refit_bucket_mib * MIB)
        self._offload = self.is_asleep = config.offload  # then it is woken for every generation
        if config.offload:
            self._weights.swap_out()
        else:
            self._weights.fill()
        shards, chunk = self._weights.shards, chunks[0]
        rotates = chunk.architecture.position_embedding == PositionEmbedding.rope
        self.decoder = Decoder(
            self._weights.model,
            chunk.architecture,
            shards,
            max_sequence_length=chunk.max_sequence_length,
            frequencies=chunk.rotary_pos_emb.inv_freq if rotates else None,
        )
        # The blocks are of consecutive ranks in training's tensor-parallel groups too, which vary fastest.
        self.replica = Replica(
            index=dist.get_rank() // shards.count, count=dist.get_world_size() // shards.count, is_leader=shards.index == 0
        )

    def refit(self, version: int) -> None:
        """Sample from the policy's current weights, of optimizer step `version`; while the engine sleeps, from when it wakes.

        Raises EngineError where an engine that sleeps between generations is awake: the policy's weights are away.
        """
        if self._offload and not self.is_asleep:
            raise EngineError("the rollout engine was asked to take new weights while it has the policy's place: sleep() it first")
        self.version = version
        if not self.is_asleep:
            self._weights.fill()

    def sleep(self) -> None:
        """Give the engine's own weights' memory back and return the policy's, where `rollout.offload` asks for it."""
        if self._offload:
            self._weights.swap_out()
            self.is_asleep = True

    def wake(self) -> None:
        """Take the policy's weights of now; until `sleep` the policy cannot compute. Does nothing where the engine does not sleep."""
        if self.is_asleep:
            self.is_asleep = False
            self._weights.swap_in()

    def generate(self, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingConfig | None = None) -> Iterator[list[Rollout]]:
        """One response per (prompt, seed), in any order, in lists as they finish. `sampling` overrides the engine's (validation).

        Raises EngineError where the engine sleeps, and naming a prompt that is empty or leaves no room for a response in the context.
        """
        if self.is_asleep:
            raise EngineError("the rollout engine was asked to generate while it sleeps: wake() it first")
        sampling = sampling or self.sampling
        context = self.decoder.max_sequence_length
        for prompt in prompts:
            if not 0 < len(prompt.tokens) < context:
                raise EngineError(
                    f"{prompt.source}: a prompt of {len(prompt.tokens)} tokens leaves no room for a response in the context of {context}"
                )
        # Sequences of like prompt length share a batch: less padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        for start in range(0, len(order), self.max_batch_size):
            rows = order[start : start + self.max_batch_size]
            yield from self._generate_batch([prompts[i] for i in rows], [seeds[i] for i in rows], sampling)

    @torch.no_grad()
    def _prefill(self, prompts: list[Prompt], num_slots: int) -> tuple[Tensor, KVCache]:
        """Logits after each prompt and the cache; a prompt that occurs several times (a GRPO group) is computed once."""
        unique = list(dict.fromkeys(prompt.tokens for prompt in prompts))
        longest = max(map(len, unique))
        padded = [(0,) * (longest - len(tokens)) + tokens for tokens in unique]
        device = platform.device()
        padding = torch.tensor([longest - len(tokens) for tokens in unique], device=device)
        cache = self.decoder.new_cache(padding, num_slots)
        logits = self.decoder.step(torch.tensor(padded, device=device), 0, cache)
        if len(unique) < len(prompts):
            number = {tokens: i for i, tokens in enumerate(unique)}
            rows = torch.tensor([number[prompt.tokens] for prompt in prompts], device=device)
            cache.select(rows)
            logits = logits[rows]
        return logits, cache

    def _generate_batch(self, prompts: list[Prompt], seeds: list[int], sampling: SamplingConfig) -> Iterator[list[Rollout]]:
        longest = max(len(prompt.tokens) for prompt in prompts)
        context, device = self.decoder.max_sequence_length, platform.device()
        limits = [min(sampling.max_response_length, context - len(prompt.tokens)) for prompt in prompts]  # each by its own prompt
        budget = max(limits)
        logits, cache = self._prefill(prompts, longest + budget)
        stop_ids = torch.tensor(sorted({self.eos_id, *sampling.stop_token_ids}), device=device)
        limit_of = torch.tensor(limits, device=device)
        draws = uniforms(torch.tensor(seeds, device=device)[:, None], torch.arange(budget, device=device))
        active = torch.arange(len(prompts), device=device)  # which sample each row of the cache is
        tokens_of = torch.zeros(len(prompts), budget, dtype=torch.int64, device=device)
        logprobs_of = torch.zeros(len(prompts), budget, dtype=torch.float32, device=device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)  # by row
        for position in range(budget):
            tokens, logprobs = sample(
                logits, draws[active, position], temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            tokens_of[active, position], logprobs_of[active, position] = tokens, logprobs
            stopped = torch.isin(tokens, stop_ids) & ~done
            finished = stopped | (limit_of[active] <= position + 1) & ~done
            if bool(finished.any()):
                rows = active[finished]
                reasons = stopped[finished].tolist()
                yield self._collect(prompts, seeds, rows.tolist(), reasons, tokens_of[rows, : position + 1], logprobs_of[rows])
                done |= finished
                if bool(done.all()):
                    return
                if int(done.sum()) * 4 >= done.shape[0]:  # dropping rows copies the cache: do it when a quarter has ended
                    keep = (~done).nonzero()[:, 0]
                    cache.select(keep)
                    active, tokens, done = active[keep], tokens[keep], done[keep]
            with torch.no_grad():
                logits = self.decoder.step(tokens[:, None], longest + position, cache)

    def _collect(
        self, prompts: list[Prompt], seeds: list[int], rows: list[int], stopped: list[bool], tokens: Tensor, logprobs: Tensor
    ) -> list[Rollout]:
        length = tokens.shape[1]
        return [
            Rollout(
                prompt=prompts[row],
                response=tuple(response),
                logprobs=tuple(response_logprobs[:length]),
                finish_reason=FinishReason.stop if stop else FinishReason.length,
                policy_version=self.version,
                seed=seeds[row],
            )
            for row, stop, response, response_logprobs in zip(rows, stopped, tokens.tolist(), logprobs.tolist(), strict=True)
        ]
