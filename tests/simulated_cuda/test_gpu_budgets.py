"""How often the host waits for the device, what is captured and how much is allocated: budgets, whatever the size of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

same_numbers = pytest.importorskip("same_numbers")
gpu_cases = pytest.importorskip("simulated_cuda.gpu_cases")
pytestmark = pytest.mark.simulated_cuda
NO_SAVES = ["loop.save_every=0", "loop.validate_every=0", "run.export_hf=false"]
LAGGING = ("Event.synchronize",)  # the host waits for the step before the one that it has just started
LAYOUTS = {
    "single": (1, []),
    "full recomputation": (1, ["model.recompute=full"]),
    "dp 2": (2, []),
    "optimizer on the host": (1, ["optimizer.cpu_offload=true"]),
    "half of the optimizer on the host": (1, ["optimizer.cpu_offload=true", "optimizer.cpu_offload_fraction=0.5"]),
    "tp 2 with sequence parallelism": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp 2": (2, ["parallel.pp=2"]),
    "cp 2": (2, ["parallel.cp=2"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    same_numbers.write_data(folder)
    lines = [json.dumps({"prompt": "1+1=", "response": "1234567890" * 50}) for _ in range(16)]
    (folder / "long.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def trained(data, tmp_path):
    """`trained(case, *settings)`: the process that trains, of several the first, without checkpoints, validation and export."""
    numbers = iter(range(100))

    def run(case: str, *settings: str):
        found = gpu_cases.run(gpu_cases.CASES[case], data, tmp_path / f"run{next(numbers)}", *NO_SAVES, *settings)
        return found.trainer()[0]

    return run


def waits(process) -> dict[tuple[str, str], int]:
    return {key: count for key, count in process.waits_of_steps.items() if key[0] not in LAGGING}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("sft", []),
        ("sft", ["model.packing=true"]),
        ("sft, tp 2 with sequence parallelism", []),
        ("sft, tp 2 with sequence parallelism", ["model.packing=true"]),
        ("sft, pp 2", []),
    ],
    ids=["padded", "packed", "tp 2", "tp 2 packed", "pp 2"],
)
def test_the_host_waits_once_per_update_whatever_the_number_of_layers_and_micro_batches(case, settings, trained) -> None:
    packed = bool(settings)
    few = ["model.micro_batch_size=4"] if not packed else ["model.micro_batch_tokens=64"]
    many = ["model.micro_batch_size=1"] if not packed else ["model.micro_batch_tokens=16"]
    small, deep, cut = (waits(trained(case, *settings, *more)) for more in (few, [*few, "model.architecture.num_layers=4"], many))
    assert small
    assert cut == small  # more micro-batches of the same rows
    assert deep == small


def test_decoding_waits_for_no_step_it_has_just_started(trained) -> None:
    settings = ["model.dtype=float32", "rollout.sampling.stop_token_ids=[]"]
    short, long = (trained("grpo", *settings, f"rollout.sampling.max_response_length={length}") for length in (8, 24))
    assert long.replays > short.replays > 0
    assert waits(long) == waits(short)


def test_a_graph_is_captured_once_per_shape_and_run(trained) -> None:
    once, twice = trained("grpo", "loop.max_steps=1"), trained("grpo", "loop.max_steps=3")
    assert twice.replays > once.replays
    assert sum(once.captures.values()) == sum(twice.captures.values()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_allocator_peaks_where_the_plan_says(layout: str, data, tmp_path) -> None:
    ranks, settings = LAYOUTS[layout]
    model = ["num_layers=4", "hidden_size=256", "num_attention_heads=8", "num_key_value_heads=4", "ffn_hidden_size=768"]
    model = [f"model.architecture.{size}" for size in (*model, "max_position_embeddings=512")]
    common = ["model.make_vocab_divisible_by=1024", "model.micro_batch_size=4", "algorithm.batch_size=8", "data.max_length=512"]
    common += [f"data.train={data}/long.jsonl", "model.dtype=bfloat16", "model.layers=torch", *NO_SAVES]
    if not (data / "model").exists():
        first = gpu_cases.run(gpu_cases.CASES["sft"], data, data / "model_run", *model, *common, "run.export_hf=true", "loop.max_steps=1")
        (first.directory / "export").rename(data / "model")
    common.append(f"model.path={data}/model")
    case = gpu_cases.GpuCase(of="sft", settings=settings, ranks=ranks)
    own = [setting for setting in same_numbers.MODEL if "architecture" not in setting]
    planned = plan([*(setting.format(data=data) for setting in own), *common, *settings], ranks, tmp_path / "plan.json")
    found = gpu_cases.run(case, data, tmp_path / "run", *common, without="model.architecture.")
    for process in found.trainer():
        stage = process.rank if "pp 2" in layout else 0
        row = {"what": f"{layout}, rank {process.rank}", "planned": planned[stage], "allocated": process.peak_bytes}
        gpu_cases.note("memory", row)
        assert planned[stage] == pytest.approx(process.peak_bytes, rel=0.1), (process.rank, planned, process.peak_bytes)


def plan(settings: list[str], ranks: int, output: Path) -> dict[int, float]:
    """Bytes that torch's allocator is to hold in training, by stage: the plan's, without what is not torch's."""
    command = [sys.executable, "-m", "aligner.cli", "plan", "sft", *settings, "cluster=dgx_h200", f"cluster.gpus_per_node={ranks}"]
    command += [f"num_processes={ranks}", "--json", str(output)]
    environment = os.environ | {"PYTHONPATH": str(gpu_cases.ROOT)} | gpu_cases.ON_CPU
    done = subprocess.run(command, env=environment, cwd=gpu_cases.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    memory = json.loads(output.read_text())["components"]["trainer"]["memory"]
    outside = ("context and communicators", "lost between blocks")
    return {one["stage"]: one["bytes"] - sum(one["parts"].get(part, 0) for part in outside) for one in memory}
