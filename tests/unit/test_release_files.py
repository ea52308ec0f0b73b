"""What names a version and what runs the tools agree: setup.py, CITATION.cff, CHANGELOG.md, Makefile, pre-commit, hosted CI; and the
pins fit: everything that a run may need imports in one process."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import versions
import yaml
from same_numbers import CASES

import aligner

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict:
    given = {}
    monkeypatch.setattr("setuptools.setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def test_one_version_is_said_everywhere(monkeypatch: pytest.MonkeyPatch):
    assert setup_arguments(monkeypatch)["version"] == aligner.__version__ == version("aligner")
    assert yaml.safe_load(read("CITATION.cff"))["version"] == aligner.__version__
    newest = re.search(r"^## \[(.+)\]", read("CHANGELOG.md"), re.MULTILINE)[1]
    assert newest in (aligner.__version__, "Unreleased")
    assert f"## [{aligner.__version__}]" in read("CHANGELOG.md")


def test_the_public_surface():
    """Every module of it is there, and those that read settings and results import no torch."""
    program = (
        "import importlib, sys; from aligner import *\n"
        "light = [importlib.import_module(f'aligner.{name}') for name in ('api', 'errors', 'reporting.jsonl')]\n"
        "print(__version__, train.__module__, Result.__module__, 'torch' in sys.modules)\n"
        "print(*(importlib.import_module(name).__name__ for name in PUBLIC))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [aligner.__version__, "aligner.api", "aligner.api", "False", *aligner.PUBLIC], done.stderr


def test_pre_commit_runs_the_tools_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)[1]
    lint = {line.strip().removeprefix("@$(BIN)/").removesuffix(" .") for line in recipe.splitlines()}
    (local,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in local["hooks"]}
    assert len(lint) == 4 and lint <= hooks
    assert {hook["language"] for hook in local["hooks"]} == {"system"}


def test_hosted_ci_runs_the_projects_own_on_every_python_that_is_supported(monkeypatch: pytest.MonkeyPatch):
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    assert any(step.get("run") == ".ci/run" for step in jobs["tests"]["steps"])
    said = [line.rsplit(" ", 1)[1] for line in setup_arguments(monkeypatch)["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == said


def test_a_wheel_has_all_files_that_are_no_python(monkeypatch: pytest.MonkeyPatch):
    declared = setup_arguments(monkeypatch)["package_data"]
    packaged = {file for package, globs in declared.items() for name in globs for file in (ROOT / package.replace(".", "/")).glob(name)}
    assert packaged == {file for file in (ROOT / "aligner").rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert {"echarts.common.min.js", "LICENSE", "NOTICE", "LICENSE-d3", "charts.js"} <= {file.name for file in packaged}


def test_every_recipe_and_every_supported_python_is_run_with_the_oldest_versions_of_setup():
    """What tests/versions.py does; its environments are not made here."""
    recipes = {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml") if path.stem == path.parent.name}
    assert {CASES[name].recipe for name in CASES if name not in versions.LEFT_OUT} == recipes
    assert set(versions.RESUMED) <= set(CASES) and {CASES[name].ranks for name in versions.RESUMED} == {1, 2}
    hosted = re.search(r"python: \[(.*)\]", read(".github/workflows/ci.yml"))[1]
    assert {environment.python for environment in versions.ENVIRONMENTS.values()} == set(re.findall(r'"(.*?)"', hosted))
    bounds = {name: re.search(rf'"{name}>=([\d.]+)', read("setup.py"))[1] for name in ("torch", "transformers", "megatron-core")}
    oldest = dict(package.split("==") for package in versions.ENVIRONMENTS["oldest-3.10"].packages if "==" in package)
    assert {name: version.removesuffix(".0") for name, version in oldest.items()} == bounds


@pytest.mark.pytriton
def test_everything_imports_together():
    program = """
import numpy, pyarrow, datasets, transformers, tokenizers, safetensors, rich, hydra, omegaconf
import aligner.parallel.mcore
import megatron.core
import pytriton.triton, pytriton.client, tritonclient.http
import torch
assert torch.from_numpy(numpy.arange(3)).sum() == 3  # torch and numpy agree on the ABI
assert pyarrow.array(numpy.arange(3)).sum().as_py() == 3
print("together")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "together" in done.stdout


def test_a_cuda_build_of_torch_without_a_gpu_is_no_news(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    pretends = "torch.cuda._is_compiled = lambda: True; torch.cuda.is_available = lambda: False; torch.version.cuda = '13.0'"
    program = f"import torch; {pretends}; import aligner.parallel.mcore; print(torch.utils.cpp_extension.CUDA_HOME)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("/nowhere\n", "")
