"""PPO on test clusters with other sites' rules: what is exported, what following jobs ask for, who waits for a crash."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from slurm_cluster import Job, SlurmCluster
from slurm_job import kill
from slurm_runs import ENVIRONMENT, PATIENCE_SECONDS, SlurmRun, run_settings
from training_jobs import ROOT, eventually, steps_of

from aligner.cluster.slurm.client import _FIELD

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.pytriton, pytest.mark.timeout(1800)]
NUM_STEPS = 12


def launched(slurm: SlurmCluster, run: SlurmRun, *settings: str, **variables: str) -> Job:
    command = [sys.executable, "-m", "aligner.cli", "launch", "slurm", "ppo_smoke_cpu"]
    output = f"slurm.output={run.directory.parent}/%x-%j.out"
    done = slurm.run(
        *command,
        *run.settings,
        f"run.directory={run.directory}",
        output,
        *settings,
        environment={**ENVIRONMENT, **variables},
        cwd=ROOT,
        timeout=120,
    )
    number = int(done.stdout.split()[-1])
    return slurm.job(number, run.directory.parent, run.directory / "logs")


def test_a_site_where_nothing_is_exported(slurm: SlurmCluster, task: Path) -> None:
    """`--export=NONE` by rule: the choices of the submitter, the preflight, servers and the next job all get what they need."""
    run = SlurmRun(slurm, task, "nothing", run_settings(task, NUM_STEPS))
    run.set_pace(0.3)
    job = launched(slurm, run, SBATCH_EXPORT="NONE", ALIGNER_PREFLIGHT="1")
    run.progress(job, beyond=2)
    assert "preflight on 3 nodes" in job.output and "the preflight" not in job.output.partition("attempt ")[2]
    (batch,) = run.processes()["conductor"]
    assert batch.variables["SLURM_EXPORT_ENV"] == "NONE" and batch.variables["ALIGNER_VENV"] == ENVIRONMENT["ALIGNER_VENV"]
    actor, *_ = run.processes()["actor"]
    assert actor.variables["ALIGNER_COMPONENT"] == "actor" and "SLURM_EXPORT_ENV" not in actor.variables
    job.signal(signal.SIGUSR1)
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    run.finish(job.next_of_run(timeout_seconds=30), NUM_STEPS)


@pytest.fixture
def other_cluster(_slurm_cluster: SlurmCluster, request: pytest.FixtureRequest):
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory, SlurmCluster(Path(directory), **request.param) as cluster:
        yield cluster


def tried(cluster: SlurmCluster, *settings: str) -> tuple[int, str]:
    """`aligner launch slurm grpo_70b --test-only` on its phantom nodes: exit code and output."""
    command = [sys.executable, "-m", "aligner.cli", "launch", "slurm", "grpo_70b", "--test-only", "slurm.partition=phantom"]
    required = ["data.train=x", "model.path=y", *settings]
    done = cluster.run(*command, *required, environment=ENVIRONMENT, cwd=ROOT, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_what_a_search_writes_is_taken(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The config and script of a job of 256 GPUs, by `aligner plan --search --write`: servers on the nodes of the actor."""
    settings = {name: "256" for name in ("num_processes", "critic.num_processes", "reward.num_processes")} | {"placement": "colocated"}
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N; from aligner.commands.plan.search import write\n"
        "job = N(components=[N(component=N(optimizer=None))])\n"
        f"write(Path(sys.argv[1]), 'ppo_70b', [], N(gpus=256, seconds=1.0, settings={settings!r}, job=job), steps=0)"
    )
    slurm.run(sys.executable, "-c", code, str(tmp_path), environment=ENVIRONMENT, cwd=ROOT, timeout=120)
    script = tmp_path / "ppo_70b_256_gpus.sub"
    assert "--nodes=32 --ntasks-per-node=8 --gpus-per-node=8" in script.read_text()
    assert "to start at" in slurm.accepts(script)


@pytest.mark.parametrize("other_cluster", [{"num_gpus": 0}], indirect=True)
def test_a_cluster_that_does_not_count_gpus(other_cluster: SlurmCluster) -> None:
    """It refuses every script that asks for GPUs; `slurm.gpu_request=auto` does not ask there."""
    code, said = tried(other_cluster, "slurm.gpu_request=gpus_per_node")
    assert code == 2 and "Invalid generic resource (gres) specification" in said
    code, said = tried(other_cluster)
    assert code == 0 and "to start at" in said


@pytest.mark.parametrize("other_cluster", [{"gpu_type": "h100"}], indirect=True)
def test_a_cluster_with_types_of_gpus(other_cluster: SlurmCluster) -> None:
    for settings in ((), ("slurm.gpu_type=h100",), ("slurm.gpu_type=h100", "slurm.gpu_request=gres"), ("slurm.exclusive=false",)):
        code, said = tried(other_cluster, *settings)
        assert code == 0 and "to start at" in said


