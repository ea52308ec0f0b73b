"""PPO on a test cluster with an accounting database: accounts, limits, and preemption by jobs of a better QOS."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Job, SlurmCluster, missing_for_accounting
from slurm_runs import ENVIRONMENT, SlurmRun, run_settings
from training_jobs import ROOT, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.pytriton, pytest.mark.timeout(1800)]
PATIENCE_SECONDS = 240.0
NUM_STEPS = 8
GRACE_SECONDS = 120
ACCOUNTS = (
    ("add", "account", "lab"),
    ("add", "user", "root", "account=lab"),
    ("add", "qos", "urgent"),
    ("modify", "qos", "urgent", "set", "preempt=normal", "priority=1000"),
    ("modify", "qos", "normal", "set", f"gracetime={GRACE_SECONDS}"),
    ("modify", "user", "root", "set", "qos=normal,urgent"),
)


@pytest.fixture(scope="module")
def accounted(_slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """`warned`: preempted jobs get the signal that they asked for (--signal); at other sites SIGTERM, long before their end."""
    if reason := missing_for_accounting():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory:
        with SlurmCluster(Path(directory), accounting=True, preemption_warns=request.param, num_phantoms=0) as cluster:
            for words in ACCOUNTS:
                cluster.run("sacctmgr", "--immediate", *words)
            yield cluster


def shown(cluster: SlurmCluster, job: Job, field: str) -> set[str]:
    """A field of all parts of a job."""
    words = cluster.run("scontrol", "show", "job", "--oneliner", str(job.number)).stdout.split()
    return {word.partition("=")[2] for word in words if word.startswith(f"{field}=")}


@pytest.mark.parametrize("accounted", [pytest.param(True, id="warned"), pytest.param(False, id="terminated")], indirect=True)
def test_a_better_job_takes_the_nodes(accounted: SlurmCluster, task: Path) -> None:
    """The run saves within the grace time, and goes on when the nodes are free again: no step is lost, none is done twice."""
    run = SlurmRun(accounted, task, f"preempted{accounted.settings.preemption_warns}", run_settings(task, NUM_STEPS))
    run.set_pace(0.5)
    job = run.submit("--account=lab", "--qos=normal", "--exclusive")
    job.until(lambda: run.step() > 2, "step 3", 2 * PATIENCE_SECONDS)
    better = ("--qos=urgent", "--account=lab", "--nodes=3", "--exclusive", "--time=1")
    urgent = accounted.submit("#!/bin/bash\nsleep 3\n", options=better, directory=task)
    urgent.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    assert run.saved() == run.step()
    assert job.state == "COMPLETED", job.report()
    later = job.next_of_run(timeout_seconds=60)
    run.set_pace(0.0)
    later.wait("COMPLETED", timeout_seconds=2 * PATIENCE_SECONDS)
    assert shown(accounted, later, "Account") == {"lab"} and shown(accounted, later, "QOS") == {"normal"}
    assert shown(accounted, later, "Requeue") == {"0"}
    assert steps_of(run.directory) == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("accounted", [True], indirect=True, ids=["warned"])
def test_an_account_that_is_not_the_users(accounted: SlurmCluster) -> None:
    command = [sys.executable, "-m", "aligner.cli", "launch", "slurm", "ppo_smoke_cpu", "data.train=x", "model.tokenizer=y"]
    for more in ((), ("slurm.separate=true",)):
        done = accounted.run(*command, "slurm.account=nobody", *more, environment=ENVIRONMENT, cwd=ROOT, timeout=120, check=False)
        assert done.returncode != 0 and "Invalid account or account/partition combination specified" in done.stderr


@pytest.mark.parametrize("accounted", [True], indirect=True, ids=["warned"])
def test_limits_on_the_number_of_jobs(accounted: SlurmCluster, task: Path) -> None:
    """No following job may be submitted: the run says so at its start, stops with a checkpoint, and goes on when it is submitted again."""
    run = SlurmRun(accounted, task, "limited", run_settings(task, NUM_STEPS))
    run.set_pace(0.3)
    accounted.run("sacctmgr", "--immediate", "modify", "user", "root", "set", "maxsubmitjobs=3")
    try:
        job = run.submit()
        job.until(lambda: run.step() > 1, "step 2", 2 * PATIENCE_SECONDS)
        assert "warning: no job is queued to restart after a crash" in job.output and "AssocMaxSubmitJobLimit" in job.output
        job.signal(signal.SIGUSR1)
        job.wait("FAILED", timeout_seconds=PATIENCE_SECONDS)
        assert "warning: cannot submit the next job" in job.output and "submit the same script again to continue" in job.output
        assert "(exit code 75)" in job.output and run.saved() == run.step()
    finally:
        accounted.run("sacctmgr", "--immediate", "modify", "user", "root", "set", "maxsubmitjobs=-1")
    run.set_pace(0.0)
    run.submit().wait("COMPLETED", timeout_seconds=2 * PATIENCE_SECONDS)
    assert steps_of(run.directory) == list(range(1, NUM_STEPS + 1))
