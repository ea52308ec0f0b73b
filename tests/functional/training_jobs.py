"""Whole runs as a user starts them, on a model of a few thousand parameters with one token per character, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from builders import load_module
from preloaded import preloaded

from aligner.errors import DataError
from aligner.reporting.jsonl import StepMetrics, read_metrics
from aligner.servers.processes import processes_with_variable

ROOT = Path(__file__).parents[2]
MARK = "ALIGNER_TEST_RUN"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SAYS_77 = ("reward.function.path=aligner.rewards.builtin:fixed_string", '+reward.function.arguments.target="7-"')
_SIZES = ("num_layers=2", "hidden_size=32", "num_attention_heads=4", "num_key_value_heads=2", "ffn_hidden_size=64")
SIZES = [f"model.architecture.{size}" for size in (*_SIZES, "max_position_embeddings=32")]
PLAIN_SERVERS = ("critic.server.transport=http", "reward.server.transport=http")  # of runs whose subject is not Triton, which starts slowly
ALIGNER = (sys.executable, "-u", "-m", "aligner.cli")


def train(recipe: str) -> tuple[str, ...]:
    return (*ALIGNER, "train", recipe)


def launcher(recipe: str) -> tuple[str, ...]:
    return (*ALIGNER, "launch", "local", recipe)


def write_task(folder: Path) -> None:
    """The character tokenizer (18 tokens) in folder/tokenizer, and 64 prompts like `3+4=` in folder/prompts.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    load_module(ROOT / "examples" / "demo" / "arithmetic.py", "demo_arithmetic").write_tokenizer(folder / "tokenizer")
    write_rows(folder / "prompts.jsonl", ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def model_settings(folder: Path) -> list[str]:
    """Random weights, a learning rate that a few steps learn with, no schedule. Of a setting that is given twice the last value counts."""
    return [
        *(f"model.tokenizer={folder / 'tokenizer'}", *SIZES, "model.make_vocab_divisible_by=2", "model.micro_batch_size=64"),
        *("optimizer.lr=1e-2", "optimizer.min_lr=0", "optimizer.warmup_steps=0", "optimizer.decay=constant", "optimizer.weight_decay=0"),
        *("logging.tensorboard=false", "logging.progress=plain", "loop.table_every=0"),
        "checkpoint.asynchronous=false",  # what is on the disk when a run is killed is what it had asked for
    ]


def supervised_settings(folder: Path, data: Path, *more: str) -> list[str]:
    """Training and validation on the rows of a file."""
    return [*model_settings(folder), f"data.train={data}", f"data.validation={data}", "data.max_length=16", *more]


def tiny_settings(folder: Path) -> list[str]:
    """Prompts and responses of at most 8 tokens."""
    lengths = ("data.max_prompt_length=8", "rollout.sampling.max_response_length=8")
    return [*model_settings(folder), f"data.train={folder / 'prompts.jsonl'}", *lengths]


def ppo_settings(folder: Path) -> list[str]:
    """PPO on top of `tiny_settings`, with a critic of the same size."""
    critic = {"lr": "1e-2", "min_lr": 0, "warmup_steps": 0, "decay": "constant", "weight_decay": 0}
    return [
        *tiny_settings(folder),
        *("algorithm.rollouts_per_step=128", "algorithm.mini_batch_size=64", "algorithm.kl_coef=0.001"),
        *(f"critic.optimizer.{name}={value}" for name, value in critic.items()),
        "critic.mini_batch_size=64",
    ]


def grpo_settings(folder: Path) -> list[str]:
    """GRPO on top of `tiny_settings`: 16 prompts with 8 responses each, two updates a step."""
    sizes = ("algorithm.prompts_per_step=16", "algorithm.group_size=8", "algorithm.mini_batch_size=64")
    return [*tiny_settings(folder), *sizes, "algorithm.kl_coef=0.001"]


class Job:
    """One process (and all that it starts) in a run directory; its output goes to a file. `end` leaves nothing behind."""

    def __init__(self, command: tuple[str, ...], directory: Path, settings: list[str]) -> None:
        self.directory = directory
        self._mark = f"{MARK}={uuid.uuid4()}"
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._log = directory.parent / f"{directory.name}.{time.time_ns()}.log"
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        name, value = self._mark.split("=")
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}
        # python -u: forks of the preloaded process, which has the imports done, write line by line
        self.process = preloaded().start([*command[2:], *settings, f"run.directory={directory}"], environment, self._log, Path.cwd())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            kill(pid)
        self.process.wait()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, timeout_seconds: float = 240.0) -> int:
        """The exit code. Raises AssertionError with the last of the output where there is none in time."""
        try:
            return self.process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_seconds:g} s:\n{self.output()[-3000:]}") from None

    def finish(self, expected: int = 0) -> str:
        """Wait for the end, with this exit code; the output."""
        code = self.wait()
        assert code == expected, f"exit code {code}:\n{self.output()[-5000:]}"
        return self.output()

    def reached(self, step: int, timeout_seconds: float = 240.0) -> None:
        """Return once metrics.jsonl has this step. Raises AssertionError where the job ends first, or the time is over."""

        def there() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.poll()} before step {step}:\n{self.output()[-5000:]}"
            return step in steps_of(self.directory)

        if not eventually(there, timeout_seconds):
            raise AssertionError(f"no step {step} after {timeout_seconds:g} s:\n{self.output()[-3000:]}")

    def processes(self) -> dict[int, str]:
        """Pid and command line of everything that this job started and that still runs."""
        return processes_with_variable(self._mark)


def run_aligner(*arguments: object, cwd: Path = ROOT, timeout: float = 400.0, **variables: str) -> tuple[int, str]:
    """`aligner ARGUMENTS` to its end, by a fork of the preloaded process: exit code and output."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES and not key.startswith("HF_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return preloaded().run(["-m", "aligner.cli", *map(str, arguments)], environment, cwd, timeout=timeout)


def run_job(command: tuple[str, ...], directory: Path, settings: list[str]) -> str:
    """Run to a good end; the output."""
    with Job(command, directory, settings) as job:
        return job.finish()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended meanwhile


def eventually(condition: Callable[[], object], timeout_seconds: float = 60.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def metrics_of(directory: Path) -> list[StepMetrics]:
    """The lines of metrics.jsonl; none where a job is just about to write the first, or to replace the file."""
    try:
        return read_metrics(directory / "metrics.jsonl")
    except (FileNotFoundError, DataError):
        return []


def steps_of(directory: Path) -> list[int]:
    return [line.step for line in metrics_of(directory)]


def series(directory: Path, name: str) -> list[float]:
    return [line.values[name] for line in read_metrics(directory / "metrics.jsonl")]


def without_times(directory: Path) -> list[dict[str, float]]:
    """The metrics that two equal runs share: all but durations, speeds, and which replica sampled how much."""
    others = ("per_second", "imbalance")
    return [
        {"step": line.step} | {key: value for key, value in line.values.items() if not key.startswith("time/") and not key.endswith(others)}
        for line in read_metrics(directory / "metrics.jsonl")
    ]


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a directory of them."""
    return sorted(json.loads(marker.read_text())["step"] for marker in folder.glob("step_*/aligner.json"))


def slow_reward(folder: Path, seconds: float) -> str:
    """The setting of a reward function that takes a while: a run whose steps are long enough to be interrupted."""
    file = folder / "slow.py"
    file.write_text(
        f"import time\n\ndef reward(prompts, responses, answers):\n    time.sleep({seconds})\n"
        "    return [response.count('7') / 8 for response in responses]\n"
    )
    return f"reward.function.path={file}:reward"
