"""The body of every batch script in slurm/: `python3 -m aligner.cluster.slurm --script "$0" --config ppo_70b -- [key=value ...]`.

Requires only Python 3.10 on the batch host: a first job step composes the config in the run's software environment and writes the spec.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aligner.cluster.lease import RunHeld
from aligner.cluster.outcomes import ExitCode, exit_code_of
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import Allocation, StopRequests, allocation, step_environment
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.conductor import conduct
from aligner.cluster.slurm.separate import hold
from aligner.cluster.slurm.spec import SPEC_LINE, ContainerConfig, read_spec
from aligner.cluster.slurm.steps import EXPORT, Place, Runtime, runtime, wrapped
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.files import checkout
from aligner.telemetry import terminal

_SPEC_SECONDS = 600.0  # a cold container image, and Python's imports on a busy shared file system


def main(argv: Sequence[str] | None = None) -> int:
    """The job's exit code."""
    terminal.guard()
    parser = argparse.ArgumentParser(prog="python3 -m aligner.cluster.slurm", description="Run a job of this run, in its batch script.")
    parser.add_argument("--script", type=Path, required=True, help="the batch script itself, for the jobs that follow")
    parser.add_argument("--config", required=True, help="such as ppo_70b")
    parser.add_argument("--set", dest="fixed", action="append", default=[], metavar="key=value", help="a setting of the script itself")
    parser.add_argument("--beside", default="", metavar="JOB,JOB", help="the jobs that hold the nodes of the other parts (slurm.separate)")
    parser.add_argument("--holds-for", type=Path, metavar="NOTE", help="this is such a job: hold the nodes for the one that the file names")
    parser.add_argument("overrides", nargs="*", help="settings, as for `aligner train`")
    arguments = parser.parse_args(argv)
    requests = StopRequests()
    requests.install()
    try:
        return int(hold(arguments.holds_for, requests, _say) if arguments.holds_for else _run(arguments, requests))
    except AlignerError as error:
        code = ExitCode.refused if isinstance(error, RunHeld) else exit_code_of(error)
        _say(f"error: {error} (exit code {int(code)})")
        return int(code)


def _run(arguments: argparse.Namespace, requests: StopRequests) -> int:
    here = allocation(os.environ, [job for job in arguments.beside.split(",") if job])
    where = runtime(os.environ, home=checkout(), directory=here.submit_directory)
    overrides = [*arguments.fixed, *arguments.overrides]
    _say(f"job {here.job} on {here.node}: {shlex.join([arguments.config, *overrides])}")
    spec = read_spec(_compose(here, where, arguments.config, overrides))
    run = RunDirectory(Path(spec.run_directory))
    script = run.jobs / here.job / "script.sub"  # a copy: Slurm deletes its own after the job
    try:
        shutil.copyfile(arguments.script, script)
    except OSError as error:
        raise LaunchError(f"cannot copy the batch script {arguments.script} to {script}: {error}") from error
    place = Place(
        spec=spec,
        run=run,
        allocation=here,
        runtime=where,
        client=SlurmClient(spec.slurm.command_timeout_seconds),
        requests=requests,
        script=script,
        arguments=tuple(arguments.overrides),
        environ=os.environ,
        say=_say,
    )
    return conduct(place)


def _compose(here: Allocation, where: Runtime, config: str, overrides: Sequence[str]) -> Path:
    """Write the job's spec in a step with the software; its path. Raises LaunchError with the step's output."""
    program = ["-m", "aligner.commands.slurm", here.job, config, *overrides]
    options, command = wrapped(where, program, ContainerConfig(), has_gpus=False)
    step = ["srun", *here.step_options(0), EXPORT, "--job-name=compose", "--nodes=1", "--ntasks=1"]
    try:
        done = subprocess.run(
            [*step, "--input=none", f"--chdir={where.directory}", *options, *command],
            env=step_environment(os.environ, where.home, in_container=where.is_container),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_SPEC_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"the step that composes the config did not end within {_SPEC_SECONDS:g} s") from error
    except OSError as error:
        raise LaunchError(f"cannot run srun: {error}") from error
    paths = [line.removeprefix(SPEC_LINE) for line in done.stdout.splitlines() if line.startswith(SPEC_LINE)]
    if done.returncode == ExitCode.refused:
        raise ConfigError("the settings were refused; see the line above")
    if done.returncode or not paths:
        raise LaunchError(f"the config could not be composed (srun's exit code {done.returncode}); see the lines above")
    return Path(paths[-1])


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
