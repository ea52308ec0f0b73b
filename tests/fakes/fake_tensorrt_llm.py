"""TensorRT-LLM for tests: the parts that the adapter uses, each bound to the recorded contract, with the rules that the real ones have.

`installed(version, folder)` makes `import tensorrt_llm` find this package, and `importlib.metadata` its version. Every call is bound to the
contract's signature: an unknown keyword raises TypeError that names it, as the real package does. The model behind it is a small one of
transformers, whose weights are those that were given to it and nothing else; its fused copies become the model's when their modules are
finalised, so that a refit that is not finished is noticed in the tokens too.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_tensorrt_llm_executor as parts
from fake_tensorrt_llm_binding import Fields

from aligner.rollout.tensorrt_llm_contract import Contract, load


def _fields_class(contract: Contract, name: str) -> type:
    symbol = contract.find(name)

    def make(self: Fields, **kwargs: Any) -> None:
        Fields.__init__(self, symbol, contract, kwargs)

    return type(name, (Fields,), {"__init__": make})


def _modules(contract: Contract) -> dict[str, types.ModuleType]:
    world = parts.World(contract)
    names = ["", "._utils", "._torch", "._torch.virtual_memory", ".llmapi", ".llmapi.llm_args", ".llmapi.mpi_session", ".llmapi.rlhf_utils"]
    made = {f"tensorrt_llm{name}": types.ModuleType(f"tensorrt_llm{name}") for name in [*names, ".executor", ".executor.worker"]}
    for module in made.values():
        module.__path__ = []
    root, llmapi, memory = made["tensorrt_llm"], made["tensorrt_llm.llmapi"], made["tensorrt_llm._torch.virtual_memory"]
    root.world = world
    root.LLM = parts.llm_class(world, Fields)
    root.SamplingParams = _fields_class(contract, "SamplingParams")
    for name in ("KvCacheConfig", "CudaGraphConfig"):
        setattr(llmapi, name, _fields_class(contract, name))
    if contract.find("SleepConfig"):
        made["tensorrt_llm.llmapi.llm_args"].SleepConfig = _fields_class(contract, "SleepConfig")
    if contract.find("WorkerExtension.finalize_weight_update"):
        made["tensorrt_llm.llmapi.rlhf_utils"].WorkerExtension = parts.extension_class()
    memory.release_with_tag = world.release_with_tag
    memory.materialize_with_tag = world.materialize_with_tag
    made["tensorrt_llm._utils"].set_mpi_comm = world.set_mpi_comm
    made["tensorrt_llm.llmapi.mpi_session"].set_mpi_session_cpp = world.set_mpi_session_cpp
    made["tensorrt_llm.executor.worker"].GenerationExecutorWorker = parts.worker_class(world)
    return made


@contextmanager
def installed(version: str, folder: Path) -> Iterator[Any]:
    """Install the stand-in for a version while the block runs; gives the world, which knows what happened. `folder` is an empty one."""
    information = folder / f"tensorrt_llm-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    made = _modules(load(version))
    sys.path.insert(0, str(folder))
    sys.modules.update(made)
    try:
        yield made["tensorrt_llm"].world
    finally:
        made["tensorrt_llm"].world.stop()
        sys.path.remove(str(folder))
        for name in made:
            sys.modules.pop(name, None)
