"""A decode step on the compiled kernels: one kernel between any two matrix products, in reused buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aligner.models.training.tracing import Operation, Tap
from aligner.rollout.builtin.attention import DecodeBatch, PagedKV
from aligner.rollout.builtin.native.library import Cache, Library, Model, Step
from aligner.rollout.builtin.weights import Affine, LayerWeights, ModelWeights, tensors

# The kernels' own matrix products read the matrix once, which BLAS does not:
FEW_ROWS = 12  # up to these with sums across vectors,
MANY_ROWS = 64  # up to these with vectors across rows; BLAS is made for more


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """Parts of a step that remain with the decoder."""

    embed: Callable[[Tensor, Tensor], Tensor]  # tokens, positions -> [B, H]
    reduce: Callable[[Tensor], Tensor]  # in place, over the ranks that share the model
    experts: Callable[[LayerWeights, int, Tensor], Tensor]  # a mixture's output for normed [B, H], of all ranks; the layer's number


class Buffers:
    """Room for up to `capacity` rows, filled from the start."""

    def __init__(self, capacity: int, weights: ModelWeights, model: Model, room: int, threads: int) -> None:
        heads = model.groups * model.head_dim
        inner = max((layer.experts[0].down.weight.shape[1] for layer in weights.layers if layer.router is None), default=0)
        widths = {
            "x": model.hidden,
            "delta": model.hidden,
            "normed": model.hidden,
            "mixed": heads * (model.queries + 2),
            "attended": heads * model.queries,
            "up": inner * (1 + model.gated),
            "inner": inner,
        }
        self.capacity, self.room, self.threads = capacity, room, threads
        self.rows = {name: torch.empty(capacity, width) for name, width in widths.items()}
        self.at = {name: tensor.data_ptr() for name, tensor in self.rows.items()}
        self.scores = torch.empty(threads, room)
        self.columns = torch.empty(max(widths.values()) * (min(capacity, MANY_ROWS) + 15))
        self.step = Step(room=room, mixed=self.at["mixed"], attended=self.at["attended"], scores=self.scores.data_ptr())
        self._views: dict[tuple[str, int], Tensor] = {}

    def view(self, name: str, rows: int) -> Tensor:
        """The first rows of a buffer."""
        if (name, rows) not in self._views:
            self._views[name, rows] = self.rows[name][:rows]
        return self._views[name, rows]


class Matrix:
    """A weight [outputs, inputs] for both products."""

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.address = weight.data_ptr()
        self.transposed = weight.detach().t()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm(weights: Affine | None) -> tuple[int | None, int | None]:
    return (None, None) if weights is None else (_address(weights.weight), _address(weights.bias))


class Layer:
    """Addresses of one layer's weights and pages."""

    def __init__(self, number: int, weights: LayerWeights, keys: Tensor, values: Tensor) -> None:
        self.number = number
        self.weights = weights
        self.input_norm, self.mlp_norm = _norm(weights.input_norm), _norm(weights.mlp_norm)
        self.qkv, self.qkv_bias = Matrix(weights.qkv.weight), _address(weights.qkv.bias)
        self.attention_out, self.attention_bias = Matrix(weights.attention_out.weight), _address(weights.attention_out.bias)
        cache = Cache(*_norm(weights.q_norm), *_norm(weights.k_norm), keys.data_ptr(), values.data_ptr())
        self.cache, self._cache = ctypes.byref(cache), cache
        self.is_dense = weights.router is None
        if self.is_dense:
            dense = weights.experts[0]
            self.up, self.up_bias = Matrix(dense.up.weight), _address(dense.up.bias)
            self.down, self.down_bias = Matrix(dense.down.weight), _address(dense.down.bias)


