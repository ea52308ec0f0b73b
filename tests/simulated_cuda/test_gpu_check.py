"""`tools/gpu_check.py --tiny` on the simulated GPU: every stage but the comparison with TRL, whose kernels only a GPU can run."""

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
sys.path.insert(0, str(TOOLS))
import gpu_check_halves  # noqa: E402
import gpu_check_table  # noqa: E402

ABSENT = ["transformer_engine", "flash_attn", "varlen_attn", "vllm", "tensorrt_llm"]
STAGES = [stage.name for stage in gpu_check_halves.STAGES if stage.name != "trl"]
RIGHT = ("numbers", "kernels", "sft_bits", "gap", "two_ranks")  # of the others' figures a simulation says little
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def checked(output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--tiny", "--minutes", "29", "--slowness", "10", "--output", str(output)]
    done = subprocess.run([*command, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    return done, json.loads((output / "gpu_check.json").read_text())


@pytest.mark.timeout(1800)
def test_every_stage_gives_its_figures_and_numbers_are_right(tmp_path: Path) -> None:
    done, found = checked(tmp_path, "--only", *STAGES, "--allow-missing", *ABSENT, "pytriton")
    problems = {name: one["problem"] for name, one in found.items() if one["problem"] and not one["allowed"]}
    assert done.returncode == 0 and not problems, f"{problems}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
    assert list(found) == STAGES and sorted(name for name, one in found.items() if one["allowed"] and not one["figures"]) == sorted(ABSENT)
    for name, one in found.items():
        figures = {figure.name: figure for figure in gpu_check_halves.STAGES_BY_NAME[name].figures}
        assert name in ABSENT or set(one["figures"]) == set(figures), name
        assert (tmp_path / f"{name}.json").is_file()
        if name in RIGHT:
            assert all(figures[figure].meets(value) for figure, value in one["figures"].items()), one
    assert any("torch" in note and "numpy" in note for note in found["environment"]["notes"])


def test_what_does_not_import_fails_the_check(tmp_path: Path) -> None:
    done, found = checked(tmp_path, "--only", "flash_attn", "varlen_attn", "--allow-missing", "varlen_attn")
    assert done.returncode == 1
    assert (
        "skipped: flash_attn does not import (ModuleNotFoundError" in found["flash_attn"]["problem"] and not found["flash_attn"]["allowed"]
    )
    assert "varlen_attn has no ['block_table'" in found["varlen_attn"]["problem"] and found["varlen_attn"]["allowed"]
    assert "| flash_attn | skipped | " in done.stdout and "| varlen_attn | skipped (allowed) | " in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "wrong", "missed"), [("vllm", "stale", "vLLM, negated"), ("transformer_engine", "other", "least cosine")]
)
def test_stages_of_packages_run_with_stand_ins_and_notice_what_is_wrong(stage: str, wrong: str, missed: str, tmp_path: Path) -> None:
    started = {}
    for mode in ("", wrong):
        folder = tmp_path / (mode or "right")
        folder.mkdir()
        command = [sys.executable, str(Path(__file__).with_name("package_stages.py")), stage, str(folder), f"{folder}.json", "tiny"]
        environment = ENVIRONMENT | {"PYTHONPATH": str(gpu_cases.ROOT), "CUDA_VISIBLE_DEVICES": "0"}
        started[folder] = subprocess.Popen(
            [*command, *filter(None, [mode])],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    judged = []
    for folder, process in started.items():
        said = process.communicate()[0]
        assert process.returncode == 0, said[-4000:]
        outcome = gpu_check_table.Outcome(**json.loads(Path(f"{folder}.json").read_text()))
        outcome.figures |= {one.name: 1.0 for one in gpu_check_halves.STAGES_BY_NAME[stage].figures if one.name.startswith("SFT")}
        gpu_check_table.judge(gpu_check_halves.STAGES_BY_NAME[stage], outcome, tiny=True)
        judged.append(outcome)
    assert judged[0].problem == ""
    assert judged[1].kind == "missed" and missed in judged[1].problem


def test_results_come_back_where_they_are_a_part_of_what_was_sent() -> None:
    """A reduce-scatter into a part of the buffer that it reduces, as Megatron-Core's gradients have it."""
    import torch

    from aligner.parallel.host_collectives import over_the_host

    def reduce_scatter_(output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return output.copy_(2 * given[:2])

    buffer = torch.arange(4.0, device="cuda")
    over_the_host(reduce_scatter_, buffer[:2], buffer)
    assert buffer.tolist() == [0.0, 2.0, 2.0, 3.0]
