"""Micro-batched passes over a model's chunks through Megatron-Core's schedules: one pass after the other, 1F1B or interleaved pipelines.

`outputs` turns the last stage's hidden states and a micro-batch into `TokenOutputs`. Every rank of a replica runs the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aligner.models.modules.noise import Noise
from aligner.models.modules.router import give, routers
from aligner.models.training.placement import Placement, Splits, in_slots, input_lengths, input_shape, place
from aligner.parallel import platform
from aligner.parallel.mcore import DistributedDataParallel, get_forward_backward_func
from aligner.protocols import Loss
from aligner.telemetry.metrics import Metric, merge
from aligner.types import Batch, Images, MaskedBatch, Routes, TokenOutputs
from aligner.types.rows import take_rows, to_device, trim_columns, upload


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, on the device and on the host. A `filler` micro-batch keeps ranks in step and counts nothing.

    `routes` [L, rows, layers, k], on the host, are those of the tokens in the placement's slots; `images` the `Images` of the rows; `noise`
    is added to their embeddings. `added`: the loss of a batch besides the step's (`aligner.protocols.Added`).
    """

    batch: Batch
    host: Batch
    placement: Placement
    filler: bool = False
    routes: Tensor | None = None
    images: Tensor | None = None
    noise: Noise | None = None
    added: Loss | None = None


Outputs = Callable[[Tensor, MicroBatch], TokenOutputs]


def cut(
    batch: Batch,
    rows: Sequence[Sequence[int]],
    splits: Splits,
    *,
    count: int,
    unit: int,
    fixed_shape: bool,
    at_least: tuple[int, int] = (0, 0),
) -> list[MicroBatch]:
    """The micro-batches with these rows, each cut to its own longest sequence, and fillers up to `count` of them.

    `fixed_shape` gives all of them the same input shape, `at_least` this one: pipeline stages exchange activations without announcing their
    sizes.
    """
    parts = [take_rows(batch, torch.tensor(numbers)) for numbers in rows]
    parts = [trim_columns(part, int(part.lengths.max())) for part in parts]
    fillers = [_filler(batch, unit) for _ in range(count - len(parts))]
    everything = [*parts, *fillers]
    shape = None
    if fixed_shape and everything:
        shapes = [at_least, *(input_shape(input_lengths(part, splits), splits) for part in everything)]
        shape = (max(shape[0] for shape in shapes), max(shape[1] for shape in shapes))
    return [_micro_batch(part, splits, shape, filler=number >= len(parts)) for number, part in enumerate(everything)]


def _micro_batch(part: Batch, splits: Splits, shape: tuple[int, int] | None, *, filler: bool) -> MicroBatch:
    placement, own = place(part, splits, shape=shape), dict(part.extras)
    recorded, seen = own.pop(Routes.name, None), own.pop(Images.name, None)  # no loss reads them
    part = replace(part, extras=own)
    routes = None if recorded is None or filler else in_slots(recorded.data, placement)
    images = None if seen is None else torch.zeros_like(seen.data) if filler else seen.data
    device = platform.device()
    placed = placement.to(device)
    return MicroBatch(batch=to_device(part, device), host=part, placement=placed, filler=filler, routes=routes, images=images)


def _filler(batch: Batch, unit: int) -> Batch:
    """One unit of rows of one token, none of which a loss counts."""
    part = trim_columns(take_rows(batch, torch.arange(unit)), 1)
    part = replace(part, lengths=torch.ones_like(part.lengths))
    return replace(part, loss_mask=torch.zeros_like(part.loss_mask)) if isinstance(part, MaskedBatch) else part


def forward(chunks: list[Any], parts: list[MicroBatch], outputs: Outputs) -> list[TokenOutputs]:
    """One `TokenOutputs` per micro-batch (fillers left out) on the last pipeline stage, none elsewhere; no gradient, dropout off."""
    if not parts:
        return []
    was_training = chunks[0].training
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            results = _run(chunks, parts, lambda part: lambda hidden, non_loss_data=True: outputs(hidden, part), forward_only=True)
    finally:
        for chunk in chunks:
            chunk.train(was_training)
    return [result for result, part in zip(results, parts, strict=False) if not part.filler]


def forward_backward(chunks: list[Any], parts: list[MicroBatch], outputs: Outputs, loss: Loss, *, counts: bool) -> dict[str, Metric]:
    """Accumulate gradients of the loss's sum over the micro-batches, finalised (reduced and divided by the global count) by Megatron.

    `counts`: whether this rank's count is part of the global one (a context-parallel group computes one loss together). Only the last
    pipeline stage returns metrics.
    """

    def loss_of(part: MicroBatch) -> Callable:
        def compute(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Metric]]:
            result = (part.added or loss)(outputs(hidden, part), part.batch)
            return result.total, result.count * int(counts), dict(result.metrics)

        return compute

    for chunk in chunks:
        chunk.train()
    metrics = _run(chunks, parts, loss_of, forward_only=False)
    return merge([found for found, part in zip(metrics, parts, strict=False) if not part.filler])


def _run(chunks: list[Any], parts: list[MicroBatch], loss_of: Callable[[MicroBatch], Callable], *, forward_only: bool) -> list[Any]:
    def step(iterator: Any, model: Any) -> tuple[Tensor, Callable]:
        part = next(iterator)
        placed = part.placement
        options = {}
        if part.images is not None and (seen := _unwrapped(model).see(part.host, part.images, placed.token_of)) is not None:
            options["images"] = seen
        if part.noise is not None:
            options["noise"] = part.noise
        if model.config.num_moe_experts:
            options["padding_mask"] = _padding(part, model)
            module, routes = _unwrapped(model), part.routes
            if routes is not None:
                tp = module.pg_collection.tp  # sequence parallelism leaves a part of the slots to this rank's routers
                routes = upload(routes.chunk(tp.size())[tp.rank()] if model.config.sequence_parallel else routes, platform.device())
            give(routers([module]), routes)
        return model(placed.tokens, placed.positions, None, packed_seq_params=placed.packed, **options), loss_of(part)

    rows, length = parts[0].placement.whole_shape
    try:
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(parts) for _ in chunks],
            model=chunks,
            num_microbatches=len(parts),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    finally:
        for router in routers([_unwrapped(chunk) for chunk in chunks]):
            router.routes.forget()


def _padding(part: MicroBatch, model: Any) -> Tensor:
    """Bool [rows, L] for the experts' router, a filler's all True. The first stage splits it over tensor-parallel ranks, others do not."""
    padding, module = part.placement.padding | part.filler, _unwrapped(model)
    if not model.config.sequence_parallel or module.pre_process:
        return padding
    tp = module.pg_collection.tp
    return padding.chunk(tp.size(), dim=1)[tp.rank()].contiguous()


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model
