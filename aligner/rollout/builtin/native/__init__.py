"""A decode step on compiled kernels (`kernels.h` describes each one): one kernel between any two matrix products, in reused buffers.

The kernels are compiled once for this machine's processor. The library is kept in the user's cache directory under a name derived from
sources, compiler flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from aligner.models.architecture.divisible import unusual
from aligner.models.config import Activation, Architecture, Normalization
from aligner.models.training.tracing import Operation, Tap
from aligner.rollout.builtin.attention import DecodeBatch, PagedKV
from aligner.rollout.builtin.weights import Affine, LayerWeights, ModelWeights, tensors

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: it would let the compiler forget infinities, which mask, and NaN, which must show.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden")
OPENMP = "-fopenmp"
TIMEOUT_SECONDS = 120


class BuildError(Exception):
    """The kernels cannot be compiled here."""


def processor() -> str:
    """The inputs of `-march=native`, as far as they are readable: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def compiled(environment: Mapping[str, str] = os.environ, flags: Sequence[str] = FLAGS) -> Path:
    """The shared library, in `aligner` under XDG_CACHE_HOME or ~/.cache, compiled now unless it exists. Raises BuildError."""
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    if not sources:
        raise BuildError(f"no sources in {SOURCES}")
    text = "\0".join([*(source.read_text() for source in sources), *flags, OPENMP, processor(), environment.get("CC", "")])
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "aligner" / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        try:
            _compile([source for source in sources if source.suffix == ".c"], library, _compiler(environment), flags)
        except OSError as error:
            raise BuildError(f"{library}: {error}") from error
    return library


def _compiler(environment: Mapping[str, str]) -> str:
    wanted = [environment["CC"]] if environment.get("CC") else COMPILERS
    for name in wanted:
        found = shutil.which(name, path=environment.get("PATH"))
        if found:
            return found
    raise BuildError(f"no C compiler: looked for {', '.join(wanted)}")


