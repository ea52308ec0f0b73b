"""PPO whose components share a node of a real Slurm cluster: with GPUs of their own, and on the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_cluster import Job, SlurmCluster
from slurm_runs import ENVIRONMENT
from training_jobs import ROOT, steps_of

from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.pytriton, pytest.mark.timeout(900)]
SIZES = ["num_processes=2", "cluster.gpus_per_node=8", "cluster.device=gpu", "slurm.preflight=false", "slurm.memory="]
PATIENCE_SECONDS = 240.0


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


def test_components_on_one_node_have_gpus_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    found = watched(submitted(slurm, tmp_path), tmp_path / "run")
    (node,) = {node for places in found.values() for node, _ in places}
    assert found == {"actor": {(node, "0,1")}, "critic": {(node, "2")}, "reward": {(node, "")}}  # a function needs none


def test_colocated_components_have_the_same_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    found = watched(submitted(slurm, tmp_path, "placement=colocated"), tmp_path / "run")
    (node,) = {node for places in found.values() for node, _ in places}
    assert found == {"actor": {(node, "0,1")}, "critic": {(node, "0,1")}, "reward": {(node, "")}}
