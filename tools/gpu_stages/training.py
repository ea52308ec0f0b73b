"""Stages that train: bfloat16 against float32, recomputation, save and resume; two ranks on one GPU; PPO with its servers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_stages.common import (
    ROOT,
    Check,
    Figures,
    cluster,
    digits,
    free,
    generate,
    is_deterministic,
    loaded,
    random_on_device,
    random_tokens,
    relaid,
    session,
    torch_layers,
)
from sft_ours import make_algorithm as make_sft
from trl_sft_reference import Spec as SFTSpec

from aligner.loop.loop import Clock
from aligner.models.checkpoint import checkpoint
from aligner.models.checkpoint.checkpoint import SaveRequest
from aligner.models.config import Dtype, Recompute
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig, VerifyRefit
from aligner.rollout.create import create_engine


def sft_bits(check: Check) -> Figures:
    """Packed SFT of 0.5B in bfloat16: the first update against float32's; then, with fewer layers, recomputation, save and resume."""
    is_deterministic()
    length, rows = check.number(1024, 64), check.number(8, 4)
    settings = [*check.model("0.5b"), *torch_layers(), "model.packing=true", f"model.micro_batch_tokens={2 * length}"]
    settings += [f"data.max_length={length}", f"algorithm.batch_size={rows}"]
    config = loaded("sft", settings, check.folder / "run")
    vocabulary = config.model.architecture.vocab_size
    tokens = [row[: length - 7 * number] for number, row in enumerate(random_tokens(vocabulary, rows, length))]
    spec = SFTSpec(model="", rows=tokens, prompt_lengths=[1] * rows, steps=5, warmup_steps=0)
    with session(config, component="trainer") as layout:
        first = {}
        for dtype in (Dtype.bfloat16, Dtype.float32):
            algorithm = make(with_model(config, dtype=dtype), spec, layout)
            first[dtype] = algorithm.step(1, Clock()).metrics
            del algorithm
            free()
        for name in ("sft/loss", "optim/grad_norm"):
            a, b = (first[dtype][name] for dtype in (Dtype.bfloat16, Dtype.float32))
            yield f"bfloat16 against float32: {name}, relative gap", abs(a - b) / abs(b)
        small = with_model(config, architecture=replace(config.model.architecture, num_layers=check.number(4, 2)))
        yield from continued(small, spec, layout, check.folder / "checkpoints")
        whole, again = (steps(make(with_model(small, recompute=kind), spec, layout), 3) for kind in (Recompute.none, Recompute.full))
        yield "recompute=none and full: equal bits", float(whole == again)


def make(config: Any, spec: SFTSpec, layout: Any) -> Any:
    with random_on_device():
        return make_sft(config, spec, layout)


def with_model(config: Any, **changes: Any) -> Any:
    return replace(config, model=replace(config.model, **changes))


def steps(algorithm: Any, count: int, first: int = 1) -> list[tuple[float, float, list[int]]]:
    """Loss, gradient norm and the sums of the main weights' bits, of so many steps."""
    found = []
    for number in range(first, first + count):
        metrics = algorithm.step(number, Clock()).metrics
        found.append((metrics["sft/loss"], metrics["optim/grad_norm"], algorithm.model.model.fingerprint()))
    return found


def continued(config: Any, spec: SFTSpec, layout: Any, folder: Path) -> Figures:
    """Three steps, a checkpoint and two more; another process's two from the checkpoint are to have the same bits."""
    algorithm = make(config, spec, layout)
    steps(algorithm, 3)
    saved = checkpoint.save(folder, algorithm.model.model, SaveRequest(step=3, state={}))
    through = steps(algorithm, 2, 4)
    del algorithm
    free()
    resumed = make(config, spec, layout)
    checkpoint.load(resumed.model.model, saved)
    yield "resumed: steps with equal bits", sum(a == b for a, b in zip(through, steps(resumed, 2, 4), strict=True)) / 2


LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {},
    "tp 2": {"tp": 2, "sequence_parallel": True},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
}


