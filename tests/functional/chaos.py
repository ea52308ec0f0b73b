"""Kills random processes of PPO runs at random moments, starts them again, and compares every run that gets to its end with one that
was left alone: weights, optimizer states, metrics and files, bit for bit. Counts what the dead leave behind.

    make chaos ARGS='--kills 100 --seed 1'

The run has two actor ranks and a critic server, saves in the background at every step, and its launcher may restart the server twice.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from resumed_runs import same_runs
from training_jobs import Job, eventually, kill, launcher, ppo_settings, run_job, slow_reward, write_task

LAUNCH = launcher("ppo")
NUM_STEPS = 6
POLL_SECONDS = 0.2
RUN_SECONDS = 300.0  # a start that lasts longer hangs
CLEAN_SECONDS = 30.0  # after the last sign of a run, for its watchdogs
WEIGHTS = {"actor": 3, "critic": 3, "Triton": 3, "helper process": 2, "launcher": 1, "everything": 1}
# What a run may leave behind otherwise than one that was left alone: it was started more often.
STARTS = ("logs/", "calls/", "jobs/", "launcher.lock")


LEFT = {"processes": "processes", "ports": "listening ports", "segments": "segments of shared memory", "files": "temporary files"}


def told(left: Counter[str]) -> str:
    """What of a run is still there when it should not be."""
    return ", ".join(f"{left[kind]} {name}" for kind, name in LEFT.items())


@dataclass(frozen=True, slots=True)
class Kill:
    """`after`: seconds since the start of the run, or the kill before; `went_on`: without a person who starts the run again."""

    victim: str
    after: float
    went_on: bool


@dataclass(slots=True)
class Report:
    """`left_by_dead`: the most that was there after any start; `left`: after one more, at the end."""

    kills: list[Kill]
    num_starts: int
    num_runs: int
    left_by_dead: Counter[str]
    left: Counter[str]


class Observer:
    """Collects what the processes of a job hold while they live, to look for it afterwards."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._sockets: set[str] = set()
        self._segments: set[str] = set()

    def look(self, pids: Collection[int]) -> None:
        listening = _listening()
        for pid in pids:
            self._sockets |= listening & _sockets(pid)
            self._segments |= _segments(pid)

    def left(self, job: Job) -> Counter[str]:
        """What is there CLEAN_SECONDS after the job's end, or as soon as nothing is."""
        eventually(lambda: not self._now(job), CLEAN_SECONDS)
        return self._now(job)

    def _now(self, job: Job) -> Counter[str]:
        files = sum(not name.startswith("torchinductor_") for name in os.listdir(self._temporary))  # torch's cache, for the next run
        segments = sum(Path(name).exists() for name in self._segments)
        return +Counter(processes=len(job.processes()), ports=len(self._sockets & _listening()), segments=segments, files=files)


