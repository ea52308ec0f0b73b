"""vLLM as a rollout engine, in the training processes: each rank has an `LLM` whose worker is this process, on this rank's device.

Tokens go in and tokens come out, so no tokenizer is loaded. With `rollout.tp` ranks to a replica each of them schedules the same requests
(vLLM's external launcher), and their workers meet in the process groups that training has. Weights are loaded as vLLM's own trainers do it,
layer by layer into the tensors that its compiled code and CUDA graphs read.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError, EngineError
from aligner.models.config import Architecture
from aligner.parallel import platform
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import ALL_MEMORY, Capabilities, GenRequest, GenResult, Memory, WeightForm, Work, missing_ids
from aligner.rollout.manifest import Manifest, hf_manifest, named_few
from aligner.types import FinishReason, LogprobKind, SamplingConfig

KNOWN_VERSIONS = ("0.32.0",)  # what this file was run against; it uses parts of vLLM that are not its public interface
LEAST_BIAS = -100.0  # that vLLM adds to a logit
LARGEST_PAGE = 128  # tokens; vLLM's on the CPU, 16 on a GPU
_REASONS = {"stop": FinishReason.stop, "length": FinishReason.length}
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMModel:
    """The model to sample from. `directory` has the model's Hugging Face config.json; its weights are not read."""

    directory: Path
    architecture: Architecture
    dtype: torch.dtype
    max_sequence_length: int
    eos_id: int


