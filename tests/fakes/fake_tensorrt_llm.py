"""TensorRT-LLM for tests: the parts that the adapter uses, each bound to the recorded contract, with the rules that the real ones have.

`installed(version, folder)` makes `import tensorrt_llm` find this package, and `importlib.metadata` its version. Every call is bound to the
contract's signature: an unknown keyword raises TypeError that names it, as the real package does. The model behind it is a small one of
transformers, whose weights are those that were given to it and nothing else; its fused copies become the model's when their modules are
finalised, so that a refit that is not finished is noticed in the tokens too.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_tensorrt_llm_executor as parts
import torch
from fake_tensorrt_llm_binding import Fields
from fake_tensorrt_llm_model import Misuse

from aligner.rollout.config import RolloutConfig, TensorRTLLMConfig
from aligner.rollout.tensorrt_llm.contract import Contract, load
from aligner.types import SamplingConfig

EOS, CONTEXT = 2, 64
OTHER_PROCESS = """import sys
sys.path.insert(0, {folder!r})
from aligner.rollout.tensorrt_llm.contract import load
from fake_tensorrt_llm import modules
sys.modules.update(modules(load({version!r})))
"""


class InThread:
    """The engine's process as a thread of this one, so that a test sees into the stand-in: has what is used of Popen."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        from aligner.rollout.tensorrt_llm import worker as tensorrt_llm_worker

        self.given = dict(environment)
        self._status: list[int] = []
        for name in [name for name in os.environ if name not in environment]:
            del os.environ[name]  # the fixture puts them back
        self._thread = threading.Thread(target=lambda: self._status.append(tensorrt_llm_worker.serve(home)), daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self._status[0] if self._status else None

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)  # never TimeoutExpired: nobody may end this process


def _fields_class(contract: Contract, name: str) -> type:
    symbol = contract.find(name)

    def make(self: Fields, **kwargs: Any) -> None:
        Fields.__init__(self, symbol, contract, kwargs)

    return type(name, (Fields,), {"__init__": make})


def spawned_worker(make: Callable[..., Any], home: Path, llm_args: dict[str, Any]) -> str:
    """In a process that MPI spawned, until `over` is there: '' if the worker then has whole weights and its memory."""
    import tensorrt_llm
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()  # one task for each process
    world, rank = tensorrt_llm.world, MPI.COMM_WORLD.Get_rank()
    world.first_rank = rank
    more = {"postproc_worker_config": None, "is_llm_executor": False, "tokenizer": None}
    worker = make(None, None, None, hf_model_dir=home, llm_args=llm_args, **more)
    (home / f"ready{rank}").touch()
    while not (home / "over").exists():
        time.sleep(0.05)
    engine = worker.engine
    missing = set(engine.model_engine.model.targets) - engine.model_engine.model.given - {"lm_head.weight"}
    return f"rank {rank}: {missing} {engine.asleep}" if missing or engine.asleep or engine.needs_finish or worker.rank != rank else ""


