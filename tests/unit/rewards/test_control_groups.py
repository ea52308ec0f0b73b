"""Control groups of sandboxed programs: where they may be made, what a program in one meets, the kernel's own where there are some."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from aligner.rewards import sandbox, surroundings
from aligner.rewards.sandbox import Ending, Isolation, Sandbox, SandboxLimits
from aligner.rewards.surroundings import ControlGroup, control_group, delegated_place

PYTHON = "/usr/bin/python3"
DELEGATED = delegated_place()
FILLERS = """import os, time
for _ in range(4):
    if os.fork() == 0:
        data = bytearray(100 * 2**20)
        time.sleep(30)
time.sleep(30)"""


def tree(place: Path, **switches: str | None) -> Path:
    """A /proc/self of a process in job/run below a mount at place/cg; `switches`: what is on in each group (None: nothing can be)."""
    for name in ("job", "run"):
        group = place / "cg" / ("job" if name == "job" else "job/run")
        group.mkdir(parents=True)
        (group / "cgroup.procs").touch()
        if switches[name] is None:
            (group / "cgroup.subtree_control").mkdir()  # as little writable as that of a group with processes
        else:
            (group / "cgroup.subtree_control").write_text(switches[name])
    process = place / "self"
    process.mkdir()
    (process / "cgroup").write_text("4:memory:/old\n0::/slice/job/run\n")
    (process / "mountinfo").write_text(
        f"22 1 254:0 / / rw - ext4 /dev/root rw\n30 22 0:26 /slice {place}/cg rw shared:9 - cgroup2 cgroup rw\n"
    )
    return process


def test_where_groups_may_be_made(tmp_path, monkeypatch):
    def found(name: str, **switches: str | None) -> Path | None:
        place = tmp_path / name
        place.mkdir()
        answer = delegated_place(tree(place, **switches))
        return answer and answer.relative_to(place / "cg")

    assert found("own", job="", run="cpu memory pids") == Path("job/run")
    assert found("switched-on", job="", run="cpu") == Path("job/run")
    assert (tmp_path / "switched-on/cg/job/run/cgroup.subtree_control").read_text() == "+memory +pids"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert found("above", job="memory pids", run=None) == Path("job")
    assert found("neither", job=None, run=None) is None
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # may write everywhere, and stays below the limits of its job unless the job is its own
    assert found("of-root", job="memory pids", run=None) is None
    monkeypatch.setattr(os, "listxattr", lambda path: ["user.delegate"])
    assert found("given-to-root", job="memory pids", run=None) == Path("job")


def test_no_groups_of_version_2(tmp_path):
    process = tree(tmp_path, job="", run="")
    (process / "cgroup").write_text("4:memory:/old\n")
    assert delegated_place(process) is None
    (process / "cgroup").write_text("0::/elsewhere\n")  # not below what is mounted
    assert delegated_place(process) is None


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Groups in a directory: what joins them is written into a file, and the kernel has ended something in each."""
    made = []

    @contextlib.contextmanager
    def fake(place, **limits):
        (place / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
        with open(place / "procs", "wb", buffering=0) as file:
            made.append(limits)
            yield ControlGroup(place, file.fileno())

    monkeypatch.setattr(sandbox, "control_group", fake)
    monkeypatch.setattr(sandbox, "delegated_place", lambda: tmp_path)
    return made


def test_a_program_joins_its_group_and_is_judged_by_it(groups, tmp_path):
    limits = SandboxLimits(memory_bytes=200 * 2**20, disk_bytes=2**20, processes=9)
    box = Sandbox(limits, Isolation.limits, interpreter=PYTHON if os.path.exists(PYTHON) else "")
    assert "by cgroup v2" in box.describe() and groups[-1]["processes"] == sandbox.TRIAL.processes
    outcome = box.run("import os; os.kill(os.getpid(), 9)")
    assert (tmp_path / "procs").read_bytes() == b"0"  # whoever writes 0 joins
    assert groups[-1] == {"memory_bytes": 201 * 2**20, "processes": 9}
    assert (outcome.ending, outcome.code) == (Ending.memory, 9)
    assert box.run("print(1)").ending is Ending.exited


def test_groups_that_do_not_work_are_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "delegated_place", lambda: tmp_path / "none")
    box = Sandbox(isolation=Isolation.limits, interpreter=PYTHON if os.path.exists(PYTHON) else "")
    assert "cgroup" not in box.describe() and box.run("print(1)").stdout == "1\n"


@pytest.mark.skipif(DELEGATED is None, reason="no control groups of version 2 were delegated to this process")
def test_the_kernels_own_groups(monkeypatch):
    with control_group(DELEGATED, memory_bytes=2**26, processes=3) as group:
        assert (group.path / "memory.max").read_text() == f"{2**26}\n" and (group.path / "pids.max").read_text() == "3\n"
        assert not group.out_of_memory()
    assert not group.path.exists()
    monkeypatch.setattr(surroundings, "EMPTYING_SECONDS", 20.0)
    limits = SandboxLimits(memory_bytes=200 * 2**20, wall_seconds=20.0)
    for isolation in list(Isolation)[1:]:
        with contextlib.suppress(sandbox.ConfigError):
            box = Sandbox(limits, isolation, interpreter=PYTHON if os.path.exists(PYTHON) else "")
            assert "by cgroup v2" in box.describe() and box.run(FILLERS).ending is Ending.memory
    assert not [path for path in DELEGATED.iterdir() if path.name.startswith(surroundings.NAME)]
