"""What `aligner plan` says of PPO whose components share GPUs, or processes, beside what it says of three components of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_jobs import run_aligner

OFFLOAD = ("rollout.offload=true", "optimizer.offload=true", "critic.optimizer.offload=true")


def plan(folder: Path, *settings: str) -> tuple[dict[str, Any], str]:
    _, said = run_aligner("plan", "ppo_8b", "num_processes=8", *settings, "--json", folder / "plan.json", cwd=folder)
    return json.loads((folder / "plan.json").read_text()), said


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return plan(tmp_path_factory.mktemp("apart"), *OFFLOAD)


def peaks(job: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Bytes of every phase, by component and phase; there is one pipeline stage."""
    return {(name, moment["phase"]): moment["bytes"] for name, one in job["components"].items() for moment in one["memory"]}


def seconds(job: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, phase): time for name, one in job["components"].items() for phase, time in one["seconds"].items()}


def test_components_that_take_turns(apart: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    """Memory is the largest phase's and not their sum: of the others there are the processes' own parts alone on the device."""
    together, said = plan(tmp_path, "placement=colocated", "cluster.host_memory_gib=300")
    context = apart[0]["components"]["actor"]["memory"][0]["parts"]["context and communicators"]  # alike: so are the layouts
    assert peaks(together) == {phase: size + 2 * context for phase, size in peaks(apart[0]).items()}
    turns = {key: time["parts"]["turns on the GPUs"] for key, time in seconds(together).items() if "turns on the GPUs" in time["parts"]}
    assert turns.keys() == {("actor", "generate"), ("actor", "train"), ("critic", "values"), ("critic", "train"), ("reward", "scores")}
    reward, critic = (together["components"][name]["state_bytes"][0] for name in ("reward", "critic"))
    pcie = together["cluster"]["host_gb_per_second"] * 1e9 * together["cluster"]["achievable_link"]
    assert turns["reward", "scores"] == pytest.approx(2 * reward["weights"] / pcie)
    assert turns["critic", "train"] == pytest.approx(2 * (critic["weights"] + critic["optimizer"]) / pcie)
    phases = sum(time["total"] for time in seconds(together).values())
    assert together["step_seconds"] == pytest.approx(together["step_phases"]["host work"] + phases)
    assert "8 GPUs, on which the components take turns" in said and "24 ranks" in apart[1]
    waiting = "weights (while others have the GPUs)"
    for name, one in together["components"].items():
        assert (
            one["host_bytes"][waiting] == 8 * one["state_bytes"][0]["weights"] and waiting not in apart[0]["components"][name]["host_bytes"]
        )
    host = sum(size for one in together["components"].values() for size in one["host_bytes"].values())
    (problem,) = together["problems"]
    assert problem.startswith(f"all components together: the host memory of a node needs {host / 2**30:.1f} GiB of 300")


def test_a_critic_with_the_reward(apart: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    """The two models lie beside each other; the one that waits has its weights there, and the critic its training state."""
    both, said = plan(tmp_path, *OFFLOAD[:2], "critic.with_reward=true")
    critic, reward = (both["components"][name]["state_bytes"][0] for name in ("critic", "reward"))
    state = critic["gradients"] + critic["optimizer"]  # offloaded between training phases in the other plan
    grown = {key: size - peaks(apart[0])[key] for key, size in peaks(both).items()}
    assert grown["critic", "train"] == reward["weights"]
    assert grown["critic", "values"] == pytest.approx(reward["weights"] + state, rel=0.05)  # and what the allocator loses between blocks
    assert grown["reward", "scores"] == critic["weights"] + state
    assert grown["actor", "train"] == 0
    assert "reward in the processes of the critic" in said and "16 ranks" in said
    times = seconds(both)
    scoring = times["critic", "values"]["total"] + times["reward", "scores"]["total"]
    others = times["actor", "logprobs"]["total"] + times["actor", "ref_logprobs"]["total"]
    training = max(times["actor", "train"]["total"], times["critic", "train"]["total"])
    # What has been sampled is scored while the rest is; the last batch of responses, all as long as they may be, ends at once.
    sampling, waiting = both["step_phases"]["host work"] + times["actor", "generate"]["total"], both["step_phases"]["waiting for scores"]
    assert 0 < waiting < scoring
    assert both["step_seconds"] == pytest.approx(sampling + waiting + others + training)
