"""`make gpu-check` without a GPU: its predictions in the docs, what it keeps of stages that fail or hang, and its packages."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402
import gpu_check_wheels  # noqa: E402

RARELY = ("sft_transformer_engine", "vllm", "tensorrt_llm")  # the packages are not among those that it brings
STAGE = """
import json, sys, time
from pathlib import Path
name, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
assert folder.is_dir() and sys.stdin.readline() == "go\\n"
result.write_text(json.dumps({"bf16 matmul TFLOP/s": 700.0}))
if name == "numbers":
    sys.exit("no such kernel")
if name == "decode":
    time.sleep(600)
"""


def test_the_docs_have_the_table_of_predictions() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(gpu_check.table({})) in text


def test_every_stage_is_a_function_and_every_figure_has_one_name() -> None:
    source = (ROOT / "tools" / "gpu_check_stages.py").read_text()
    names = [figure.name for stage in gpu_check.STAGES for figure in stage.figures]
    assert len(set(names)) == len(names)
    assert all(f"def {stage.name}(check: Check)" in source for stage in gpu_check.STAGES)
    needed = [stage.seconds for stage in gpu_check.STAGES if stage.name not in RARELY]
    assert sum(needed) < 800  # limits; two thirds of them are expected, within ten minutes


def test_a_goal_says_whether_a_value_meets_it() -> None:
    at_most, none = gpu_check.Figure(name="a", predicted=1, goal="<= 0.1"), gpu_check.Figure(name="b", predicted=1)
    assert at_most.meets(0.1) and not at_most.meets(0.11) and none.meets(1e9) and not at_most.meets(float("nan"))
    lines = gpu_check.table({"environment": gpu_check.Outcome(figures={"copy GB/s": 4212.0})})
    assert any("| copy GB/s | 4300 |  | 4212 |" in line for line in lines)


def test_stages_fail_and_hang_alone_and_what_they_measured_is_kept(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "gpu_check_stages.py").write_text(STAGE)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    chosen = gpu_check.parse(["--output", str(tmp_path / "out"), "--slowness", "0.05"])  # decode may take six seconds
    stages = [gpu_check.STAGES_BY_NAME[name] for name in ("environment", "numbers", "decode", "ppo")]
    started = time.monotonic()
    outcomes = gpu_check.check(stages, chosen, tmp_path, started + 600)
    assert time.monotonic() - started < 120
    problems = {name: outcome.problem for name, outcome in outcomes.items()}
    assert problems == {"environment": "", "numbers": "exit code 1: no such kernel", "decode": "ended after 6 s", "ppo": ""}
    assert all(outcome.figures == {"bf16 matmul TFLOP/s": 700.0} for outcome in outcomes.values())
    assert json.loads((tmp_path / "out" / "gpu_check.json").read_text())["decode"]["problem"] == "ended after 6 s"
    assert "**ended after 6 s**" in (tmp_path / "out" / "gpu_check.md").read_text()


def test_no_stage_is_begun_without_time(tmp_path, monkeypatch) -> None:
    (tmp_path / "gpu_check_stages.py").write_text(STAGE)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    chosen = gpu_check.parse(["--output", str(tmp_path / "out")])
    outcomes = gpu_check.check([gpu_check.STAGES_BY_NAME["ppo"]], chosen, tmp_path, time.monotonic() + 5)
    assert outcomes["ppo"].problem == "no time was left"
    assert "no time was left" in (tmp_path / "out" / "gpu_check.md").read_text()


def test_a_wheel_is_repacked_without_what_no_stage_needs(tmp_path) -> None:
    wheel = tmp_path / "nvidia_pytriton-0.7.0-py3-none-any.whl"
    kept, record = "pytriton/tritonserver/python_backend_stubs/3.12/stub", "nvidia_pytriton-0.7.0.dist-info/RECORD"
    left_out = ["pytriton/tritonserver/python_backend_stubs/3.10/stub", "nvidia_pytriton.libs/libpython3-419a3a08.13.so.1.0"]
    with zipfile.ZipFile(wheel, "w") as target:
        for name in (kept, *left_out):
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o100755 << 16
            target.writestr(member, "x" * 1000)
        target.writestr(record, "".join(f"{name},sha256=0,1000\n" for name in (kept, *left_out)))
    gpu_check_wheels._slim(wheel)
    with zipfile.ZipFile(wheel) as found:
        assert sorted(found.namelist()) == sorted([kept, record])
        assert found.getinfo(kept).external_attr >> 16 == 0o100755  # a program stays one
        assert found.read(record).decode() == f"{kept},sha256=0,1000\n"


@pytest.mark.parametrize("package", ["pytest", "no-such-package"])
def test_what_the_machine_has_stays(package: str) -> None:
    assert gpu_check_wheels._is_here(package) == (package == "pytest")
