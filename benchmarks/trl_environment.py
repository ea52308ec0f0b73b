"""An environment of its own for TRL, whose dependencies (numpy 2, newer pyarrow) do not fit beside PyTriton's."""

from __future__ import annotations

import subprocess
import sys
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
    python = directory / "bin" / "python"
    if python.exists() and _works(python):
        return python
    if sys.version_info < MINIMUM_PYTHON:
        raise EnvironmentFailed(
            f"{PACKAGES[0]} needs Python {'.'.join(map(str, MINIMUM_PYTHON))}, not {sys.version.split()[0]}: pass --trl-python PATH, an "
            "interpreter that can import trl, or --ours-only"
        )
    print(f"creating {directory} with {torch_requirement()} and {' '.join(PACKAGES)} (a few minutes, once)", flush=True)
    _run([sys.executable, "-m", "venv", str(directory)], what="create a virtual environment")
    for packages in ((torch_requirement(),), PACKAGES):
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], what=f"install {' '.join(packages)}")
    if not _works(python):
        raise EnvironmentFailed(f"{directory}: TRL was installed but cannot be imported; run: {python} -c '{PROBE}'")
    return python


def _works(python: Path) -> bool:
    return subprocess.run([str(python), "-c", PROBE], capture_output=True, timeout=300, check=False).returncode == 0


def _run(command: list[str], *, what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"could not {what}: no end after {INSTALL_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise EnvironmentFailed(
            f"could not {what} (exit code {done.returncode}). Without a network or a package index, pass --trl-python PATH, an interpreter "
            f"that can import trl, or --ours-only.\n{tail}"
        )
