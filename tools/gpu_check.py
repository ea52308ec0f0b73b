"""Does everything work on the first real GPU, and is it as fast as predicted? Two calls of ten minutes each, no network.

    python tools/gpu_check.py --half 1 [--wheels FOLDER] [--output FOLDER]      (make gpu-check ARGS='--half 1'; without --half both)
    python tools/gpu_check.py --only STAGE ... [--allow-missing vllm trl]
    python tools/gpu_check.py --table                                           the predictions alone

The stages come in order of risk: single kernels against float32 first, speed and other packages last. Each has its own process and time
limit and may fail alone; STAGE.json, gpu_check.json and gpu_check.md are written when one ends. A package that does not import is said,
and fails the check unless --allow-missing names it (or says `all`). Exit code: 0 if every stage has passed. `--wheels`: packages that this
machine lacks, from `make gpu-check-wheels`. Standard library only: the packages are installed first.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import gpu_check_wheels
from gpu_check_halves import HALF_SECONDS, PACKAGES, STAGES, STAGES_BY_NAME, Stage
from gpu_check_table import Outcome, budget, judge, state, summary, table

HERE = Path(__file__).resolve().parent
LEAST_SECONDS = 10.0  # a stage is not begun with less
PROBE_SECONDS = 60.0  # for the packages together


def missing(packages: Sequence[str], python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Which of the packages cannot be used, and why; each is imported in a process of its own, all at once. Prints versions."""
    started = {}
    for name in packages:
        of_servers = environment.get("GPU_CHECK_SERVERS") if name == "pytriton" else None
        program = str(Path(of_servers, "bin", "python")) if of_servers else str(python)
        command = [program, "-c", PACKAGES[name].probe]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started[name] = subprocess.Popen(command, env=dict(environment), start_new_session=True, **pipes)
    found, until = {}, time.monotonic() + PROBE_SECONDS
    for name, process in started.items():
        try:
            said = process.communicate(timeout=max(until - time.monotonic(), 0.1))[0].strip().splitlines()[-1:] or [""]
            why = said[0] if process.returncode else ""
        except subprocess.TimeoutExpired:
            said, why = [""], f"its import took more than {PROBE_SECONDS:.0f} s"
        end(process)
        if why or process.returncode:
            found[name] = why or f"exit code {process.returncode}"
        print(f"{name}: {f'does not import ({found[name]})' if name in found else said[0]}", flush=True)
    return found


