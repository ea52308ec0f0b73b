"""The studio's pages in Chromium: many runs, one long run, and the server's CPU time for a live update.

    python benchmarks/studio.py [--runs 200] [--steps 10000]

Targets: the first page of 200 runs under 1 s, a run of 10,000 steps under 2 s, a live update of it under 100 ms of the server's CPU time.
Times are from the request to the first row, or to the charts, of a page that is opened for the second time; the first one warms caches.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import browser

NUM_METRICS = 60  # of a GRPO step
UPDATES, EVERY_SECONDS = 10, 2.5  # the page looks every 2 s
LIMIT_SECONDS = 120.0


def line(step: int, source: random.Random) -> str:
    """A step's metrics, with names that fall into all groups of curves."""
    areas = ("rollout", "policy", "optim", "critic", "time", "learnt")
    names = ["rollout/reward", "policy/loss", "policy/entropy", "time/step", "rollout/response_length", "rollout/logprob_gap"]
    names += [f"{areas[i % len(areas)]}/measure_{i}" for i in range(NUM_METRICS - len(names))]
    values = {name: 1 - math.exp(-step / 500) + 0.1 * source.random() for name in names}
    return json.dumps({"step": step, "time": 1.7e9 + step, **values}) + "\n"


def write_run(path: Path, steps: int) -> None:
    path.mkdir(parents=True)
    source = random.Random(steps)
    (path / "run.json").write_text(json.dumps({"run_id": "0" * 32, "created": "2026-01-01T00:00:00+0000", "recipe": "grpo"}))
    (path / "config.yaml").write_text(f"loop: {{max_steps: {steps}}}\n")
    (path / "metrics.jsonl").write_text("".join(line(step, source) for step in range(1, steps + 1)))


def seconds_until(driver: Any, url: str, there: Callable[[], Any]) -> float:
    began = time.perf_counter()
    driver.get(url)
    while not there():
        if time.perf_counter() - began > LIMIT_SECONDS:
            raise SystemExit(f"{url}: not shown within {LIMIT_SECONDS} s")
        time.sleep(0.01)
    return time.perf_counter() - began


def update_cpu(server: psutil.Process, metrics: Path, steps: int) -> float:
    """The server's CPU seconds for each of UPDATES new steps, beyond those of an idle page."""

    def spent(writes: bool) -> float:
        before = sum(server.cpu_times()[:2])
        for number in range(UPDATES):
            if writes:
                with metrics.open("a") as file:
                    file.write(line(steps + 1 + number, random.Random(number)))
            time.sleep(EVERY_SECONDS)
        return sum(server.cpu_times()[:2]) - before

    idle = spent(writes=False)
    return (spent(writes=True) - idle) / UPDATES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    if why := browser.missing():
        raise SystemExit(f"cannot look at pages: {why}")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs - 1):
            write_run(Path(folder, f"group{number % 10}", f"run{number}"), 200)
        write_run(Path(folder, "long"), arguments.steps)
        command = [sys.executable, "-m", "aligner.cli", "studio", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, browser.chromium() as driver:
            assert server.stdout is not None
            url = next(found[1] for text in server.stdout if (found := re.match(r"open: (\S+)", text)))
            base = url.partition("/?")[0]
            rows = lambda: driver.find_elements("css selector", "tbody tr a")  # noqa: E731
            charts = lambda: driver.find_elements("css selector", "canvas")  # noqa: E731
            cold = seconds_until(driver, url, rows)
            print(f"{arguments.runs} runs: {seconds_until(driver, base + '/', rows):.2f} s (the first time {cold:.2f} s)", flush=True)
            cold = seconds_until(driver, f"{base}/run/long", charts)
            warm = seconds_until(driver, f"{base}/run/long", charts)
            print(f"{arguments.steps} steps: {warm:.2f} s (the first time {cold:.2f} s)", flush=True)
            time.sleep(15.0)  # the findings are judged, and pages that were left are forgotten
            spent = update_cpu(psutil.Process(server.pid), Path(folder, "long", "metrics.jsonl"), arguments.steps)
            print(f"a live update: {1000 * spent:.0f} ms of the server's CPU time", flush=True)
            server.terminate()


if __name__ == "__main__":
    main()
