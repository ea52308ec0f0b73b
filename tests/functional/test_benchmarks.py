"""The benchmarks still run, on the smallest of everything: nobody looks at figures here, but their checks that work was equal hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SEEING = ["--rounds", "1", "--width", "32", "--pixels", "16", "--response-length", "8"]
TINY = ["--rounds", "1", "--prompt-length", "8", "--response-length", "8"]


@pytest.mark.parametrize(
    "command",
    [
        ["grpo_vs_trl.py", "--ours-only", "--lengths", "varied", "--prompts", "2", "--group-size", "2", "--steps", "1", *TINY],
        ["vision_trl.py", "--ours-only", "--prompts", "2", "--group-size", "2", "--steps", "1", *SEEING],
        ["rollout.py", "--sizes", "small", "--batches", "2", "--lengths", "varied", "--against", "dynamic", "--repeats", "1", *TINY],
        ["checks.py", "--size", "small", "--rows", "2", "--length", "16", "--pairs", "1"],
        ["endpoint.py", "--requests", "4", "--batch", "2", "--length", "8", "--rounds", "1", "--stream"],
        ["trace_cost.py", "--spans", "1000"],
        ["refit.py", "--size", "small", "--cases", "in_place", "--repeats", "1"],
    ],
    ids=lambda command: command[0].removesuffix(".py"),
)
def test_runs(command: list[str], tmp_path: Path) -> None:
    program, *arguments = command
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / program, *arguments, "--output", tmp_path], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())


def test_the_price_of_what_saves_memory() -> None:
    tiny = ["--layers", "1", "--hidden", "128", "--tokens", "128", "--rounds", "1"]
    ran = subprocess.run([sys.executable, BENCHMARKS / "few_gpus.py", *tiny], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert list(found["adapters"]) == ["none", "nf4", "int8"]
    assert list(found["all weights"]) == ["adam", "cpu_offload", "nvme_path", "adam8bit", "muon"]
