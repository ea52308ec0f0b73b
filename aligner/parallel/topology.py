"""How the ranks of one component are laid out: which of them share a tensor, and which hold replicas.

`ParallelConfig` is what the user writes and is checked against the world size and the model's sizes before anything starts;
`initialize` makes Megatron-Core's process groups from it and returns the `Topology` that the rest of the code is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from aligner.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Parallel sizes of one component; the data-parallel size is what remains of the world."""

    tp: int = 1  # tensor parallel: ranks that split every layer
    sequence_parallel: bool = False  # split the norms' activations over the tensor-parallel ranks too

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"parallel.tp={self.tp}: must be at least 1")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "parallel.sequence_parallel=true: needs parallel.tp > 1 (the sequence is split over the tensor-parallel ranks)"
            )

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError where `world_size` ranks cannot be laid out like this."""
        if world_size % self.tp:
            raise ConfigError(
                f"parallel.tp={self.tp} does not divide the {world_size} ranks of this component; "
                f"allowed: {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This rank's place: the same-named groups are torch process groups."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup

    @property
    def is_replica_leader(self) -> bool:
        """True on the one rank of each data-parallel replica that speaks for it."""
        return self.tp_rank == 0


def initialize(parallel: ParallelConfig, *, seed: int) -> Topology:
    """Make Megatron-Core's groups over the initialised torch.distributed world and seed its generators. Every rank calls this.

    Raises ConfigError where the world size does not fit.
    """
    from aligner.parallel.mcore import parallel_state, tensor_parallel

    parallel.check_world(dist.get_world_size())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel.tp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Topology(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
    )
