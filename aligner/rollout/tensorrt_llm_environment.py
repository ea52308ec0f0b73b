"""The environment of TensorRT-LLM's first import, and time limits of its blocking calls.

Importing it starts MPI, with whatever the environment says: in a rank that Slurm, torchrun or another MPI started, it would join (or wait
for) a world that does not exist. So the launcher's variables are hidden for the import, unless this process is in MPI already. Others tell
it to stay in this process, for good: it reads them again later.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aligner.errors import EngineError
from aligner.parallel import mpi

HIDDEN_PREFIXES = ("PMI_", "PMIX_", "MPI_", "OMPI_", "SLURM_")
LASTING = {
    "TLLM_WORKER_USE_SINGLE_PROCESS": "1",  # the executor in this process: its engine can be refitted
    "TLLM_NUMA_AWARE_WORKER_AFFINITY": "0",  # training's threads are placed by the launcher
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # of a bucket at a time there is nothing to win by threads
}


@contextmanager
def import_environment() -> Iterator[None]:
    """Hide the launcher's variables from the import in this block, and put them back after it; set the lasting ones."""
    os.environ.update(LASTING)
    hidden = {} if mpi.is_started() else {name: value for name, value in os.environ.items() if name.startswith(HIDDEN_PREFIXES)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(HIDDEN_PREFIXES)]:
            if hidden and name not in hidden:
                del os.environ[name]  # MPI's own, of a world of one: a child process must not take them for its launcher's
        os.environ.update(hidden)


def require_devices(count: int, *, visible: int, current: int, index: int) -> None:
    """Raise EngineError unless this process sees the `count` GPUs of its replica alone, and uses the one that the engine will use.

    The package takes the GPU whose number is the rank in its MPI world, which is the replica: with more in sight it is another rank's.
    """
    if visible != count:
        raise EngineError(
            f"rollout.engine=tensorrt_llm: this process sees {visible} GPUs (CUDA_VISIBLE_DEVICES), not those of its replica alone, "
            f"{count}: start each rank with its own (srun --gpus-per-task=1, or a wrapper that sets CUDA_VISIBLE_DEVICES)"
        )
    if current != index:
        raise EngineError(f"rollout.engine=tensorrt_llm: rank {index} of its replica uses GPU {current} of those that it sees, not {index}")


@contextmanager
def limit(seconds: float, what: str, *, end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """End the process if the block takes longer than that: it is in a call of the package that nothing can interrupt.

    Says what it waited for and writes every thread's stack first. The launcher sees a non-zero status and ends the other ranks.
    """

    def expire() -> None:
        print(f"aligner: waited {seconds:.0f} s for TensorRT-LLM {what}; this process ends. Its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        end(1)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