class VLLMEngine:
    """`aligner.rollout.engine.ForeignEngine`, which says what the methods do. `tp` consecutive ranks share a replica."""

    def __init__(self, model: VLLMModel, config: RolloutConfig, *, tp: int) -> None:
        self.max_sequence_length = model.max_sequence_length
        self._model, self._config, self._tp = model, config, tp
        # Whether vLLM is to give log-probs after the temperature (and all else) was applied, not before.
        self._scaled = config.sampling.temperature not in (0.0, 1.0) and not config.sampling.reshaping()
        kind = self._kind(config.sampling)
        self.capabilities = Capabilities(
            name="vLLM", max_tp=None, per_request_seeds=True, logprobs=kind, weights=WeightForm.full, atomic_groups=True
        )
        self._llm: Any = None
        self._manifest, self._loaded, self._version = Manifest(tensors={}), set(), 0
        self._can_sleep, self._asleep = config.offload and torch.cuda.is_available(), frozenset()

    def start(self) -> None:
        """Collective over the component. Raises EngineError if vLLM is missing or of an unknown version."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        try:
            import vllm
        except ImportError as error:
            raise EngineError(f"rollout.engine=vllm: vLLM cannot be imported ({error}); pip install 'aligner[vllm]'") from error
        if vllm.__version__.split("+")[0] not in KNOWN_VERSIONS:
            raise EngineError(f"rollout.engine=vllm: version {vllm.__version__} is not known to work; known: {', '.join(KNOWN_VERSIONS)}")
        with torch.random.fork_rng():  # vLLM seeds the generators of the process
            self._llm = vllm.LLM(model=str(self._model.directory), **self._settings())
        # At shutdown, or when it is collected, vLLM would destroy the process groups of training.
        self._llm.llm_engine.engine_core._finalizer.detach()

    def _settings(self) -> dict[str, Any]:
        model, config = self._model, self._config
        launcher = {}
        if dist.is_initialized():
            os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(platform.device().index or 0)}
            launcher = {"distributed_executor_backend": "external_launcher"}
        memory = {"gpu_memory_utilization": self._memory_share()} if torch.cuda.is_available() else {}
        own = {}
        if model.architecture.no_rope_layers:  # else vLLM decides by the context's length, whatever the model's config says
            own = {"override_generation_config": {"attn_temperature_tuning": model.architecture.attention_temperature > 0}}
        return (
            launcher
            | memory
            | own
            | {
                "load_format": "dummy",
                "dtype": str(model.dtype).removeprefix("torch."),
                "skip_tokenizer_init": True,
                "generation_config": "vllm",
                "tensor_parallel_size": self._tp,
                "max_model_len": model.max_sequence_length,
                "max_num_seqs": config.max_batch_size,
                "max_num_batched_tokens": max(config.prefill_chunk_tokens, config.max_batch_size),
                "kv_cache_memory_bytes": self._cache_bytes(),
                "enable_prefix_caching": config.vllm.prefix_caching,
                "enforce_eager": config.vllm.enforce_eager,
                "enable_sleep_mode": self._can_sleep,
                "logprobs_mode": "processed_logprobs" if self._scaled else "raw_logprobs",
                "seed": 0,
            }
        )

    def _memory_share(self) -> float:
        """The part of the device's memory that must be free at the start: weights and cache. vLLM's own part, 0.92, never is beside a
        trainer; it is checked (`request_memory`) although the cache's size is given, and means nothing else then.

        Raises EngineError if less is free.
        """
        torch.cuda.empty_cache()  # vLLM looks at what the device has, not at what training's allocator could hand out again
        free, total = torch.cuda.mem_get_info()
        weights, cache = hf_manifest(self._model.architecture, self._model.dtype).num_bytes // self._tp, self._cache_bytes()
        if weights + cache > free:
            sizes = {"weights": weights, "cache": cache, "free": free, "total": total}
            gib = {name: f"{size / 2**30:.1f}" for name, size in sizes.items()}
            raise EngineError(
                f"rollout.engine=vllm: its weights ({gib['weights']} GiB) and key-value cache ({gib['cache']} GiB) do not fit into the "
                f"{gib['free']} GiB that are free of the device's {gib['total']}; allowed: a smaller rollout.kv_cache_tokens or "
                "rollout.max_batch_size, a larger rollout.tp, optimizer.offload=true"
            )
        return (weights + cache) / total

    def _cache_bytes(self) -> int:
        """Keys and values of as many tokens as the config says, on one rank."""
        sizes, pages = self._model.architecture, -(-self.max_sequence_length // LARGEST_PAGE)
        tokens = self._config.kv_cache_tokens or pages * self._config.max_batch_size * LARGEST_PAGE
        groups = max(sizes.num_key_value_heads // self._tp, 1)
        # One page more: vLLM keeps one for itself.
        return (tokens + LARGEST_PAGE) * 2 * sizes.num_layers * groups * sizes.head_dim * self._model.dtype.itemsize

    def begin_refit(self, manifest: Manifest) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._manifest, self._loaded = manifest, set()
        self._on_model(initialize_layerwise_reload)

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        def load(model: torch.nn.Module) -> None:
            self._loaded |= model.load_weights(iter(bucket))
            for layer in model.modules():  # layers whose weight has come and whose bias has not hold on to what they were given
                for _, call in get_layerwise_info(layer).loaded_weights:
                    held = {name: value for name, value in call.arguments.items() if isinstance(value, Tensor) and not value.is_meta}
                    call.arguments |= {name: value.clone() for name, value in held.items()}

        self._on_model(load)

    def finish_refit(self, version: int) -> None:
        """Raises EngineError naming weights of vLLM's model that did not come."""
        self.abort_refit()
        names = self._on_model(lambda model: [name for name, _ in model.named_parameters()])
        if missing := [name for name in names if name not in self._loaded]:
            raise EngineError(f"vLLM's model has weights that the policy did not send: {named_few(missing)} of {len(names)}")
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not forget the prefixes that it computed with the weights before")
        self._version = version

    def abort_refit(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        def finalize(model: torch.nn.Module) -> None:
            finalize_layerwise_reload(model, self._llm.model_config)
            if self._model.architecture.tied_embeddings:  # vLLM forgets that on the CPU the output layer has a packed copy
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

        self._on_model(finalize)

    def read_back(self, name: str) -> Tensor | None:
        *parents, part, kind = name.split(".")
        fused = _FUSED.get(part, part)
        group = [each for each in _FUSED if _FUSED[each] == fused] if part in _FUSED else [part]
        held = self._on_model(lambda model: dict(model.named_parameters())).get(".".join([*parents, fused, kind]))
        start = sum(self._manifest.tensors[".".join([*parents, each, kind])].shape[0] for each in group[: group.index(part)])
        end = start + self._manifest.tensors[name].shape[0]
        if self._tp > 1 or held is None or held.dtype != self._model.dtype or held.shape[:1] < (end,):
            return None  # a part of it, or packed for a kernel
        return held[start:end]

    def sleep(self, memory: frozenset[Memory]) -> None:
        """All memory or none, and on a GPU only."""
        if self._can_sleep and memory == ALL_MEMORY:
            self._llm.sleep(level=2)
            self._asleep = memory

    def wake(self, memory: frozenset[Memory]) -> None:
        if tags := [kind.value for kind in Memory if kind in memory & self._asleep]:
            self._llm.wake_up(tags)
            self._asleep -= memory

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Raises ConfigError for settings of `sampling` that vLLM cannot follow here."""
        from vllm.inputs import tokens_input

        kind, engine, more = self._kind(sampling), self._llm.llm_engine, True
        running: dict[str, GenRequest] = {}
        try:
            while more or running:
                room = self._config.max_batch_size - len(running)
                if more and room:
                    requests = work.take(room)
                    more = bool(requests) or work.is_open
                    for request in requests:
                        running[str(request.index)] = request
                        engine.add_request(str(request.index), tokens_input(list(request.tokens)), self._params(request, sampling))
                with torch.random.fork_rng():  # on the CPU vLLM draws from it
                    outputs = engine.step()
                if finished := [output for output in outputs if output.finished]:
                    yield [self._result(output, running.pop(output.request_id), kind) for output in finished]
        finally:
            engine.abort_request(list(running))  # where the caller has stopped early

    def _params(self, request: GenRequest, sampling: SamplingConfig) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        room = self.max_sequence_length - len(request.tokens)
        return SamplingParams(
            **{name: getattr(sampling, name) for name in same},
            **({"logit_bias": dict.fromkeys(gaps, LEAST_BIAS)} if (gaps := missing_ids(sampling)) else {}),
            min_tokens=min(sampling.min_response_length, room, request.limit or room),
            max_tokens=min(sampling.longest, room, request.limit or room),
            stop_token_ids=sorted({self._model.eos_id, *sampling.stop_token_ids}.intersection(range(self._model.architecture.vocab_size))),
            ignore_eos=True,  # vLLM's idea of it; the one of this run is a stop token
            seed=request.seed,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _kind(self, sampling: SamplingConfig) -> LogprobKind:
        """What the log-probs are of."""
        self._config.vllm.check(sampling)
        if self._scaled and (refused := sampling.reshaping()):  # vLLM's log-probs are then of what is drawn from, which these reshape
            scaled = f"where rollouts have temperature={self._config.sampling.temperature}"
            raise ConfigError(f"rollout.sampling.{refused[0]}: not available with rollout.engine=vllm {scaled}; allowed: the default")
        return LogprobKind.sampled if self._scaled or sampling.temperature in (0.0, 1.0) else LogprobKind.raw

    def _result(self, output: Any, request: GenRequest, kind: LogprobKind) -> GenResult:
        (one,) = output.outputs
        if one.finish_reason not in _REASONS:
            raise EngineError(f"vLLM ended the response to request {request.index} for another reason: {one.finish_reason}")
        return GenResult(
            index=request.index,
            tokens=tuple(one.token_ids),
            logprobs=tuple(step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)),
            kind=kind,
            finish_reason=_REASONS[one.finish_reason],
            weight_version=self._version,
        )

    def shutdown(self) -> None:
        """Process groups stay: training's are among them."""
        if self._llm is not None:
            core = self._llm.llm_engine.engine_core.engine_core
            core.model_executor.shutdown()
            core.scheduler.shutdown()
            self._llm = None
            gc.unfreeze()
            gc.collect()

    def _on_model(self, action: Callable[[torch.nn.Module], Any]) -> Any:
        """Run `action` on this rank's model, as a worker would."""
        from vllm.config import set_current_vllm_config

        def run(worker: Any) -> Any:
            with set_current_vllm_config(worker.vllm_config):
                return action(worker.model_runner.get_model())

        return self._llm.collective_rpc(run)[0]
