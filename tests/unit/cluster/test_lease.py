"""Who holds a run, and what its processes do when nobody does any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_jobs import eventually

from aligner.cluster import lease as leases
from aligner.cluster.lease import LeaseRecord, RunHeld, claim, read_lease
from aligner.errors import LaunchError

ROOT = Path(__file__).parents[3]
WATCHER = (
    "import os, sys, time; from aligner.cluster.lease import watch_lease; watch_lease(os.environ); print('on', flush=True); time.sleep(60)"
)


def record(job: str = "1", attempt: str = "1.0", valid_seconds: float = 0.5) -> LeaseRecord:
    return LeaseRecord(job=job, attempt=attempt, host="n1", pid=7, valid_seconds=valid_seconds)


def nobody_knows(other: LeaseRecord) -> None:
    return None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease.json"


def take(path: Path, one: LeaseRecord, is_over=nobody_knows) -> leases.Lease:
    return claim(path, one, is_over=is_over, settle_seconds=0.01)


def test_a_held_lease_is_touched_and_withdrawn(path: Path) -> None:
    lease = take(path, record(valid_seconds=0.2))
    found, first = read_lease(path)
    assert found == record(valid_seconds=0.2)
    deadline = time.monotonic() + 20
    while read_lease(path)[1] == first:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.renew("1.1")
    assert read_lease(path)[0].attempt == "1.1" and lease.lost == ""
    lease.release()
    lease.release()
    assert not path.exists()


def test_another_living_holder_refuses(path: Path) -> None:
    lease = take(path, record(valid_seconds=1.0))
    with pytest.raises(RunHeld, match=r"held by Slurm job 1 \(pid 7 on n1, attempt 1.0\), which still lives"):
        take(path, record("2", "2.0"))  # its signs of life say so
    with pytest.raises(RunHeld):
        take(path, record("2", "2.0"), lambda other: False)
    assert take(path, record("1", "1.0")).lost == ""  # the same job once more
    lease.release()


@pytest.mark.parametrize("is_over", [nobody_knows, lambda other: True], ids=["silent", "known to be over"])
def test_a_dead_holder_is_replaced(is_over, path: Path) -> None:
    leases._write(path, record(valid_seconds=0.2))
    lease = take(path, record("2", "2.0"), is_over)
    assert read_lease(path)[0].job == "2"
    lease.release()


def test_of_two_claims_of_one_moment_one_stands(path: Path, monkeypatch) -> None:
    def other_claims_too(seconds: float) -> None:
        leases._write(path, record("2", "2.0"))

    monkeypatch.setattr(leases.time, "sleep", other_claims_too)
    with pytest.raises(RunHeld, match="taken at the same time by Slurm job 2"):
        take(path, record())


def test_the_holder_notices_that_it_lost_the_run(path: Path) -> None:
    lease = take(path, record(valid_seconds=0.2))
    leases._write(path, record("2", "2.0"))
    assert eventually(lambda: lease.lost)
    assert "was taken by Slurm job 2" in lease.lost
    lease.release()
    assert path.exists()  # it is the other's


def test_a_file_that_is_no_lease(path: Path) -> None:
    path.write_text(json.dumps({"job": "1"}))
    with pytest.raises(LaunchError, match="is not a lease of this version"):
        read_lease(path)


def watcher(path: Path, attempt: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "ALIGNER_LEASE": str(path), "ALIGNER_ATTEMPT": attempt}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", WATCHER], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "on\n"
    return process


def test_processes_leave_with_their_lease(path: Path) -> None:
    """Four watchers at once: of a lease that goes stale, one that is withdrawn, one of another attempt, and one that is kept."""
    folder = path.parent
    paths = {name: folder / f"{name}.json" for name in ("stale", "withdrawn", "renewed", "kept")}
    leases._write(paths["stale"], record(valid_seconds=0.5))
    held = {name: take(paths[name], record(valid_seconds=0.5)) for name in ("withdrawn", "renewed", "kept")}
    watchers = {name: watcher(paths[name], "1.0") for name in paths}
    held["withdrawn"].release()
    held["renewed"].renew("1.1")
    said = {}
    for name in ("stale", "withdrawn", "renewed"):
        said[name] = watchers[name].communicate(timeout=60)[1]
        assert watchers[name].returncode == 1
    assert watchers["kept"].poll() is None
    watchers["kept"].kill()
    watchers["kept"].communicate()
    for name in ("renewed", "kept"):
        held[name].release()
    assert "was not touched for" in said["stale"]
    assert "was withdrawn: the starter of this process has ended" in said["withdrawn"]
    assert "belongs to attempt 1.1 now, this is a process of attempt 1.0" in said["renewed"]
