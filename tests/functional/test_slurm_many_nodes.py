"""The conductor and 64 nodes: it starts a rank on each, survives the death of any of them, and leaves nothing."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Job, SlurmCluster
from slurm_runs import ENVIRONMENT
from training_jobs import ROOT

from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.attempt import newest_step
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, SlurmConfig, to_json

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1200),
    pytest.mark.slow,
]
SIZES = {"actor": 32, "critic": 16, "reward": 16}
MAX_STEPS = 100000  # it ends when it is told
PATIENCE_SECONDS = 120.0
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=many --time=20 --signal=B:USR1@60 --no-requeue --output=%x-%j.out
#SBATCH --nodes={SIZES["actor"]} --ntasks-per-node=1 --exclusive
#SBATCH hetjob
#SBATCH --nodes={SIZES["critic"]} --ntasks-per-node=1 --exclusive
#SBATCH hetjob
#SBATCH --nodes={SIZES["reward"]} --ntasks-per-node=1 --exclusive
exec {sys.executable} {ROOT}/tests/functional/many_ranks.py job "$1" "$2"
"""


@pytest.fixture(scope="module")
def wide(_slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """64 nodes, and some to spare for each that dies: where many nodes die or end at once Slurm drains a few ("Kill task failed")."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory:
        with SlurmCluster(Path(directory), num_nodes=sum(SIZES.values()) + 4 * len(SIZES), num_phantoms=0, num_gpus=0) as cluster:
            yield cluster


def test_the_death_of_any_node(wide: SlurmCluster, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create()
    program = str(ROOT / "tests" / "functional" / "many_ranks.py")
    components = tuple(
        ComponentSpec(
            name=name,
            program=(program, "server" if part else "actor", str(run.path), str(MAX_STEPS)),
            num_nodes=size,
            ranks_per_node=1,
            gpus_per_node=0,
            part=part,
        )
        for part, (name, size) in enumerate(SIZES.items())
    )
    spec = JobSpec(
        name="many",
        run_directory=str(run.path),
        max_steps=MAX_STEPS,
        checkpoints=("policy",),
        components=components,
        preflight=(),
        slurm=SlurmConfig(signal_seconds_before_end=60, abandon_seconds=10, grace_seconds=2, lease_seconds=10),
    )
    (tmp_path / "spec.json").write_text(to_json(spec))
    script = tmp_path / "many.sub"
    script.write_text(SCRIPT)
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    job = wide.submit(script, tmp_path / "spec.json", script, directory=tmp_path, environment=environment, logs=run.logs)
    chosen = random.Random(64)
    for component in ("actor", "critic", "reward"):
        at = newest_step(run, ("policy",))
        job.until(lambda at=at: newest_step(run, ("policy",)) > at + 2, "two more steps", PATIENCE_SECONDS)
        nodes = nodes_of(job, component)
        assert len(nodes) == SIZES[component] and len(set().union(*(nodes_of(job, one) for one in SIZES))) == 64
        victim = chosen.choice(sorted(nodes - {batch_host(job)}))
        wide.kill_node(victim)
        # Of the batch script's component: where a step's own daemon hangs, Slurm takes minutes to give one node of another up.
        job.until(lambda job=job: job.state == "NODE_FAIL", "the end of the job", PATIENCE_SECONDS)
        job = job.next_of_run(timeout_seconds=PATIENCE_SECONDS)
    (run.path / "finish").touch()
    job.until(lambda: job.state == "COMPLETED", "its end", 2 * PATIENCE_SECONDS)
    assert json.loads(run.done.read_text())["step"] == MAX_STEPS and job.orphans() == [] and "warning" not in job.output
    assert sorted(path.name for path in run.logs.glob("actor.*.log")) == sorted(
        ["actor.step.log", *(f"actor.{rank}.log" for rank in range(SIZES["actor"]))]
    )


def nodes_of(job: Job, component: str) -> set[str]:
    ranks = [one for one in job.processes() if one.variables.get("ALIGNER_COMPONENT") == component and one.program.startswith("python")]
    return {one.node for one in ranks}


def batch_host(job: Job) -> str:
    return next(one.node for one in job.processes() if one.step is None and "job" in one.command)
