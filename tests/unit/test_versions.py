"""tests/versions.py: what is run in which environment, and what is told of one that cannot be had. Makes no environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import versions
from same_numbers import CASES

ROOT = Path(__file__).parents[2]


def test_every_recipe_and_every_supported_python_is_run():
    recipes = {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml") if path.stem == path.parent.name}
    assert {CASES[name].recipe for name in CASES if name not in versions.LEFT_OUT} == recipes
    assert set(versions.RESUMED) <= set(CASES) and {CASES[name].ranks for name in versions.RESUMED} == {1, 2}
    hosted = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())[1]
    assert {environment.python for environment in versions.ENVIRONMENTS.values()} == set(re.findall(r'"(.*?)"', hosted))


def test_the_oldest_versions_are_the_lower_bounds_of_setup():
    setup = (ROOT / "setup.py").read_text()
    bounds = {name: re.search(rf'"{name}>=([\d.]+)', setup)[1] for name in ("torch", "transformers", "megatron-core")}
    oldest = dict(package.split("==") for package in versions.ENVIRONMENTS["oldest-3.10"].packages if "==" in package)
    assert {name: version.removesuffix(".0") for name, version in oldest.items()} == bounds


def _main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, *names: str) -> tuple[int, str]:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    code = versions.main(names)
    return code, capsys.readouterr().out


def test_an_environment_that_cannot_be_had_is_told_by_name(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(versions.ENVIRONMENTS, "no", versions.Environment("3.99"))
    code, shown = _main(monkeypatch, capsys, tmp_path, "no")
    assert code == 1  # nothing could run
    assert "| no | Python 3.99 | not run: no python3.99 on PATH or among pyenv's |" in shown


@pytest.mark.parametrize("outcome, expected", [("26 runs passed, 9 s", 0), ("FAILED: sft, 9 s", 1)])
def test_the_exit_code_says_whether_what_could_run_passed(outcome, expected, monkeypatch, capsys, tmp_path):
    results = {"oldest-3.10": ("Python 3.10", "not run: no wheel"), "newest-3.11": ("Python 3.11", outcome)}
    monkeypatch.setattr(versions, "check", lambda name, *_: results[name])
    assert _main(monkeypatch, capsys, tmp_path, *results)[0] == expected