def llm_class(world: parts.World, fields: type) -> type:
    class LLM:
        proxy = proxy_class(world)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = world.bind("LLM.__init__", *args, **kwargs)
            if hidden := [name for name in os.environ if name.startswith(("OMPI_", "PMI_", "PMIX_", "SLURM_")) or name == "LOCAL_RANK"]:
                raise Misuse(f"LLM: it would join the launcher's world: {hidden}")
            if given.get("backend") != "pytorch" or not given.get("skip_tokenizer_init"):
                raise Misuse("LLM: backend='pytorch' and skip_tokenizer_init=True are what this stands for")
            sleeps = bool(given.get("enable_sleep")) or given.get("sleep_config") is not None
            if sleeps and given.get("cuda_graph_config") is not None and not world.contract.rules.cuda_graphs_with_sleep:
                raise Misuse("LLM: CUDA graphs with sleep")
            self.given = given
            size = given.get("tensor_parallel_size", 1)
            world.building = self.engines = []
            self._executor = given["executor_cls"].create(
                None,
                executor_config=None,
                batched_logits_processor=None,
                model_world_size=size,
                mpi_session=Session(size) if size > 1 else None,
                reuse_mpi_comm=False,
                return_logits=False,
                postproc_worker_config=None,
                is_llm_executor=True,
                hf_model_dir=Path(given["model"]),
                tokenizer=None,
                llm_args=given,
            )
            if len(self.engines) != size and not getattr(self._executor, "futures", []):
                raise Misuse(f"LLM: {len(self.engines)} workers for tensor_parallel_size={size}")
            world.llms.append(self)

        def generate_async(self, *args: Any, **kwargs: Any) -> parts.Result:
            given = world.bind("BaseLLM.generate_async", *args, **kwargs)
            params, engine = given["sampling_params"], self.engines[0]
            if not isinstance(params, fields):
                raise Misuse("generate_async: sampling_params is not the package's")
            if params.end_id is None:
                raise Misuse("generate_async: end_id is None and there is no tokenizer to take it from")
            if not 0 < len(given["inputs"]) + params.max_tokens <= engine.max_seq_len:
                raise Misuse("generate_async: prompt and max_tokens are longer than max_seq_len")
            result = parts.Result(engine)
            engine.submit(parts.Running(list(given["inputs"]), params, result))
            return result

        def shutdown(self) -> None:
            for engine in self.engines:
                engine.stop()
            if isinstance(self._executor, self.proxy):
                self._executor.shutdown()

    return LLM


class Session:
    """The pool of processes that LLM makes for a model on several GPUs."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers


def worker_class(world: parts.World) -> type:
    class GenerationExecutorWorker:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = world.bind("GenerationExecutorWorker.__init__", *args, **kwargs)
            self.engine = parts.Engine(world, given["llm_args"])
            self.rank = self.engine.rank

    return GenerationExecutorWorker


def proxy_class(world: parts.World) -> type:
    class GenerationExecutorProxy:
        """Starts the workers; here they are in this process, one after the other, and not on GPUs of their own.

        With FAKE_TENSORRT_LLM_SPAWNS in the environment they are processes that MPI spawns, as the real ones, and answer no requests.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = world.bind("GenerationExecutorProxy.__init__", *args, **kwargs)
            if getattr(given["mpi_session"], "n_workers", None) != given["model_world_size"]:
                raise Misuse("the MPI session has another size than the model")
            # It travels to other processes, in which this one's `__main__` is another module.
            made, shared = pickle.loads(pickle.dumps(given["worker_cls"])), given["worker_kwargs"]
            if made.__module__ == "__main__":
                raise Misuse(f"worker_cls={made} cannot be found in another process")
            self.home, self.futures = Path(shared["hf_model_dir"]), []
            if "FAKE_TENSORRT_LLM_SPAWNS" in os.environ:
                self._spawn(made, shared["llm_args"], given["model_world_size"])
                return
            self.workers = [
                made(
                    shared["engine"],
                    shared.get("executor_config"),
                    shared.get("batched_logits_processor"),
                    postproc_worker_config=given["postproc_worker_config"],
                    is_llm_executor=False,
                    **{name: shared[name] for name in ("hf_model_dir", "tokenizer", "llm_args")},
                )
                for _ in range(given["model_world_size"])
            ]

        def _spawn(self, made: Callable[..., Any], llm_args: dict[str, Any], size: int) -> None:
            from mpi4py.futures import MPIPoolExecutor

            plain = {name: value for name, value in llm_args.items() if isinstance(value, (str, int, float, bool))}
            self.pool = MPIPoolExecutor(max_workers=size, path=sys.path)
            self.futures = [self.pool.submit(spawned_worker, made, self.home, plain) for _ in range(size)]
            while not all((self.home / f"ready{rank}").exists() for rank in range(size)):
                for future in self.futures:
                    if future.done():
                        raise Misuse(f"a worker died: {future.result()}")
                time.sleep(0.05)

        def shutdown(self) -> None:
            if self.futures:
                (self.home / "over").touch()
                if wrong := [said for future in self.futures if (said := future.result(60.0))]:
                    raise Misuse(f"workers: {wrong}")
                self.pool.shutdown()

    return GenerationExecutorProxy


