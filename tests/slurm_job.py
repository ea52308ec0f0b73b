"""A job of a test cluster, and its processes, seen from the machine that holds the cluster (pids are this machine's)."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_cluster import SlurmCluster

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class JobComponent:
    """What scontrol tells of a job, or of one component of a heterogeneous one."""

    number: int
    name: str
    state: str
    reason: str
    exit_code: str
    nodes: str
    dependency: str


class Job:
    """`number` is what sbatch said; `directory` holds the output of its batch script."""

    def __init__(self, cluster: SlurmCluster, number: int, directory: Path, logs: Path | None = None) -> None:
        self.cluster = cluster
        self.number = number
        self.directory = directory
        self.logs = logs

    def __repr__(self) -> str:
        return f"job {self.number}"

    def components(self) -> list[JobComponent]:
        """One per component of a heterogeneous job, else one."""
        text = self.cluster.run("scontrol", "show", "job", str(self.number), "--oneliner").stdout
        return [_component(line) for line in text.splitlines() if line.strip()]

    @property
    def name(self) -> str:
        return self.components()[0].name

    @property
    def states(self) -> list[str]:
        return [component.state for component in self.components()]

    @property
    def state(self) -> str:
        """Of the first component, which is the batch script's."""
        return self.states[0]

    @property
    def ended(self) -> bool:
        return all(state in ENDED for state in self.states)

    @property
    def output(self) -> str:
        """Of the batch script, so far."""
        return "".join(path.read_text(errors="replace") for path in self.directory.glob(f"*-{self.number}.out"))

    def wait(self, *states: str, timeout_seconds: float) -> Job:
        """Until every component is in one of the states (without states: has ended). Raises AssertionError, with all there is to know,
        where that does not come in time or can no longer come."""
        wanted = states or ENDED
        deadline = time.monotonic() + timeout_seconds
        while True:
            seen = self.states
            if all(state in wanted for state in seen):
                return self
            if all(state in ENDED for state in seen):
                raise AssertionError(f"{self} ended as {seen}, not as {'/'.join(wanted)}\n{self.report()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_seconds:g} s for {self} to be {'/'.join(wanted)}; it is {seen}\n{self.report()}")
            time.sleep(_POLL_SECONDS)

    def until(self, condition: Callable[[], object], what: str, timeout_seconds: float) -> None:
        """Until the condition comes true while the job runs. Raises AssertionError where the job ends first, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise AssertionError(f"waited {timeout_seconds:g} s for {what} of {self}\n{self.report()}")
            if now - asked > 1.0:  # scontrol is a process: not at every turn
                asked = now
                if self.ended and not condition():
                    raise AssertionError(f"{self} ended as {self.states} before {what}\n{self.report()}")
            time.sleep(0.02)

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.number))

    def signal(self, number: signal.Signals) -> None:
        """To the batch script alone, as `--signal=B:` does before the end of the time."""
        self.cluster.run("scancel", "--batch", f"--signal={number.value}", str(self.number))

    def successors(self) -> list[Job]:
        """The jobs of the same name that were submitted later, oldest first."""
        return self._later(self.name)

    def gatekeepers(self) -> list[Job]:
        """Those that wait for this one, or a later one of the run, to fail."""
        return self._later(f"{self.name}-gatekeeper")

    def _later(self, name: str) -> list[Job]:
        lines = self.cluster.run("squeue", "--noheader", "--states=all", "--format=%i", f"--name={name}").stdout.split()
        numbers = sorted({int(re.split(r"[+_]", line)[0]) for line in lines})
        return [self.cluster.job(number, self.directory, self.logs) for number in numbers if number > self.number]

    def next_of_run(self, *, timeout_seconds: float) -> Job:
        """The next job of the same name that Slurm has started or can start: not one that was cancelled."""
        deadline = time.monotonic() + timeout_seconds
        while not (found := [job for job in self.successors() if job.state != "CANCELLED"]):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_seconds:g} s for the next job after {self}\n{self.report()}")
            time.sleep(_POLL_SECONDS)
        return found[0]

    def end_in_two_minutes(self) -> None:
        """Set the time limit so that the time is over after one to two minutes from now (Slurm counts in whole minutes)."""
        for component in self.components():
            text = self.cluster.run("scontrol", "show", "job", str(component.number), "--oneliner").stdout
            hours, minutes, _ = re.search(r"RunTime=(\d+):(\d+):(\d+)", text).groups()
            limit = int(hours) * 60 + int(minutes) + 2
            self.cluster.run("scontrol", "update", f"jobid={component.number}", f"timelimit={limit}")

    def processes(self) -> list[NodeProcess]:
        return [process for process in self.cluster.processes() if process.job == self.number]

    def orphans(self, patience_seconds: float = 10.0) -> list[NodeProcess]:
        """What still lives on the nodes after the job has ended: everything there that belongs to no other job. Looked for until there is
        nothing, or the patience is over."""
        deadline = time.monotonic() + patience_seconds
        own = {None, *(component.number for component in self.components())}
        while left := [process for process in self.cluster.processes() if process.job in own]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return left

    def report(self) -> str:
        details = "\n".join(map(str, self.components()))
        own = sorted(self.directory.glob("*.out"))
        others = sorted(self.logs.glob("*.log")) if self.logs and self.logs.is_dir() else []
        return "\n".join([self.cluster.queue(), details, *map(tail, [*own, *others]), self.cluster.logs()])


def _component(line: str) -> JobComponent:
    fields = dict(re.findall(r"(\w+(?::\w+)*)=(\S*)", line))
    return JobComponent(
        number=int(fields["JobId"]),
        name=fields["JobName"],
        state=fields["JobState"],
        reason=fields["Reason"],
        exit_code=fields["ExitCode"],
        nodes=fields["NodeList"],
        dependency=fields["Dependency"],
    )


def kill(process: NodeProcess, number: signal.Signals = signal.SIGKILL) -> bool:
    """Whether the process was still there."""
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProcess:
    """`variables` is its initial environment; `parents_job` is that of the process that started it, which may say what itself does not."""

    pid: int
    command: tuple[str, ...]
    variables: dict[str, str] = field(repr=False)
    node: str = ""
    parents_job: int | None = None

    def on(self, node: str, parents_job: int | None) -> NodeProcess:
        return replace(self, node=node, parents_job=parents_job)

    @property
    def job(self) -> int | None:
        """The job's number (of a heterogeneous job: its first component's, but a slurmstepd's is that of its own component)."""
        text = self.variables.get("SLURM_JOB_ID", "")
        if step := re.match(r"slurmstepd: \[(\d+)\.", self.command[0] if self.command else ""):
            text = step[1]
        return int(text) if text.isdigit() else self.parents_job

    @property
    def step(self) -> str | None:
        """The step's number; None in a batch script."""
        step = self.variables.get("SLURM_STEP_ID")
        return None if step in (None, "4294967291", "4294967290") else step

    @property
    def program(self) -> str:
        """The file name of what runs."""
        return Path(self.command[0]).name.rstrip(":") if self.command else ""


def read_process(pid: int) -> NodeProcess | None:
    """None where it has ended (also where its parent has not noticed yet)."""
    folder = Path(f"/proc/{pid}")
    try:
        if (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return None
        command = tuple((folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0"))
        assignments = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    variables = dict(assignment.split("=", 1) for assignment in assignments if "=" in assignment)
    return NodeProcess(pid=pid, command=command, variables=variables)


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended meanwhile
    return found


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a file under its name."""
    return f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) + "\n"
