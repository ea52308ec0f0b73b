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


def name_of(command: list[str]) -> str:
    return command[0].removesuffix(".py")


def run(program: str, *arguments: str) -> str:
    """What a benchmark prints; it ends with 0."""
    ran = subprocess.run([sys.executable, BENCHMARKS / program, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


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
        ["advantages.py", "--rows", "64", "--length", "32", "--repeats", "1"],
        ["logprob_memory.py", "--rows", "1", "--length", "64", "--chunks", "32"],
        ["asynchronous.py", "--steps", "2", "--warmup-steps", "1", "--prompts", "2", "--group-size", "2", *TINY[2:], "--staleness", "1"],
    ],
    ids=name_of,
)
def test_runs(command: list[str], tmp_path: Path) -> None:
    run(*command, "--output", str(tmp_path))
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())


@pytest.mark.parametrize(
    "command",
    [
        ["batch_invariant.py", "--prompts", "2", "--group", "2", "--prompt", "8", "--response", "8"],
        ["live_engine.py", "--batch", "2", "--clients", "4", *TINY],
        ["own_modules.py", "--rounds", "1", "--rows", "4", "--seats", "2"],
        pytest.param(["servers.py", "--rows", "2", "--length", "16", "--seconds", "1", "--clients", "1"], marks=pytest.mark.pytriton),
        pytest.param(["data_scale.py", "--records", "1100", "--tokenize", "100", "--workers", "2"], marks=pytest.mark.shared),
    ],
    ids=name_of,
)
def test_prints(command: list[str]) -> None:
    assert any(char.isdigit() for char in run(*command))


def test_the_price_of_what_saves_memory() -> None:
    tiny = ["--layers", "1", "--hidden", "128", "--tokens", "128", "--rounds", "1"]
    found = json.loads(run("few_gpus.py", *tiny))
    assert list(found["adapters"]) == ["none", "nf4", "int8"]
    assert list(found["all weights"]) == ["adam", "cpu_offload", "nvme_path", "adam8bit", "muon"]
