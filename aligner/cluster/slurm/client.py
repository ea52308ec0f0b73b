"""Slurm's own commands, each with a deadline."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import LaunchError

# States in which nothing of a job runs any more.
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_UNKNOWN_JOB = "Invalid job id"
_STEP_ENDS = re.compile("Job step not running|[Jj]ob/step already complet")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """One component of a job as the controller knows it; `options` give a following job the same place in the queue."""

    state: str
    reason: str
    end_time: float | None  # Unix time; None: unlimited, or not started
    options: tuple[str, ...]


class SlurmClient:
    """Commands to the controller. Each raises LaunchError if it fails or takes longer than `timeout_seconds`."""

    def __init__(self, timeout_seconds: float, environ: Mapping[str, str] | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._environ = dict(os.environ if environ is None else environ)

    def run(self, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        """stdout of a command."""
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=self._timeout_seconds,
                cwd=cwd,
                env=self._environ if environ is None else dict(environ),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"{command[0]} did not answer within {self._timeout_seconds:g} s ({' '.join(command)})") from error
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}: {error}") from error
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise LaunchError(f"{' '.join(command)} failed with exit code {done.returncode}: {said}")
        return done.stdout

    def show(self, job: str) -> list[JobRecord]:
        """The components of a job, its leader first; empty if the controller no longer knows it."""
        try:
            text = self.run("scontrol", "show", "job", "-o", job)
        except LaunchError as error:
            if _UNKNOWN_JOB in str(error):
                return []
            raise
        return [_record(line) for line in text.splitlines() if line.startswith("JobId=")]

    def is_over(self, job: str) -> bool:
        """Whether every component of a job has ended; a job unknown to the controller has."""
        return all(record.state in OVER for record in self.show(job))

    def submit(self, options: Sequence[str], script: Path, arguments: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> str:
        """The id of the new job."""
        answer = self.run("sbatch", "--parsable", *options, str(script), *arguments, cwd=cwd, environ=environ)
        job = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
        if not job.isdigit():
            raise LaunchError(f"sbatch answered {answer.strip()!r} instead of a job id")
        return job

    def cancel(self, job: str) -> None:
        """End a job, running or not; one that has ended already is not an error."""
        self.run("scancel", "--quiet", job)

    def steps(self, jobs: Sequence[str]) -> dict[str, str]:
        """Step id -> name, of the running steps of these components."""
        found = {}
        for line in self.run("squeue", "--noheader", "--steps", "--format=%i|%j").splitlines():
            step, _, name = line.strip().partition("|")
            if step.partition(".")[0] in jobs:
                found[step] = name
        return found

    def signal_steps(self, steps: Sequence[str], signal_name: str) -> None:
        """Send a signal to every task of these steps; one that ends meanwhile is not an error."""
        try:
            if steps:
                self.run("scancel", "--quiet", f"--signal={signal_name}", *steps)
        except LaunchError as error:
            if not _STEP_ENDS.search(str(error)):
                raise


# What a job was given -> the option that asks for the same; Slurm prints values of nothing as in _NOTHING.
_OPTIONS = {
    "Partition": "--partition",
    "Account": "--account",
    "QOS": "--qos",
    "Reservation": "--reservation",
    "TimeLimit": "--time",
    "TimeMin": "--time-min",
    "Nice": "--nice",
    "ReqNodeList": "--nodelist",
    "ExcNodeList": "--exclude",
    "Features": "--constraint",
    "Prefer": "--prefer",
    "MinTmpDiskNode": "--tmp",
    "MinMemoryNode": "--mem",
    "MinMemoryCPU": "--mem-per-cpu",
    "CoreSpec": "--core-spec",
    "Licenses": "--licenses",
    "Network": "--network",
    "Switches": "--switches",
    "BurstBuffer": "--bb",
    "WCKey": "--wckey",
    "Comment": "--comment",
    "MailUser": "--mail-user",
    "MailType": "--mail-type",
}
_NOTHING = ("", "(null)", "N/A", "Partition_Limit", "*")
_MAY_BE_NOUGHT = ("MinMemoryNode",)  # all of a node's memory
_GPUS = {
    "TresPerNode": "--gpus-per-node",
    "TresPerJob": "--gpus",
    "TresPerSocket": "--gpus-per-socket",
    "TresPerTask": "--gpus-per-task",
    "CpusPerTres": "--cpus-per-gpu",
    "MemPerTres": "--mem-per-gpu",
}
_GPU = re.compile(r"gres[:/]gpu[:=/](.*)")  # before version 23.02 gres:gpu:8, later gres/gpu:8
_SHARING = {"NO": "--exclusive", "USER": "--exclusive=user", "MCS": "--exclusive=mcs", "TOPO": "--exclusive=topo", "YES": "--oversubscribe"}
_FIELD = re.compile(r"(?:^| )([A-Z][\w/:]*)=")


def _record(line: str) -> JobRecord:
    """Of a line of `scontrol show job -o`, whose values may hold blanks."""
    parts = _FIELD.split(line)
    fields = dict(zip(parts[1::2], (value.strip() for value in parts[2::2]), strict=True))
    options = list(_options(fields))
    folder, _, file = fields.get("StdOut", "").rpartition("/")
    if fields["JobId"] in file:  # the following job's output goes beside it, under its own number
        options.append(f"--output={folder}/{file.replace(fields['JobId'], '%j')}")
    return JobRecord(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        end_time=_unix_time(fields.get("EndTime", "")),
        options=tuple(options),
    )


def _options(fields: Mapping[str, str]) -> Iterator[str]:
    """Everything that was requested, as far as Slurm reports it, from command line, variables and script: see docs/slurm.md."""
    given = {key: value for key in _OPTIONS if (value := fields.get(key, "")) not in _NOTHING}
    given = {key: value for key, value in given.items() if value != "0" or key in _MAY_BE_NOUGHT}
    if "MemPerTres" in fields:  # a default stands there
        given.pop("MinMemoryCPU", None)
    yield from (f"{_OPTIONS[key]}={value}" for key, value in given.items())
    for key, option in _GPUS.items():
        found = [(_GPU.fullmatch(part), part) for part in fields.get(key, "").split(",") if part]
        if gpus := ",".join(gpu[1] for gpu, _ in found if gpu):
            yield f"{option}={gpus}"
        if key == "TresPerNode" and (others := ",".join(re.sub("^gres[:/]", "", part) for gpu, part in found if not gpu)):
            yield f"--gres={others}"
    if (sharing := _SHARING.get(fields.get("OverSubscribe", ""))) is not None:
        yield sharing
    if fields.get("Contiguous") == "1":
        yield "--contiguous"
    if fields.get("Reboot") == "1":
        yield "--reboot"


def _unix_time(text: str) -> float | None:
    """Parse Slurm's local time (no zone): this host's zone applies."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown, None
        return None