ASKED = ("--comment=two words", "--nice=7", "--mem=500", "--mail-type=FAIL,END", "--mail-user=me@site", "--oversubscribe")
FIELDS = ("Comment", "Nice", "MinMemoryNode", "MailType", "MailUser", "OverSubscribe", "ExcNodeList", "TimeLimit", "Partition")


def asked_of(slurm: SlurmCluster, job: Job) -> list[dict[str, str]]:
    found = []
    for line in slurm.run("scontrol", "show", "job", "--oneliner", str(job.number)).stdout.splitlines():
        parts = _FIELD.split(line)
        fields = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True)) if parts[1:] else {}
        found += [{name: fields.get(name, "") for name in FIELDS}] if fields else []
    return found


def test_following_jobs_ask_for_what_the_first_one_did(slurm: SlurmCluster, task: Path) -> None:
    """After a hand-over, and after a crash: the job goes on with every wish of whoever submitted it."""
    run = SlurmRun(slurm, task, "wishes", [*run_settings(task, NUM_STEPS), "slurm.on_actor_failure=end"])
    job = run.begin(*ASKED, "--time=00:20:00")
    first = asked_of(slurm, job)
    assert first[0]["Comment"] == "two words" and first[0]["MinMemoryNode"] == "500M" and first[0]["MailUser"] == "me@site"
    job.signal(signal.SIGUSR1)
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    second = job.next_of_run(timeout_seconds=30)
    assert asked_of(slurm, second) == first

    second.until(lambda: run.processes()["actor"], "its actor", PATIENCE_SECONDS)
    run.progress(second, beyond=run.step())
    assert kill(run.processes()["actor"][0])
    second.wait("FAILED", timeout_seconds=PATIENCE_SECONDS)
    run.set_pace(0.0)
    third = second.next_of_run(timeout_seconds=60)
    assert asked_of(slurm, third) == first
    gatekeeper = [one for one in job.gatekeepers() if one.state == "COMPLETED"]
    assert len(gatekeeper) == 1 and len(gatekeeper[0].components()) == 1
    run.finish(third, NUM_STEPS)


@pytest.mark.parametrize("other_cluster", [{"scheduler": "sched/builtin", "num_phantoms": 0}], indirect=True)
def test_a_site_without_heterogeneous_jobs(other_cluster: SlurmCluster, task: Path) -> None:
    """`--separate`: a job for each component. They begin, hand over, crash and end together."""
    run = SlurmRun(other_cluster, task, "separate", run_settings(task, NUM_STEPS))
    with pytest.raises(AssertionError, match="Requested operation not supported on this system"):
        run.submit()
    run.set_pace(0.3)
    job = launched(other_cluster, run, "slurm.separate=true", "slurm.exclusive=true", "slurm.grace_seconds=3")
    assert [part.name for part in running(other_cluster)] == ["ppo_smoke_cpu", "ppo_smoke_cpu-critic", "ppo_smoke_cpu-reward"]
    run.progress(job, beyond=2)
    critic = next(part for part in running(other_cluster) if part.name.endswith("critic"))
    nodes = {process.node for kind in ("actor", "critic", "reward") for process in run.processes()[kind]}
    assert len(nodes) == 3

    critic.signal(signal.SIGUSR1)  # the end of one job's time is that of the run's
    job.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    second = job.next_of_run(timeout_seconds=30)
    second.until(lambda: run.processes()["actor"], "its actor", PATIENCE_SECONDS)
    assert {part.number for part in running(other_cluster)}.isdisjoint({job.number, critic.number})
    at = run.step()
    second.until(lambda: run.step() > at, "a step of it", PATIENCE_SECONDS)

    next(part for part in running(other_cluster) if part.name.endswith("reward")).cancel()
    second.wait("FAILED", timeout_seconds=PATIENCE_SECONDS)
    assert "which held nodes of this run, has ended" in second.output
    run.finish(second.next_of_run(timeout_seconds=60), NUM_STEPS)
    assert eventually(lambda: running(other_cluster) == [], 30)


def running(cluster: SlurmCluster) -> list[Job]:
    lines = cluster.run("squeue", "--noheader", "--format=%j %i").stdout.splitlines()
    found = sorted(line.split() for line in lines if "gatekeeper" not in line)
    return [cluster.job(int(number), cluster.settings.directory) for _, number in found]


@pytest.mark.parametrize("other_cluster", [{"cgroups": True, "num_phantoms": 0}], indirect=True)
def test_a_site_that_holds_jobs_to_their_memory(other_cluster: SlurmCluster, task: Path) -> None:
    """A server that takes more than the job asked for is killed by the kernel: the run says so, and goes on with a new one."""
    if not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip("no control group of version 1 for memory, which Slurm 22.05 needs where there is no systemd")
    run = SlurmRun(other_cluster, task, "memory", run_settings(task, NUM_STEPS))
    hungry = run.directory.parent / "hungry"
    rewards = run.directory.parent / "rewards.py"
    rewards.write_text(
        "import pathlib, time\n\ndef reward(target):\n    def score(prompts, responses, answers):\n        time.sleep(0.3)\n"
        f"        hungry = pathlib.Path({str(hungry)!r})\n        if hungry.exists():\n            hungry.unlink()\n"
        "            bytearray(4 << 30)\n        return [response.count(target[0]) / 8 for response in responses]\n    return score\n"
    )
    job = launched(other_cluster, run, "slurm.memory=3000M", f"reward.function.path={rewards}:reward", ALIGNER_PREFLIGHT="0")
    run.progress(job, beyond=1)
    hungry.touch()
    job.wait("COMPLETED", timeout_seconds=2 * PATIENCE_SECONDS)
    assert "reward was killed: it took more memory than Slurm gave its step (slurm.memory)" in job.output
    assert job.output.count("starting it again") == 1 and steps_of(run.directory) == list(range(1, NUM_STEPS + 1))


