"""The compiled kernels as Python functions. `kernels.h` describes each one.

They are compiled once for this machine's processor. The library is kept in the user's cache directory under a name derived from sources,
compiler flags and processor.
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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aligner.models.architecture.divisible import unusual
from aligner.models.config import Activation, Architecture, Normalization

if TYPE_CHECKING:
    from aligner.rollout.builtin.weights import ModelWeights

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: it would let the compiler forget infinities, which mask, and NaN, which must show.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden")
OPENMP = "-fopenmp"
TIMEOUT_SECONDS = 120


class BuildError(Exception):
    """The kernels cannot be compiled here."""


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The folder of compiled kernels: `aligner` under XDG_CACHE_HOME or ~/.cache."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"


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
    """The shared library, compiled now unless it exists. Raises BuildError."""
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    if not sources:
        raise BuildError(f"no sources in {SOURCES}")
    text = "\0".join([*(source.read_text() for source in sources), *flags, OPENMP, processor(), environment.get("CC", "")])
    library = cache_directory(environment) / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
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
    **dict.fromkeys(("positions", "pages", "mixed", "attended", "scores"), _pointer),
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
    if unusual(architecture):
        return False
    layer = weights.layers[0]
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
