"""Compiling the kernels for this machine's processor, once: the library is kept in the user's cache directory under a name made from
its inputs, so that a new source, compiler flag or processor gets its own."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: it would let the compiler forget infinities, which mask, and NaN, which must show.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden")
OPENMP = "-fopenmp"
TIMEOUT_SECONDS = 120


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why."""


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where compiled kernels are kept: `aligner` under XDG_CACHE_HOME or ~/.cache."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"


def processor() -> str:
    """The inputs of `-march=native`, as far as they can be read: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def compiled(environment: Mapping[str, str] = os.environ, flags: Sequence[str] = FLAGS) -> Path:
    """The shared library, compiled now if no process has done it before. Raises BuildError."""
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
    """Ranks that start together may all come here: each compiles to a file of its own and moves it to its place at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=library.stem, suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        for openmp in ([OPENMP], []):  # a compiler without OpenMP gives kernels of one thread
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
