"""A program is not taken for done where user code ended it; its exit code and its last words say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys, threading
from aligner.cluster import outcomes
from aligner.cluster.outcomes import ExitCode

def user_code():
    {code}

with outcomes.unless_ended_early(os.environ):
    {call}
outcomes.record(os.environ, ExitCode.done)
"""


def run(folder: Path, code: str, call: str = "user_code()") -> tuple[int, str, list[dict]]:
    """Exit code and output of a program that calls this, and what its rank left behind."""
    (folder / "program.py").write_text(PROGRAM.format(code=code, call=call))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ALIGNER_OUTCOMES": str(folder / "said"), "RANK": "3"}
    done = subprocess.run([sys.executable, "-S", folder / "program.py"], capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stderr, [json.loads(path.read_text()) for path in (folder / "said").glob("*.json")]


@pytest.mark.parametrize(
    ("code", "call", "named"),
    [
        ("os._exit(0)", "user_code()", "os._exit in {}/program.py:7 (user_code)"),
        ("os._exit(0)", "thread = threading.Thread(target=user_code); thread.start(); thread.join()", "os._exit in {}/program.py:7"),
        ("sys.exit()", "user_code()", "sys.exit in {}/program.py:7 (user_code)"),
        ("raise SystemExit(0)", "user_code()", "sys.exit in {}/program.py:7 (user_code)"),
    ],
)
def test_success_is_nobody_elses_to_claim(tmp_path: Path, code: str, call: str, named: str) -> None:
    ended, stderr, (outcome,) = run(tmp_path, code, call)
    assert ended == 1
    assert f"error: rank 3 was ended with exit code 0 before its work was done, by {named.format(tmp_path)}" in stderr
    assert (outcome["rank"], outcome["code"]) == (3, 1) and named.format(tmp_path) in outcome["message"]


@pytest.mark.parametrize(("code", "ended"), [("os._exit(7)", 7), ("sys.exit(9)", 9), ("sys.exit('why')", 1)])
def test_other_codes_stay(tmp_path: Path, code: str, ended: int) -> None:
    assert run(tmp_path, code)[0] == ended


def test_forked_processes_end_as_they_like_and_so_does_the_program(tmp_path: Path) -> None:
    forks = "child = os.fork()\n    if not child: os._exit(0)\n    assert os.waitpid(child, 0)[1] == 0"
    ended, stderr, (outcome,) = run(tmp_path, forks)
    assert (ended, outcome["code"], outcome["message"]) == (0, 0, ""), stderr
