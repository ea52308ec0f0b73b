"""The runs of the GPU path: recipes and layouts on the simulated device, and what a run of one did there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import same_numbers

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 900
IS_SIMULATED = "simulated_cuda.startup" in sys.modules
ROWS = ROOT / "build" / "gpu_path"
# Where the host may wait: the start, checkpoints and exports copy every parameter, ranks that share a GPU every message.
APART = (
    "parallel/host_collectives",
    "models/checkpoint",
    "models/weights.py",
    "parallel/progress",
    "models/modules/build.py",
)
APART += ("models/training/adam.py", "models/modules/peft.py")
ON_CPU = {"SIMULATED_CUDA": "0", "CUDA_VISIBLE_DEVICES": ""}  # the environment of a process that is to see no GPU
EXPERTS = ["family=mixtral", "num_experts=4", "experts_per_token=2", "ffn_hidden_size=32", "expert_ffn_hidden_size=32"]
MOE = [f"model.architecture.{setting}" for setting in (*EXPERTS, "tied_embeddings=false")]
PACKED = ["model.packing=true", "model.micro_batch_tokens=256"]
LORA = ["model.lora.rank=4"]
OFFLOAD = ["optimizer.offload=true", "rollout.offload=true"]
ONE_GPU = "run.ranks_per_gpu=2"
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCase:
    """A case of same_numbers.py with more settings; `after` names those whose files it reads."""

    of: str
    settings: Sequence[str] = ()
    ranks: int = 1
    after: Sequence[str] = ()

    @property
    def gpus(self) -> int:
        """How many it takes: PPO's servers have one each."""
        return self.ranks + (2 if self.of == "ppo_served" else 0)


CASES = {
    "sft": GpuCase(of="sft"),
    "sft, packed, dp 2": GpuCase(of="sft", settings=PACKED, ranks=2),
    "sft, optimizer on the host": GpuCase(of="sft", settings=["optimizer.cpu_offload=true"]),
    "sft, LoRA": GpuCase(of="sft", settings=LORA),
    "sft, float16": GpuCase(of="sft", settings=["model.dtype=float16"]),
    "sft, tp 2 with sequence parallelism": GpuCase(of="sft", settings=TP2, ranks=2),
    "sft, pp 2": GpuCase(of="sft", settings=["parallel.pp=2"], ranks=2),
    "sft, pp 2 interleaved": GpuCase(of="sft", settings=["model.architecture.num_layers=4", "parallel.pp=2", "parallel.vpp=2"], ranks=2),
    "sft, tp 2 on one GPU": GpuCase(of="sft", settings=[*TP2, ONE_GPU], ranks=2),
    "sft, packed, dp 2 on one GPU": GpuCase(of="sft", settings=[*PACKED, ONE_GPU], ranks=2),
    "sft, pp 2 on one GPU": GpuCase(of="sft", settings=["parallel.pp=2", ONE_GPU], ranks=2),
    "grpo, dp 2 to rollout tp 2 on one GPU": GpuCase(of="grpo", settings=["rollout.tp=2", ONE_GPU], ranks=2),
    "sft, cp 2": GpuCase(of="sft", settings=["parallel.cp=2"], ranks=2),
    "sft, cp 2, packed": GpuCase(of="sft", settings=["parallel.cp=2", *PACKED], ranks=2),
    "sft, experts, ep 2": GpuCase(of="sft", settings=[*MOE, "parallel.ep=2"], ranks=2),
    "reward_model": GpuCase(of="reward_model"),
    "dpo": GpuCase(of="dpo"),
    "dpo, packed, shared prompts, offload": GpuCase(of="dpo", settings=[*PACKED, "model.share_prompts=true", "optimizer.offload=true"]),
    "kto": GpuCase(of="kto"),
    "ppo with its servers": GpuCase(of="ppo_served", after=["reward_model"]),
    "grpo": GpuCase(of="grpo"),
    "grpo, dp 2, dynamic sampling": GpuCase(of="grpo_dp2", ranks=2),
    "grpo, LoRA": GpuCase(of="grpo", settings=LORA),
    "grpo, float16, packed": GpuCase(of="grpo", settings=["model.dtype=float16", *PACKED]),
    "grpo, tp 2": GpuCase(of="grpo", settings=[*TP2, "rollout.tp=2"], ranks=2),
    "grpo, pp 2, offload, packed, shared prompts": GpuCase(
        of="grpo", settings=["parallel.pp=2", *OFFLOAD, *PACKED, "model.share_prompts=true"], ranks=2
    ),
    "grpo, cp 2 to rollout tp 2": GpuCase(of="grpo", settings=["parallel.cp=2", "rollout.tp=2"], ranks=2),
    "grpo, experts, ep 2": GpuCase(of="grpo", settings=[*MOE, "parallel.ep=2"], ranks=2),
    "grpo, asynchronous": GpuCase(of="grpo_async"),
    "online_dpo": GpuCase(of="online_dpo"),
    "online_distill": GpuCase(of="online_distill", after=["sft"]),
    "teacher_logprobs": GpuCase(of="teacher_logprobs"),
    "distill": GpuCase(of="distill", after=["teacher_logprobs"]),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What one process of a run did on its device; see `Counts` of device.py."""

    component: str
    rank: int
    waits: dict[tuple[str, str], int]
    captures: dict[str, int]
    replays: int
    peak_bytes: int

    @property
    def waits_of_steps(self) -> dict[tuple[str, str], int]:
        """How often the host waited for the device in steps, by kind and line: without the start, checkpoints and exports."""
        return {key: count for key, count in self.waits.items() if not any(part in key[1] for part in APART)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    directory: Path
    processes: list[Process] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def trainer(self) -> list[Process]:
        return sorted((one for one in self.processes if one.component == "train"), key=lambda one: one.rank)


def trains(case: GpuCase) -> bool:
    """Whether it makes optimizer steps; the others write records."""
    return case.of != "teacher_logprobs"


def run(case: GpuCase, data: Path, directory: Path, *more: str, on_cpu: bool = False, without: str = "no such setting") -> Run:
    """One run in this environment, on its GPUs or on the CPU. Settings of the case that begin with `without` are left out.

    Real GPUs report no processes. Raises RuntimeError with the run's output where it fails.
    """
    given = same_numbers.arguments(replace(same_numbers.CASES[case.of], ranks=case.ranks), data, directory)
    command = [sys.executable, *(one for one in given if not one.startswith(without)), *case.settings]
    command += ["loop.max_steps=2", "guard.learnt_nothing=warn"] if trains(case) else []
    command += more
    report = directory.with_name(f"{directory.name}-report")
    device = ON_CPU if on_cpu else {"SIMULATED_CUDA_REPORT": str(report)}
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests", "OMP_NUM_THREADS": "1"} | device
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{directory}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-3000:]}")
    return Run(directory=directory, processes=[_read(path) for path in sorted(report.glob("*.json"))])


def _read(path: Path) -> Process:
    found = json.loads(path.read_text())
    program = found["program"][1:]
    return Process(
        component=program[1] if program[:1] == ["serve"] else program[0],
        rank=int(found["rank"]),
        waits={(what, line): count for what, line, count in found["waits"]},
        captures=found["captures"],
        replays=found["replays"],
        peak_bytes=max(found["peak_allocated"]),
    )


def note(table: str, row: dict[str, object]) -> None:
    """Keep a row of a table of docs/containers.md; table.py writes them there."""
    folder = ROWS / table
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in str(row["what"]))
    (folder / f"{name}.json").write_text(json.dumps(row))
