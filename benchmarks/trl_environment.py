"""Environments of their own for competitors, here for TRL, whose dependencies (numpy 2, newer pyarrow) do not fit beside PyTriton's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Pinned, so that figures can be compared; torch is pinned to this project's own version, so that the sides share their kernels.
PACKAGES = ("trl==1.16.0", "transformers==5.23.0", "accelerate", "datasets")
MINIMUM_PYTHON = (3, 11)
PROBE = "import torch, trl, transformers; print(trl.__version__)"
INSTALL_TIMEOUT_SECONDS = 1800


class EnvironmentFailed(RuntimeError):
    """TRL's environment cannot be made; the message says what was tried and what to do."""


def torch_requirement() -> str:
    """This environment's torch version, without a local build label such as `+cpu`, which only some indexes carry."""
    import torch

    return f"torch=={torch.__version__.split('+')[0]}"


def trl_python(directory: Path) -> Path:
    """The interpreter of an environment that can import TRL; made at `directory` where it is missing. Raises EnvironmentFailed."""
    try:
        return make_environment(directory, ((torch_requirement(),), PACKAGES), probe=PROBE)
    except EnvironmentFailed as error:
        raise EnvironmentFailed(f"{error}\nWithout it: --trl-python PATH, an interpreter that can import trl, or --ours-only") from error


def make_environment(directory: Path, groups: Sequence[Sequence[str]], *, probe: str, unwanted: Sequence[str] = ()) -> Path:
    """The interpreter of a virtual environment at `directory` in which `probe` runs; made where it is missing.

    `groups` of requirements are installed in turn, `unwanted` packages that came with them removed. Raises EnvironmentFailed.
    """
    python = directory / "bin" / "python"
    if python.exists() and _works(python, probe):
        return python
    named = " ".join(requirement for group in groups for requirement in group)
    if sys.version_info < MINIMUM_PYTHON:
        raise EnvironmentFailed(f"{named} needs Python {'.'.join(map(str, MINIMUM_PYTHON))}, not {sys.version.split()[0]}")
    print(f"creating {directory} with {named} (a few minutes, once)", flush=True)
    _run([sys.executable, "-m", "venv", str(directory)], what="create a virtual environment")
    for group in groups:
        _run([str(python), "-m", "pip", "install", "--quiet", *group], what=f"install {' '.join(group)}")
    if unwanted:
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted], what=f"remove {' '.join(unwanted)}")
    if not _works(python, probe):
        raise EnvironmentFailed(f"{directory}: {named} was installed but cannot be imported; run: {python} -c '{probe}'")
    return python


def _works(python: Path, probe: str) -> bool:
    return subprocess.run([str(python), "-c", probe], capture_output=True, timeout=300, check=False).returncode == 0


def _run(command: list[str], *, what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"could not {what}: no end after {INSTALL_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise EnvironmentFailed(f"could not {what} (exit code {done.returncode}); is there a network, or a package index?\n{tail}")


if __name__ == "__main__":
    print(trl_python(Path(__file__).resolve().parents[1] / ".venv-trl"))
