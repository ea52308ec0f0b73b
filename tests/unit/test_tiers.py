"""tests/tiers.py: what costs more than a minute has the mark `slow`, no planted fault needs such a test, and what is left out is told."""

from __future__ import annotations

import re

import pytest
from mutants import ROOT, TABLE, read_table
from preloaded import preloaded
from tiers import BEGIN, LIMIT_SECONDS, PAGE, Tiers, cost, durations, exists, last_whole_run, page, table

KILLERS = {by for by in read_table(TABLE.read_text()).values() if by.startswith("tests/")}
COSTLY = {test for test, (wall, cpu) in durations().items() if cost(test, wall, cpu) > LIMIT_SECONDS and exists(test)}
SLOW_FILES = {file for file in sorted({test.partition("::")[0] for test in KILLERS | COSTLY}) if "mark.slow" in (ROOT / file).read_text()}


@pytest.fixture(scope="module")
def slow() -> set[str]:
    """The tests with the mark, of the files that the checks are about; those of one function once."""
    arguments = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow", *SLOW_FILES]
    _, shown = preloaded().run(arguments, {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}, ROOT, timeout=300)
    found = set(re.findall(r"^tests/\S+::.*$", shown, re.MULTILINE))
    assert found, shown
    return found


def test_what_costs_more_than_a_minute_is_slow(slow: set[str]) -> None:
    assert {test: durations()[test] for test in COSTLY - slow} == {}


def test_no_fault_needs_a_slow_test(slow: set[str]) -> None:
    """`make mutants` plants them under `make test`'s tier; this holds what tests/mutants.md last said to the marks of today."""
    assert KILLERS & slow == set()


def test_what_is_recorded_is_in_the_page() -> None:
    assert PAGE.read_text() == page(PAGE.read_text(), last_whole_run(), durations())


def test_the_slowest_come_first_and_a_wait_for_slurm_counts_half() -> None:
    found = {"tests/a.py::test_b": (90.0, 30.0), "tests/functional/test_slurm_a.py::test_b": (90.0, 1.0), "tests/a.py::test_c": (9.0, 9.0)}
    rows = table(found).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == ["functional/test_slurm_a.py::test_b", "a.py::test_b", "a.py::test_c"]
    assert page(f"x\n{BEGIN}\nold\n<!-- end of table -->\ny\n", "", {}).splitlines()[::-1][:2] == ["y", "<!-- end of table -->"]


class Lines(list):
    stats: dict = {}

    def line(self, text: str, **_: object) -> None:
        self.append(text)


def test_the_summary_tells_what_was_not_run(pytestconfig: pytest.Config) -> None:
    class Report:
        longrepr = ("file", 1, "Skipped: slurm: needs root on Linux")

    class Config:
        option = type("Options", (), {"markexpr": "not slow"})

    class Item:
        def __init__(self, slow: bool) -> None:
            self.get_closest_marker = lambda name: object() if slow else None

    told, plugin = Lines(), Tiers(Config())  # type: ignore[arg-type]
    plugin.pytest_deselected([Item(True), Item(False), Item(True)])  # type: ignore[list-item]
    told.stats = {"skipped": [Report(), Report()]}
    plugin.pytest_terminal_summary(told)
    assert told == [
        "not run: 2 tests of the tier `slow`; `make test-all` runs them",
        "not run: 2 tests that need what is not here: slurm: needs root on Linux",
    ]
