"""`tools/gpu_check.py` on the simulated GPU: every stage but the comparison with TRL, whose kernels only a GPU can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

gpu_cases = pytest.importorskip("simulated_cuda.gpu_cases")
pytestmark = pytest.mark.simulated_cuda
TOOLS = gpu_cases.ROOT / "tools"
STAGES = ["environment", "numbers", "decode", "sft", "grpo", "offload", "layouts", "ppo"]


@pytest.mark.timeout(1800)
def test_every_stage_gives_its_figures_and_numbers_are_right(tmp_path: Path) -> None:
    sys.path.insert(0, str(TOOLS))
    import gpu_check

    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--tiny", "--minutes", "29", "--slowness", "10", "--output", str(tmp_path)]
    done = subprocess.run([*command, "--only", *STAGES], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    problems = {name: one["problem"] for name, one in found.items() if one["problem"]}
    assert done.returncode == 0, f"{problems}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
    for name in STAGES:
        figures = {figure.name: figure for figure in gpu_check.STAGES_BY_NAME[name].figures}
        assert set(found[name]["figures"]) == set(figures), name
        if name in ("numbers", "layouts"):  # of the others a simulation says nothing
            assert all(figures[figure].meets(value) for figure, value in found[name]["figures"].items()), found[name]
    assert found["decode"]["figures"]["responses with and without graphs that are equal"] == 1
