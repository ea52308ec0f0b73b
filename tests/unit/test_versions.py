"""tests/versions.py: what is run in which environment, and what is told of one that cannot be had. Makes no environment."""

from __future__ import annotations

import re
from pathlib import Path

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
