"""Ninety programs that try to get out of the sandbox, as root, as an ordinary user, and as the root of a container without privileges.

The programs are in tests/fakes/escapes.txt, what they aim at in escapes.py. Whatever the isolation claims to stop is stopped, nothing comes
to harm, and each program ends with its reason.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu  # it forks processes of other users: that takes as much memory as this one has mapped, a GPU's too
ROOT = Path(__file__).parents[3]
ESCAPES = ROOT / "tests" / "fakes" / "escapes.py"
SPEC = importlib.util.spec_from_file_location("escapes", ESCAPES)
escapes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(escapes)
SYSTEM_PYTHON = "/usr/bin/python3"  # which every user may run; this one may lie in a home directory
PARTS = (
    *("__init__.py", "version.py", "errors.py", "rewards/__init__.py"),
    *("rewards/sandbox.py", "rewards/surroundings.py", "rewards/jail.py"),
)
OTHER = 1000
AS_OTHER = {"user": OTHER, "group": OTHER, "extra_groups": []}
USERS = {"this user": [], "an ordinary user": [], "root of its own namespace": ["unshare", "--user", "--map-root-user"]}
ISOLATIONS = ("bubblewrap", "landlock")
SLOW = "root of its own namespace"
RUNS = [pytest.param(*run, marks=[pytest.mark.slow] * (run[0] == SLOW)) for run in itertools.product(USERS, ISOLATIONS)]


@pytest.fixture(scope="module")
def package():
    """What the sandbox needs of this package, and the programs, where every user may read them."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in PARTS:
            (place / "aligner" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "aligner" / name, place / "aligner" / name)
        for path in (ESCAPES, ESCAPES.with_suffix(".txt")):
            shutil.copy(path, place)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        yield place


def as_user(user: str, command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command as one of USERS."""
    if user != "this user" and os.geteuid() == 0:
        more |= AS_OTHER
    elif user == "an ordinary user":
        pytest.skip("this is an ordinary user")
    if USERS[user] and subprocess.run([*USERS[user], "true"], capture_output=True, **(AS_OTHER if "user" in more else {})).returncode:
        pytest.skip("user namespaces are forbidden here")
    environment = {"PATH": os.environ["PATH"], "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*USERS[user], *command], capture_output=True, text=True, env=environment, cwd="/", timeout=500, **more)


@pytest.mark.parametrize(("user", "isolation"), RUNS)
def test_programs_that_try_to_get_out(user, isolation, package):
    python = SYSTEM_PYTHON if os.path.exists(SYSTEM_PYTHON) else sys.executable
    ran = as_user(user, [python, str(package / "escapes.py"), str(package), isolation, python])
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    if "refused" in found:
        pytest.skip(found["refused"])
    assert found["harm"] == []
    expected = escapes.programs(found["strong"])
    assert len(expected) >= 75 and expected.keys() == found["said"].keys()
    bad = {}
    for name, (_, endings) in expected.items():
        ending, code, stdout, stderr = found["said"][name]
        held = endings != "exited" or (code, stdout) == (0, "held\n") or (code, stdout) == (7, "")
        if ending not in endings.split() or not held or "escaped" in stdout:
            bad[name] = (ending, code, stdout, stderr)
    assert not bad
    assert ("of all its processes together" in found["in_force"]) == found["strong"]
