"""NVIDIA TensorRT-LLM as a rollout engine: `aligner.rollout.engine.ForeignEngine` over its PyTorch backend.

The engine of a replica of `rollout.tp` ranks is a separate process, started by the replica's first rank on the replica's GPUs
(`aligner.rollout.tensorrt_llm.worker`). Each rank has a connection to the worker on its GPU, for new weights and the release of memory; the
first rank has another one for requests. Requests and results are tokens. The contract (`aligner.rollout.tensorrt_llm.contract`) lists the
parts of the package in use; docs/tensorrt_llm.md lists the parts that have run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.errors import ConfigError, EngineError
from aligner.parallel import platform
from aligner.parallel.collectives import gather_objects
from aligner.parallel.transfer import block_group
from aligner.rollout.config import CudaGraphs, RolloutConfig, Sampler, TensorRTLLMConfig
from aligner.rollout.engine import Capabilities, GenResult, Memory, Work
from aligner.rollout.engine.manifest import Manifest
from aligner.rollout.tensorrt_llm.contract import Contract, gate
from aligner.rollout.tensorrt_llm.link import (
    REQUESTS,
    Door,
    Link,
    engine_environment,
    gpu_name,
    handle,
    knock,
    packed,
    start_process,
    worker_socket,
)
from aligner.rollout.tensorrt_llm.requests import Requests, Take
from aligner.types import SamplingConfig

_SAMPLERS = {Sampler.trtllm: "TRTLLMSampler", Sampler.torch: "TorchSampler"}
_PROCESS, _WORKER = "TensorRT-LLM's process", "TensorRT-LLM's worker"
END_SECONDS = 60.0  # for the process to end by itself


class TensorRTLLMEngine:
    """One rank's engine. The constructor checks the installed version and the settings, and starts nothing.

    path: a Hugging Face directory with config.json, for sockets; weights in it are not read. tp: ranks that share a replica.
    max_sequence_length: tokens of prompt and response. Raises EngineError for an unknown version, ConfigError for a setting that cannot
    work.
    """

    def __init__(
        self, config: RolloutConfig, *, path: Path, dtype: torch.dtype, eos_id: int, max_sequence_length: int, tp: int = 1
    ) -> None:
        self._settings = settings = config.tensorrt_llm
        contract = gate(allow_drafts=settings.allow_drafts)
        settings.check_sampling(config.sampling)
        self.capabilities = Capabilities(name="tensorrt_llm", logprobs=contract.rules.logprobs[settings.sampler.value])
        self.max_sequence_length = max_sequence_length
        self._config = config
        self._path, self._dtype, self._eos_id = path, dtype, eos_id
        self._graphs = _uses_graphs(settings, contract, sleeps=config.offload)
        self._tp, self._index = tp, dist.get_rank() % tp if tp > 1 else 0
        self._group: dist.ProcessGroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: Link | None = None
        self._requests: Link | None = None
        self._asleep: frozenset[Memory] = frozenset()
        self._unready = "it was never refitted"
        self._version = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def start(self) -> None:
        """Start the replica's process, which builds the model with random weights. Collective over the component.

        Raises EngineError if it fails, if the replica's ranks are on several nodes, and if a worker is not on its rank's GPU.
        """
        if self._worker is not None:
            raise EngineError("TensorRT-LLM was started twice")
        self._group = block_group(self._tp, backend="gloo")
        place = (socket.gethostname(), self._path)
        places = [place] if self._group is None else gather_objects(place, self._group)
        if len({host for host, _ in places}) > 1:
            hosts = ", ".join(sorted({host for host, _ in places}))
            raise EngineError(
                f"rollout.tp={self._tp}: the ranks of a replica of rollout.engine=tensorrt_llm must be on one node, and are on {hosts}"
            )
        home = places[0][1]
        door = self._open_door(home)
        try:
            self._worker = self._lead(home, door) if self._index == 0 else door.answer(_WORKER, self._settings.start_seconds)
            self._greet()
        except BaseException:
            self._end(0.0)
            raise

    def begin_refit(self, manifest: Manifest) -> None:
        """Pause the executor for exactly these tensors, which the caller checks; nothing is generated until `finish_refit`."""
        self._running()
        self._unready = "its last refit did not end well, so its weights are mixed"
        self._shapes = {name: spec.shape for name, spec in manifest.tensors.items()}
        self._tell("begin_refit")

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        specs, buffer = packed(bucket)
        platform.synchronize()  # the other process reads it
        self._tell("load", specs, handle(buffer))

    def finish_refit(self, version: int) -> None:
        self._tell("finish_refit")
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        self._version, self._unready = version, ""

    def abort_refit(self) -> None:
        """The refit failed on some rank: let the executor continue, with weights that must not be used."""
        self._unready = "its last refit failed, so its weights are mixed"
        if self._worker is not None and not self._worker.is_lost:
            self._tell("abort_refit")

    def read_back(self, name: str) -> Tensor | None:
        """A weight in host memory: embeddings, norms and output projections of a replica of one rank; None for fused or split ones."""
        if self._tp > 1 or name not in self._shapes:
            return None
        return self._tell("parameter", name, self._shapes[name])

    def sleep(self, memory: frozenset[Memory]) -> None:
        """Release device memory, if the model was built for it."""
        if self._config.offload and (awake := memory - self._asleep):
            self._tell("release", awake)
            self._asleep |= memory

    def wake(self, memory: frozenset[Memory]) -> None:
        if self._config.offload and (asleep := memory & self._asleep):
            self._tell("materialize", asleep)
            self._asleep -= memory
            if Memory.weights in memory:
                self._unready = "its weights woke and were not refitted"

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        """Responses as they end, from the replica's first rank. Raises EngineError, also if none ends for `timeout_seconds`."""
        self._running()
        self._settings.check_sampling(sampling)
        if self._unready:
            raise EngineError(f"TensorRT-LLM does not generate: {self._unready}")
        if self._asleep:
            raise EngineError(f"TensorRT-LLM does not generate: its {' and '.join(sorted(self._asleep))} sleep")
        take = Take(work, self._group)
        if self._requests is None:
            take.follow()
            return
        requests = Requests(
            self._requests,
            sampling,
            eos_id=self._eos_id,
            context=self.max_sequence_length,
            kind=self.capabilities.logprobs,
            version=self._version,
            timeout_seconds=self._settings.timeout_seconds,
        )
        yield from requests.run(take, limit=self._config.max_batch_size + max(1, self._config.max_batch_size // 8))

    def shutdown(self) -> None:
        """End the replica's process, which frees its memory. Not collective: the first rank ends it."""
        self._unready = "it was shut down"
        self._end(END_SECONDS)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _running(self) -> Link:
        if self._worker is None:
            raise EngineError("TensorRT-LLM is not running: start() it first, and not after shutdown()")
        return self._worker

    def _tell(self, name: str, *arguments: Any) -> Any:
        return self._running().call(name, *arguments, seconds=self._settings.pause_seconds)

    def _open_door(self, home: Path) -> Door:
        """The door for this rank's worker. Returns once every rank of the replica has one; raises EngineError on all if one cannot."""
        door, failure = None, ""
        try:
            door = Door(worker_socket(home, self._index))
        except EngineError as error:  # raised below, once all ranks know
            failure = str(error)
        failures = [failure] if self._group is None else gather_objects(failure, self._group)
        if door is None or any(failures):
            raise EngineError(next(one for one in failures if one))
        return door

    def _lead(self, home: Path, door: Door) -> Link:
        """Start the process; returns the connection to this rank's worker. The other ranks of the replica are informed of a failure."""
        try:
            desk = Door(home / REQUESTS)
            self._process = start_process(home, engine_environment(os.environ, _devices(self._tp)))
            self._requests = desk.answer(_PROCESS, self._settings.start_seconds, self._check_process)
            self._requests.send(self._arguments(home))
            worker = door.answer(_WORKER, self._settings.start_seconds, self._check_process)
            kind, said = self._requests.receive(self._settings.start_seconds)
            if kind == "error":
                raise EngineError(f"{_PROCESS} could not build its model: {said}")
            return worker
        except BaseException as error:
            for index in range(1, self._tp):
                with suppress(OSError, EngineError):  # it already has its worker, or does not wait
                    knock(worker_socket(home, index), "another rank").send("error", str(error))
            raise

    def _check_process(self) -> None:
        """Raise EngineError, with the process's message, if waiting for it is useless."""
        assert self._process is not None
        if self._requests is not None and self._requests.has_message(0):
            raise EngineError(f"{_PROCESS} could not build its model: {self._requests.receive(0)[1]}")
        if (status := self._process.poll()) is not None:
            raise EngineError(f"{_PROCESS} ended with status {status} before it was ready; see its own messages")

    def _greet(self) -> None:
        kind, said = self._running().receive(self._settings.start_seconds)
        if kind == "error":
            raise EngineError(said)
        if said != gpu_name():
            raise EngineError(
                f"{_WORKER} {self._index} computes on the GPU {said}, its training rank on {gpu_name()}: the ranks of a replica must use "
                "consecutive GPUs in their order (CUDA_VISIBLE_DEVICES, and the launcher's binding of tasks to GPUs)"
            )

    def _end(self, seconds: float) -> None:
        """Give the process this time to end by itself, then kill it."""
        process, self._process = self._process, None
        if process is not None and self._requests is not None and seconds:
            with suppress(EngineError):  # it is gone, or does not read
                self._requests.send("shutdown")
        if process is not None:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for link in (self._worker, self._requests):
            if link is not None:
                link.close()
        self._worker = self._requests = None

    def _arguments(self, home: Path) -> dict[str, Any]:
        """Arguments of `LLM`, with dictionaries for its configs; see `aligner.rollout.tensorrt_llm.worker.build`."""
        config, settings, longest = self._config, self._settings, self.max_sequence_length
        # It cannot release and reallocate the buffers of its own all-reduce.
        reduces = {"allreduce_strategy": "NCCL"} if self._tp > 1 and config.offload else {}
        return reduces | {
            "model": str(home),
            "tensor_parallel_size": self._tp,
            "backend": "pytorch",
            "skip_tokenizer_init": True,
            "dtype": str(self._dtype).removeprefix("torch."),
            "load_format": "dummy",
            "max_seq_len": longest,
            "max_input_len": longest,  # else 1024
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.prefill_chunk_tokens + config.max_batch_size,  # in one forward pass
            "enable_chunked_prefill": True,
            "sampler_type": _SAMPLERS[settings.sampler],
            "kv_cache_config": {
                "enable_block_reuse": True,  # a group's prompt is computed once
                "max_tokens": config.kv_cache_tokens or config.max_batch_size * longest,
                "free_gpu_memory_fraction": settings.kv_memory_fraction,
            },
            "cuda_graph_config": {"enable_padding": True, "max_batch_size": config.max_batch_size} if self._graphs else None,
            "sleeps": config.offload,
        }


def _devices(tp: int) -> list[str]:
    """The GPUs of this rank's replica, as CUDA_VISIBLE_DEVICES names them. Raises EngineError if this process does not see all of them."""
    if not torch.cuda.is_available():
        return []
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = visible or [str(number) for number in range(torch.cuda.device_count())]
    try:
        return platform.block_of(visible, torch.cuda.current_device(), tp)
    except ConfigError as error:
        raise EngineError(
            f"rollout.tp={tp}: the first rank of a replica must see the GPUs of all its ranks: {error}; srun --gpus-per-task hides them: "
            "use --gpus-per-node, or --gpu-bind=none"
        ) from error


def _uses_graphs(settings: TensorRTLLMConfig, contract: Contract, *, sleeps: bool) -> bool:
    """Whether CUDA graphs are used. Raises ConfigError if they are required and not possible."""
    possible = contract.rules.cuda_graphs_with_sleep or not sleeps
    if settings.cuda_graphs == CudaGraphs.always and not possible:
        raise ConfigError(
            f"rollout.tensorrt_llm.cuda_graphs=always: version {contract.version} cannot replay CUDA graphs after its memory slept "
            "(rollout.offload=true); allowed: auto, never, or rollout.offload=false"
        )
    return settings.cuda_graphs != CudaGraphs.never and possible
