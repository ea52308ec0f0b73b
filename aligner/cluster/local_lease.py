"""The local launcher as the holder of a run: it keeps Slurm jobs of the same run away, and its own processes know when it is gone."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aligner.cluster import lease as leases
from aligner.cluster.lease import LeaseRecord
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.client import SlurmClient
from aligner.errors import LaunchError

_SCONTROL_SECONDS = 30.0
_SETTLE_SECONDS = 0.05  # the run directory's lock keeps other launchers of this machine away already


@contextmanager
def hold(run_directory: RunDirectory, valid_seconds: float) -> Iterator[dict[str, str]]:
    """Hold the run meanwhile, under the launcher's lock; gives the variables that its processes need.

    Raises:
        RunHeld: a Slurm job, or a launcher on another machine, holds it.
    """
    job = f"local-{os.getpid()}"
    record = LeaseRecord(job=job, attempt=f"{job}.0", host=socket.gethostname(), pid=os.getpid(), valid_seconds=valid_seconds)
    lease = leases.claim(run_directory.lease, record, is_over=_is_over, settle_seconds=_SETTLE_SECONDS)
    try:
        yield {leases.ATTEMPT_VARIABLE: record.attempt, leases.VARIABLE: str(run_directory.lease)}
    finally:
        lease.release()


def _is_over(other: LeaseRecord) -> bool | None:
    if other.host == socket.gethostname() and other.job.startswith("local-"):
        return True  # this launcher has the lock that the other one held
    if not other.job.isdigit() or shutil.which("scontrol") is None:
        return None
    try:
        return SlurmClient(_SCONTROL_SECONDS).is_over(other.job)
    except LaunchError:  # no controller here: the signs of life decide
        return None
