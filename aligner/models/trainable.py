"""A module with its optimizer, spread over data-parallel ranks: what policy, value and reward models have in common.

Batches are global: every rank holds the whole batch, computes its own contiguous rows, and results are gathered, so that callers never see
the layout. See `aligner.protocols`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aligner.errors import AlignerError, ConfigError
from aligner.metrics import Max, Mean, Metric
from aligner.models import forward as passes
from aligner.models.build import Transformer
from aligner.models.optimizer import OptimizerConfig, build_optimizer, build_scheduler
from aligner.parallel import mcore, platform
from aligner.parallel.collectives import all_ranks, gather_rows, reduce_metrics, shard_bounds
from aligner.parallel.topology import Topology
from aligner.protocols import Loss
from aligner.types import Batch, PreferenceBatch, num_rows, select_rows, to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is used: trained with `optimizer`, or frozen where that is None."""

    optimizer: OptimizerConfig | None
    total_steps: int = 1  # optimizer steps of the whole run: the length of the learning-rate schedule
    micro_batch_size: int = 1  # rows per forward pass; changes memory and speed, never the numbers
    temperature: float = 1.0  # of the policy's log-probs


class TrainableModel:
    """One Megatron module on this rank, its optimizer (None for a frozen one) and the rows that this rank computes."""

    def __init__(self, module: Transformer, topology: Topology, training: Training) -> None:
        optimizer = training.optimizer
        self.topology = topology
        self.module = module.to(platform.device())
        self.micro_batch_size = training.micro_batch_size
        self.version = 0
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.runner: Any = module
        if optimizer is None:
            module.requires_grad_(False)
            return
        self.runner = mcore.DistributedDataParallel(
            module.config,
            mcore.DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=optimizer.distributed,
                overlap_grad_reduce=torch.cuda.is_available(),
                check_for_nan_in_grad=False,  # it raises on one rank and leaves the others waiting: see _require_finite_gradient
            ),
            module,
        )
        self.optimizer = build_optimizer(optimizer, self.runner, module.config.params_dtype)
        self.scheduler = build_scheduler(optimizer, self.optimizer, training.total_steps)
        module.config.finalize_model_grads_func = mcore.finalize_model_grads
        module.config.no_sync_func = self.runner.no_sync if torch.cuda.is_available() else None

    def run(self, batch: Batch, outputs: passes.Outputs, field: str) -> Tensor:
        """The output `field` of every row, on the CPU: [B, S] for a per-token field, [B, K] for scores. Collective."""
        rows, width, unit = num_rows(batch), batch.tokens.shape[1], _unit(batch)
        results = passes.forward(self.runner, self._local_parts(batch, unit), outputs)
        tensors = [getattr(result, field) for result in results]
        if field != "scores":
            tensors = [torch.nn.functional.pad(t, (0, width - t.shape[1]))[:, :width] for t in tensors]
        if not tensors:  # fewer rows than replicas
            tensors = [torch.zeros(0, self._num_columns(field, width), device=platform.device())]
        return gather_rows(torch.cat(tensors), num_rows=rows, group=self.topology.dp_group, unit=unit).cpu()

    def train_step(self, batch: Batch, outputs: passes.Outputs, loss: Loss) -> dict[str, Metric]:
        """One optimizer step over all rows. Collective. Returns the loss's metrics over the global batch and `optim/*`.

        Raises ConfigError where a data-parallel replica would get no row, AlignerError (on every rank, weights unchanged) where the
        gradient is not finite.
        """
        unit = _unit(batch)
        if num_rows(batch) // unit < self.topology.dp_size:
            raise ConfigError(
                f"a training batch of {num_rows(batch) // unit} is smaller than the {self.topology.dp_size} data-parallel replicas"
            )
        self.runner.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = passes.forward_backward(self.runner, self._local_parts(batch, unit), outputs, loss)
        self._require_finite_gradient()
        self.scheduler.step(1)  # before the update: the first update of a warm-up must not have a learning rate of 0
        _, grad_norm, _ = self.optimizer.step()
        self.version += 1
        reduced = reduce_metrics(metrics, self.topology.dp_group, platform.device())
        rate = self.optimizer.param_groups[0]["lr"]
        return reduced | {"optim/grad_norm": Mean(total=float(grad_norm), count=1), "optim/lr": Max(maximum=rate)}

    def _require_finite_gradient(self) -> None:
        norms = [float(buffer.grad_data.norm()) for buffer in (*self.runner.buffers, *self.runner.expert_parallel_buffers)]
        if not all_ranks(all(map(math.isfinite, norms)), platform.device()):
            raise AlignerError(
                f"the gradient of optimizer step {self.version + 1} is not finite (its norm on rank {self.topology.rank}: "
                f"{math.hypot(*norms)}); the weights are those of step {self.version}"
            )

    def _local_parts(self, batch: Batch, unit: int) -> list[Batch]:
        start, stop = shard_bounds(num_rows(batch), shard=self.topology.dp_rank, num_shards=self.topology.dp_size, unit=unit)
        if start == stop:
            return []
        local = to_device(select_rows(batch, start, stop), platform.device())
        multiple = self.topology.tp_size if self.module.config.sequence_parallel else 1
        return passes.micro_batches(local, self.micro_batch_size * unit, column_multiple=multiple)

    def _num_columns(self, field: str, width: int) -> int:
        return self.module.score_head.out_features if field == "scores" else width


def _unit(batch: Batch) -> int:
    return 2 if isinstance(batch, PreferenceBatch) else 1
