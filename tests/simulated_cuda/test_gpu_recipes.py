"""Every kind of recipe and layout takes steps on GPUs, simulated or real; supervised ones learn in float32 what they do on the CPU."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path

import pytest
import same_numbers
import torch
from simulated_cuda import gpu_cases

pytestmark = pytest.mark.gpu
# Objects that ranks show each other, and buffers of experts.
AT_THE_START = ("aligner/parallel/collectives.py", "aligner/models/training/trainable.py")
# Megatron-Core 0.19's answer, kept, to whether a parameter has a gradient norm of its own.
ONCE = "megatron/core/optimizer/optimizer.py:315 <"
SUPERVISED = [name for name, case in gpu_cases.CASES.items() if case.of in ("sft", "reward_model", "dpo", "kto")]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    same_numbers.write_data(folder)
    return folder


@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    """`runs(name)`: the run of a case of gpu_cases.py, made once."""
    folder, made, number = tmp_path_factory.mktemp("runs"), {}, count()

    def get(name: str):
        if name not in made:
            case = gpu_cases.CASES[name]
            enough_gpus(case)
            for earlier in case.after:
                get(earlier)
            directory = folder / (name if name == case.of else f"case{next(number)}")
            made[name] = gpu_cases.run(case, data, directory)
        return made[name]

    return get


def enough_gpus(case) -> None:
    if (found := torch.cuda.device_count()) < case.gpus:
        pytest.skip(f"gpu: {found} GPUs, and it takes {case.gpus}")


@pytest.mark.parametrize("name", gpu_cases.CASES)
def test_takes_steps_on_the_gpu(name: str, runs) -> None:
    found = runs(name)
    if gpu_cases.IS_SIMULATED:
        is_counted(name, found.trainer())
    if gpu_cases.trains(gpu_cases.CASES[name]):
        norms = [line["optim/grad_norm"] for line in found.metrics if "optim/grad_norm" in line]
        assert len(norms) == 2 and all(math.isfinite(norm) and norm > 0 for norm in norms)


def is_counted(name: str, trained) -> None:
    """A row of the table for what the simulated device counted."""
    assert [process.rank for process in trained] == list(range(gpu_cases.CASES[name].ranks))
    assert all(process.peak_bytes > 0 for process in trained)
    first = trained[0]
    waits, lagging = first.waits_of_steps, ("Event.synchronize",)
    pageable = {line: count for (kind, line), count in waits.items() if kind == "pageable copy"}
    assert sum(pageable.pop(line) for line in list(pageable) if line.startswith(ONCE)) <= 2  # a float32 head is an optimizer of its own
    assert all(line.startswith(AT_THE_START) for line in pageable) and (len(trained) > 1 or not pageable), pageable
    gpu_cases.note(
        "recipes",
        {
            "what": name,
            "ranks": len(trained),
            "waits": sum(count for (kind, _), count in waits.items() if kind not in lagging),
            "pageable": sum(pageable.values()),
            "captures": sum(first.captures.values()),
            "replays": first.replays,
        },
    )


@pytest.mark.parametrize("name", SUPERVISED)
def test_in_float32_learns_what_the_cpu_does(name: str, data, tmp_path) -> None:
    enough_gpus(gpu_cases.CASES[name])
    sides = {
        side: gpu_cases.run(gpu_cases.CASES[name], data, tmp_path / side, "model.dtype=float32", "loop.save_every=0", on_cpu=side == "cpu")
        for side in ("gpu", "cpu")
    }
    rows = {side: [line for line in found.metrics if "optim/grad_norm" in line] for side, found in sides.items()}
    assert len(rows["gpu"]) == len(rows["cpu"]) == 2
    for gpu, cpu in zip(rows["gpu"], rows["cpu"], strict=True):
        compared = [key for key in cpu if key.startswith(("train/", "optim/", "loss", "sft/", "dpo/", "kto/", "reward/", "policy/"))]
        assert "optim/grad_norm" in compared
        for key in compared:
            assert gpu[key] == pytest.approx(cpu[key], rel=1e-4, abs=1e-5), key
