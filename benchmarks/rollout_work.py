"""The work of the rollout comparison, the same for every side, and how a side is timed. Standard library only: every environment has it.

A side is a script `SIDE SPEC.json RESULT.json` that makes a `Sampler`, the competitor, and hands it to `run`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement. `limits` are the tokens of each response: nothing else ends one. Requests keep this order."""

    lengths: str
    batch: int  # sequences decoded at a time
    prompts: list[list[int]]
    limits: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a side does in its process."""

    model: str  # a Hugging Face directory
    cases: list[Case]
    greedy: list[list[int]]  # prompts of the check, of one length
    greedy_length: int
    mode: str = ""  # of the sides that have several
    threads: int = 1
    repeats: int = 3  # timed runs of a case, after one that warms up
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        timed = (len(prompt) + limit for case in self.cases for prompt, limit in zip(case.prompts, case.limits, strict=True))
        return max(*timed, max(map(len, self.greedy)) + self.greedy_length)

    @property
    def largest_batch(self) -> int:
        """Of all cases."""
        return max(case.batch for case in self.cases)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A competitor, ready to sample.

    `sample(case)` draws at temperature 1 and returns how many tokens each response has; `greedy(prompts, length)` returns
    [(tokens, log-probs or None)]. `synchronize` waits for the device. `versions` names what ran.
    """

    sample: Callable[[Case], list[int]]
    greedy: Callable[[Sequence[Sequence[int]], int], list[tuple[list[int], list[float] | None]]]
    versions: dict[str, str]
    synchronize: Callable[[], None] = lambda: None


def response_limits(lengths: str, *, count: int, longest: int, mean: int, seed: int) -> list[int]:
    """Tokens of each response: all `longest` (fixed), or geometric with about this mean, cut at `longest` (varied)."""
    if lengths == "fixed":
        return [longest] * count
    drawn = random.Random(seed)
    return [min(longest, 1 + int(drawn.expovariate(1 / mean))) for _ in range(count)]


def read_spec(path: Path) -> Spec:
    """Raises TypeError naming a field that Spec has not, or that is missing."""
    fields = json.loads(path.read_text())
    return Spec(**fields | {"cases": [Case(**case) for case in fields["cases"]]})


def measure(case: Case, side: Side, *, repeats: int) -> dict[str, Any]:
    """Warm up and time one case. Raises RuntimeError where a response has not its length."""
    reset_peak_memory()
    runs = []
    for _ in range(1 + repeats):
        side.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        counts = side.sample(case)
        side.synchronize()
        runs.append({"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})
        if counts != case.limits:
            raise RuntimeError(f"responses of {counts} tokens where {case.limits} were asked for")
    timed = runs[1:]
    return {
        "num_tokens": sum(case.limits),
        "runs": timed,
        "median": {name: statistics.median(run[name] for run in timed) for name in timed[0]},
        "peak_memory_bytes": peak_memory(),
    }


def reset_peak_memory() -> None:
    """Count the peak from now on. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most resident memory of this process since the count was reset, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))


def run(make_side: Callable[[Spec], Side]) -> None:
    """The main function of a side."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {Path(sys.argv[0]).name} SPEC.json RESULT.json")
    spec = read_spec(Path(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)  # before torch is loaded
    side = make_side(spec)
    result = {
        "versions": side.versions | {"python": sys.version.split()[0]},
        "dtype": spec.dtype,
        "greedy": side.greedy(spec.greedy, spec.greedy_length),
        "cases": [measure(case, side, repeats=spec.repeats) for case in spec.cases],
    }
    Path(sys.argv[2]).write_text(json.dumps(result, indent=2) + "\n")
