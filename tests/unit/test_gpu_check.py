"""`make gpu-check` without a GPU: its predictions in the docs, what it keeps of stages that fail or hang, and its packages."""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gpu_check  # noqa: E402
import gpu_check_wheels  # noqa: E402
from gpu_check_halves import HALF_SECONDS, PACKAGES, SETUP_SECONDS, STAGES, STAGES_BY_NAME, Figure  # noqa: E402
from gpu_check_table import Outcome, advice, budget, judge, summary, table  # noqa: E402

FOREIGN = ("transformer_engine", "vllm", "tensorrt_llm", "flash_attn", "varlen_attn")  # not among the packages that it brings
STAGE = """
import json, sys, time
from pathlib import Path
name, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sys.path.insert(0, {tools!r})
from gpu_check_halves import STAGES_BY_NAME
assert folder.is_dir() and sys.stdin.readline() == "go\\n"
good = {{one.name: float((one.goal or "<= 1").split()[1]) for one in STAGES_BY_NAME[name].figures}}
if name == "kernels":
    good["grouped experts, relative error"] = 0.5
if name == "gap":
    del good["offload: page-locked host memory, GiB"]
result.write_text(json.dumps({{"figures": good, "notes": [name + " was here"]}}))
if name == "numbers":
    sys.exit("no such kernel")
if name == "speed":
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(*arguments, seconds=...)`: the exit code and the outcomes of stages that are told what to give."""
    (tmp_path / "gpu_check_stages.py").write_text(STAGE.format(tools=str(ROOT / "tools")))
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    monkeypatch.setitem(PACKAGES, "vllm", gpu_check.PACKAGES["trl"].__class__(probe="import no_such_vllm", otherwise="the built-in one"))
    monkeypatch.setitem(PACKAGES, "trl", gpu_check.PACKAGES["trl"].__class__(probe="print('1.16.0')", otherwise=""))
    monkeypatch.setitem(PACKAGES, "pytriton", gpu_check.PACKAGES["trl"].__class__(probe="import no_such_triton", otherwise="bring it"))

    def go(*arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "out"), *arguments])
        code = gpu_check.main()
        return code, json.loads((tmp_path / "out" / "gpu_check.json").read_text())

    return go


def test_the_docs_have_the_table_of_predictions() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(table({})) in text and "\n".join(budget()) in text


