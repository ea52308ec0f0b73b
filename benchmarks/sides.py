"""The two sides of a comparison, each run in a process of its own, and the checks that they did the same work."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHILD_TIMEOUT_SECONDS = 1800
LOSS_TOLERANCE = 1e-4  # relative, of losses and gradient norms on the same batch: the same fp32 arithmetic in another order


class Mismatch(RuntimeError):
    """The two sides did not do the same work: a comparison of their times would mean nothing."""


def run_side(
    python: Path, script: str, spec: Path, result: Path, *, threads: int, device: str = "cpu", preload: Path | None = None
) -> dict:
    """Run one side in a process of its own; its result. Raises RuntimeError with its last lines where it fails.

    Scripts `*_reference.py` do not see this project's packages, which another environment cannot import. On the CPU GPUs are hidden.
    `preload` is a library that the side wants loaded first.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    own = [str(HERE)] if script.endswith("_reference.py") else [str(HERE.parent), str(HERE)]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in (str(HERE), str(HERE.parent))]
    environment["PYTHONPATH"] = os.pathsep.join(own + others)
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    command = [str(python), str(HERE / script), str(spec), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise RuntimeError(f"{script} ended with exit code {done.returncode}:\n{tail}")
    return json.loads(result.read_text())


def check_close(what: str, ours: float, trl: float) -> None:
    """Raise Mismatch where two numbers that must be the same differ by more than rounding."""
    if not abs(ours - trl) <= LOSS_TOLERANCE * max(abs(ours), abs(trl)):  # a NaN is a mismatch too
        raise Mismatch(f"{what} of the same batch under the same weights: ours {ours}, TRL {trl}")
