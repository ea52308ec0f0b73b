"""The processes of a TensorRT-LLM engine, which do not train.

    python -m aligner.rollout.tensorrt_llm.worker DIRECTORY         # the engine of one replica; started by its first rank

The process builds the package's `LLM` and answers requests. For a model on several GPUs `LLM` starts a worker on each by MPI, as usual; for
one GPU the worker is this process. In addition each worker has a thread that takes orders from the training rank on the same GPU: it pauses
the worker's executor, loads new weights, and releases and reallocates memory.

Most of this uses private parts of the package, recorded in the contract. The rules: weights are replaced while the executor is paused
(`control_action`), on all workers of the model; a refit ends with each module's own work after loading, and with forgetting all cached
prefixes; a long pause counts as a hang, so training must not happen in between.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from aligner.errors import AlignerError, EngineError
from aligner.parallel import platform
from aligner.rollout.engine import Memory
from aligner.rollout.tensorrt_llm.contract import PACKAGE, Contract, load
from aligner.rollout.tensorrt_llm.link import REQUESTS, Link, Spec, gpu_name, knock, opened, unpacked, worker_socket

OF_WORKERS = ("hf_model_dir", "tokenizer", "llm_args")  # the package's arguments for each of them
GRACE_SECONDS = 60.0  # for the package to end by itself once training is gone
_BEFORE, _AFTER = ("pre_reload_weights",), ("process_weights_after_loading", "post_load_weights")


class Control:
    """Controls a worker's executor (a PyExecutor). Methods are called over a `Link`, in one thread, on every worker of a model."""

    def __init__(self, engine: Any, contract: Contract) -> None:
        self._engine = engine
        self._contract = contract
        self._refit = ExitStack()
        self._is_loading = False

    def begin_refit(self) -> None:
        """Pause until `finish_refit` or `abort_refit`, and get the modules ready."""
        if self._is_loading:
            raise EngineError("TensorRT-LLM: a refit began before the last one ended")
        self._is_loading = True
        self._pause(self._refit)
        platform.synchronize()
        if self._contract.find("ModelLoader.begin_update_weights"):
            self._loader.begin_update_weights()
        self._call_modules(_BEFORE)

    def load(self, specs: Sequence[Spec], buffer: Any) -> None:
        """Copy full tensors, by Hugging Face name, into the fused and split ones. Keeps no reference to them."""
        weights = unpacked(specs, opened(buffer, torch.cuda.current_device() if torch.cuda.is_available() else 0))
        self._loader.reload(self._model, weights, allow_partial_loading=True)
        platform.synchronize()
        del weights
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()

    def finish_refit(self) -> None:
        """Finish after the last bucket; then continue."""
        if self._contract.find("WorkerExtension.finalize_weight_update"):
            self._finalize_by_extension()
        else:
            self._call_modules(_AFTER)
        self._engine.reset_prefix_cache()
        platform.synchronize()
        platform.release_cached()
        self._resume()

    def abort_refit(self) -> None:
        """Continue with mixed weights, which must not be used. Does nothing outside of a refit."""
        if not self._is_loading:
            return
        try:
            if self._contract.find("ModelLoader.abort_update_weights"):
                self._loader.abort_update_weights()
        finally:
            self._resume()

    def release(self, memory: frozenset[Memory]) -> None:
        """Release device memory, with or without its contents."""
        from tensorrt_llm._torch.virtual_memory import release_with_tag

        self._exchange(release_with_tag, memory)
        gc.collect()
        platform.release_cached()

    def materialize(self, memory: frozenset[Memory]) -> None:
        """Allocate it again, at the same addresses."""
        from tensorrt_llm._torch.virtual_memory import materialize_with_tag

        self._exchange(materialize_with_tag, memory)

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The model's parameter of exactly this name and shape, in host memory; None if it is fused, renamed or padded."""
        found = dict(self._model.named_parameters()).get(name)
        return found.detach().cpu() if found is not None and tuple(found.shape) == shape else None

    @property
    def _model(self) -> Any:
        return self._engine.model_engine.model

    @property
    def _loader(self) -> Any:
        return self._engine.model_engine.model_loader

    def _pause(self, stack: ExitStack) -> None:
        """Enter control_action: its requests are done and its loop is paused."""
        drains = {"drain": True} if self._contract.accepts("PyExecutor.control_action", "drain") else {}
        stack.enter_context(self._engine.control_action(**drains))

    def _resume(self) -> None:
        self._is_loading = False
        self._refit.close()

    def _exchange(self, action: Callable[..., int], memory: frozenset[Memory]) -> None:
        tags = [tag for kind in sorted(memory) for tag in self._contract.rules.memory_tags[kind.value]]
        with ExitStack() as stack:
            self._pause(stack)
            if Memory.kv_cache in memory:
                self._engine.reset_prefix_cache()  # the cache's contents are lost: no prefix may be found in them
            platform.synchronize()
            action(*tags)
            platform.synchronize()

    def _call_modules(self, names: Sequence[str]) -> None:
        """Call the modules' hooks, as the package's own refit does. Not every module has one."""
        for module in self._model.modules():
            if getattr(module, "_weights_removed", False):
                continue
            for name in names:
                hook = getattr(module, name, None)
                if hook is not None:
                    hook()

    def _finalize_by_extension(self) -> None:
        """The package's own finalisation, which keeps addresses that captured CUDA graphs use. It is a method of a class for Ray's workers
        that only needs the executor."""
        from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

        extension = WorkerExtension.__new__(WorkerExtension)
        extension.engine = self._engine
        extension.finalize_weight_update()


