"""Maths answers through math-verify in its own processes, and programs against tests in the sandbox."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from aligner.errors import ConfigError
from aligner.rewards import maths as module
from aligner.rewards.code import parse_tests, program_of, python_tests
from aligner.rewards.maths import final_answer, maths

needs_math_verify = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
GSM8K = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 1,018"

# the prompt's answer, the response, whether it is right
ANSWERS = [
    (GSM8K, "So the answer is \\boxed{1018}.", True),
    (GSM8K, "9 * 2 = 18, and then\n#### 1,018 dollars", True),
    (GSM8K, "She makes $1,018.00 a day.", True),
    (GSM8K, "#### 18", False),
    (GSM8K, "", False),
    (GSM8K, "1018 was my first thought, but the answer is \\boxed{18}", False),
    ("72", "\\boxed{72\\text{ apples}}", True),
    ("-3", "The result is -3.", True),
    ("\\frac{1}{2}", "\\boxed{0.5}", True),
    ("x^2 + 1", "\\boxed{1 + x^2}", True),
    ("x^2 + 1", "\\boxed{1 - x^2}", False),
    ("10%", "0.1", True),
]


@needs_math_verify
def test_maths(capsys):
    check = maths(timeout_seconds=2.0, num_workers=1)
    golds, responses, right = zip(*ANSWERS, strict=True)
    assert check([""] * len(golds), list(responses), list(golds)) == [float(one) for one in right]
    assert capsys.readouterr().out == ""
    # What cannot be worked out is wrong, and said; the process goes on with the next.
    assert check(["", ""], ["\\boxed{9^{9^{9^9}}}", "7"], ["7", "7"]) == [0.0, 1.0]
    assert "maths: 1 of 2 answers could not be checked within timeout_seconds=2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the prompt 'How many' has no answer"):
        check(["How many"], ["3"], [None])


@needs_math_verify
def test_a_checking_process_that_dies_or_never_comes_up(monkeypatch, capsys):
    # Each answers two questions, the first of which is its trial.
    connected = "from multiprocessing.connection import Connection\nconnection = Connection({descriptor})\n"
    answers = connected + "for count in (1, 2):\n    connection.recv()\n    connection.send(dict(right=True))"
    monkeypatch.setattr(module, "START", answers)
    check = maths(num_workers=1)
    assert check([""] * 3, ["1", "2", "3"], ["1", "2", "3"]) == [1.0, 0.0, 1.0]
    assert "a new checking process takes its place" in capsys.readouterr().out
    # This one no longer listens once its trial is answered.
    deaf = connected + "import time\nconnection.recv()\nconnection.send(dict(right=True))\nconnection.close()\ntime.sleep(60)"
    monkeypatch.setattr(module, "START", deaf)
    assert maths(num_workers=1)([""], ["1"], ["1"]) == [0.0]
    assert "the checking process ended without an answer" in capsys.readouterr().out
    monkeypatch.setattr(module, "START", "import sys; sys.exit(7)")
    with pytest.raises(module.CheckFailed, match="ended without an answer"):
        maths(num_workers=1)([""], ["1"], ["1"])


def test_maths_without_math_verify_and_bad_arguments(monkeypatch):
    for settings, text in (({"timeout_seconds": 0}, "timeout_seconds is 0"), ({"num_workers": 0}, "num_workers is 0")):
        if importlib.util.find_spec("math_verify"):
            with pytest.raises(ValueError, match=text):
                maths(**settings)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires math-verify, which is not installed: pip install"):
        maths()


@pytest.mark.parametrize(
    ("text", "answer"),
    [(GSM8K, "1018"), ("$1,234.50", "1234.50"), ("x = #### -5", "-5"), ("\\frac{1}{2}", "\\frac{1}{2}"), ("(1,2)", "(1,2)"), (" 7 ", "7")],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


ASSERTS = "assert f(1) == 2\nassert f(2) == 3"
EXCHANGES = '{"inputs": ["1\\n", "2\\n"], "outputs": ["2", "5"]}'
# Finds the word that the last line begins with, and writes another one: no number, none that can be, one too many, nothing.
FORGER = """import os
word = next(word for word in open('program.py').read().split() if len(word) == 17 and word[0] == '_')[1:]
os.write(1, f'{word} VALUE'.encode())
os._exit(0)"""
PROGRAMS = [
    ("```python\ndef f(x):\n    return x + 1\n```\nDone.", ASSERTS, 1.0),
    ("Not:\n```\ndef f(x): return 0\n```\nbut:\n```py\ndef f(x): return 2\n```", ASSERTS, 0.5),
    ("def f(x): return x + 1", ASSERTS, 1.0),
    *[(FORGER.replace("VALUE", one), ASSERTS, 0.0) for one in ("x", "9" * 5000, "3", "1 2", "")],
    ("import sys; sys.exit(0)", ASSERTS, 0.0),  # exit code 0, before the tests
    ("def f(x): raise SystemExit(0)", ASSERTS, 0.0),
    ("def f(x) return", ASSERTS, 0.0),
    ("def f(x):\n    while True: pass", ASSERTS, 0.0),
    ("print(2 * int(input()))", EXCHANGES, 0.5),
    ("def g(): return 3", "def check(g):\n    if g() != 3: raise ValueError\ncheck(g)", 1.0),
    ("def g(): return 4", "def check(g):\n    if g() != 3: raise ValueError\ncheck(g)", 0.0),
]


def test_programs_against_tests(capsys):
    interpreter = "" if sys.executable.startswith("/usr") else "/usr/bin/python3"
    try:
        partial = python_tests(timeout_seconds=1.0, partial=True, interpreter=interpreter)
    except ConfigError as error:
        pytest.skip(str(error))
    responses, tests, fractions = zip(*PROGRAMS, strict=True)
    assert partial([""] * len(tests), list(responses), list(tests)) == list(fractions)
    whole = python_tests(timeout_seconds=1.0, interpreter=interpreter)
    assert whole(["", ""], [responses[0], responses[1]], [ASSERTS, ASSERTS]) == [1.0, 0.0]
    assert whole.about.startswith("sandbox isolation=") and capsys.readouterr().out.splitlines()[-1] == whole.about
    with pytest.raises(ValueError, match="the prompt has no tests"):
        whole([""], ["x = 1"], [None])
    with pytest.raises(ConfigError, match="isolation is 'none'"):
        python_tests(isolation="none")


def test_reading_tests_and_programs():
    assert parse_tests('{"inputs": ["1"], "outputs": ["2"]}') == [("1", "2")]
    assert parse_tests(ASSERTS) == ASSERTS
    bad = {"assert (": "neither JSON nor Python", "[1]": "not an object with inputs", '{"inputs": [], "outputs": []}': "as many inputs"}
    for text, why in bad.items():
        with pytest.raises(ValueError, match=why):
            parse_tests(text)
    assert program_of("a\n```python\nx\n```\n```\ny\n```") == "y\n"
    assert program_of("plain") == "plain"
