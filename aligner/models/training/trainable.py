"""A model with its optimizer, spread over the ranks of a component: what policy, value and reward models have in common.

Batches are global: every rank holds the whole batch, computes its replica's rows, and results are gathered, so that callers never see the
layout. See `aligner.protocols`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from aligner.data.vision import Vision
from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.models.architecture.divisible import fp8_token_multiple
from aligner.models.modules.chunk import Chunk, WeightGather, WholeChunk
from aligner.models.modules.fusions import note_once
from aligner.models.modules.linear import weight_storage
from aligner.models.modules.noise import noise_of
from aligner.models.modules.packed import check_filled
from aligner.models.modules.router import AuxiliaryLosses, loss_count, routers, take_metrics
from aligner.models.modules.scalar_head import PolicyHead
from aligner.models.modules.shared_prompts import prompt_keys
from aligner.models.training import forward as passes
from aligner.models.training.adam import (
    LossScale,
    averaging_step,
    build_optimizer,
    build_scheduler,
    exchange,
    main_weights,
    settle_files,
)
from aligner.models.training.added import joined, noting_totals, scaled
from aligner.models.training.guard import LOSS_SCALE, OVERFLOWS, SKIPPED, SKIPPED_IN_A_ROW, SPOILT, UPDATES, Guard, GuardConfig
from aligner.models.training.offload import HostMemory, by_device, device_tensors, gradients, optimizer_tensors
from aligner.models.training.optimizer import OptimizerConfig
from aligner.models.training.placement import Splits
from aligner.parallel import mcore, platform
from aligner.parallel.collectives import all_ranks, broadcast_object, gather_assigned_rows, gather_objects, raise_everywhere, reduce_metrics
from aligner.parallel.mcore import tensor_parallel
from aligner.parallel.micro_batches import Family, MicroBatching, Plan, plan, plan_families
from aligner.parallel.topology import Topology
from aligner.protocols import Added, Loss
from aligner.telemetry.metrics import Max, Mean, Metric, Sum, without_values
from aligner.types import Batch, MaskedBatch, PreferenceBatch, Routes, TokenBatch
from aligner.types.rows import num_rows, pad_columns

_SHOWN = 3  # tensors that a message names


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is used: trained with `optimizer`, or frozen where that is None."""

    optimizer: OptimizerConfig | None
    total_steps: int = 1  # optimizer steps of the whole run: the length of the learning-rate schedule
    micro_batch_size: int = 1  # rows per forward pass; like the two below it changes memory and speed, never the numbers
    micro_batch_tokens: int = 0  # where it is not 0: tokens per forward pass
    packing: bool = False
    share_prompts: bool = False
    neftune_alpha: float = 0.0  # noise on the embeddings of training passes (`aligner.models.modules.noise`); 0: none
    temperature: float = 1.0  # of the policy's log-probs
    value_head: PolicyHead | None = None  # beside a policy's output layer
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    replay_routes: bool = False  # those that a batch has; else they are only compared with the router's own
    sees: Vision | None = None  # reads the images of rows
    guard: Guard = field(default_factory=lambda: Guard(GuardConfig()))  # against updates that are not finite
    overlap: bool = field(default_factory=torch.cuda.is_available)  # replicas exchange gradients and weights while they compute


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """What one row has of an output: [S] or [S, K] per token, [K] per sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def generator_state() -> dict[str, Any]:
    """The states of the generators: torch's for the CPU and the device, and Megatron-Core's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generator_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def non_finite_parameters(runners: Sequence[Any], limit: float) -> str:
    """Which trained parameters are not finite, or above `limit` in magnitude (0: any finite one may be); empty where all are sound.

    `runners`: this rank's DDP-wrapped chunks. Before an asynchronous gather each rank has its own share of the update, and of the others'
    shares what it had before: a fault there is found an update later. The same on every rank. Collective: one number is added up.
    """
    buffers = [buffer for runner in runners for buffer in (*runner.buffers, *runner.expert_parallel_buffers)]
    # The distributed optimizer keeps all parameters of a buffer in one tensor.
    flat = [t for b in buffers for t in ([b.param_data] if b.param_data is not None else [p.data for p in b.params])]
    count = (~_sound(flat, limit)).sum()
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(count)
    return _describe(runners, limit) if int(count) else ""


