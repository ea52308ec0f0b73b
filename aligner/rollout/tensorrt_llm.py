"""NVIDIA TensorRT-LLM in the training processes: `aligner.rollout.engine.ForeignEngine` over its PyTorch backend.

One `LLM` in each rank (or, experimental, one shared by a block of ranks: `aligner.rollout.tensorrt_llm_spmd`), tokens in, tokens out. What
it does of the package is in the contract (`aligner.rollout.tensorrt_llm_contract`) and was written against that: docs/tensorrt_llm.md says
what of it has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError, EngineError
from aligner.rollout.config import RolloutConfig
from aligner.rollout.engine import Capabilities, GenResult, Memory, WeightForm, Work
from aligner.rollout.manifest import Manifest
from aligner.rollout.tensorrt_llm_config import CudaGraphs, Sampler, TensorRTLLMConfig
from aligner.rollout.tensorrt_llm_contract import Contract, gate
from aligner.rollout.tensorrt_llm_environment import import_environment, limit, require_devices
from aligner.rollout.tensorrt_llm_executor import Executor
from aligner.rollout.tensorrt_llm_requests import Requests, Take
from aligner.rollout.tensorrt_llm_spmd import Block
from aligner.types import SamplingConfig

_SAMPLERS = {Sampler.trtllm: "TRTLLMSampler", Sampler.torch: "TorchSampler"}


class TensorRTLLMEngine:
    """One rank's. Constructing it checks the installed version and the settings, and imports nothing of the package.

    path: a Hugging Face directory with config.json; weights in it are not read. tp: ranks that share a replica. max_sequence_length: tokens
    of prompt and response. Raises EngineError for a version that is not known, ConfigError for a setting that cannot work.
    """

    def __init__(
        self, config: RolloutConfig, *, path: Path, dtype: torch.dtype, eos_id: int, max_sequence_length: int, tp: int = 1
    ) -> None:
        self._settings = settings = config.tensorrt_llm
        self._contract = gate(allow_drafts=settings.allow_drafts)
        settings.check(config.sampling, tp=tp)
        rules, sampler = self._contract.rules, settings.sampler.value
        self.capabilities = Capabilities(
            name="tensorrt_llm",
            max_tp=None if settings.spmd else 1,
            per_request_seeds=rules.per_request_seeds[sampler],
            logprobs=rules.logprobs[sampler],
            weights=WeightForm.full,
            atomic_groups=True,
        )
        self.max_sequence_length = max_sequence_length
        self._config = config
        self._path, self._dtype, self._eos_id = path, dtype, eos_id
        self._graphs = _uses_graphs(settings, self._contract, sleeps=config.offload)
        self._block = Block(size=tp, index=dist.get_rank() % tp if tp > 1 else 0)
        self._open = ExitStack()
        self._executor: Executor | None = None
        self._asleep: frozenset[Memory] = frozenset()
        self._unready = "it was never refitted"
        self._version = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def start(self) -> None:
        """Import the package and build the model with random weights. Collective over the component if MPI started it."""
        if self._executor is not None:
            raise EngineError("TensorRT-LLM was started twice")
        size, index = self._block.size, self._block.index
        if torch.cuda.is_available():
            require_devices(size, visible=torch.cuda.device_count(), current=torch.cuda.current_device(), index=index)
        with limit(self._settings.start_seconds, "to import and to build its model"), import_environment():
            from tensorrt_llm import LLM

            self._block.join()
            self._llm = LLM(**self._arguments())
        self._open.callback(self._llm.shutdown)
        self._executor = Executor(self._llm._executor.engine, self._contract, pause_seconds=self._settings.pause_seconds)

    def begin_refit(self, manifest: Manifest) -> None:
        """Pause the executor for exactly these tensors (the caller checks that they come); nothing is generated until `finish_refit`."""
        self._unready = "its last refit did not end well, so its weights are mixed"
        self._shapes = {name: spec.shape for name, spec in manifest.tensors.items()}
        self._running().begin_refit()

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy full tensors, whole fusion groups, into the engine's weights. They may be overwritten when it returns."""
        self._running().load(bucket)

    def finish_refit(self, version: int) -> None:
        """All buckets have come: results are of `version` from now on."""
        self._running().finish_refit()
        self._version, self._unready = version, ""

    def abort_refit(self) -> None:
        """The refit failed on some rank: let the executor continue, with weights that must not be used."""
        self._unready = "its last refit failed, so its weights are mixed"
        if self._executor is not None:
            self._executor.abort_refit()

    def read_back(self, name: str) -> Tensor | None:
        """The engine's weight of this name if it is kept unchanged: embeddings, norms and output projections of a replica of one rank.

        None for weights that it fuses or splits over ranks.
        """
        if self._block.size > 1 or name not in self._shapes:
            return None
        return self._running().parameter(name, self._shapes[name])

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release device memory, if the model was built for it."""
        if self._config.offload:
            self._running().release(memory - self._asleep)
            self._asleep |= memory

    def wake(self, memory: frozenset[Memory]) -> None:
        """Take it again; weights are undefined until the next refit."""
        if self._config.offload:
            self._running().materialize(memory & self._asleep)
            self._asleep -= memory
            if Memory.weights in memory:
                self._unready = "its weights woke and were not refitted"

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Yield responses as they end. In a replica of several ranks the first one yields them, the others nothing.

        Raises EngineError out of order, if the package reports an error for a request, and if none ends for `timeout_seconds`.
        """
        self._running()
        self._settings.check_sampling(sampling)
        if self._unready:
            raise EngineError(f"TensorRT-LLM does not generate: {self._unready}")
        if self._asleep:
            raise EngineError(f"TensorRT-LLM does not generate: its {' and '.join(sorted(self._asleep))} sleep")
        take = Take(work, self._block)
        if not self._block.is_leader:
            take.follow()
            return
        requests = Requests(
            self._llm,
            sampling,
            eos_id=self._eos_id,
            context=self.max_sequence_length,
            kind=self.capabilities.logprobs,
            version=self._version,
            timeout_seconds=self._settings.timeout_seconds,
        )
        yield from requests.run(take, limit=self._config.max_batch_size + max(1, self._config.max_batch_size // 8))

    def shutdown(self) -> None:
        """End the package's threads and free its memory."""
        self.abort_refit()
        self._executor, self._llm = None, None
        self._open.close()
        self._block.leave()

    def _running(self) -> Executor:
        if self._executor is None:
            raise EngineError("TensorRT-LLM is not running: start() it first, and not after shutdown()")
        return self._executor

    def _arguments(self) -> dict[str, Any]:
        """Of `LLM`."""
        from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig

        config, settings, longest = self._config, self._settings, self.max_sequence_length
        return {
            "model": str(self._path),
            "backend": "pytorch",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": self._block.size,
            "dtype": str(self._dtype).removeprefix("torch."),
            "load_format": "dummy",
            "max_seq_len": longest,
            "max_input_len": longest,  # else 1024
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.prefill_chunk_tokens + config.max_batch_size,  # in one forward pass
            "enable_chunked_prefill": True,
            "sampler_type": _SAMPLERS[settings.sampler],
            "kv_cache_config": KvCacheConfig(
                enable_block_reuse=True,  # a group's prompt is computed once
                max_tokens=config.kv_cache_tokens or config.max_batch_size * longest,
                free_gpu_memory_fraction=settings.kv_memory_fraction,
            ),
            "cuda_graph_config": CudaGraphConfig(enable_padding=True, max_batch_size=config.max_batch_size) if self._graphs else None,
            **self._sleep_arguments(),
            **self._block.arguments(self._contract),
        }

    def _sleep_arguments(self) -> dict[str, Any]:
        if not self._config.offload:
            return {}
        if self._contract.accepts("TorchLlmArgs", "enable_sleep"):
            return {"enable_sleep": True}
        from tensorrt_llm.llmapi.llm_args import SleepConfig

        return {"sleep_config": SleepConfig()}


def _uses_graphs(settings: TensorRTLLMConfig, contract: Contract, *, sleeps: bool) -> bool:
    """Raise ConfigError if they were asked for and cannot be had."""
    possible = contract.rules.cuda_graphs_with_sleep or not sleeps
    if settings.cuda_graphs == CudaGraphs.always and not possible:
        raise ConfigError(
            f"rollout.tensorrt_llm.cuda_graphs=always: version {contract.version} cannot replay CUDA graphs after its memory slept "
            "(rollout.offload=true); allowed: auto, never, or rollout.offload=false"
        )
    return settings.cuda_graphs != CudaGraphs.never and possible
