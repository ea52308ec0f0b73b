"""What names a version and what runs the tools agree: setup.py, CITATION.cff, CHANGELOG.md, Makefile, pre-commit, hosted CI."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

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


def test_a_wheel_has_what_the_pages_are_made_of(monkeypatch: pytest.MonkeyPatch):
    package = ROOT / "aligner" / "reporting"
    shipped = {file for pattern in setup_arguments(monkeypatch)["package_data"]["aligner.reporting"] for file in package.glob(pattern)}
    assert shipped == {file for folder in ("templates", "static") for file in (package / folder).iterdir()}
    assert {"echarts.common.min.js", "LICENSE", "NOTICE", "LICENSE-d3", "report.js"} <= {file.name for file in shipped}
