"""What `make house` measures, on graphs that are known; and what must hold of the package at every commit."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import house
from house import circles, config_depth, depth, files_of_a_recipe, functions, imports_of, limits, measures

A = """
import aligner.b
from aligner import c
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aligner.d import x
try:
    from aligner.e.f import y
except ImportError:
    pass

def later():
    from aligner.g import z
"""


def test_imports_at_import_time_and_of_any_kind():
    names = ["aligner.a", "aligner.b", "aligner.c", "aligner.d", "aligner.e.f", "aligner.g"]
    assert imports_of("aligner.a", ast.parse(A), names) == {"aligner.b", "aligner.c", "aligner.e.f"}
    assert imports_of("aligner.a", ast.parse(A), names, later=True) == set(names) - {"aligner.a"}


def test_circles_and_depth():
    graph = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [] and depth(graph) == 4
    assert circles(graph | {"e": {"b"}}) == [["b", "d", "e"]]


def test_functions_and_configs():
    modules = {"m": ast.parse("def f():\n    pass\n\nclass ARun:\n    def g(self):\n        return 1\n")}
    assert sorted(functions(modules)) == [(2, "m.f"), (2, "m.g")]
    text = "@dataclass\nclass ARun: ...\n@dataclass\nclass BRun(ARun): ...\n@dataclass\nclass CConfig(BRun): ...\n"
    assert config_depth({"m": ast.parse(text)}) == (2, "CConfig")


def test_files_of_a_recipe():
    recipe = "class T: ...\nRECIPE = Recipe(name='a', config=T, build=build)\n"
    modules = {"a": ast.parse(recipe), "b": ast.parse("RECIPE = replace(a.RECIPE, name='b')\n"), "c": ast.parse("print(T, T)\n")}
    assert files_of_a_recipe({"a": modules["a"], "b": modules["b"]}) == (4, "(most: a, 4)")
    assert files_of_a_recipe(modules) == (5, "(most: a, 5)")


@pytest.mark.parametrize("entry", ["{limit: 5, aim: 4}", "{limit: 5, aim: 4, why: ''}", "{aim: 4}", "{limit: 5, because: x}"])
def test_a_limit_above_its_aim_needs_a_reason(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(house, "LIMITS", tmp_path / "house.yaml")
    house.LIMITS.write_text(f"lines: {entry}\nfiles: {{limit: 3, aim: 2, why: vision}}\n")
    with pytest.raises(ValueError, match=r"house.yaml: lines: "):
        limits()
    house.LIMITS.write_text("lines: {limit: 4, aim: 4}\nfiles: {limit: 3, aim: 2, why: vision}\n")
    assert limits() == {"lines": 4, "files": 3}


def test_what_is_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(house, "measures", lambda grpo: {"lines": (5, ""), "files": (3, ""), "unlimited": (9, "")})
    for lines, code in ((5, 0), (4, 1)):
        monkeypatch.setattr(house, "limits", lambda lines=lines: {"lines": lines, "files": 3})
        assert house.main([]) == code
    assert capsys.readouterr().err == "error: lines: 5 is above its limit of 4 in tests/house.yaml\n"


@pytest.mark.parametrize("grpo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_package(grpo: bool):
    found, allowed = measures(grpo=grpo), limits()
    assert found["files of a recipe"][0] == 4
    assert {name: number for name, (number, _) in found.items() if number > allowed.get(name, number)} == {}
