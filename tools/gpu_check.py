"""Does everything work on the first real GPU, and is it as fast as predicted? One command, at most ten minutes, no network.

    python tools/gpu_check.py [--wheels FOLDER] [--output FOLDER] [--only STAGE ...] [--minutes 9.5]    (make gpu-check)
    python tools/gpu_check.py --table                                                                  the predictions alone

Each stage has its own process and time limit and may fail alone. `gpu_check.json` and `gpu_check.md` are written after each. `--wheels`: a
folder of packages that this machine lacks, from `make gpu-check-wheels`. The predictions were written before any GPU had run this. Standard
library only: the packages are installed first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gpu_check_wheels

HERE = Path(__file__).resolve().parent
LEAST_SECONDS = 10.0  # a stage is not begun with less


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of a stage: what is predicted of one H200, and what is aimed at."""

    name: str
    predicted: float
    goal: str = ""  # as "<= 0.1" or ">= 0.6"
    because: str = ""

    def meets(self, value: float) -> bool:
        """Whether the goal is met; without one it is."""
        if not self.goal:
            return True
        relation, bound = self.goal.split()
        return value <= float(bound) if relation == "<=" else value >= float(bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A function of gpu_check_stages.py, the most that it may take, and its figures."""

    name: str
    seconds: float
    figures: tuple[Figure, ...]


def _decode(size: str, batch: int, milliseconds: float, share: float, because: str, goal: str = "") -> tuple[Figure, Figure]:
    name = f"decode {size}, batch {batch}"
    return (
        Figure(name=f"{name}: step, ms", predicted=milliseconds, because=because),
        Figure(name=f"{name}: of the bandwidth limit", predicted=share, goal=goal),
    )


def _grpo(name: str, generate: float, train: float, because: str) -> tuple[Figure, ...]:
    return (
        Figure(name=f"{name}: generate, s", predicted=generate, because=because),
        Figure(name=f"{name}: generate, of the planned time", predicted=2.5, goal="<= 1.2"),
        Figure(name=f"{name}: ref_logprobs, s", predicted=0.35),
        Figure(name=f"{name}: ref_logprobs, of the planned time", predicted=1.3, goal="<= 1.2"),
        Figure(name=f"{name}: train, s", predicted=train),
        Figure(name=f"{name}: train, of the planned time", predicted=1.5, goal="<= 1.2"),
        Figure(name=f"{name}: MFU of training", predicted=0.33, goal=">= 0.45"),
        Figure(name=f"{name}: peak memory, of the plan's", predicted=0.95, goal="<= 1.1"),
    )


def _sft(layers: str, seconds: float, mfu: float, because: str) -> tuple[Figure, ...]:
    name = f"SFT 1.5b, {layers} layers"
    return (
        Figure(name=f"{name}: train, s", predicted=seconds, because=because),
        Figure(name=f"{name}: train, of the planned time", predicted=0.5 / mfu, goal="<= 1.2"),
        Figure(name=f"{name}: MFU of training", predicted=mfu, goal=">= 0.45"),
        Figure(name=f"{name}: peak memory, of the plan's", predicted=0.95, goal="<= 1.1"),
    )


GATHERED = "weights, and without a paged kernel the cache four times; at least 2 us a kernel"
STAGES = (
    Stage(
        name="environment",
        seconds=40,
        figures=(
            Figure(name="copy GB/s", predicted=4300, because="90 % of 4.8 TB/s, bytes read and written"),
            Figure(name="bf16 matmul TFLOP/s", predicted=750, because="three quarters of the peak: the clock falls under load"),
            Figure(name="pinned upload GB/s", predicted=52, because="PCIe 5.0 x16"),
            Figure(name="launch of a kernel, us", predicted=5, because="from Python, one after the other"),
        ),
    ),
    Stage(
        name="numbers",
        seconds=75,
        figures=(
            Figure(name="loss, relative gap", predicted=1e-6, goal="<= 1e-4", because="float32 sums in another order"),
            Figure(name="gradients, largest relative gap of a tensor", predicted=1e-5, goal="<= 1e-4"),
            Figure(name="log-probs, largest gap", predicted=5e-6, goal="<= 1e-4"),
            Figure(name="sampled responses that are equal", predicted=1.0, goal=">= 1", because="draws are integers of the seed"),
        ),
    ),
    Stage(
        name="decode",
        seconds=120,
        figures=(
            *_decode("0.5b", 32, 1.1, 0.26, f"380 kernels of a step; {GATHERED}"),
            *_decode("1.5b", 1, 1.3, 0.55, "450 kernels of a step against 0.72 ms of reading weights"),
            *_decode("1.5b", 32, 1.9, 0.45, GATHERED, ">= 0.6"),
            Figure(name="responses with and without graphs that are equal", predicted=1.0, goal=">= 1", because="the same kernels"),
            Figure(name="refit by whole tensors, of a copy's speed", predicted=0.5, goal=">= 0.5", because="two copies instead of one"),
            *_decode("1.5b", 128, 4.5, 0.34, GATHERED),
            *_decode("7b", 32, 5.6, 0.68, GATHERED, ">= 0.6"),
        ),
    ),
    Stage(
        name="sft",
        seconds=60,
        figures=_sft("torch", 1.0, 0.35, "unfused norms, RoPE and SwiGLU: a third of the time moves memory"),
    ),
    Stage(
        name="sft_transformer_engine",
        seconds=60,
        figures=_sft("transformer_engine", 0.75, 0.47, "fused; measured only where Transformer Engine imports"),
    ),
    Stage(
        name="grpo",
        seconds=80,
        figures=(
            *_grpo("GRPO 1.5b", 1.6, 1.3, "512 decode steps of 64 rows at 2.6 ms, and the prompts"),
            Figure(
                name="bfloat16 gap of engine and trainer, mean", predicted=0.004, goal="<= 0.02", because="half a bfloat16 step of a logit"
            ),
            Figure(name="bfloat16 gap of engine and trainer, largest", predicted=0.06, goal="<= 0.5"),
        ),
    ),
    Stage(
        name="offload",
        seconds=70,
        figures=_grpo("GRPO 1.5b with offload", 2.1, 2.1, "18.5 GB of the optimizer's to the host and back in a step, at 50 GB/s"),
    ),
    Stage(
        name="layouts",
        seconds=90,
        figures=(
            Figure(name="tp 2 on one GPU, largest relative gap of a loss", predicted=1e-6, goal="<= 1e-4"),
            Figure(name="pp 2 on one GPU, largest relative gap of a loss", predicted=1e-6, goal="<= 1e-4"),
        ),
    ),
    Stage(
        name="ppo",
        seconds=100,
        figures=(
            Figure(name="PPO: step, s", predicted=0.6, because="eight turns on the GPU, each a lock and a copy of small weights"),
            Figure(name="PPO: reward of the last steps", predicted=0.5, goal=">= 0.2", because="as on a CPU"),
        ),
    ),
    Stage(
        name="trl",
        seconds=110,
        figures=(
            Figure(name="TRL / ours: total", predicted=4.0, goal=">= 1", because="its generation launches each kernel of each step"),
            Figure(name="TRL / ours: generation", predicted=6.0),
            Figure(name="TRL / ours: train", predicted=1.5),
        ),
    ),
    Stage(
        name="vllm",
        seconds=120,
        figures=(
            Figure(name="vLLM / ours: generation 0.5b, batch 32", predicted=0.8, because="compiled and fused; only where it imports"),
        ),
    ),
    Stage(
        name="tensorrt_llm",
        seconds=240,
        figures=(Figure(name="TensorRT-LLM: refits, decodes and sleeps", predicted=1.0, goal=">= 1", because="only where it imports"),),
    ),
)
STAGES_BY_NAME = {stage.name: stage for stage in STAGES}


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of a stage."""

    figures: dict[str, float]
    seconds: float = 0.0
    problem: str = ""


class Started:
    """The process of a stage: it loads its packages and waits for `go`."""

    def __init__(self, stage: Stage, python: Path, folder: Path, environment: Mapping[str, str], *, tiny: bool) -> None:
        self.stage = stage
        self.result, self.log = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
        own = folder / stage.name
        own.mkdir()
        command = [str(python), str(HERE / "gpu_check_stages.py"), stage.name, str(own), str(self.result), *(["tiny"] if tiny else [])]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )

    def go(self, limit: float) -> Outcome:
        """Let it measure, at most `limit` seconds. What it has measured counts, however it ends."""
        started, problem = time.monotonic(), ""
        try:
            self.process.communicate(b"go\n", timeout=limit)
            if self.process.returncode:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                problem = f"exit code {self.process.returncode}: {lines[-1] if lines else ''}"
        except subprocess.TimeoutExpired:
            problem = f"ended after {limit:.0f} s"
        finally:
            self.end()
        figures = json.loads(self.result.read_text()) if self.result.exists() else {}
        return Outcome(figures=figures, seconds=time.monotonic() - started, problem=problem)

    def end(self) -> None:
        """End it and everything that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def check(stages: list[Stage], chosen: argparse.Namespace, folder: Path, until: float) -> dict[str, Outcome]:
    """Run the stages one after the other, each loading while the one before it measures."""
    python, installed = gpu_check_wheels.install(chosen.wheels, folder) if chosen.wheels else (Path(sys.executable), [])
    print(f"installed beside this machine's packages: {', '.join(installed) or 'nothing'}", flush=True)
    path = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE.parent / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"PYTHONPATH": path, "GPU_CHECK_SERVERS": ""}
    if (folder / gpu_check_wheels.SERVERS).exists():
        environment["GPU_CHECK_SERVERS"] = str(folder / gpu_check_wheels.SERVERS)
    environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1"}
    outcomes: dict[str, Outcome] = {}
    following: Started | None = None
    try:
        for number, stage in enumerate(stages):
            left = until - time.monotonic()
            if left < LEAST_SECONDS:
                outcomes[stage.name] = Outcome(figures={}, problem="no time was left")
                write(outcomes, chosen.output)
                continue
            running = following or Started(stage, python, folder, environment, tiny=chosen.tiny)
            following = Started(stages[number + 1], python, folder, environment, tiny=chosen.tiny) if number + 1 < len(stages) else None
            outcomes[stage.name] = running.go(min(stage.seconds * chosen.slowness, left))
            write(outcomes, chosen.output)
            said = outcomes[stage.name].problem or f"{len(outcomes[stage.name].figures)} figures"
            print(f"{stage.name}: {said}, {outcomes[stage.name].seconds:.0f} s", flush=True)
            if outcomes[stage.name].problem:
                print(running.log.read_text(errors="replace")[-3000:], flush=True)
    finally:
        if following is not None:
            following.end()
    return outcomes


def write(outcomes: Mapping[str, Outcome], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: {"figures": one.figures, "seconds": one.seconds, "problem": one.problem} for name, one in outcomes.items()}
    (folder / "gpu_check.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "gpu_check.md").write_text("\n".join(table(outcomes)) + "\n")


def table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Every figure with its prediction, its goal and, where a GPU has run it, what was measured."""
    lines = ["| stage | figure | predicted | goal | measured | because |", "|---|---|---:|---:|---:|---|"]
    for stage in STAGES:
        outcome = outcomes.get(stage.name, Outcome(figures={}))
        for figure in stage.figures:
            value = outcome.figures.get(figure.name)
            measured = "" if value is None else f"{value:.4g}" + ("" if figure.meets(value) else " (missed)")
            lines.append(f"| {stage.name} | {figure.name} | {figure.predicted:.4g} | {figure.goal} | {measured} | {figure.because} |")
        if outcome.problem:
            lines.append(f"| {stage.name} | **{outcome.problem}** | | | | |")
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="a folder of packages that this machine may lack")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where gpu_check.json and gpu_check.md are written")
    parser.add_argument("--only", choices=list(STAGES_BY_NAME), nargs="+", default=list(STAGES_BY_NAME))
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    parser.add_argument("--slowness", type=float, default=1.0, help="of this machine: the stages' time limits are multiplied by it")
    parser.add_argument("--tiny", action="store_true", help="the smallest of everything, to try the check itself")
    parser.add_argument("--table", action="store_true", help="print the table of predictions and stop")
    return parser.parse_args(arguments)


def main() -> int:
    chosen = parse(sys.argv[1:])
    if chosen.table:
        print("\n".join(table({})))
        return 0
    until = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        outcomes = check([STAGES_BY_NAME[name] for name in chosen.only], chosen, Path(folder), until)
    print("\n".join(table(outcomes)))
    print(f"figures: {chosen.output / 'gpu_check.json'} and .md")
    return int(any(outcome.problem for outcome in outcomes.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"error: {error}")
