"""PPO on test clusters: with an accounting database, on a shared node, and in containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Job, SlurmCluster, missing_for_accounting
from slurm_runs import ENVIRONMENT, PATIENCE_SECONDS, SlurmRun, run_settings
from training_jobs import ROOT, steps_of

from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.pytriton, pytest.mark.timeout(1800)]
IMAGE = os.environ.get("ALIGNER_TEST_IMAGE", "")
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

SIZES = ["num_processes=2", "cluster.gpus_per_node=8", "cluster.device=gpu", "slurm.preflight=false", "slurm.memory="]


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
    job = run.begin("--account=lab", "--qos=normal", "--exclusive", pace=0.5, beyond=2)
    better = ("--qos=urgent", "--account=lab", "--nodes=3", "--exclusive", "--time=1")
    urgent = accounted.submit("#!/bin/bash\nsleep 3\n", options=better, directory=task)
    urgent.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    assert run.saved() == run.step()
    assert job.state == "COMPLETED", job.report()
    later = job.next_of_run(timeout_seconds=60)
    run.finish(later, NUM_STEPS)
    assert shown(accounted, later, "Account") == {"lab"} and shown(accounted, later, "QOS") == {"normal"}
    assert shown(accounted, later, "Requeue") == {"0"}


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
    accounted.run("sacctmgr", "--immediate", "modify", "user", "root", "set", "maxsubmitjobs=3")
    try:
        job = run.begin()
        assert "warning: no job is queued to restart after a crash" in job.output and "AssocMaxSubmitJobLimit" in job.output
        job.signal(signal.SIGUSR1)
        job.wait("FAILED", timeout_seconds=PATIENCE_SECONDS)
        assert "warning: cannot submit the next job" in job.output and "submit the same script again to continue" in job.output
        assert "(exit code 75)" in job.output and run.saved() == run.step()
    finally:
        accounted.run("sacctmgr", "--immediate", "modify", "user", "root", "set", "maxsubmitjobs=-1")
    run.finish(run.submit(), NUM_STEPS)


def submitted(slurm: SlurmCluster, folder: Path, *settings: str) -> Job:
    """The job of a script that was made for these settings; three steps, of which the last is waited for."""
    run, script = folder / "run", folder / "shared.sub"
    given = [*SIZES, *settings, "loop.max_steps=3", f"run.directory={run}"]
    assert launch_slurm("ppo_smoke_cpu", given, LaunchOptions(output=script)) == 0
    place = {"directory": folder, "cwd": ROOT, "logs": run / "logs"}
    return slurm.submit(
        script,
        "data.train=examples/nlp/data/digits/prompts.jsonl",
        options=(f"--output={folder}/%x-%j.out",),
        environment=ENVIRONMENT,
        **place,
    )


def watched(job: Job, run: Path) -> dict[str, set[tuple[str, str]]]:
    """(node, GPUs) of each component's ranks, while it runs; then its end is waited for."""
    job.until(lambda: len(steps_of(run)) > 0, "step 1", PATIENCE_SECONDS)
    found: dict[str, set[tuple[str, str]]] = {}
    for process in job.processes():
        if "aligner.cli" in process.command and process.program != "srun":
            variables = process.variables
            found.setdefault(variables["ALIGNER_COMPONENT"], set()).add((process.node, variables["CUDA_VISIBLE_DEVICES"]))
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    assert steps_of(run) == [1, 2, 3] and json.loads((run / "done.json").read_text())
    assert job.states == ["COMPLETED"] and job.orphans() == []
    return found


@pytest.mark.parametrize(("placement", "critics"), [("separate", "2"), ("colocated", "0,1")])
def test_components_that_share_a_node(slurm: SlurmCluster, tmp_path: Path, placement: str, critics: str) -> None:
    """They have GPUs of their own, or the same ones; a function needs none."""
    found = watched(submitted(slurm, tmp_path, f"placement={placement}"), tmp_path / "run")
    (node,) = {node for places in found.values() for node, _ in places}
    assert found == {"actor": {(node, "0,1")}, "critic": {(node, critics)}, "reward": {(node, "")}}


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
@pytest.mark.skipif(not IMAGE, reason="ALIGNER_TEST_IMAGE names no image (tests/slurm_versions.sh)")
def test_a_job_in_containers(slurm: SlurmCluster, task: Path, tmp_path: Path) -> None:
    """Preflight and components run in the image's root directory; the host's Python packages stay outside."""
    run = SlurmRun(slurm, task, "contained", run_settings(task, NUM_STEPS))
    run.set_pace(0.3)
    strangers = tmp_path / "strangers"
    strangers.mkdir()
    (strangers / "mpi4py.py").write_text("raise RuntimeError('a package of the host')\n")
    variables = {
        **ENVIRONMENT,
        "ALIGNER_CONTAINER": f"apptainer:{IMAGE}",
        "ALIGNER_MOUNTS": f"{sys.base_prefix},{tmp_path},{task}",
        "ALIGNER_PREFLIGHT": "1",
        "PYTHONPATH": f"{ROOT}:{strangers}",
    }
    del variables["ALIGNER_VENV"]
    job = run.submit(environment=variables)
    run.progress(job, beyond=2)
    for kind in ("actor", "critic", "reward"):
        (process, *_) = (one for one in run.processes()[kind] if one.program.startswith("python"))
        assert Path(f"/proc/{process.pid}/root/etc/os-release").read_text() == (Path(IMAGE) / "etc" / "os-release").read_text(), process
        assert process.variables["PYTHONPATH"] == str(ROOT) and process.variables["PYTHONNOUSERSITE"] == "1"
    run.finish(job, NUM_STEPS)
