"""Which GPUs the components of a run get: on one machine, on the nodes of a Slurm job, and what is refused."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.algorithms.ppo import TrainPPO
from aligner.algorithms.registry import recipes
from aligner.cluster.component import Component, rank_environment
from aligner.cluster.slurm.allocation import allocation
from aligner.cluster.slurm.spec import JobSpec, render
from aligner.cluster.slurm.steps import runtime, srun_command
from aligner.commands.plan.command import components
from aligner.commands.preflight import sizing
from aligner.commands.preflight.framework import Level
from aligner.commands.programs import launch_local, programs
from aligner.commands.slurm import job_spec
from aligner.errors import ConfigError
from aligner.jobs.serves import serve_reward_model
from aligner.parallel import host_collectives, platform
from aligner.settings.compose import compose

GIB = 2**30
MODEL = ("model.tokenizer=x", "reward.model.path=x", "data.train=x")
SMALL = ("num_processes=4", "critic.num_processes=2", "reward.num_processes=1")
DGX = ("+cluster=dgx_h100",)


def ppo(*settings: str) -> JobSpec:
    given = ["data.train=x", *settings]
    return job_spec("ppo", compose(recipes()["ppo"].config, "ppo", given), given)


def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: list[str], *settings: str) -> list[Component]:
    """What `aligner launch local ppo` starts on a machine with these GPUs."""
    started: list[Component] = []
    monkeypatch.setattr(platform, "visible_devices", lambda: devices)
    monkeypatch.setattr("aligner.commands.programs.launch", lambda components, **_: started.extend(components) or 0)
    assert launch_local("ppo", [*MODEL, *settings, f"run.directory={tmp_path / 'run'}"]) == 0
    return started


def shown(component: Component) -> str | None:
    return rank_environment(component, 0, 1, {}).get("CUDA_VISIBLE_DEVICES")


def test_the_local_launcher_shows_each_component_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    actor, critic, reward = launched(monkeypatch, tmp_path, [f"GPU-{letter}" for letter in "abcdefgh"], *SMALL)
    assert [shown(one) for one in (actor, critic, reward)] == ["GPU-a,GPU-b,GPU-c,GPU-d", "GPU-e,GPU-f", "GPU-g"]
    function = ("reward.model.path=", "reward.function.path=aligner.rewards.builtin:exact_match")
    *_, reward = launched(monkeypatch, tmp_path, ["0", "1"], *function)
    assert shown(reward) == ""  # a function computes nothing there
    assert all(shown(one) is None for one in launched(monkeypatch, tmp_path, []))  # a CPU machine


def test_the_local_launcher_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this run needs 3 GPUs .actor 1, critic 1, reward 1., and this machine shows 2"):
        launched(monkeypatch, tmp_path, ["0", "1"])
    shared = launched(monkeypatch, tmp_path, ["0", "1", "2"], "num_processes=2", "run.ranks_per_gpu=2")
    assert [shown(one) for one in shared] == ["0", "1", "2"]


@pytest.mark.cpu  # its backend would be that of the process group
def test_a_rank_claims_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: current.__setitem__(0, number))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    properties = type("Properties", (), {"uuid": "6f1c"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    over_the_host: list[bool] = []
    monkeypatch.setattr(host_collectives, "install", lambda: over_the_host.append(True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert platform.visible_devices() == ["0", "1"]
    assert platform.claim_device(3) == "6f1c" and current == [1]  # another rank's: they are refused where they meet
    assert not over_the_host
    assert platform.claim_device(3, ranks_per_gpu=2) == "" and platform.backend(ranks_per_gpu=2) == "gloo"
    assert over_the_host
    with pytest.raises(ConfigError, match=r"run.ranks_per_gpu=2: local rank 4 finds no free one .* run.ranks_per_gpu=3$"):
        platform.claim_device(4, ranks_per_gpu=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert platform.claim_device(1) == "GPU-b"
    properties.uuid = "00000000-0000-0000-0000-000000000000"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert platform.claim_device(1) == platform.claim_device(3) == "1"  # the driver does not say
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert platform.claim_device(1) == ""


def test_components_that_fit_on_a_node_share_it() -> None:
    spec = ppo(*DGX, *SMALL)
    assert [(one.part, one.num_nodes, one.ranks_per_node, one.gpus_per_node, one.gpus) for one in spec.components] == [
        (0, 1, 4, 7, "1-4"),
        (0, 1, 2, 7, "5-6"),
        (0, 1, 1, 7, "7-7"),
    ]
    assert all(spec.shares(one) for one in spec.components)
    lines = render("ppo", spec, title="x").splitlines()
    assert "#SBATCH --nodes=1 --ntasks-per-node=7 --gpus-per-node=7 --cpus-per-task=14 --mem=0 --exclusive" in lines
    assert not any("hetjob" in line for line in lines)
    environment = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "SLURM_JOB_NUM_NODES": "1"}
    allocation(environment).check(spec)
    with pytest.raises(ConfigError, match="this job has 2 nodes, its config requires 1"):
        allocation(environment | {"SLURM_JOB_NUM_NODES": "2"}).check(spec)


def test_components_that_do_not_fit_on_a_node_have_their_own() -> None:
    spec = ppo(*DGX, "num_processes=8")
    assert [(one.part, one.gpus_per_node, one.gpus) for one in spec.components] == [(0, 8, None), (1, 1, None), (2, 1, None)]
    assert not any(spec.shares(one) for one in spec.components)
    assert [one.part for one in ppo(*SMALL, "cluster.gpus_per_node=8").components] == [0, 1, 2]  # on CPUs nothing is shared out


def test_a_step_on_a_shared_node_sees_its_own_gpus() -> None:
    where = replace(runtime({}, home=None, directory=Path("/")), python="python3")
    spec = ppo(*DGX, *SMALL)
    critic = replace(spec.components[1], program=("-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"))

    def run(component, shown: dict[str, str]) -> subprocess.CompletedProcess[str]:
        made = srun_command(component, spec.slurm, where, on=[], log="x", shares=True)
        assert "--overlap" in made and "--gpus-per-node=7" in made
        command = made[made.index("x") + 1 :]
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.run(command, env=environment | shown, capture_output=True, text=True, timeout=60)

    assert run(critic, {"CUDA_VISIBLE_DEVICES": "8,9,10,11,12,13,14"}).stdout == "12,13\n"
    assert run(replace(critic, gpus=""), {"CUDA_VISIBLE_DEVICES": "8,9"}).stdout == "\n"
    refused = run(critic, {})
    assert refused.returncode and "is not set: Slurm gave this step no GPUs" in refused.stderr


def test_a_plan_refuses_ranks_that_do_not_fill_nodes() -> None:
    settings = ["data.train=x", "num_processes=12", "parallel.tp=4"]
    with pytest.raises(ConfigError, match="actor has 12 ranks: they must fill nodes of cluster.gpus_per_node=8"):
        components(compose(recipes()["ppo"].config, "ppo_8b", settings))


def test_the_preflight_counts_the_gpus_of_the_machine(context_of, settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    sizes = {"gpus": 2, "gpu_bytes": 80 * GIB, "gpu_free_bytes": 80 * GIB, "host_bytes": 64 * GIB, "shared_bytes": 8 * GIB}
    machine = sizing.Machine(gpu="H100", own="GPU-a", node_gpus=2, **sizes)
    context = context_of(settings("ppo", {"critic.num_processes": 2}))
    with pytest.raises(ConfigError, match="this run needs 3 GPUs .actor 1, critic 2, reward 0., and this machine shows 2"):
        sizing.judge_devices(context, {0: machine})
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # there the critic has nodes of its own
    found = context.findings["devices"] = sizing.judge_devices(context, {0: machine})
    assert found.level is Level.ok and "cluster.gpus_per_node=2" in sizing.real_cluster(context)  # not the one rank that came
    both = sizing.judge_devices(context_of(settings("ppo"), nodes=("n0", "n0")), {0: machine, 1: machine})
    assert both.level is Level.fatal and both.found == "all ranks: on the same GPU (GPU-a)"


def colocated(*settings: str) -> TrainPPO:
    return compose(recipes()["ppo"].config, "ppo_8b", ["data.train=x", "num_processes=8", "placement=colocated", *settings])


def test_colocated_components_see_the_same_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = launched(monkeypatch, tmp_path, ["2", "3", "5"], "num_processes=2", "placement=colocated")
    assert [shown(one) for one in found] == ["2,3", "2", "2"]
    with pytest.raises(ConfigError, match="placement=colocated: this run needs 4 GPUs .actor 4, critic 1, reward 1., .* shows 3"):
        launched(monkeypatch, tmp_path, ["2", "3", "5"], "num_processes=4", "placement=colocated")


def test_colocated_components_share_their_nodes() -> None:
    spec = job_spec("ppo_8b", colocated("num_processes=16"), ["data.train=x"])
    assert [(one.part, one.num_nodes, one.gpus_per_node, one.gpus) for one in spec.components] == [
        (0, 2, 8, None),
        (0, 1, 8, None),
        (0, 1, 8, None),
    ]
    lines = render("ppo_8b", spec, title="x").splitlines()
    assert "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=14 --mem=0 --exclusive" in lines
    assert not any("hetjob" in line for line in lines)


def test_what_colocation_needs_is_on_and_what_it_cannot_do_is_refused() -> None:
    config = colocated()
    assert config.rollout.offload and config.optimizer.offload and config.critic.optimizer.offload
    refused = {
        "rollout.asynchronous.max_staleness=1": "max_staleness=1 samples while the policy trains.*allowed: 0, or placement=separate",
        "critic.num_processes=16": "critic.num_processes=16 is more than the actor's num_processes=8, whose GPUs it shares",
        "placement=nowhere": "separate, colocated",
    }
    for setting, text in refused.items():
        with pytest.raises(ConfigError, match=text):
            colocated(setting)
    with pytest.raises(ConfigError, match="placement=colocated: this run has no servers; allowed: separate, or reward.serve=true"):
        compose(recipes()["grpo"].config, "grpo", ["data.train=x", "placement=colocated"])
    with pytest.raises(ConfigError, match="critic.with_reward=true: needs reward.serve=true"):
        colocated("reward.serve=false", "critic.with_reward=true")


def test_a_critic_with_the_reward_is_one_component() -> None:
    given = ["data.train=x", "critic.with_reward=true"]
    config = compose(recipes()["ppo"].config, "ppo_8b", given)
    assert [(one.component, one.num_ranks) for one in programs("ppo_8b", config, given)] == [("actor", 16), ("critic", 8)]
    assert config.reward_service == "critic"
    with pytest.raises(ConfigError, match="critic.with_reward=true: the critic serves the reward; start no component for it"):
        serve_reward_model(config)