def check_before_save(chunks: Sequence[torch.nn.Module], optimizer: Any, rank: int) -> None:
    """Raise CheckpointError on every rank where a weight, a moment or a main weight of the optimizer on any rank is not finite, or its
    disk fails (`optimizer.nvme_path`)."""
    try:
        settle_files(optimizer)
    except AlignerError as failed:
        raise_everywhere(CheckpointError(f"rank {rank}: {failed}"))
    weights = [p.data for chunk in chunks for p in chunk.parameters()]
    own, saved = [], {"the weights": weights, "the optimizer": optimizer_tensors(optimizer) if optimizer is not None else []}
    for what, tensors in saved.items():
        bad = sum(int((~_sound(own_device, 0.0)).sum()) for own_device in by_device(tensors))
        if bad:
            own.append(f"{bad} of {len(tensors)} tensors of {what}")
    error = f"rank {rank}: {', '.join(own)} are not finite; nothing is saved, the checkpoints before stay" if own else ""
    raise_everywhere(CheckpointError(error) if error else None)


@torch.no_grad()
def _sound(tensors: Iterable[Tensor], limit: float) -> Tensor:
    """Bool [tensors]: whether every element is finite and at most `limit` in magnitude, on the tensors' device."""
    ends = [torch.stack(torch.aminmax(t)).float() for t in tensors if t.is_floating_point() and t.numel()]
    if not ends:
        return torch.ones(1, dtype=torch.bool, device=platform.device())
    largest = torch.stack(ends).abs().amax(dim=1)  # NaN where any element is
    return largest <= (limit or torch.finfo(torch.float32).max)


def _describe(runners: Sequence[Any], limit: float) -> str:
    named = [(name, p.data) for runner in runners for name, p in runner.module.named_parameters() if p.requires_grad and p.numel()]
    sound = _sound([data for _, data in named], limit).tolist() if named else []
    own = [f"{name}: {float(data.abs().max()):.3g}" for (name, data), good in zip(named, sound, strict=True) if not good]
    found = [(rank, entry) for rank, part in enumerate(gather_objects(own)) for entry in part]
    total = sum(gather_objects(len(named)))
    shown = ", ".join(f"{entry} on rank {rank}" for rank, entry in found[:_SHOWN])
    above = f", or above guard.max_weight={limit:g}" if limit else ""
    return f"{len(found)} of {total} parameters that are not finite{above} (largest magnitudes: {shown})"


