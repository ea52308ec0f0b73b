"""PPO whose steps run in containers of Apptainer, on a test cluster: `make test-slurm-versions` has both."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_runs import ENVIRONMENT, SlurmRun, run_settings
from training_jobs import ROOT, steps_of, write_task

IMAGE = os.environ.get("ALIGNER_TEST_IMAGE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed"),
    pytest.mark.skipif(not IMAGE, reason="ALIGNER_TEST_IMAGE names no image (tests/slurm_versions.sh)"),
]
NUM_STEPS = 8


def test_a_job_in_containers(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Preflight and components run in the image's root directory; the host's Python packages stay outside."""
    write_task(tmp_path)
    run = SlurmRun(slurm, tmp_path, "contained", run_settings(tmp_path, NUM_STEPS))
    run.set_pace(0.3)
    strangers = tmp_path / "strangers"
    strangers.mkdir()
    (strangers / "mpi4py.py").write_text("raise RuntimeError('a package of the host')\n")
    variables = {
        **ENVIRONMENT,
        "ALIGNER_CONTAINER": f"apptainer:{IMAGE}",
        "ALIGNER_MOUNTS": f"{sys.base_prefix},{tmp_path}",
        "ALIGNER_PREFLIGHT": "1",
        "PYTHONPATH": f"{ROOT}:{strangers}",
    }
    del variables["ALIGNER_VENV"]
    job = run.submit(environment=variables)
    job.until(lambda: run.step() > 2, "step 3", 300)
    for kind in ("actor", "critic", "reward"):
        (process, *_) = (one for one in run.processes()[kind] if one.program.startswith("python"))
        assert Path(f"/proc/{process.pid}/root/etc/os-release").read_text() == (Path(IMAGE) / "etc" / "os-release").read_text(), process
        assert process.variables["PYTHONPATH"] == str(ROOT) and process.variables["PYTHONNOUSERSITE"] == "1"
    run.set_pace(0.0)
    job.wait("COMPLETED", timeout_seconds=300)
    assert steps_of(run.directory) == list(range(1, NUM_STEPS + 1)) and job.orphans() == []
