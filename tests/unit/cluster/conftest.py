"""A run whose jobs the conductor runs in this process, against the fake commands of tests/fakes/slurm_commands."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs import eventually

from aligner.cluster import lease as leases
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm import attempt as attempts, conductor as preflights, steps
from aligner.cluster.slurm.allocation import StopRequests, allocation
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.conductor import conduct
from aligner.cluster.slurm.following import go_on
from aligner.cluster.slurm.spec import ComponentSpec, JobSpec, SlurmConfig, to_json
from aligner.cluster.slurm.steps import Place, runtime

FAKES = Path(__file__).parents[2] / "fakes" / "slurm_commands"
RUNNING = "JobId=42 JobName=demo JobState=RUNNING Account=lab QOS=(null) Partition=gpu TimeLimit=01:00:00 EndTime=2099-01-01T00:00:00"
SERVER = "register; lasts"


class World:
    """A run directory, what the components do, and what came of the jobs."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "slurm"
        self.folder.mkdir()
        self.run = RunDirectory(tmp_path / "run").create()
        self.requests = StopRequests()
        self.said: list[str] = []
        self.environ = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "demo", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURMD_NODENAME": "n1"}
        self.environ |= {"SLURM_HET_SIZE": "3"}
        for group in range(3):
            self.environ |= {f"SLURM_JOB_ID_HET_GROUP_{group}": str(42 + group), f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}": "1"}
        self.environ |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_SLURM": str(self.folder), "FAKE_RUN": str(self.run.path)}
        monkeypatch.setenv("PATH", self.environ["PATH"])
        self.slurm = SlurmConfig(
            restart_delay_seconds=0.0,
            grace_seconds=0.2,
            shutdown_timeout_seconds=5.0,
            lease_seconds=30.0,
            ready_timeout_seconds=20.0,
        )
        self.script = tmp_path / "script.sub"
        self.preflight: tuple[str, ...] = ()
        self.behaves(critic=SERVER, reward=SERVER, job=RUNNING)

    def behaves(self, **scripts: str) -> None:
        """`actor="..."`, `actor_2="..."` (its second start), `job="..."` (what scontrol prints)."""
        for name, text in scripts.items():
            component, _, number = name.partition("_")
            file = "job.42" if component == "job" else f"{component}.{number}.sh" if number else f"{component}.sh"
            (self.folder / file).write_text(text + "\n")

    def conduct(self, **variables: str) -> int:
        environ = {**self.environ, **variables}
        components = tuple(
            ComponentSpec(name=name, program=(f"{name}.py", "a=1"), num_nodes=1, ranks_per_node=1, gpus_per_node=0, part=part)
            for part, name in enumerate(("actor", "critic", "reward"))
        )
        spec = JobSpec(
            name="demo",
            run_directory=str(self.run.path),
            max_steps=10,
            checkpoints=("policy", "critic"),
            components=components,
            preflight=self.preflight,
            slurm=self.slurm,
        )
        home = Path(self.environ["SLURM_SUBMIT_DIR"])
        folder = self.run.jobs / environ["SLURM_JOB_ID"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(to_json(spec))
        place = Place(
            spec=spec,
            run=self.run,
            allocation=allocation(environ),
            runtime=runtime({"ALIGNER_CONTAINER": "apptainer:x.sif"}, home=home, directory=home),
            client=SlurmClient(20.0, environ),
            requests=self.requests,
            script=self.script,
            arguments=("a=1", "b=two words"),
            environ=environ,
            say=self.said.append,
        )
        return conduct(place)

    def gatekeeper(self, job: str = "42") -> str:
        """What the job says that waits for the failure of `job`."""
        return go_on(self.run.jobs / job, SlurmClient(20.0, self.environ), self.environ)

    def once_it_lasts(self, action: Callable[[], object]) -> None:
        """Do it in another thread when an actor has said `lasts`."""

        def act() -> None:
            eventually((self.folder / "actor.lasts").exists)
            action()

        threading.Thread(target=act).start()

    def lines(self, name: str) -> list[str]:
        path = self.folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    def starts(self) -> list[str]:
        """Which components were started, as `actor.1`; the starts of one attempt are at once."""
        return sorted(line.split()[0] for line in self.lines("srun"))

    def events(self) -> list[str]:
        return [line["event"] for line in self.history()]

    def history(self) -> list[dict]:
        return [json.loads(line) for line in self.run.attempts.read_text().splitlines()]

    def cancelled(self) -> list[str]:
        return [line.removeprefix("--quiet ") for line in self.lines("scancel") if "--signal" not in line]

    def living_steps(self) -> list[str]:
        """Steps that still run, five seconds after they should have ended."""
        deadline = time.monotonic() + 5
        while (left := [path.name for path in (self.folder / "steps").glob("*") if _lives(path.name)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def text(self) -> str:
        return "\n".join(self.said)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    monkeypatch.setattr(leases, "_SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(attempts, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(preflights, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(steps, "_POLL_SECONDS", 0.02)
    return World(tmp_path, monkeypatch)
