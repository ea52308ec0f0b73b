"""The planted faults of tests/faults still fit the code, so that `make mutants` can plant them; and what is made of pytest's answers."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from mutants import AREAS, ROOT, Fault, read_faults

FAULTS = read_faults()


@pytest.mark.parametrize("area", AREAS)
def test_every_fault_can_be_planted(area: str) -> None:
    faults = [fault for fault in FAULTS if fault.area == area]
    assert faults
    for fault in faults:
        planted = fault.plant((ROOT / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(planted)


def test_there_are_enough_faults_and_each_names_its_tests() -> None:
    assert len(FAULTS) >= 150
    assert [id_ for id_, count in Counter(fault.id for fault in FAULTS).items() if count > 1] == []
    for fault in FAULTS:
        assert fault.tests and fault.breaks and "|" not in fault.breaks, fault.id
        for test in fault.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert not name or f"def {name.partition('[')[0]}(" in text, f"{fault.id}: {test}"


def test_a_fault_that_does_not_fit_is_refused() -> None:
    fields = {"id": "x", "area": "data", "file": "a.py", "breaks": "nothing", "tests": ("t",)}
    assert Fault(was="a = 1", now="a = 2", **fields).plant("a = 1\nb = 1\n") == "a = 2\nb = 1\n"
    for source, was, now, message in (
        ("a = 1\na = 1\n", "a = 1", "a = 2", "x: the text to replace stands 2 times in a.py, not once"),
        ("b = 1\n", "a = 1", "a = 2", "x: the text to replace stands 0 times in a.py, not once"),
        ("a = 1\n", "a = 1", "a = (1)  # the same", "x: changes nothing in a.py"),
    ):
        with pytest.raises(ValueError, match=message):
            Fault(was=was, now=now, **fields).plant(source)
