"""Processes of jobs, seen from the machine that holds the cluster (pids are this machine's, so `os.kill` reaches them)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProcess:
    """`variables` is its initial environment; `parents_job` is that of the process that started it, which may say what itself does not."""

    pid: int
    command: tuple[str, ...]
    variables: dict[str, str] = field(repr=False)
    node: str = ""
    parents_job: int | None = None

    def on(self, node: str, parents_job: int | None) -> NodeProcess:
        """The same, with its node."""
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
    """Pids of what a process has started and of what it adopted."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended meanwhile
    return found