def modules(contract: Contract) -> dict[str, types.ModuleType]:
    world = parts.World(contract)
    names = ["", "._torch", "._torch.virtual_memory", ".executor", ".executor.worker", ".executor.proxy"]
    made = {
        f"tensorrt_llm{name}": types.ModuleType(f"tensorrt_llm{name}")
        for name in [*names, ".llmapi", ".llmapi.llm_args", ".llmapi.rlhf_utils"]
    }
    for module in made.values():
        module.__path__ = []
    root, llmapi, memory = made["tensorrt_llm"], made["tensorrt_llm.llmapi"], made["tensorrt_llm._torch.virtual_memory"]
    root.world = world
    root.LLM = llm_class(world, Fields)
    root.SamplingParams = _fields_class(contract, "SamplingParams")
    for name in ("KvCacheConfig", "CudaGraphConfig"):
        setattr(llmapi, name, _fields_class(contract, name))
    if contract.find("SleepConfig"):
        made["tensorrt_llm.llmapi.llm_args"].SleepConfig = _fields_class(contract, "SleepConfig")
    if contract.find("WorkerExtension.finalize_weight_update"):
        made["tensorrt_llm.llmapi.rlhf_utils"].WorkerExtension = parts.extension_class()
    memory.release_with_tag = world.release_with_tag
    memory.materialize_with_tag = world.materialize_with_tag
    made["tensorrt_llm.executor.proxy"].GenerationExecutorProxy = root.LLM.proxy
    made["tensorrt_llm.executor.worker"].GenerationExecutorWorker = worker_class(world)
    return made


@contextmanager
def installed(version: str, folder: Path, *, in_thread: bool = True) -> Iterator[Any]:
    """Install the stand-in for a version while the block runs; gives the world, which knows what happened. `folder` is an empty one.

    `in_thread`: the engines of this process run in it; else in processes of their own, with worlds of their own.
    """
    information = folder / f"tensorrt_llm-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    package = folder / "tensorrt_llm"  # what another process imports
    package.mkdir()
    (package / "__init__.py").write_text(OTHER_PROCESS.format(folder=str(Path(__file__).parent), version=version))
    made = modules(load(version))
    sys.path.insert(0, str(folder))
    sys.modules.update(made)
    try:
        with ExitStack() as stack:
            if in_thread:
                stack.enter_context(patch("aligner.rollout.tensorrt_llm.engine.start_process", InThread))
                # For good: an engine that a test leaves behind is collected later, and its threads would then end this process.
                importlib.import_module("aligner.rollout.tensorrt_llm.worker").abandoned = lambda: None
            yield made["tensorrt_llm"].world
    finally:
        made["tensorrt_llm"].world.stop()
        sys.path.remove(str(folder))
        for name in made:
            sys.modules.pop(name, None)


def engine_of(
    path: Path, *, sampling: SamplingConfig | None = None, offload: bool = False, max_batch_size: int = 4, **settings: Any
) -> Any:
    """The adapter over an installed stand-in, which computes in float32; it has not started."""
    from aligner.rollout.tensorrt_llm.engine import TensorRTLLMEngine

    config = RolloutConfig(
        sampling=sampling or SamplingConfig(max_response_length=12),
        max_batch_size=max_batch_size,
        offload=offload,
        tensorrt_llm=TensorRTLLMConfig(**settings),
    )
    return TensorRTLLMEngine(config, path=path, dtype=torch.float32, eos_id=EOS, max_sequence_length=CONTEXT)