def two_ranks(check: Check) -> Figures:
    """Two ranks that share the GPU, collectives over the host: float32 SFT in each layout, and a verified refit from pp 2 to tp 2."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    entry = str(Path(__file__).parents[1] / "gpu_check_stages.py")
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, entry, "one_of_two", str(check.folder)],
            env=os.environ | meeting | place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in places
    ]
    said = [process.communicate()[0] for process in processes]
    if failed := [rank for rank, process in enumerate(processes) if process.returncode]:
        raise RuntimeError(f"rank {failed[0]}: exit code {processes[failed[0]].returncode}\n{said[failed[0]][-4000:]}")
    ran = json.loads((check.folder / "rank0.json").read_text())
    for name in list(LAYOUTS)[1:]:
        gaps = [abs(a - b) / abs(b) for a, b in zip(ran["losses"][name], ran["losses"]["replicas"], strict=True)]
        yield f"{name} on one GPU, largest relative gap of a loss", max(gaps)
    yield "refit from pp 2 to tp 2, verified: responses as from replicas", ran["same"]


def one_of_two(folder: str) -> None:
    """A rank of `two_ranks`."""
    common = [*digits(hidden=64), "model.dtype=float32", "run.ranks_per_gpu=2", "model.packing=true", "model.micro_batch_tokens=64"]
    config = loaded("sft", [*common, "algorithm.batch_size=8", "data.max_length=16"], Path(folder) / "run", ranks=2)
    rows = [row[: 16 - number] for number, row in enumerate(random_tokens(18, 8, 16))]
    spec = SFTSpec(model="", rows=rows, prompt_lengths=[1] * 8, steps=4, warmup_steps=0)
    losses, greedy = {}, {}
    with session(config, component="trainer") as opened:
        for name, sizes in LAYOUTS.items():
            one = replace(config, parallel=ParallelConfig(**sizes))
            with relaid(one.parallel) as layout:
                algorithm = make_sft(one, spec, layout)
                if name in ("replicas", "pp 2"):
                    greedy[name] = refitted(
                        algorithm.model, RolloutConfig(tp=1 if name == "replicas" else 2, verify_refit=VerifyRefit.checksum)
                    )
                losses[name] = [loss for loss, _, _ in steps(algorithm, 4)]
        same = sum(a == b for a, b in zip(*greedy.values(), strict=True)) / len(greedy["pp 2"])
        Path(folder, f"rank{opened.rank}.json").write_text(json.dumps({"losses": losses, "same": same}))


def refitted(policy: Any, config: RolloutConfig) -> list[tuple[int, ...]]:
    """Greedy responses of an engine of this layout, after a refit that was compared bit for bit."""
    engine = create_engine(policy, config, eos_id=-1)
    prompts = random_tokens(18, 4, 6, seed=1)
    found = [one.tokens for one in generate(engine, prompts, 6, temperature=0.0)]
    engine.shutdown()
    return found


def ppo(check: Check) -> Figures:
    """PPO with its servers on one GPU, all components taking turns: what each process holds there, and whether it learns."""
    count = check.number(20, 2)
    settings = ["placement=colocated", f"loop.max_steps={count}", "loop.save_every=0", "guard.learnt_nothing=warn"]
    if servers := os.environ.get("GPU_CHECK_SERVERS"):
        settings += [f"critic.environment={servers}", f"reward.environment={servers}"]
    with watched() as memory:
        run = recipe("ppo_smoke_cpu", [*settings, *digits(hidden=256)], check.folder / "run")
    yield from memory.pop("processes")
    yield "PPO: device memory of all processes at most, GiB", (memory["least"][0] - memory["least"][1]) / 2**30
    yield "PPO: device memory left behind, GiB", (memory["least"][0] - torch.cuda.mem_get_info()[0]) / 2**30
    yield "PPO: step, s", statistics.median(one["time/step"] for one in run[1:])
    yield "PPO: reward of the last steps", statistics.mean(one["rollout/reward"] for one in run[-3:])


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """In the block the device's free memory is looked at twice a second, and what each process holds, where nvidia-smi says it.

    `least`: (before, at least); `processes`: a line for each that was seen, with the most that it held.
    """
    before, over = torch.cuda.mem_get_info()[0], threading.Event()
    found: dict[str, Any] = {"least": (before, before), "processes": []}
    most: dict[str, int] = {}

    def look() -> None:
        while not over.wait(0.5):
            found["least"] = (before, min(found["least"][1], torch.cuda.mem_get_info()[0]))
            for name, mib in held().items():
                most[name] = max(mib, most.get(name, 0))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found["processes"] = [f"process {name}: at most {mib} MiB" for name, mib in most.items()] or ["nvidia-smi names no processes here"]


def held() -> dict[str, int]:
    """MiB of device memory by process."""
    if not shutil.which("nvidia-smi"):
        return {}
    asked = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    parts = [[part.strip() for part in line.split(",")] for line in lines]
    return {f"{one[0]} {one[1]}": int(one[-1]) for one in parts if len(one) >= 3 and one[-1].isdigit()}


def recipe(name: str, settings: Sequence[str], directory: Path) -> list[dict[str, float]]:
    """The metrics of a run that `aligner launch local` started."""
    common = ["logging.tensorboard=false", "logging.progress=plain", f"run.directory={directory}"]
    command = [sys.executable, "-m", "aligner.cli", "launch", "local", name, *cluster(), *common, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-3000:]}")
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