def _compile(sources: Sequence[Path], library: Path, compiler: str, flags: Sequence[str]) -> None:
    """Ranks may compile at the same time: each compiles to its own file and moves it into place."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=library.stem, suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        for openmp in ([OPENMP], []):  # without OpenMP the kernels have one thread
            command = [compiler, *flags, *openmp, "-o", name, *map(str, sources), "-lm"]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{compiler} did not finish within {TIMEOUT_SECONDS} s") from error
            if result.returncode == 0:
                os.replace(name, library)
                return
        raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
    finally:
        Path(name).unlink(missing_ok=True)


_NORMS = (Normalization.rms_norm, Normalization.layer_norm, Normalization.layer_norm_1p)  # in the order of kernels.h
_ACTIVATIONS = (Activation.silu, Activation.gelu, Activation.gelu_tanh, Activation.squared_relu)
_BLOCK = 128  # sample.c's
_size, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def _structure(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Model = _structure(
    "Model",
    **dict.fromkeys(("hidden", "groups", "queries", "head_dim", "rotated", "page_size", "norm", "activation", "gated"), _size),
    eps=_double,
    cosines=_pointer,
    sines=_pointer,
)
Cache = _structure("Cache", **dict.fromkeys(("q_norm", "q_norm_bias", "k_norm", "k_norm_bias", "keys", "values"), _pointer))
Step = _structure(
    "Step",
    **dict.fromkeys(("rows", "columns", "room"), _size),
    **dict.fromkeys(("positions", "rotary", "pages", "mixed", "attended", "scores"), _pointer),
)


class Library:
    """The kernels' entry points. They take addresses: tensors must be float32, contiguous, on the CPU and outlive the call."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)

        def function(name: str, *types: type) -> Callable[..., None]:
            found = loaded[f"aligner_{name}"]
            found.argtypes, found.restype = types, None
            return found

        pointers = [_pointer] * 6
        self.linear = function("linear", _size, _size, _size, *pointers[:3], _size)
        self.wide_linear = function("wide_linear", _size, _size, _size, *pointers[:4], _size)
        self.add_norm = function("add_norm", _pointer, _size, *pointers, _size)
        self.activate = function("activate", _pointer, _size, _size, *pointers[:3], _size)
        self.attend = function("attend", *pointers[:4], _size)
        self._draw = function("draw", _size, _size, _pointer, _pointer, _double, *pointers[:5], _size)

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float, *, raw: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token of each row by inverting the cumulative distribution, as the sampler does without top-k and top-p.

        Args:
            logits: float32 [B, V] on the CPU.
            uniforms: float64 [B] in [0, 1); not read if `temperature` is 0 (greedy).
            raw: whether log-probs at temperature 1 are wanted too.

        Returns:
            (tokens int64 [B], log-probs at `temperature` (at 1 for greedy) float32 [B], raw log-probs float32 [B] or None). A row with NaN
            gets NaN log-probs.
        """
        rows, vocabulary = logits.shape
        if logits.dtype != torch.float32 or uniforms.dtype != torch.float64 or uniforms.shape != (rows,):
            raise ValueError(f"draw: logits {logits.dtype} {[*logits.shape]} and uniforms {uniforms.dtype} {[*uniforms.shape]}")
        logits, uniforms, threads = logits.contiguous(), uniforms.contiguous(), torch.get_num_threads()
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        raw_logprobs = torch.empty(rows) if raw else None
        weights = torch.empty(threads * vocabulary)
        sums = torch.empty(threads * -(-vocabulary // _BLOCK), dtype=torch.float64)
        outputs = (tokens.data_ptr(), logprobs.data_ptr(), None if raw_logprobs is None else raw_logprobs.data_ptr())
        scratch = (weights.data_ptr(), sums.data_ptr())
        self._draw(rows, vocabulary, logits.data_ptr(), uniforms.data_ptr(), temperature, *outputs, *scratch, threads)
        return tokens, logprobs, raw_logprobs


@functools.cache
def load() -> Library | None:
    """The kernels, or None if they cannot be compiled or loaded (logged once)."""
    try:
        return Library(str(compiled()))
    except (BuildError, OSError) as error:
        logging.getLogger(__name__).warning("rollouts compute without the compiled CPU kernels: %s", error)
        return None


def fits(weights: ModelWeights, architecture: Architecture) -> bool:
    """Whether the kernels support this model with these weights."""
    layer = weights.layers[0]
    if unusual(architecture) or not isinstance(layer.attention_out.weight, Tensor):  # packed, or rounded
        return False
    used = (weights.embedding, weights.output, layer.qkv.weight, layer.attention_out.weight, layer.experts[0].up.weight)
    return all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in used)


def model_of(architecture: Architecture, *, groups: int, queries: int, page_size: int, rotary: tuple[Tensor, Tensor] | None) -> Model:
    """The sizes of one rank's share; `rotary` are the tables, which must outlive it."""
    cosines, sines = rotary or (None, None)
    return Model(
        hidden=architecture.hidden_size,
        groups=groups,
        queries=queries,
        head_dim=architecture.head_dim,
        rotated=0 if cosines is None else cosines.shape[-1],
        page_size=page_size,
        norm=_NORMS.index(architecture.normalization),
        activation=_ACTIVATIONS.index(architecture.activation),
        gated=architecture.gated_mlp,
        eps=architecture.norm_eps,
        cosines=None if cosines is None else cosines.data_ptr(),
        sines=None if sines is None else sines.data_ptr(),
    )


# The kernels' own matrix products read the matrix once, which BLAS does not:
FEW_ROWS = 12  # up to these with sums across vectors,
MANY_ROWS = 64  # up to these with vectors across rows; BLAS is made for more


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
        self.qkv, self.qkv_bias = weights.qkv.weight, _address(weights.qkv.bias)
        self.attention_out, self.attention_bias = weights.attention_out.weight, _address(weights.attention_out.bias)
        cache = Cache(*_norm(weights.q_norm), *_norm(weights.k_norm), keys.data_ptr(), values.data_ptr())
        self.cache, self._cache = ctypes.byref(cache), cache
        self.is_dense = weights.router is None
        if self.is_dense:
            dense = weights.experts[0]
            self.up, self.up_bias = dense.up.weight, _address(dense.up.bias)
            self.down, self.down_bias = dense.down.weight, _address(dense.down.bias)