def test_every_stage_is_a_function_and_every_figure_has_one_name() -> None:
    functions = {
        node.name: path.stem
        for path in (ROOT / "tools" / "gpu_stages").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    entry = (ROOT / "tools" / "gpu_check_stages.py").read_text()
    names = [figure.name for stage in STAGES for figure in stage.figures]
    assert len(set(names)) == len(names) and len(STAGES_BY_NAME) == len(STAGES)
    assert all(f"{functions[stage.name]}.{stage.name}" in entry for stage in STAGES)
    assert all(stage.needs in ("", *PACKAGES) and stage.uses in ("", *PACKAGES) for stage in STAGES)


def test_stages_come_in_order_of_risk_and_each_half_fits_into_a_call_of_ten_minutes() -> None:
    for half in (1, 2):
        assert sum(stage.seconds for stage in STAGES if stage.half == half) + SETUP_SECONDS <= HALF_SECONDS < 600
    first = ["environment", "numbers", "kernels", "flash_attn", "varlen_attn", "sft_bits", "gap", "two_ranks", "ppo", "speed"]
    assert [stage.name for stage in STAGES if stage.half == 1] == first
    assert [stage.name for stage in STAGES if stage.half == 2][:3] == ["transformer_engine", "vllm", "tensorrt_llm"]
    assert {stage.needs for stage in STAGES} >= set(FOREIGN)
    assert [stage.half for stage in gpu_check.parse(["--half", "2"]).stages] == [2] * (len(STAGES) - len(first))
    assert gpu_check.parse([]).minutes == 2 * gpu_check.parse(["--half", "1"]).minutes == 2 * HALF_SECONDS / 60
    with pytest.raises(SystemExit):
        gpu_check.parse(["--half", "2", "--only", "kernels"])


def test_a_goal_says_whether_a_value_meets_it() -> None:
    at_most, none = Figure(name="a", h100=1, h200=1, goal="<= 0.1"), Figure(name="b", h100=1, h200=1)
    assert at_most.meets(0.1) and not at_most.meets(0.11) and none.meets(1e9) and not at_most.meets(float("nan"))
    lines = table({"environment": Outcome(figures={"copy GB/s": 4212.0})})
    assert any("| copy GB/s | 3000 | 4300 |  | 4212 |" in line for line in lines)


def test_what_must_be_and_is_not_is_a_problem_and_an_aim_is_not() -> None:
    stage = STAGES_BY_NAME["ppo"]
    good = {figure.name: float((figure.goal or "<= 1").split()[1]) for figure in stage.figures}
    missed = Outcome(figures=good | {"PPO: device memory left behind, GiB": float("nan")})
    judge(stage, missed)
    assert missed.problem.startswith("missed: PPO: device memory left")
    aims = Outcome(figures=good | {"PPO: device memory of all processes at most, GiB": 40.0})
    judge(stage, aims)
    assert aims.problem == "" and "Triton's own contexts" in advice(stage, aims)[0]
    assert "| ppo | passed, aims missed | " in summary({"ppo": aims})[-1] and "goal <= 4" in summary({"ppo": aims})[-1]
    tiny = Outcome(figures=good | {"PPO: reward of the last steps": 0.0})
    judge(stage, tiny, tiny=True)
    assert tiny.problem == ""


def test_stages_fail_and_hang_alone_and_what_they_measured_is_kept(run, tmp_path, capsys) -> None:
    code, found = run("--only", "environment", "numbers", "kernels", "gap", "speed", "trl", "--slowness", "0.1")  # speed: six seconds
    assert code == 1
    kinds = {name: (one["kind"], one["problem"].partition(":")[0]) for name, one in found.items()}
    assert kinds == {
        "environment": ("", ""),
        "numbers": ("failed", "exit code 1"),
        "kernels": ("missed", "missed"),
        "gap": ("failed", "gave no figure"),
        "speed": ("late", "ended after 6 s"),
        "trl": ("", ""),
    }
    assert all(one["figures"] and one["notes"] == [f"{name} was here"] for name, one in found.items())
    assert json.loads((tmp_path / "out" / "numbers.json").read_text()) == found["numbers"]
    text, said = (tmp_path / "out" / "gpu_check.md").read_text(), capsys.readouterr().out
    for row in ("| numbers | failed | ", "| speed | late | ", "| environment | passed | ", "| kernels | missed | "):
        assert row in text and row in said
    assert STAGES_BY_NAME["numbers"].failed in said and "py-spy dump" in said and "grouped experts, relative error: let" in said


def test_a_package_that_does_not_import_fails_the_check_unless_that_is_allowed(run, capsys) -> None:
    code, found = run("--only", "vllm", "ppo", "trl")
    assert code == 1 and found["trl"]["problem"] == ""
    assert found["vllm"]["problem"].startswith("skipped: vllm does not import (ModuleNotFoundError") and not found["vllm"]["figures"]
    assert found["ppo"]["problem"].startswith("ran without: pytriton does not import") and found["ppo"]["figures"]
    assert "| vllm | skipped | " in (said := capsys.readouterr().out) and "the built-in one" in said
    assert run("--only", "vllm", "ppo", "trl", "--allow-missing", "vllm")[0] == 1
    assert run("--only", "vllm", "ppo", "trl", "--allow-missing", "vllm", "pytriton")[0] == 0
    assert run("--only", "vllm", "ppo", "--allow-missing", "all")[0] == 0
    assert "| vllm | skipped (allowed) | " in capsys.readouterr().out


def test_no_stage_is_begun_without_time(run) -> None:
    code, found = run("--only", "environment", "numbers", "--minutes", "0.1")
    assert code == 1
    assert {(one["kind"], one["problem"]) for one in found.values()} == {("late", "no time was left")}


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