def end(process: subprocess.Popen) -> None:
    """End it and everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Started:
    """The process of a stage: it loads its packages and waits for `go`."""

    def __init__(self, stage: Stage, python: Path, folder: Path, environment: Mapping[str, str], *, tiny: bool) -> None:
        self.stage, self.tiny = stage, tiny
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
        started, problem, kind = time.monotonic(), "", ""
        try:
            self.process.communicate(b"go\n", timeout=limit)
            if self.process.returncode:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                problem, kind = f"exit code {self.process.returncode}: {lines[-1] if lines else ''}", "failed"
        except subprocess.TimeoutExpired:
            problem, kind = f"ended after {limit:.0f} s", "late"
        finally:
            end(self.process)
        found = json.loads(self.result.read_text()) if self.result.exists() else {}
        outcome = Outcome(**found or {"figures": {}}, seconds=time.monotonic() - started, problem=problem, kind=kind)
        judge(self.stage, outcome, tiny=self.tiny)
        return outcome


def surroundings(chosen: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of the stages, with the wheels installed, and their environment."""
    python, installed = gpu_check_wheels.install(chosen.wheels, folder) if chosen.wheels else (Path(sys.executable), [])
    print(f"installed beside this machine's packages: {', '.join(installed) or 'nothing'}", flush=True)
    path = os.pathsep.join([str(HERE.parent), str(HERE), str(HERE.parent / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"PYTHONPATH": path, "GPU_CHECK_SERVERS": ""}
    if (folder / gpu_check_wheels.SERVERS).exists():
        environment["GPU_CHECK_SERVERS"] = str(folder / gpu_check_wheels.SERVERS)
    return python, environment | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"} | (
        {} if chosen.tiny else {"OMP_NUM_THREADS": "4"}
    )


def check(stages: Sequence[Stage], chosen: argparse.Namespace, folder: Path, until: float) -> dict[str, Outcome]:
    """Run the stages one after the other, each loading while the one before it measures."""
    python, environment = surroundings(chosen, folder)
    lacking = missing([name for name in PACKAGES if any(name in (stage.needs, stage.uses) for stage in stages)], python, environment)
    outcomes: dict[str, Outcome] = {}
    running = [stage for stage in stages if stage.needs not in lacking]
    following: Started | None = None
    try:
        for stage in stages:
            if stage.needs in lacking:
                outcomes[stage.name] = Outcome(figures={})
            elif until - time.monotonic() < LEAST_SECONDS:
                outcomes[stage.name] = Outcome(figures={}, problem="no time was left", kind="late")
            else:
                current = following or Started(stage, python, folder, environment, tiny=chosen.tiny)
                after = running[running.index(stage) + 1 :][:1]
                following = Started(after[0], python, folder, environment, tiny=chosen.tiny) if after else None
                outcomes[stage.name] = current.go(min(stage.seconds * chosen.slowness, until - time.monotonic()))
            excuse(stage, outcomes[stage.name], lacking, chosen.allow_missing)
            write(outcomes, chosen.output)
            tell(stage, outcomes[stage.name], folder / f"{stage.name}.log")
    finally:
        if following is not None:
            end(following.process)
    return outcomes


def excuse(stage: Stage, outcome: Outcome, lacking: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Say what the stage lacks, where nothing else is wrong with it; it may, if that is allowed."""
    name = next((name for name in (stage.needs, stage.uses) if name in lacking), "")
    if name and not outcome.problem:
        what = "skipped" if name == stage.needs else "ran without"
        outcome.problem, outcome.kind = f"{what}: {name} does not import ({lacking[name]})", "skipped"
        outcome.allowed = name in allowed or "all" in allowed


def tell(stage: Stage, outcome: Outcome, log: Path) -> None:
    said = outcome.problem or f"{len(outcome.figures)} figures"
    print(f"{stage.name}: {state(outcome, missed=False)}: {said}, {outcome.seconds:.0f} s", flush=True)
    if outcome.kind in ("failed", "late") and log.exists():
        print(log.read_text(errors="replace")[-3000:], flush=True)


def write(outcomes: Mapping[str, Outcome], folder: Path) -> None:
    """The last stage's own file, and those of all so far."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: asdict(one) for name, one in outcomes.items()}
    last = next(reversed(found))
    (folder / f"{last}.json").write_text(json.dumps(found[last], indent=2) + "\n")
    (folder / "gpu_check.json").write_text(json.dumps(found, indent=2) + "\n")
    notes = [f"- {name}: {note}" for name, one in outcomes.items() for note in one.notes]
    (folder / "gpu_check.md").write_text("\n".join([*summary(outcomes), "", *notes, "", *table(outcomes)]) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", type=int, choices=(1, 2), help="the stages of one call of ten minutes; both, if it is not given")
    parser.add_argument("--only", choices=list(STAGES_BY_NAME), nargs="+", help="these stages")
    parser.add_argument("--allow-missing", choices=[*PACKAGES, "all"], nargs="+", default=[], help="packages that need not import")
    parser.add_argument("--wheels", type=Path, help="a folder of packages that this machine may lack")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the results are written")
    parser.add_argument("--minutes", type=float, help="for all stages together; 9.5 for each half")
    parser.add_argument("--slowness", type=float, default=1.0, help="of this machine: the stages' time limits are multiplied by it")
    parser.add_argument("--tiny", action="store_true", help="the smallest of everything, to try the check itself")
    parser.add_argument("--table", action="store_true", help="print the table of predictions and stop")
    chosen = parser.parse_args(arguments)
    chosen.stages = [
        stage
        for stage in STAGES
        if (chosen.only is None or stage.name in chosen.only) and (chosen.half is None or stage.half == chosen.half)
    ]
    if not chosen.stages:
        parser.error(f"--only {' '.join(chosen.only)}: not in --half {chosen.half}")
    chosen.minutes = chosen.minutes or HALF_SECONDS / 60 * len({stage.half for stage in chosen.stages})
    return chosen


def main() -> int:
    chosen = parse(sys.argv[1:])
    if chosen.table:
        print("\n".join([*budget(), "", *table({})]))
        return 0
    until = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        outcomes = check(chosen.stages, chosen, Path(folder), until)
    print("\n".join(["", *summary(outcomes)]))
    print(f"figures: {chosen.output / 'gpu_check.json'} and .md")
    return int(any(outcome.problem and not outcome.allowed for outcome in outcomes.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"error: {error}")
