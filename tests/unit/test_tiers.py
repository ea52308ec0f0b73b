"""tests/tiers.py: what costs more than a minute has the mark `slow`, no planted fault needs such a test, and what is left out is told."""

from __future__ import annotations

import re

import pytest
from mutants import ROOT, TABLE, read_table
from preloaded import preloaded
from tiers import LIMIT_SECONDS, PAGE, cost, durations, exists, last_whole_run, page

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
