"""A real Slurm cluster on this machine, for tests: munge, slurmctld and three nodes with fake GPUs, up in about a second.

    with SlurmCluster(directory) as cluster:
        job = cluster.submit(script, "argument", options=("--nodes=2",), directory=tmp_path)
        job.wait("COMPLETED", timeout_seconds=60)

Every cluster lives in namespaces of its own (see slurm_keeper.py): several can run at once, and nothing of one outlives the test process,
however that ends. Needs root.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_job import Job, NodeProcess, children, kill, read_process, tail
from slurm_settings import ClusterSettings, write_files

_KEEPER = Path(__file__).with_name("slurm_keeper.py")
_SPACES = ("--pid", "--net", "--uts", "--ipc", "--mount", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "ip", "unshare", "nsenter", "setpriv", "mount")
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
_DATABASE = ("slurmdbd", "mariadbd", "mariadb", "mariadb-install-db", "sacctmgr")


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=f"{_SBIN}:{os.environ.get('PATH', '')}") is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm munge iproute2 util-linux)"
    return None if can_isolate() else "namespaces, mounts or virtual network cables are forbidden here"


def missing_for_accounting() -> str | None:
    """Why no cluster with an accounting database can be started here, or None."""
    absent = [program for program in _DATABASE if shutil.which(program, path=_SBIN) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurmdbd mariadb-server-core mariadb-client-core)" if absent else None


@functools.cache
def can_isolate() -> bool:
    """Whether namespaces, mounts and virtual network cables are allowed here."""
    probe = "ip link add probe0 type veth peer name probe1 && mount --bind /etc/hosts /etc/hosts && hostname probe"
    command = ["unshare", *_SPACES, "bash", "-c", probe]
    return subprocess.run(command, capture_output=True, timeout=30, env=os.environ | {"PATH": _SBIN}).returncode == 0


class SlurmCluster:
    """A running cluster; `nodes` are n1, n2, ..."""

    def __init__(self, directory: Path, **sizes: int | str) -> None:
        """`directory`: an empty one, whose path is short; `sizes`: see ClusterSettings."""
        self.settings = ClusterSettings(directory=directory, **sizes)
        self._process: subprocess.Popen[str] | None = None
        self._prefix: tuple[str, ...] = ()
        self._running: set[str] = set()
        self.jobs: list[Job] = []

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.settings.nodes

    def start(self) -> SlurmCluster:
        """Bring it up. Raises AssertionError with the daemons' logs where it does not come up within 30 s."""
        write_files(self.settings)
        self.settings.save()
        keeper = [sys.executable, "-S", str(_KEEPER), str(self.settings.directory)]
        with (self.settings.directory / "keeper.out").open("wb") as out:
            self._process = subprocess.Popen(
                # Killed tests: the signal kills unshare and with it the keeper, and the kernel the rest.
                ["setpriv", "--pdeathsig", "KILL", "unshare", *_SPACES, *keeper],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={"PATH": _SBIN, "SLURM_CONF": str(self.settings.conf)},
                start_new_session=True,
            )
        self._ask("open")
        inside = children(self._process.pid)[0]
        self._prefix = ("nsenter", f"--target={inside}", "--net", "--uts", "--ipc", "--mount", "--pid")
        self._until(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answers")
        for node in self.nodes:
            self._ask("start", node)
            self._running.add(node)
        self.wait_for_nodes()
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:  # the keeper hangs: the kernel ends it with its namespaces
            self._process.kill()
            self._process.wait(timeout=30)
        self._process.stdout.close()
        self._process = None

    def __enter__(self) -> SlurmCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, action: str, node: str = "") -> None:
        self._process.stdin.write(json.dumps({"do": action, "node": node}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline() if select.select([self._process.stdout], [], [], 60)[0] else ""
        if not answer:
            raise AssertionError(f"no answer to {action} {node}; the keeper's end: {self._process.poll()}\n{self.logs()}")
        if error := json.loads(answer)["error"]:
            raise AssertionError(f"{action} {node}: {error}\n{self.logs()}")

    def _until(self, condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_seconds:g} s until {what}\n{self.logs()}")
            time.sleep(0.05)

    def wait_for_nodes(self) -> None:
        def usable() -> bool:
            listing = self.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t").stdout.split()
            return all(state in ("idle", "mix", "alloc") for node, state in zip(*[iter(listing)] * 2, strict=True) if node in self._running)

        self._until(usable, f"the nodes {sorted(self._running)} are usable")

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """For programs of Slurm, and for the jobs that they submit."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
        path = f"{Path(sys.executable).parent}:{_SBIN}"
        return kept | {"PATH": path, "SLURM_CONF": str(self.settings.conf), "USER": "root"} | dict(extra or {})

    def run(
        self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the cluster's head node; the CompletedProcess. Raises AssertionError where it fails and `check` is set."""
        place = ("env", f"--chdir={cwd or self.settings.directory}")  # entering a mount namespace forgets the working directory
        done = subprocess.run(
            [*self._prefix, *place, *command],
            env=self.environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}\n{self.logs()}")
        return done

    def write_programs(self, folder: Path, *names: str) -> None:
        """Slurm's programs for processes outside the cluster's namespaces: each enters them."""
        for name in names:
            enter = shlex.join((*self._prefix, "env", f"SLURM_CONF={self.settings.conf}"))
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {enter} --chdir="$PWD" {shutil.which(name, path=_SBIN)} "$@"\n')
            program.chmod(0o755)

    def submit(
        self,
        script: str | Path,
        *arguments: object,
        options: Sequence[str] = (),
        directory: Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> Job:
        """sbatch; `script` is a file, or the text of one (it starts with #!). `directory` is where its output goes, into a file whose
        name ends in -%j.out (as it does unless the script says otherwise), and the working directory unless `cwd` is another one.

        `logs`: another directory whose *.log files a failure should show.
        """
        if isinstance(script, str) and script.startswith("#!"):
            path = directory / f"job-{time.time_ns()}.sh"
            path.write_text(script)
        else:
            path = Path(script)
        command = ("sbatch", "--parsable", *options, str(path), *map(str, arguments))
        done = self.run(*command, environment=environment, cwd=cwd or directory)
        return self.job(int(re.split(r"[;\s]", done.stdout.strip().splitlines()[-1])[0]), directory, logs)

    def job(self, number: int, directory: Path, logs: Path | None = None) -> Job:
        job = Job(self, number, directory, logs)
        self.jobs.append(job)
        return job

    def accepts(self, script: Path, *options: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """What `sbatch --test-only` says of a job on the phantom nodes. Raises AssertionError where it refuses."""
        done = self.run("sbatch", "--test-only", "--partition=phantom", *options, str(script), environment=environment, cwd=cwd)
        return done.stdout + done.stderr

    def kill_node(self, node: str) -> None:
        """All its processes end at once, as without power."""
        self._ask("kill", node)
        self._running.remove(node)

    def start_node(self, node: str) -> None:
        """Boot a node that was killed; returns when it can take jobs."""
        self._ask("start", node)
        self._running.add(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # refused where it is not down (yet)
        self.wait_for_nodes()

    def processes(self) -> list[NodeProcess]:
        """Everything that jobs run on the nodes: all processes there but the nodes' own (process 1, slurmd), slurmstepd included."""
        names = {self.settings.address(node): node for node in self.nodes}
        found = []
        front: list[tuple[int, str, int | None]] = [(child, "", None) for child in children(self._process.pid)]
        while front:
            pid, node, job = front.pop()
            process = read_process(pid)
            if process is None:
                continue
            if "slurm-node" in process.command:  # unshare and the node's process 1
                node = names[process.command[process.command.index("slurm-node") + 3]]
            elif node and process.program != "slurmd" and process.command != ("sleep", "3600"):
                found.append(process.on(node, job))
            if process.program not in ("munged", "slurmctld"):
                front += [(child, node, found[-1].job if found and found[-1].pid == pid else job) for child in children(pid)]
        return found

    def clean(self) -> None:
        """Cancel what still runs, boot what was killed: the cluster as it was at the start. Raises AssertionError where something stays."""
        self.run("scancel", "--quiet", "--user=root", check=False)
        self._until(lambda: not self.run("squeue", "--noheader").stdout.strip(), "the queue is empty")
        for node in sorted(set(self.nodes) - self._running):
            self.start_node(node)
        self.wait_for_nodes()
        for process in self.processes():
            kill(process)

    def queue(self) -> str:
        done = [self.run(*command, check=False) for command in (("squeue",), ("sinfo", "--Node", "--partition=batch", "--format=%N %T %E"))]
        return "".join(one.stdout + one.stderr for one in done)

    def logs(self) -> str:
        directory = self.settings.directory
        files = [*directory.glob("*.log"), directory / "keeper.out"]
        if not (directory / "slurmctld.log").exists():  # nothing came up: what the daemons said first
            files += [path for path in directory.glob("*.out") if path not in files]
        return "".join(tail(path) for path in sorted(files) if path.stat().st_size)
