"""A replica of several ranks that share one TensorRT-LLM model: experimental, and only in an MPI launch.

The package's own way to several GPUs is to start other processes, or a launcher that turns the other ranks into servers; neither leaves
training its ranks. Here each rank builds the package's worker itself, in an MPI world that is its block of `rollout.tp` consecutive ranks.
Requests are submitted on the first rank of the block, whose executor hands them to the others'; refits and memory are every rank's own
calls, at the same points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from aligner.parallel import mpi
from aligner.parallel.collectives import broadcast_integers
from aligner.parallel.transfer import block_group
from aligner.rollout.tensorrt_llm_contract import Contract

WORKER = "GenerationExecutorWorker.__init__"


@dataclass(kw_only=True, slots=True)
class Block:
    """The ranks of a replica: `size` consecutive ones of the component, this one at `index`. `join` connects them."""

    size: int
    index: int
    group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        """Whether requests are submitted on this rank."""
        return self.index == 0

    def tell(self, number: int) -> None:
        """The leader's word to the others; they `hear` it."""
        if self.group is not None:
            self._broadcast(number)

    def hear(self) -> int:
        """The leader's message. Waits as long as the group's timeout."""
        return self._broadcast(0)

    def _broadcast(self, number: int) -> int:
        assert self.group is not None
        source = dist.get_global_rank(self.group, 0)
        # On the CPU: the package computes on the GPU at the same time, with collectives of its own.
        return broadcast_integers((number,), src=source, group=self.group, device=torch.device("cpu"))[0]

    def join(self) -> None:
        """Connect the ranks, and tell the package that its MPI world is this block. Collective over the component."""
        self.group = block_group(self.size, backend="gloo")
        if self.size == 1 and not mpi.is_started():
            return  # the package's world is this process
        from tensorrt_llm._utils import set_mpi_comm
        from tensorrt_llm.llmapi.mpi_session import set_mpi_session_cpp

        communicator = mpi.block_communicator(self.size)
        set_mpi_comm(communicator)
        set_mpi_session_cpp(communicator)

    def arguments(self, contract: Contract) -> dict[str, Any]:
        """Of `LLM`, for a worker in each rank of the block. Its own all-reduce assumes processes that it started: so NCCL's."""
        if self.size == 1:
            return {}
        return {"executor_cls": worker_in_place(contract), "_mpi_session": InPlace(), "allreduce_strategy": "NCCL"}

    def leave(self) -> None:
        """Give the group back."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


class InPlace:
    """Stands for an MPI session: that there is one keeps `LLM` from starting processes."""

    def shutdown(self, wait: bool = True) -> None:
        """Nothing was started."""

    def abort(self) -> None:
        """Nothing was started."""


def worker_in_place(contract: Contract) -> type:
    """What `LLM` calls to make its executor: on every rank the worker itself, with those arguments that it takes."""

    class Executors:
        @staticmethod
        def create(engine: Any, **arguments: Any) -> Any:
            from tensorrt_llm.executor.worker import GenerationExecutorWorker

            return GenerationExecutorWorker(engine, **{name: value for name, value in arguments.items() if contract.accepts(WORKER, name)})

    return Executors