def _listening() -> set[str]:
    """The inodes of all TCP sockets that listen."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {fields[9] for fields in lines if fields[3] == "0A"}


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # it has ended meanwhile
    return found


def _segments(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return set()
    return {f"/dev/shm/{line.partition('/dev/shm/')[2]}" for line in lines if "/dev/shm/" in line and "deleted" not in line}


def role(command: str) -> str:
    """What kind of process this is, by its command line."""
    kinds = {
        "processes.py guard": "helper process",
        "servers/processes.py": "helper process",
        "resource_tracker": "helper process",
        "tritonserver --id": "Triton",
        "triton_python_backend_stub": "Triton",
        "aligner.cli launch": "launcher",
        "aligner.cli train": "actor",
        "aligner.cli serve": "critic",
    }
    return next((kind for part, kind in kinds.items() if part in command), "helper process")


def strike(job: Job, chance: random.Random) -> str:
    """Kill a process of the job, or all; which kind. Empty if there was none."""
    living = job.processes()
    kinds = {kind: [pid for pid, command in living.items() if role(command) == kind] for kind in WEIGHTS}
    kinds["everything"] = list(living)
    possible = [kind for kind in WEIGHTS if kinds[kind]]
    if not possible:
        return ""
    kind = chance.choices(possible, [WEIGHTS[one] for one in possible])[0]
    for pid in kinds[kind] if kind == "everything" else [chance.choice(sorted(kinds[kind]))]:
        kill(pid)
    return kind


class Chaos:
    """`folder` gets the runs, the data that they read, and `tmp`, which must be TMPDIR: what is left there is counted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._observer = Observer(self._temporary)
        write_task(folder)
        started = time.monotonic()
        self._whole = folder / "whole"
        run_job(LAUNCH, self._whole, self._settings())
        self._span = time.monotonic() - started
        self.report = Report(kills=[], num_starts=0, num_runs=0, left_by_dead=Counter(), left=Counter())

    def _settings(self) -> list[str]:
        return [
            *(*ppo_settings(self._folder), "algorithm.rollouts_per_step=24", "algorithm.mini_batch_size=12", "critic.mini_batch_size=12"),
            *("local_launcher.grace_seconds=3", "local_launcher.shutdown_timeout_seconds=10", "local_launcher.max_server_restarts=2"),
            *("num_processes=2", "loop.save_every=1", "checkpoint.asynchronous=true", "checkpoint.keep=2", f"loop.max_steps={NUM_STEPS}"),
            slow_reward(self._folder, 0.2),
        ]

    def run(self, kills: int) -> Report:
        """Raises AssertionError where a run hangs, ends by itself, or is not the one that was left alone."""
        while not self.report.kills or len(self.report.kills) < kills:
            self._one_run(kills)
        self._start_once_more()
        return self.report

    def _start_once_more(self) -> None:
        """A server that starts sweeps what one before it has left: here those of a run that is done, which end with it."""
        directory = self._folder / f"run{self.report.num_runs - 1}"
        with Job(LAUNCH, directory, self._settings()) as job:
            job.finish()
            self.report.left = self._observer.left(job)
        self._compare(directory)

    def _one_run(self, kills: int) -> None:
        """Start a run again and again until it is done; after the last kill it is left alone."""
        directory = self._folder / f"run{self.report.num_runs}"
        observer = self._observer
        while True:
            self.report.num_starts += 1
            before = len(self.report.kills)
            with Job(LAUNCH, directory, self._settings()) as job:
                code = self._disturb(job, observer, kills)
                left = observer.left(job)
                output = job.output()
            print(f"start {self.report.num_starts}: exit code {code}; left: {told(left)}", flush=True)
            self.report.left_by_dead |= left
            if code == 0:
                break
            assert len(self.report.kills) > before, f"exit code {code}, and nothing was killed:\n{output[-5000:]}"
        self.report.num_runs += 1
        self._compare(directory)

    def _disturb(self, job: Job, observer: Observer, kills: int) -> int:
        """Kill something now and then until the job ends; its exit code."""
        deadline = time.monotonic() + RUN_SECONDS
        while len(self.report.kills) < kills:
            wait = self._chance.uniform(0.0, self._span)
            started = time.monotonic()
            while job.process.poll() is None and time.monotonic() < min(started + wait, deadline):
                observer.look(job.processes())
                time.sleep(POLL_SECONDS)
            assert time.monotonic() < deadline, f"it neither ends nor goes on:\n{job.output()[-5000:]}"
            if job.process.poll() is not None or not (victim := strike(job, self._chance)):
                break
            ended = eventually(lambda: job.process.poll() is not None, 2.0)
            self.report.kills.append(Kill(victim=victim, after=wait, went_on=not ended))
            print(f"{len(self.report.kills)}: {victim} after {wait:.1f} s", flush=True)
        return job.wait(max(1.0, deadline - time.monotonic()))

    def _compare(self, directory: Path) -> None:
        same_runs(directory, self._whole, NUM_STEPS, components=("policy", "critic"))
        assert sorted(_files(directory) ^ _files(self._whole)) == [], "files of one of the two only"


def _files(directory: Path) -> set[str]:
    """What is in a run's directory, without the random part of the journal's names."""
    names = (re.sub(r"\.[0-9a-f]{16}\.", ".", str(path.relative_to(directory))) for path in directory.rglob("*"))
    return {name for name in names if not name.startswith(STARTS)}


def table(report: Report) -> str:
    """The kills by what was hit, and the sums below."""
    hit = Counter(one.victim for one in report.kills)
    went_on = Counter(one.victim for one in report.kills if one.went_on)
    lines = ["| killed | times | the run went on by itself | the run ended, and was started again |", "|---|---|---|---|"]
    lines += [f"| {kind} | {hit[kind]} | {went_on[kind]} | {hit[kind] - went_on[kind]} |" for kind in WEIGHTS if hit[kind]]
    lines += [f"| together | {hit.total()} | {went_on.total()} | {hit.total() - went_on.total()} |", ""]
    lines += [
        f"{report.num_starts} starts, {report.num_runs} runs came to their end: each equal to the run that was left alone, bit for bit.",
        f"The most that was left {CLEAN_SECONDS:g} s after a start had ended: {told(report.left_by_dead)}; a server that starts sweeps it.",
        f"Left at the end: {told(report.left)}.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how many, at least 1")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and of what is hit")
    parser.add_argument("--table", type=Path, help="a Markdown file for the result")
    chosen = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="chaos-")
    os.environ["TMPDIR"] = f"{folder}/tmp"
    try:
        report = Chaos(Path(folder), chosen.seed).run(chosen.kills)
    except AssertionError:
        print(f"the runs and their logs are in {folder}")
        raise
    shutil.rmtree(folder)
    print(table(report))
    if chosen.table:
        chosen.table.write_text(table(report) + "\n")
    return int(bool(report.left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