class NativeDecode:
    """Decode steps of one model, float32 on the CPU. Addresses are looked up again if weights or caches move between two steps.

    Parts of a step remain with the decoder: `embed` (tokens, positions -> [B, H]), `reduce` (in place, over the ranks that share the
    model), `experts` (a mixture's output for normed [B, H], of all ranks, from its weights and the layer's number).
    """

    def __init__(
        self,
        library: Library,
        weights: ModelWeights,
        model: Model,
        *,
        embed: Callable[[Tensor, Tensor], Tensor],
        reduce: Callable[[Tensor], Tensor],
        experts: Callable[[LayerWeights, int, Tensor], Tensor],
        max_sequence_length: int,
    ) -> None:
        self._library, self._embed, self._reduce, self._experts = library, embed, reduce, experts
        self.draw = library.draw  # what the logits are for
        self._weights = weights
        self._model, self._model_at = model, ctypes.byref(model)
        self._room = (max_sequence_length + 15) // 16 * 16 * model.groups * model.queries
        self._tensors = list(tensors(weights))
        self._known: tuple[int, ...] = ()
        self._layers: list[Layer] = []
        self._output: Tensor
        self._buffers: Buffers | None = None

    def __call__(self, batch: DecodeBatch, cache: PagedKV, vocabulary: int, tap: Tap | None = None) -> Tensor:
        """This rank's logits float32 [B, its tokens], at most `vocabulary` of them. `tap` sees the buffers between kernels."""
        rows, threads = batch.tokens.shape[0], torch.get_num_threads()
        self._look_up(cache, vocabulary)
        if self._buffers is None or self._buffers.capacity < rows or self._buffers.threads != threads:
            self._buffers = Buffers(rows, self._weights, self._model, self._room, threads)
        buffers = self._buffers
        positions, pages = batch.positions.contiguous(), batch.pages.contiguous()
        rotary = positions if batch.rotary is None else batch.rotary.contiguous()
        step = buffers.step
        step.rows, step.columns, step.positions, step.pages = rows, pages.shape[1], positions.data_ptr(), pages.data_ptr()
        step.rotary = rotary.data_ptr()
        buffers.view("x", rows).copy_(self._embed(batch.tokens, positions))
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
            self._reduce(buffers.view("delta", rows))
            self._add_norm(buffers, rows, (buffers.at["delta"], layer.attention_bias), layer.mlp_norm)
            if tap is not None:
                tap(Operation.attention_residual, layer.number, buffers.view("x", rows))
                tap(Operation.mlp_norm, layer.number, buffers.view("normed", rows))
            delta = buffers.at["delta"], self._feed_forward(buffers, rows, layer, tap)
        self._add_norm(buffers, rows, delta, _norm(self._weights.final_norm))
        if tap is not None:
            tap(Operation.residual, len(self._layers) - 1, buffers.view("x", rows))
            tap(Operation.final_norm, len(self._layers), buffers.view("normed", rows))
        logits = torch.empty(rows, len(self._output))
        self._product(buffers, rows, "normed", self._output, logits)
        return logits

    def _feed_forward(self, buffers: Buffers, rows: int, layer: Layer, tap: Tap | None) -> int | None:
        """Fills `delta`; returns the address of the bias to add to it."""
        if not layer.is_dense:
            buffers.view("delta", rows).copy_(self._experts(layer.weights, layer.number, buffers.view("normed", rows)))
            return None
        self._linear(buffers, rows, "normed", layer.up, "up")
        sizes = (rows, layer.down.shape[1])
        self._library.activate(self._model_at, *sizes, buffers.at["up"], layer.up_bias, buffers.at["inner"], buffers.threads)
        if tap is not None:
            tap(Operation.activation, layer.number, buffers.view("inner", rows))
        self._linear(buffers, rows, "inner", layer.down, "delta")
        self._reduce(buffers.view("delta", rows))
        return layer.down_bias

    def _add_norm(self, buffers: Buffers, rows: int, delta: tuple[int | None, int | None], norm: tuple[int | None, int | None]) -> None:
        at = buffers.at
        self._library.add_norm(self._model_at, rows, at["x"], *delta, *norm, at["normed"], buffers.threads)

    def _linear(self, buffers: Buffers, rows: int, source: str, weight: Tensor, target: str) -> None:
        self._product(buffers, rows, source, weight, buffers.view(target, rows))

    def _product(self, buffers: Buffers, rows: int, source: str, weight: Tensor, out: Tensor) -> None:
        sizes = (rows, weight.shape[1], len(weight))
        if rows <= FEW_ROWS:
            self._library.linear(*sizes, buffers.at[source], weight.data_ptr(), out.data_ptr(), buffers.threads)
        elif rows <= MANY_ROWS:
            columns = buffers.columns.data_ptr()
            self._library.wide_linear(*sizes, buffers.at[source], weight.data_ptr(), out.data_ptr(), columns, buffers.threads)
        else:
            torch.mm(buffers.view(source, rows), weight.detach().t(), out=out)

    def _look_up(self, cache: PagedKV, vocabulary: int) -> None:
        """Tensors move when the engine's own weights are allocated again, and by an offload."""
        # A cache of another size may start at the same address, but its later layers do not.
        now = (*(tensor.data_ptr() for tensor in self._tensors), cache.keys.data_ptr(), cache.values.data_ptr(), cache.num_pages)
        if now != self._known:
            self._known = now
            pages = zip(cache.keys, cache.values, strict=True)
            self._layers = [Layer(number, own, *kv) for number, (own, kv) in enumerate(zip(self._weights.layers, pages, strict=True))]
            self._output = self._weights.output[:vocabulary]