def make_worker(*arguments: Any, **named: Any) -> Any:
    """The package's worker, with a thread that takes orders for it. The package calls this in each worker's process.

    A function, not a class: it is pickled by name, and its base class would exist only after the package is imported.
    """
    from tensorrt_llm.executor.worker import GenerationExecutorWorker

    worker = GenerationExecutorWorker(*arguments, **named)
    control = Control(worker.engine, load(version(PACKAGE)))
    link = knock(worker_socket(Path(named["hf_model_dir"]), worker.rank), f"the training rank {worker.rank} of the replica")
    link.send("hello", gpu_name())
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    threading.Thread(target=_obey, args=(control, link, device), daemon=True, name="aligner-control").start()
    return worker


def _obey(control: Control, link: Link, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a new thread starts on the first GPU
    while True:
        try:
            name, *arguments = link.receive()
        except EngineError:
            abandoned()
            return
        try:
            value = getattr(control, name)(*arguments)
        except Exception as error:
            link.send("error", describe(error))
        else:
            link.send("done", value)


def abandoned() -> None:
    """Training is gone: exit, by force if the package does not end by itself."""
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def describe(error: BaseException) -> str:
    """A message for the training ranks."""
    return str(error) if isinstance(error, AlignerError) else f"{type(error).__name__}: {error}"


class Executors:
    """`LLM`'s factory of executors: the package's own, but with `make_worker` for its workers."""

    @staticmethod
    def create(engine: Any, **given: Any) -> Any:
        of_workers = {name: given[name] for name in OF_WORKERS}
        shared = {name: given[name] for name in ("postproc_worker_config", "is_llm_executor")}
        if given["model_world_size"] == 1:
            return make_worker(engine, **of_workers, **shared)
        from tensorrt_llm.executor.proxy import GenerationExecutorProxy

        return GenerationExecutorProxy(
            {"engine": engine, **of_workers},
            model_world_size=given["model_world_size"],
            mpi_session=given["mpi_session"],
            worker_cls=make_worker,
            **shared,
        )


def build(arguments: Mapping[str, Any]) -> Any:
    """The package's LLM. Its configs are dictionaries (`cuda_graph_config` may be None); `sleeps`: its memory can be released."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig

    given = dict(arguments)
    graphs, sleeps = given.pop("cuda_graph_config"), given.pop("sleeps")
    given["kv_cache_config"] = KvCacheConfig(**given["kv_cache_config"])
    given["cuda_graph_config"] = None if graphs is None else CudaGraphConfig(**graphs)
    if sleeps and load(version(PACKAGE)).accepts("TorchLlmArgs", "enable_sleep"):
        given["enable_sleep"] = True
    elif sleeps:
        from tensorrt_llm.llmapi.llm_args import SleepConfig

        given["sleep_config"] = SleepConfig()
    return LLM(executor_cls=Executors, **given)


class Desk:
    """Passes requests from the replica's first rank to the package, and results back."""

    def __init__(self, llm: Any, link: Link) -> None:
        self._llm = llm
        self._link = link
        self._running: dict[asyncio.Task[None], Any] = {}
        self._over = asyncio.Event()
        self._outgoing: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._least = 0  # log-probs to request at each token: 1 once this version has treated 0 as none

    async def run(self) -> None:
        """Run until the rank sends `shutdown` or is gone."""
        # In a thread: if both sides send more than the socket holds, one of them must still read.
        threading.Thread(target=self._send, daemon=True, name="aligner-answers").start()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.fileno(), self._read)
        await self._over.wait()
        loop.remove_reader(self._link.fileno())
        self._outgoing.put(())

    def _send(self) -> None:
        while message := self._outgoing.get():
            try:
                self._link.send(*message)
            except EngineError:
                return  # the rank is gone, as the reader notices too

    def _read(self) -> None:
        try:
            kind, *arguments = self._link.receive()
        except EngineError:
            kind = "shutdown"
        if kind == "submit":
            for request in arguments[0]:
                self._submit(*request)
        elif kind == "abort":
            for task, handle in self._running.items():
                handle.abort()
                task.cancel()
            self._running = {}
            self._outgoing.put(("aborted",))
        else:
            self._over.set()

    def _submit(self, index: int, tokens: Sequence[int], sampling: Mapping[str, Any]) -> None:
        from tensorrt_llm import SamplingParams

        sampling = {**sampling, "logprobs": max(self._least, sampling["logprobs"])}
        try:
            handle = self._llm.generate_async(list(tokens), SamplingParams(**sampling), streaming=False)
        except Exception as error:
            self._outgoing.put(("failed", index, describe(error)))
            return
        self._running[asyncio.ensure_future(self._finish(index, handle, tokens, sampling))] = handle

    async def _finish(self, index: int, handle: Any, tokens: Sequence[int], sampling: Mapping[str, Any]) -> None:
        try:
            await handle.aresult()
            message = ("ended", index, answer(handle.outputs[0]))
        except Exception as error:
            message = ("failed", index, describe(error))
        self._running.pop(asyncio.current_task(), None)
        if message[0] == "ended" and not message[2][1] and sampling["logprobs"] == 0:
            self._least = 1
            self._submit(index, tokens, sampling)
        else:
            self._outgoing.put(message)


def answer(output: Any) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    """(tokens, their log-probs, reason of the end) of the package's CompletionOutput."""
    tokens = tuple(output.token_ids)
    return tokens, tuple(_logprob(entry, token) for entry, token in zip(output.logprobs or (), tokens, strict=False)), output.finish_reason


def _logprob(entry: Any, token: int) -> float:
    """The sampled token's log-prob at one position, from a number or a mapping by token."""
    return float(entry[token].logprob) if isinstance(entry, Mapping) else float(entry)


def serve(home: Path) -> int:
    link = knock(home / REQUESTS, "the replica's first training rank")
    (arguments,) = link.receive()
    try:
        llm = build(arguments)
    except Exception as error:
        traceback.print_exc()
        link.send("error", describe(error))
        return 1
    link.send("ready", None)
    asyncio.run(Desk(llm, link).run())
    threading.Thread(target=abandoned, daemon=True).start()
    llm.shutdown()
    link.close()
    return 0


if __name__ == "__main__":
    from aligner.rollout.tensorrt_llm import worker as own

    sys.exit(own.serve(Path(sys.argv[1])))
