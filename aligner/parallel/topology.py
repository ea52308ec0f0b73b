"""The layout of one component's ranks: which of them share a tensor, a layer range or a sequence, and which hold replicas.

The user sets `ParallelConfig`, which is checked against the world size and the model's sizes before anything starts. `initialize` makes
Megatron-Core's process groups from it and returns the `Topology` for the rest of the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from aligner.errors import AT_LEAST_1, NOT_NEGATIVE, ConfigError, check_range


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Parallel sizes of one component; the data-parallel size is the rest of the world: ranks / (tp * pp * cp)."""

    tp: int = 1  # tensor parallel: ranks that split every layer
    sequence_parallel: bool = False  # split the norms' activations over the tensor-parallel ranks too
    pp: int = 1  # pipeline parallel: ranks that hold consecutive layers
    vpp: int = 1  # model chunks per pipeline rank; above 1 is the interleaved schedule
    first_stage_layers: int = 0  # layers of the first pipeline stage; 0: an equal share
    last_stage_layers: int = 0  # layers of the last pipeline stage; 0: an equal share
    cp: int = 1  # context parallel: ranks that split every sequence
    ep: int = 1  # expert parallel: ranks (of those that hold replicas) that split the experts
    etp: int = 1  # tensor parallel size inside an expert
    tp_comm_overlap: bool = False  # exchange a layer's activations while it computes (Transformer Engine, packed micro-batches)

    def __post_init__(self) -> None:
        check_range(self, "parallel", AT_LEAST_1, "tp", "pp", "vpp", "cp", "ep", "etp")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("parallel.sequence_parallel=true: needs parallel.tp > 1 (tensor-parallel ranks split the sequence)")
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise ConfigError("parallel.tp_comm_overlap=true: needs parallel.sequence_parallel=true (its exchanges are overlapped)")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"parallel.vpp={self.vpp}: the interleaved schedule needs parallel.pp > 1")
        ends = ("first_stage_layers", "last_stage_layers")
        check_range(self, "parallel", NOT_NEGATIVE, *ends, note=" (0 is an equal share)")
        for name in ends:
            if getattr(self, name) and (self.pp == 1 or self.vpp > 1):
                raise ConfigError(f"parallel.{name}={getattr(self, name)}: needs parallel.pp > 1 and parallel.vpp=1")

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError if this layout does not fit `world_size` ranks."""
        self._check_product(("tp", "pp", "cp"), world_size, f"the {world_size} ranks of this component")
        stage = world_size // self.pp
        self._check_product(("ep", "etp"), stage, f"the {stage} ranks of a pipeline stage")

    def _check_product(self, names: tuple[str, ...], total: int, what: str) -> None:
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) > 1}
        product = math.prod(sizes.values())
        if total % product:
            text = " x ".join(f"{name}={size}" for name, size in sizes.items()) + (f" = {product}" if len(sizes) > 1 else "")
            allowed = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
            raise ConfigError(f"parallel.{text} does not divide {what}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This rank's place in each process group. Data-parallel ranks hold different rows of a batch."""

    rank: int
    world_size: int
    seed: int  # of the component: random weights and dropout
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup


def initialize(parallel: ParallelConfig, *, seed: int) -> Topology:
    """Make Megatron-Core's groups over the world and seed its generators. Collective. Raises ConfigError for a wrong world size."""
    from aligner.parallel.mcore import parallel_state, tensor_parallel

    parallel.check_world(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    kinds = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "dp": "data"}
    places: dict[str, Any] = {}
    for name, kind in kinds.items():
        group = getattr(parallel_state, f"get_{kind}_parallel_group")()
        places |= {f"{name}_group": group, f"{name}_rank": group.rank(), f"{name}_size": group.size()}
    return Topology(rank=dist.get_rank(), world_size=dist.get_world_size(), seed=seed, **places)
