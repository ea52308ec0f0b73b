"""What `make house` measures, on graphs that are known; and what must hold of the package at every commit."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from house import circles, config_depth, depth, files_of_a_recipe, functions, imports_of, measures

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


def test_imports_at_import_time():
    names = ["aligner.a", "aligner.b", "aligner.c", "aligner.d", "aligner.e.f", "aligner.g"]
    assert imports_of("aligner.a", ast.parse(A), names) == {"aligner.b", "aligner.c", "aligner.e.f"}


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


def test_the_package():
    found = measures(grpo=False)
    assert found["files of a recipe"][0] == 4
    assert found["circles"] == (0, "") and found["deepest config"][0] <= 2
    assert found["longest function"][0] <= 60 and found["largest file"][0] <= 400