class TrainableModel:
    """The chunks of one model on this rank, their optimizer (None for a frozen one) and the rows that this rank computes."""

    def __init__(self, chunks: Sequence[Chunk], topology: Topology, training: Training) -> None:
        optimizer = training.optimizer
        self.topology = topology
        self.chunks = [chunk.to(platform.device()) for chunk in chunks]
        check_filled(self.chunks)
        self.micro_batches = MicroBatching(rows=training.micro_batch_size, tokens=training.micro_batch_tokens, packed=training.packing)
        for chunk in self.chunks:
            chunk.vision = training.sees
        self.version = 0
        self.guard = training.guard
        self.neftune_alpha = training.neftune_alpha
        self.ema_decay = 0.0 if optimizer is None else optimizer.ema_decay
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.runners: list[Any] = list(self.chunks)
        self.config = self.chunks[0].config
        self.splits = Splits(
            cp_rank=topology.cp_rank,
            cp_size=topology.cp_size,
            sequence_parallel_size=topology.tp_size if self.config.sequence_parallel else 1,
            packed=training.packing,
            segmented=self.config.transformer_impl == "local",
            share_prompts=training.share_prompts,
            token_multiple=fp8_token_multiple(self.config) if self.config.fp8 else 1,
            fixed_tokens=training.micro_batch_tokens if self.config.tp_comm_overlap else 0,
        )
        if self.config.fp8:
            note_once(f"products in 8 bits: {self.config.fp8_recipe} scales, {self.config.fp8}", rank=topology.rank)
        self.auxiliary = AuxiliaryLosses(self.chunks, aux=training.router_aux_loss_coef, z=training.router_z_loss_coef)
        for router in routers(self.chunks):
            router.routes.replays = training.replay_routes
        self.host = HostMemory()
        self.loss_scale = LossScale()
        self._everything = HostMemory(kept=self._kept, scratch=lambda: gradients(self.runners) if self.optimizer is not None else ())
        self._shows_weights = optimizer is not None and not optimizer.precision_aware
        self._clips = optimizer is not None and optimizer.clip_grad > 0
        self._max_lr = 0.0 if optimizer is None else optimizer.lr
        if optimizer is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
            return
        self._prepare_training(optimizer, training)

    @property
    def module(self) -> Chunk:
        """The whole model of a rank that holds it in one chunk."""
        (chunk,) = self.chunks
        return chunk

    def _prepare_training(self, optimizer: OptimizerConfig, training: Training) -> None:
        # Of transformers' own modules a parameter may get no gradient, or be read outside of its module's call; a tower gets none from rows
        # without images.
        overlap = training.overlap and not any(isinstance(chunk, WholeChunk) or chunk.trains_vision for chunk in self.chunks)
        gathers = overlap and optimizer.distributed and self.topology.dp_size * self.topology.cp_size > 1
        settings = mcore.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.distributed,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gathers,
            check_for_nan_in_grad=False,  # it raises on one rank and leaves the others waiting: see _find_non_finite
        )
        self.runners = [
            # Buckets pay where a reduction can start while earlier layers are still computed: in the first chunk there is nothing left to.
            mcore.DistributedDataParallel(self.config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        self.optimizer = build_optimizer(optimizer, self.runners, self.config.params_dtype, head=training.value_head)
        self.scheduler = build_scheduler(optimizer, self.optimizer, training.total_steps)
        if warning := optimizer.shortfall(training.total_steps):
            note_once(warning, rank=self.topology.rank)
        if gathers:
            for chunk, runner in zip(self.chunks, self.runners, strict=True):
                chunk.gather = WeightGather(runner)
        self.config.finalize_model_grads_func = mcore.finalize_model_grads
        self.loss_scale = LossScale(self.optimizer)
        if self.loss_scale.is_on:
            self.config.grad_scale_func = self.optimizer.scale_loss
        if overlap:
            no_syncs = [runner.no_sync for runner in self.runners]
            self.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        if optimizer.offload:
            self.host = HostMemory(kept=self._state, scratch=lambda: gradients(self.runners))

    def run(self, batch: Batch, outputs: passes.Outputs, field: str) -> Tensor:
        """The output `field` of every row, on the CPU: [B, S] for a per-token field, [B, K] for scores. Collective."""
        columns = (self.chunks[-1].head.num_outputs,) if field == "scores" else (batch.tokens.shape[1],)
        return self.run_fields(batch, outputs, {field: Field(shape=columns)})[field]

    def run_fields(self, batch: Batch, outputs: passes.Outputs, fields: Mapping[str, Field]) -> dict[str, Tensor]:
        """Several outputs of every row from one pass, on the CPU, by name. Collective."""
        layout = self._plan(batch)
        results = passes.forward(self.runners, self._micro_batches(batch, layout), outputs)
        rows = [[row for part in replica for row in part] for replica in layout]
        found = {}
        for name, one in fields.items():
            tensors = [getattr(result, name) for result in results]
            tensors = [pad_columns(t, one.shape[0]) if t.shape[1:] != one.shape else t for t in tensors]
            num_own = len(rows[self.topology.dp_rank])
            local = torch.cat(tensors) if tensors else torch.zeros(num_own, *one.shape, dtype=one.dtype, device=platform.device())
            if self.topology.pp_size > 1:  # only the last stage has them
                torch.distributed.broadcast(local, group=self.topology.pp_group, group_src=self.topology.pp_size - 1)
            found[name] = gather_assigned_rows(local, rows, group=self.topology.dp_group).cpu()
        return found

    def train_step(self, batch: Batch, outputs: passes.Outputs, loss: Loss, added: Sequence[Added] = ()) -> dict[str, Metric]:
        """One optimizer step over all rows. Collective. Returns the losses' metrics over the global batches and `optim/*`.

        If a loss or the gradient is not finite, the guard raises RunHalted or RollBack on all ranks, or omits the update: everything is as
        before then, and no value of this batch is reported. So is an update whose float16 gradient overflows, which lowers the loss scale.
        An update that leaves a parameter non-finite or absurdly large cannot be undone: the guard never continues from it.
        Raises ConfigError if a data-parallel replica would get no row.
        """
        loss, added = joined(batch, loss, added), [one for one in added if one.batch is not None]
        others = [one.batch for one in added]
        if (smallest := min(num_rows(one) // _unit(one) for one in (batch, *others))) < self.topology.dp_size:
            raise ConfigError(f"a training batch of {smallest} is smaller than the {self.topology.dp_size} data-parallel replicas")
        self.wake()
        generators = generator_state()
        for runner in self.runners:
            runner.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.auxiliary.weigh(self.config, batch, loss, others)
        totals: list[Tensor] = []
        parts = self._training_parts(batch, loss, added, totals)
        metrics = passes.forward_backward(self.runners, parts, outputs, noting_totals(loss, totals), counts=self.topology.cp_rank == 0)
        problem, is_of_gradient = self._find_non_finite(totals)
        if problem:
            set_generator_state(generators)
            if is_of_gradient and self.loss_scale.back_off():
                return self._metrics(batch, metrics) | self._optimizer_metrics(None, overflowed=True)
            self.guard.refuse(problem)
            return without_values(self._metrics(batch, metrics)) | self._optimizer_metrics(None)
        self.guard.accept()
        self.scheduler.step(1)  # before the update: the first update of a warm-up must not have a learning rate of 0
        _, grad_norm, _ = averaging_step(self.optimizer, self.ema_decay)
        self.version += 1
        spoilt = non_finite_parameters(self.runners, self.guard.max_weight)
        found = self._metrics(batch, metrics)
        for chunk in self.chunks:  # now that the host waits for no number any more
            if chunk.gather is not None:
                chunk.gather.start()
        if spoilt:
            self.settle()
            self.guard.spoilt(f"optimizer step {self.version} was made and left {spoilt}")
            return without_values(found) | {SPOILT: Sum(total=1)} | self._optimizer_metrics(None)
        return found | self._optimizer_metrics(float(grad_norm))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the moving average of its weights in their place, if it keeps one (`optimizer.ema_decay`). Collective."""
        if not self.ema_decay:
            yield
            return
        self._exchange_average()
        try:
            yield
        finally:
            self._exchange_average()

    def _exchange_average(self) -> None:
        self.wake()
        self.settle()
        exchange(self.optimizer)
        for chunk, runner in zip(self.chunks, self.runners, strict=True):
            if chunk.gather is None:
                runner.start_param_sync()
            else:
                chunk.gather.start()
        self.settle()

    def settle(self) -> None:
        """Wait for weights that an update has left under way between the replicas: before they are read other than by `train_step`."""
        for chunk in self.chunks:
            chunk.settle()

    def _optimizer_metrics(self, grad_norm: float | None, *, overflowed: bool = False) -> dict[str, Metric]:
        groups = self.optimizer.param_groups
        usual = [group["lr"] for group in groups if group["max_lr"] == self._max_lr]  # LoRA+ and a head have others
        rate = {"optim/lr": Max(maximum=min(usual or [group["lr"] for group in groups]))}
        if self.loss_scale.is_on:
            rate |= {LOSS_SCALE: Max(maximum=self.loss_scale.value), OVERFLOWS: Sum(total=int(overflowed))}
        if grad_norm is not None:
            # Without clipping Megatron-Core may not measure the norm, and gives 0, which would look like no gradient.
            norm = {"optim/grad_norm": Mean(total=grad_norm, count=1)} if grad_norm or self._clips else {}
            return {**norm, **rate, SKIPPED: Sum(total=0), UPDATES: Sum(total=1)}
        made: dict[str, Metric] = {"optim/grad_norm": Mean(total=0.0, count=0), **rate, SKIPPED: Sum(total=int(not overflowed))}
        in_a_row = {} if overflowed else {SKIPPED_IN_A_ROW: Max(maximum=self.guard.skipped_in_a_row)}
        return {**made, **in_a_row, UPDATES: Sum(total=0)}

    def fingerprint(self) -> list[int]:
        """Sums of the bit patterns of this rank's part of what the optimizer updates: the float32 main weights where the model's are
        bfloat16, so that an update which these do not show yet counts. Empty of a frozen model, and where the optimizer hides a part.
        """
        if not self._shows_weights:
            return []
        self.wake()
        sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        parameters = [p for p in main_weights(self.optimizer) if p.numel()]
        sums = [p.view(sizes[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
        return [number for own_device in by_device(sums) for number in torch.stack(own_device).tolist()]

    def sleep(self) -> None:
        """Between training phases: move what only training needs to host memory, where the optimizer's config asks for it."""
        self.host.move_out()

    def wake(self) -> None:
        """Bring back what `sleep` moved. `train_step` and checkpoints call it themselves."""
        self.host.move_in()

    def _state(self) -> list[Tensor]:
        """The optimizer's; float32 weights of a bfloat16 model (a scalar head's) are trained in place, and stay with the others."""
        weights = {p.data.untyped_storage().data_ptr() for chunk in self.chunks for p in chunk.parameters()}
        return [tensor for tensor in device_tensors(self.optimizer) if tensor.untyped_storage().data_ptr() not in weights]

    def _kept(self) -> Iterator[Tensor]:
        yield from weight_storage(self.chunks)
        if self.optimizer is not None:
            yield from device_tensors(self.optimizer)

    def leave_device(self) -> None:
        """Wait in host memory, weights and all: another process computes on the device. Until `enter_device`, only that may be called."""
        self.settle()
        self.sleep()
        self._everything.move_out()

    def enter_device(self) -> None:
        """Come back; what `sleep` has moved stays where it is until it is needed."""
        self._everything.move_in()

    def _metrics(self, batch: Batch, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """The loss's, reduced over replicas and broadcast from the last pipeline stage, which alone has them; and the routers'."""
        topology = self.topology
        if topology.pp_rank == topology.pp_size - 1:
            metrics = reduce_metrics(metrics, topology.dp_group, platform.device())
        if topology.pp_size > 1:
            last = torch.distributed.get_global_rank(topology.pp_group, topology.pp_size - 1)
            metrics = broadcast_object(metrics, src=last, group=topology.pp_group)
        has_routes = Routes.name in batch.extras
        return metrics | self.auxiliary.metrics() | (take_metrics(routers(self.chunks)) if has_routes else {})

    def _find_non_finite(self, totals: Sequence[Tensor]) -> tuple[str, bool]:
        """(the non-finite parts of this update, the same on every rank, empty if none; whether no loss is one of them).

        `totals`: this rank's losses. Collective.
        """
        norms = [gradient.norm() for gradient in gradients(self.runners)]
        finite = [number.isfinite() for number in (*norms, *totals)]
        if all_ranks(torch.stack(finite).all() if finite else True, platform.device()):  # one number is read
            return "", False
        norm, bad = math.hypot(*map(float, norms)), sum(not one for one in finite[len(norms) :])
        own = f"its norm on rank {self.topology.rank}: {norm}" + (f", the loss of {bad} of {len(totals)} micro-batches too" if bad else "")
        found = gather_objects((math.isfinite(norm), bool(bad), own))
        what = "the loss" if all(norm_is_finite for norm_is_finite, _, _ in found) else "the gradient"
        # Gradients have been summed over replicas: a rank whose own loss is at fault comes first.
        ordered = sorted(found, key=lambda one: not one[1])
        told = [text for norm_is_finite, has_bad, text in ordered if has_bad or not norm_is_finite]
        more = f" and {len(told) - 3} more ranks" if len(told) > 3 else ""
        text = (
            f"{what} of optimizer step {self.version + 1} is not finite ({'; '.join(told[:3])}{more}); "
            f"the weights are those of step {self.version}"
        )
        return text, not any(has_bad for _, has_bad, _ in found)

    def _plan(self, batch: Batch) -> Plan:
        replicas = self.topology.dp_size
        if self.splits.share_prompts and not isinstance(batch, TokenBatch):
            # Families small enough that replicas can have about equal shares of them.
            capacity = min(self.micro_batches.tokens, -(-int(batch.lengths.sum()) // (2 * replicas)) if replicas > 1 else math.inf)
            return plan_families(families(batch, unit=_unit(batch), capacity=int(capacity)), self.micro_batches, num_replicas=replicas)
        options = {"num_replicas": replicas, "unit": _unit(batch), "multiple": self.splits.row_multiple}
        return plan(batch.lengths.tolist(), self.micro_batches, **options)

    def _training_parts(self, batch: Batch, loss: Loss, added: Sequence[Added], totals: list[Tensor]) -> list[passes.MicroBatch]:
        """The micro-batches of a step, and then those of what is added, whose losses also go to `totals`."""
        layout, others, shape = self._plan(batch), [self._plan(one.batch) for one in added], (0, 0)
        for _ in range(2 if added and self.topology.pp_size > 1 else 1):  # the second time all have the largest shape
            own = self._micro_batches(batch, layout, shape)
            more = [self._micro_batches(one.batch, other, shape) for one, other in zip(added, others, strict=True)]
            rows, lengths = zip(*(part.placement.whole_shape for part in chain(own, *more)), strict=True)
            shape = max(rows), max(lengths)
        count = loss_count(batch, loss) if added else 0
        losses = [noting_totals(scaled(one, count), totals) for one in added]
        others = [replace(part, added=of_part) for parts, of_part in zip(more, losses, strict=True) for part in parts]
        return others + self._with_noise(own, layout)  # in the last, every parameter has a gradient: replicas may wait for all of them

    def _micro_batches(self, batch: Batch, layout: Plan, at_least: tuple[int, int] = (0, 0)) -> list[passes.MicroBatch]:
        own = layout[self.topology.dp_rank]
        count = len(own)
        if self.config.num_moe_experts:  # ranks of different replicas exchange tokens: they must make the same number of passes
            count = max(len(replica) for replica in layout)
        if len(self.chunks) > 1:  # the interleaved schedule works in groups of pp micro-batches
            count = -(-count // self.topology.pp_size) * self.topology.pp_size
        fixed = {"fixed_shape": self.topology.pp_size > 1, "at_least": at_least}
        return passes.cut(batch, own, self.splits, count=count, unit=_unit(batch), **fixed)

    def _with_noise(self, parts: list[passes.MicroBatch], layout: Plan) -> list[passes.MicroBatch]:
        if not self.neftune_alpha:
            return parts
        own, common = layout[self.topology.dp_rank], {"alpha": self.neftune_alpha, "seed": (self.topology.seed, self.version)}
        noisy = [
            replace(part, noise=noise_of(part.placement.token_of, part.host.lengths, rows, width=part.host.tokens.shape[1], **common))
            for part, rows in zip(parts, own, strict=False)
        ]
        return noisy + parts[len(own) :]  # fillers count nothing


def families(batch: MaskedBatch, *, unit: int, capacity: int) -> list[Family]:
    """Rows of the whole batch by their prompts, `unit` neighbours always together; cut where one would have more than `capacity` tokens."""
    lengths, prompts = batch.lengths.tolist(), prompt_keys(batch)
    by_prompt: dict[object, list[int]] = {}
    for start in range(0, len(lengths), unit):
        keys = set(prompts[start : start + unit])
        by_prompt.setdefault(keys.pop() if len(keys) == 1 else start, []).append(start)
    found: list[Family] = []
    for key, starts in by_prompt.items():
        shared = key[0] - 1 if isinstance(key, tuple) else 0
        for start in starts:
            rows = tuple(range(start, start + unit))
            added = sum(lengths[row] - shared for row in rows)
            if start != starts[0] and found[-1].size + added <= capacity:
                found[-1] = Family(rows=found[-1].rows + rows, size=found[-1].size + added)
            else:
                found.append(Family(rows=rows, size=shared + added))
    return found


def _unit(batch: Batch) -> int:
    return 2 if isinstance(batch, PreferenceBatch) else 1
