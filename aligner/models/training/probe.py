"""The trainer's side of a comparison: the outputs of Megatron-Core's modules in an ordinary forward pass, through hooks.

Modules that Transformer Engine fuses into one (a norm into the linear layer behind it) show only what the fused one gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aligner.models.architecture import rope
from aligner.models.config import Architecture
from aligner.models.modules.build import rounded_scale
from aligner.models.modules.chunk import Chunk
from aligner.models.modules.layers import attention_of
from aligner.models.training import forward as passes
from aligner.models.training.placement import Placement
from aligner.models.training.tracing import SPLIT, Operation, Place, Tap, Trace
from aligner.models.training.trainable import TrainableModel
from aligner.parallel import platform
from aligner.parallel.collectives import gather_columns
from aligner.parallel.logprobs import shaped
from aligner.parallel.mcore import IdentityOp
from aligner.parallel.micro_batches import plan
from aligner.types import MaskedBatch, TokenOutputs
from aligner.types.rows import upload

_Hooked = tuple[torch.nn.Module, Operation, bool]  # the module, what is looked at, whether that is what goes in


def trace_model(model: TrainableModel, batch: MaskedBatch, trace: Trace) -> None:
    """Run the policy's forward pass over all rows of `batch` on every data-parallel replica, and add its operations' outputs to `trace`.

    Collective. The trace then holds this rank's share: its pipeline stage's layers, its context-parallel part of the sequences.
    """
    rows = plan(batch.lengths.tolist(), model.micro_batches, num_replicas=1, unit=1, multiple=model.splits.row_multiple)[0]
    parts = passes.cut(batch, rows, model.splits, count=len(rows), unit=1, fixed_shape=model.topology.pp_size > 1)
    # The interleaved schedule works in groups of pp micro-batches: the same one as often.
    times = model.topology.pp_size if len(model.chunks) > 1 else 1
    for part, numbers in zip(parts, rows, strict=True):
        look = _Look(model, part.placement, numbers, width=batch.tokens.shape[1], own_width=part.batch.tokens.shape[1], trace=trace)
        with ExitStack() as stack:
            for chunk in model.chunks:
                stack.enter_context(_hooks(chunk, look.add))
            passes.forward(model.runners, [part] * times, look.last)


class _Look:
    """Where the tokens of one micro-batch lie, and what becomes of outputs that are in the order of its slots."""

    def __init__(self, model: TrainableModel, placement: Placement, rows: list[int], *, width: int, own_width: int, trace: Trace) -> None:
        self._chunk: Chunk = model.chunks[-1]
        self._tp = self._chunk.pg_collection.tp
        self._trace = trace
        own = placement.token_of
        row = torch.tensor(rows, device=own.device)[own.clamp(min=0) // own_width]
        tokens = torch.where(own >= 0, row * width + own.clamp(min=0) % own_width, -1)  # flat positions in the whole batch
        self._tokens = upload(tokens.t().reshape(-1), platform.device())  # Megatron-Core's order: [L, rows]

    def add(self, operation: Operation, layer: int, output: Tensor) -> None:
        tokens = self._tokens
        if operation in SPLIT:
            rows = self._trace.chosen(tokens)  # before ranks exchange anything
            output, tokens = gather_columns(output.reshape(len(tokens), -1)[rows], self._tp), tokens[rows]
        elif self._chunk.config.sequence_parallel:
            tokens = tokens.chunk(self._tp.size())[self._tp.rank()]
        self._trace.add(Place(layer, operation), tokens, output.reshape(len(tokens), -1))

    def last(self, hidden: Tensor, part: passes.MicroBatch) -> TokenOutputs:
        chunk = self._chunk
        rows = self._trace.chosen(self._tokens)
        selected = chunk.whole_sequences(hidden, grads_are_partial=False).reshape(len(self._tokens), -1)[rows]
        weight, _ = chunk.vocabulary_weight()
        products, architecture = chunk.arithmetic.project(selected, weight).float(), chunk.architecture
        own = shaped(products, scale=architecture.logits_scale, softcap=architecture.logits_softcap)
        logits = gather_columns(own, self._tp)
        self._trace.add(Place(chunk.architecture.num_layers, Operation.logits), self._tokens[rows], logits)
        return TokenOutputs()


@contextmanager
def _hooks(chunk: Chunk, tap: Tap) -> Iterator[None]:
    layers = chunk.decoder.layers
    hooked: list[tuple[int, _Hooked]] = [(layer.layer_number - 1, one) for layer in layers for one in _of_layer(chunk.architecture, layer)]
    if chunk.post_process and chunk.decoder.final_layernorm is not None:
        hooked.append((chunk.architecture.num_layers, (chunk.decoder.final_layernorm, Operation.final_norm, False)))
    with ExitStack() as stack:
        if chunk.pre_process:
            stack.callback(chunk.embedding.register_forward_hook(partial(_embedded, tap, chunk.architecture.embedding_scale)).remove)
        for number, (module, operation, before) in hooked:
            look = partial(_look, tap, operation, number, rope.factor(chunk.architecture, number))
            stack.callback((module.register_forward_pre_hook if before else module.register_forward_hook)(look).remove)
        for layer in (layer for layer in layers if chunk.architecture.has_experts(layer.layer_number - 1)):
            stack.callback(layer.mlp.router.register_forward_hook(partial(_routed, tap, layer.layer_number - 1)).remove)
        yield


def _of_layer(architecture: Architecture, layer: Any) -> list[_Hooked]:
    number = layer.layer_number - 1
    found: list[_Hooked] = [
        (layer.input_layernorm, Operation.input_norm, False),
        (layer.pre_mlp_layernorm, Operation.attention_residual, True),
        (layer.pre_mlp_layernorm, Operation.mlp_norm, False),
        (layer.mlp, Operation.mlp, False),
        (layer, Operation.residual, False),
    ]
    found += [(getattr(layer.self_attention, name), what, False) for name, what in attention_of(architecture, number).traced.items()]
    if not architecture.has_experts(number):
        found.append((layer.mlp.linear_fc2, Operation.activation, True))
    # What stands in for a norm that is fused with the linear layer behind it returns its input.
    return [one for one in found if one[2] or not (one[0] is None or isinstance(one[0], IdentityOp))]


def _look(tap: Tap, operation: Operation, number: int, factor: float, _: torch.nn.Module, inputs: tuple, output: Any = None) -> None:
    """A hook, before or after a module."""
    if output is None:
        tap(operation, number, inputs[0])
        return
    if operation is Operation.attention:  # the factor on cosines and sines is in its scale
        tap(Operation.queries, number, inputs[0] * factor)
        tap(Operation.keys, number, inputs[1] * factor)
    if isinstance(output, tuple):  # with a bias that is added later; a layer's with a context, which is not
        output = output[0] if output[1] is None or operation is Operation.residual else output[0] + output[1]
    tap(operation, number, output)


def _embedded(tap: Tap, scale: float, _: torch.nn.Module, __: tuple, output: Tensor) -> None:
    tap(Operation.embedding, -1, output * rounded_scale(scale, output.dtype))


def _routed(tap: Tap, number: int, _: torch.nn.Module, __: tuple, output: tuple) -> None:
    tap(Operation.router, number, output[0])
