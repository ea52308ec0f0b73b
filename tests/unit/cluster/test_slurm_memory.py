"""The memory and processors that job scripts ask for, beside the plans of the same jobs, which are made in a process of their own."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import launch_slurm

pytestmark = pytest.mark.cpu  # the simulated GPU cannot hold a plan's fake tensors
NAMES = ("ppo_70b", "grpo_8b", "grpo_70b_h200")
SETTINGS = {
    "whole": (),
    "shared": ("slurm.exclusive=false",),
    "typed": ("slurm.exclusive=false", "slurm.memory=480G", "slurm.cpus_per_rank=6"),
    "nothing": ("slurm.memory=", "cluster.cpus_per_node=0"),
}


@pytest.fixture(scope="module")
def found(on_ranks) -> dict[str, dict]:
    return on_ranks(jobs_and_plans, 1, timeout=600)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_gets_the_memory_and_processors_that_its_plan_wants(name: str, found: dict[str, dict]) -> None:
    """All of a whole node, of which a plan takes less; of nodes that others share what the plan wants, and a little more."""
    job = found[name]
    assert max(job["hosts"]) < job["host_memory_gib"]
    assert all(" --cpus-per-task=14 --mem=0 --exclusive" in line for line in job["whole"])
    for line in job["shared"]:
        (given,) = re.findall(r"--cpus-per-task=14 --mem=(\d+)G$", line)
        assert max(job["hosts"]) * 1.05 < int(given) < max(job["hosts"]) * 1.2
    assert job["typed"][0].endswith(" --cpus-per-task=6 --mem=480G")
    assert job["nothing"][0].endswith(f" --gpus-per-node={job['gpus_per_node']} --exclusive")


def test_servers_on_the_actors_node_add_up(found: dict[str, dict]) -> None:
    alone, shared = (int(re.findall(r"--mem=(\d+)G", found["ppo_8b"][memory][0])[0]) for memory in ("1G", "auto"))
    assert alone == 1 and shared > 30


def asked(name: str, *settings: str) -> list[str]:
    """The sizes that the script of a config asks for, a component each."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert launch_slurm(name, settings, LaunchOptions(dry_run=True)) == 0
    return [line for line in out.getvalue().splitlines() if line.startswith("#SBATCH --nodes=")]


def jobs_and_plans() -> dict[str, dict]:
    from aligner.commands.plan.command import load, plan_config

    jobs: dict[str, dict] = {
        "ppo_8b": {memory: asked("ppo_8b", "slurm.exclusive=false", f"slurm.memory={memory}") for memory in ("1G", "auto")}
    }
    for name in NAMES:
        config = load(name, [])
        plan = plan_config(name, config, advises=False)
        jobs[name] = {
            "hosts": [sum(part.host.values()) / 2**30 for part in plan.components],
            "host_memory_gib": config.cluster.host_memory_gib,
            "gpus_per_node": config.cluster.gpus_per_node,
            **{kind: asked(name, *settings) for kind, settings in SETTINGS.items()},
        }
    return jobs