class NativeDecode:
    """Decode steps of one model, float32 on the CPU. Addresses are looked up again if weights or caches move between two steps."""

    def __init__(self, library: Library, weights: ModelWeights, model: Model, outside: Outside, *, max_sequence_length: int) -> None:
        self._library = library
        self.draw = library.draw  # what the logits are for
        self._weights = weights
        self._model, self._model_at = model, ctypes.byref(model)
        self._outside = outside
        self._room = (max_sequence_length + 15) // 16 * 16 * model.groups * model.queries
        self._tensors = list(tensors(weights))
        self._known: tuple[int, ...] = ()
        self._layers: list[Layer] = []
        self._output: Matrix
        self._buffers: Buffers | None = None

    def __call__(self, batch: DecodeBatch, cache: PagedKV, vocabulary: int, tap: Tap | None = None) -> Tensor:
        """This rank's logits float32 [B, its tokens], at most `vocabulary` of them. `tap` sees the buffers between kernels."""
        rows, threads = batch.tokens.shape[0], torch.get_num_threads()
        self._look_up(cache, vocabulary)
        buffers = self._room_for(rows, threads)
        positions, pages = batch.positions.contiguous(), batch.pages.contiguous()
        step = buffers.step
        step.rows, step.columns, step.positions, step.pages = rows, pages.shape[1], positions.data_ptr(), pages.data_ptr()
        buffers.view("x", rows).copy_(self._outside.embed(batch.tokens, positions))
        delta: tuple[int | None, int | None] = (None, None)
        for layer in self._layers:
            self._add_norm(buffers, rows, delta, layer.input_norm)
            if tap is not None:
                tap(Operation.residual if layer.number else Operation.embedding, layer.number - 1, buffers.view("x", rows))
                tap(Operation.input_norm, layer.number, buffers.view("normed", rows))
            self._linear(buffers, rows, "normed", layer.qkv, "mixed")
            self._library.attend(self._model_at, layer.cache, ctypes.byref(step), layer.qkv_bias, threads)
            if tap is not None:
                tap(Operation.attention, layer.number, buffers.view("attended", rows))
            self._linear(buffers, rows, "attended", layer.attention_out, "delta")
            self._outside.reduce(buffers.view("delta", rows))
            self._add_norm(buffers, rows, (buffers.at["delta"], layer.attention_bias), layer.mlp_norm)
            if tap is not None:
                tap(Operation.attention_residual, layer.number, buffers.view("x", rows))
                tap(Operation.mlp_norm, layer.number, buffers.view("normed", rows))
            delta = buffers.at["delta"], self._feed_forward(buffers, rows, layer, tap)
        self._add_norm(buffers, rows, delta, _norm(self._weights.final_norm))
        if tap is not None:
            tap(Operation.residual, len(self._layers) - 1, buffers.view("x", rows))
            tap(Operation.final_norm, len(self._layers), buffers.view("normed", rows))
        logits = torch.empty(rows, self._output.outputs)
        self._product(buffers, rows, "normed", self._output, logits)
        return logits

    def _feed_forward(self, buffers: Buffers, rows: int, layer: Layer, tap: Tap | None) -> int | None:
        """Fills `delta`; returns the address of the bias to add to it."""
        if not layer.is_dense:
            buffers.view("delta", rows).copy_(self._outside.experts(layer.weights, layer.number, buffers.view("normed", rows)))
            return None
        self._linear(buffers, rows, "normed", layer.up, "up")
        sizes = (rows, layer.down.inputs)
        self._library.activate(self._model_at, *sizes, buffers.at["up"], layer.up_bias, buffers.at["inner"], buffers.threads)
        if tap is not None:
            tap(Operation.activation, layer.number, buffers.view("inner", rows))
        self._linear(buffers, rows, "inner", layer.down, "delta")
        self._outside.reduce(buffers.view("delta", rows))
        return layer.down_bias

    def _add_norm(self, buffers: Buffers, rows: int, delta: tuple[int | None, int | None], norm: tuple[int | None, int | None]) -> None:
        at = buffers.at
        self._library.add_norm(self._model_at, rows, at["x"], *delta, *norm, at["normed"], buffers.threads)

    def _linear(self, buffers: Buffers, rows: int, source: str, matrix: Matrix, target: str) -> None:
        self._product(buffers, rows, source, matrix, buffers.view(target, rows))

    def _product(self, buffers: Buffers, rows: int, source: str, matrix: Matrix, out: Tensor) -> None:
        sizes = (rows, matrix.inputs, matrix.outputs)
        if rows <= FEW_ROWS:
            self._library.linear(*sizes, buffers.at[source], matrix.address, out.data_ptr(), buffers.threads)
        elif rows <= MANY_ROWS:
            columns = buffers.columns.data_ptr()
            self._library.wide_linear(*sizes, buffers.at[source], matrix.address, out.data_ptr(), columns, buffers.threads)
        else:
            torch.mm(buffers.view(source, rows), matrix.transposed, out=out)

    def _room_for(self, rows: int, threads: int) -> Buffers:
        if self._buffers is None or self._buffers.capacity < rows or self._buffers.threads != threads:
            self._buffers = Buffers(rows, self._weights, self._model, self._room, threads)
        return self._buffers

    def _look_up(self, cache: PagedKV, vocabulary: int) -> None:
        """Tensors move when the engine's own weights are allocated again, and by an offload."""
        # A cache of another size may start at the same address, but its later layers do not.
        now = (*(tensor.data_ptr() for tensor in self._tensors), cache.keys.data_ptr(), cache.values.data_ptr(), cache.num_pages)
        if now != self._known:
            self._known = now
            pages = zip(cache.keys, cache.values, strict=True)
            self._layers = [Layer(number, own, *kv) for number, (own, kv) in enumerate(zip(self._weights.layers, pages, strict=True))]
            self._output = Matrix(self._weights.output[:vocabulary])