def test_a_cancelled_run_takes_no_nodes_again(slurm: SlurmCluster, task: Path) -> None:
    run = SlurmRun(slurm, task, "cancelled", run_settings(task, NUM_STEPS))
    job = run.begin()
    job.cancel()
    job.wait("CANCELLED", timeout_seconds=PATIENCE_SECONDS)
    (gatekeeper,) = job.gatekeepers()
    gatekeeper.wait("COMPLETED", timeout_seconds=PATIENCE_SECONDS)
    said = (run.directory / "jobs" / str(job.number) / f"gatekeeper-{gatekeeper.number}.out").read_text()
    assert said == f"job {job.number} is not submitted again: somebody cancelled it: submit it again to continue\n"
    assert job.successors() == []
    assert json.loads((run.directory / "attempts.jsonl").read_text().splitlines()[-1])["event"] == "not_continued"


OLD_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.6.8" && exit 0\nexit 1\n'
SITES = {  # another one is in test_slurm_runs.py
    "exports nothing": ({}, ("--export=NONE",), {}),
    "counts no GPUs": ({"num_gpus": 0}, (), {}),
    "has types of GPUs": ({"gpu_type": "h100"}, (), {}),
    "holds jobs to their memory": ({"cgroups": True}, ("--mem=4000",), {}),
    "charges accounts": ({"accounting": True}, ("--account=lab",), {}),
    "gives whole nodes": ({}, ("--exclusive",), {}),
    "has an old Python first": ({}, (), {"PATH": "old"}),
}


@pytest.mark.parametrize("site", SITES)
def test_the_smoke_job_at_every_kind_of_site(_slurm_cluster: SlurmCluster, tmp_path: Path, site: str) -> None:
    """`sbatch slurm/smoke_cpu.sub` from the checkout, preflight included."""
    settings, options, variables = SITES[site]
    if "PATH" in variables:
        for name in ("python3", "python"):
            (tmp_path / name).write_text(OLD_PYTHON)
            (tmp_path / name).chmod(0o755)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ALIGNER_PYTHON": ""}
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory:
        with SlurmCluster(Path(directory), num_phantoms=0, **settings) as cluster:
            if "accounting" in settings:
                for words in (("account", "lab"), ("user", "root", "account=lab")):
                    cluster.run("sacctmgr", "--immediate", "add", *words)
            finishes(cluster, tmp_path, *options, variables=variables)


def finishes(cluster: SlurmCluster, folder: Path, *options: str, variables: dict[str, str]) -> None:
    job = cluster.submit(
        ROOT / "slurm" / "smoke_cpu.sub",
        f"run.directory={folder}/run",
        options=(f"--output={folder}/%x-%j.out", *options),
        environment={**ENVIRONMENT, **variables},
        directory=folder,
        cwd=ROOT,
        logs=folder / "run" / "logs",
    )
    job.wait("COMPLETED", timeout_seconds=2 * PATIENCE_SECONDS)
    assert len(steps_of(folder / "run")) == 30 and "preflight on 3 nodes" in job.output and job.orphans() == []


def written(kind: str) -> list[str]:
    """Settings as docs/slurm.md has them, as a shell reads them."""
    text = (ROOT / "docs" / "slurm.md").read_text().partition("## Site requirements")[2]
    return [shlex.split(found)[0] for found in re.findall(rf'`("?{kind}[^`]*)`', text) if "=" in found]


def test_the_settings_of_the_documentation_word_for_word(slurm: SlurmCluster, task: Path) -> None:
    """Every one is taken by `aligner launch slurm --test-only`, and those that this cluster has are those of a run."""
    found = written("slurm")
    assert len(found) >= 9
    site = {"--partition=cpu": "--partition=batch", "/shared/site.sh": "/dev/null", "module load": ": module load", "480G": "4000M"}
    given = []
    for setting in found:
        for there, here in site.items():
            setting = setting.replace(there, here)
        if not setting.startswith("slurm.gpu_type"):  # the nodes here have one kind; see above
            code, said = tried(slurm, setting)
            assert code == 0 and "to start at" in said, (setting, said)
        if not setting.startswith(("slurm.gpu", "slurm.mpi")):
            given.append(setting)
    run = SlurmRun(slurm, task, "documented", run_settings(task, NUM_STEPS))
    run.finish(launched(slurm, run, *given, "slurm.memory=4000M"), NUM_STEPS)
