"""Parameters of a cluster from measured jobs: found again where the measurements are those of a cluster that is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plan_parts
import pytest
from plan_parts import architecture, work

from aligner.commands import calibrate as command
from aligner.commands.calibrate import STEP, MeasuredJob, calibrate, error
from aligner.errors import ConfigError
from aligner.planner.config import ClusterConfig, Device, PlanConfig
from aligner.planner.simulation import Habits
from aligner.planner.workload import Phase

SIZES = plan_parts.sizes(weights=10**10, gradients=2 * 10**10, optimizer=6 * 10**10, engine_weights=10**10)
ARCHITECTURE = architecture(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, ffn_hidden_size=14336, vocab_size=128256
)
GPU = ClusterConfig(
    device=Device.gpu, gpus_per_node=8, bf16_tflops=1000, hbm_gb_per_second=3000, nvlink_gb_per_second=400, network_gb_per_second=50
)


def job(name: str, measured: dict[str, float], *, length: int = 1000, rows: int = 32, tp: int = 1, sampled: bool = True) -> MeasuredJob:
    component = plan_parts.component(
        num_ranks=tp,
        architecture=ARCHITECTURE,
        parallel={"tp": tp},
        work=work(Phase.generate, Phase.train, rows=rows, length=length, response_length=length // 2, update_rows=rows),
        engine=plan_parts.engine(tp=tp, max_batch_size=32) if sampled else None,
    )
    return MeasuredJob(
        name=name,
        cluster_name="a",
        cluster=GPU,
        components=[(component, SIZES)],
        assumed=PlanConfig(),
        habits=Habits(),
        take_turns=False,
        measured=measured,
    )


def test_a_known_machine_is_found_again():
    """Four jobs as a machine would run them whose products are slower, and its memory faster, than usual."""
    usual = {name: value for name, (value, _) in command.USUAL_GPU.items()}
    machine = replace(GPU, **(usual | {"achievable_flops": 0.55, "achievable_bandwidth": 0.85, "step_seconds": 9.0}))
    jobs = [job("short", {STEP: 1.0}), job("long", {STEP: 1.0}, length=8000), job("tensor", {STEP: 1.0}, tp=4)]
    jobs.append(job("training", {"train": 1.0}, sampled=False, rows=512, length=4000))
    jobs = [replace(one, measured=one.planned(machine)) for one in jobs]
    rounds: list[float] = []
    fit = calibrate(jobs, lambda number, left: rounds.append(left))
    assert all(error(factor) < 0.06 for factor in fit.after.values()) and max(error(factor) for factor in fit.before.values()) > 0.15
    assert fit.values["a"]["achievable_flops"] == pytest.approx(0.55, rel=0.12) and usual["achievable_flops"] == 0.7
    assert fit.values["a"]["achievable_bandwidth"] > usual["achievable_bandwidth"]
    assert rounds == sorted(rounds, reverse=True)
    assert fit.values["a"]["expert_imbalance"] == pytest.approx(1.25, rel=1e-3)  # of which no job says anything


def test_what_is_written_besides_and_which_time_counts():
    one = replace(job("x", {STEP: 10.0, "train": 4.0}), written_gb=3.0)
    cluster = replace(GPU, storage_gb_per_second=2.0)
    plain = replace(one, written_gb=0.0).planned(cluster)
    assert {name: seconds - plain[name] for name, seconds in one.planned(cluster).items()} == pytest.approx({STEP: 1.5, "train": 1.5})
    assert one.factor(cluster) == pytest.approx(one.planned(cluster)[STEP] / 10)
    assert replace(one, measured={"train": 4.0}).factor(cluster) == pytest.approx(one.planned(cluster)["train"] / 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing: 1", "needs a list of jobs under calibration or held_out"),
        ("calibration: [{config: sft}]", "a job is a mapping with a name"),
        ("calibration: [{name: a, config: sft, published: {step: 1}, layout: x}]", "a: unknown layout; allowed: config, name, planned"),
        ("calibration: [{name: a, config: sft, published: {step: -1}}]", "a: needs a config with settings and published"),
        ("calibration: [{name: a, config: sft, published: {steps: 1}}]", "a: published.steps: allowed: step, generate, logprobs"),
        ("calibration: [{name: a, source: b, config: sft, published: {step: 1}}]", "a: source: b: not under sources"),
        ("calibration: {", "--calibrate .*jobs.yaml: "),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, message: str):
    (path := tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        command.read(path, "calibration")


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="--calibrate .*jobs.yaml"):
        command.fit(tmp_path / "jobs.yaml")
