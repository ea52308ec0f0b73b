"""Runs under Slurm: from a config to the job's spec, its batch script, and `sbatch`."""

from __future__ import annotations

import copy
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from aligner.algorithms.registry import composed, config_file
from aligner.cluster.component import Placement, interpreter
from aligner.cluster.outcomes import ExitCode
from aligner.cluster.run_directory import RunDirectory
from aligner.cluster.slurm.allocation import CHOICES
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.separate import Together
from aligner.cluster.slurm.spec import SPEC_LINE, ComponentSpec, GpuRequest, JobSpec, render, to_json
from aligner.commands.parts import LaunchOptions
from aligner.commands.programs import Program, programs, share_out
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.files import checkout
from aligner.planner.config import ClusterConfig, Device
from aligner.run.from_hub import fetch_named
from aligner.run.settings import JobRun
from aligner.telemetry import terminal

_LOOPBACK = "127.0.0.1"
_SUBMIT_SECONDS = 120.0


def launch_slurm(name: str, overrides: Sequence[str], options: LaunchOptions) -> int:
    """Render the batch script of the config `name` with `overrides` and submit it; the exit code."""
    is_kept = options.dry_run or options.output is not None
    overrides = [*overrides, "slurm.separate=true"] if options.separate else overrides
    config = _compose(name, overrides, may_be_incomplete=is_kept or options.test_only)
    if request := _gpu_request(config):
        overrides = [*overrides, f"slurm.gpu_request={request.value}"]
        config = replace(config, slurm=replace(config.slurm, gpu_request=request))
    if not is_kept and not options.test_only:
        fetch_named(copy.deepcopy(config))  # here, where there is a network; the job's settings keep the names
    spec = _with_memory(job_spec(name, config, overrides), config)
    if spec.is_separate and options.output is not None:
        raise ConfigError(
            f"--output={options.output}: with slurm.separate=true a run is {len(spec.parts())} jobs that are submitted together, which no "
            "single sbatch does; submit with `aligner launch slurm --separate`"
        )
    path = str(options.output) if options.output is not None else ""
    chosen = {name: value for name, value in _submitted(os.environ).items() if name in CHOICES and value}
    file = config_file(name, overrides)
    title = file.read_text().partition("\n")[0].removeprefix("#").strip() if file else name  # its first line states its purpose
    text = render(name, spec, title=title, overrides=overrides, path=path, variables={} if is_kept else chosen)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
        print(f"written to {options.output}; submit it with: sbatch {options.output} [key=value ...]", flush=True)
    if options.dry_run:
        print(text, end="", flush=True)
        for command in Together.of(spec, name).commands() if spec.is_separate else ():
            print(f"# {shlex.join(command)}", flush=True)
    return 0 if is_kept else _submit(spec, text, test_only=options.test_only)


def _with_memory(spec: JobSpec, config: JobRun) -> JobSpec:
    """Replaces `slurm.memory=auto` on shared GPU nodes by the plan's figure for the fullest node plus 10%."""
    slurm = spec.slurm
    if slurm.memory != "auto" or slurm.exclusive or config.cluster.device is not Device.gpu:
        return spec
    from aligner.commands.plan.command import plan_config  # Megatron-Core comes with it

    hosts = [sum(part.host.values()) for part in plan_config(spec.name, config, advises=False).components]
    fullest = sum(hosts) if len(spec.parts()) == 1 else max(hosts)
    return replace(spec, slurm=replace(slurm, memory=f"{math.ceil(1.1 * fullest / 2**30)}G"))


def job_spec(name: str, config: JobRun, overrides: Sequence[str]) -> JobSpec:
    """The conductor's job for this config. Raises ConfigError if ranks do not fill nodes, or layouts do not fit ranks."""
    # Other nodes reach a server at every address of its node, unless the user has set its host.
    hosts = [f"{server.name}.server.host=0.0.0.0" for server in config.servers() if server.settings.host == _LOOPBACK]
    overrides = [*overrides, *hosts]
    found = programs(name, config, overrides)
    preflight = ("-m", "aligner.cli", "preflight", name, *overrides) if config.slurm.preflight else ()
    cluster = config.cluster
    return JobSpec(
        name=name,
        run_directory=str(RunDirectory(Path(config.run.directory)).path),
        max_steps=config.loop.max_steps,
        epochs=config.loop.epochs,
        checkpoints=tuple(config.traits().checkpoints),
        components=_components(found, config.server_placement, cluster),
        preflight=preflight,
        slurm=replace(config.slurm, cpus_per_rank=config.slurm.cpus_per_rank or cluster.cpus_per_node // cluster.gpus_per_node),
        idle_seconds=max((server.settings.idle_timeout_seconds for server in config.servers()), default=0.0),
        container=config.container,
    )


def _compose(name: str, overrides: Sequence[str], *, may_be_incomplete: bool) -> JobRun:
    """The config; a script that is only rendered gets the data's path at submission."""
    config = composed(name, ["data.train=given-later", *overrides] if may_be_incomplete else overrides)
    if not may_be_incomplete:
        config.check_complete()
    return config


def _components(found: Sequence[Program], placement: Placement, cluster: ClusterConfig) -> tuple[ComponentSpec, ...]:
    """Each component on its own nodes, or with its own GPUs on one node if all fit there. Colocated ones share the first one's nodes."""
    specs = [_component(program, cluster, part) for part, program in enumerate(found)]
    if placement is Placement.colocated:
        return tuple(
            replace(spec, part=0, gpus_per_node=specs[0].gpus_per_node, gpus=None if program.num_gpus else "")
            for spec, program in zip(specs, found, strict=True)
        )
    total = sum(program.num_gpus for program in found)
    if len(found) == 1 or cluster.device is not Device.gpu or total > cluster.gpus_per_node:
        return tuple(specs)
    own = share_out(found, placement, total)
    fields = {name: f"{gpus.start + 1}-{gpus.stop}" if gpus else "" for name, gpus in own.items()}
    return tuple(replace(spec, part=0, gpus_per_node=total, gpus=fields[spec.name]) for spec in specs)


def _component(program: Program, cluster: ClusterConfig, part: int) -> ComponentSpec:
    ranks_per_node = cluster.ranks_on_node(program.component, program.num_ranks)
    return ComponentSpec(
        name=program.component,
        part=part,
        program=program.arguments,
        num_nodes=program.num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        gpus_per_node=ranks_per_node if cluster.device is Device.gpu else 0,
        python=_python(program),
    )


def _python(program: Program) -> str:
    """The component's interpreter; empty without an environment of its own. A container's interpreter is only checked inside the job."""
    if not program.environment or (os.environ.get("ALIGNER_CONTAINER") and "SLURM_JOB_ID" not in os.environ):
        return program.environment
    return interpreter(program.component, program.environment)


def _gpu_request(config: JobRun) -> GpuRequest | None:
    """The choice of `slurm.gpu_request=auto` if this cluster does not accept --gpus-per-node; None if it does, or cannot be asked."""
    slurm = config.slurm
    if slurm.gpu_request is not GpuRequest.auto or config.cluster.device is not Device.gpu or shutil.which("scontrol") is None:
        return None
    client = SlurmClient(slurm.command_timeout_seconds)
    try:
        settings = dict(re.findall(r"^(\w+)\s*= (.*)$", client.run("scontrol", "show", "config"), re.MULTILINE))
    except LaunchError as error:
        print(f"warning: slurm.gpu_request=auto: {error}; GPUs are requested with --gpus-per-node", file=sys.stderr, flush=True)
        return None
    if "gpu" not in settings.get("GresTypes", "gpu").split(","):  # sinfo would miss the GPUs of powered-down nodes
        return GpuRequest.none
    # Plugins of versions before 24.05 count GPUs as generic resources.
    return GpuRequest.gres if settings.get("SelectType") in ("select/linear", "select/cons_res") else None


def _submit(spec: JobSpec, text: str, *, test_only: bool) -> int:
    """Submit the script from here: paths in the settings are relative to this directory."""
    if shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch on PATH: submit from a login node of the cluster, or look at the script with --dry-run")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{spec.name}.sub"
        script.write_text(text)
        if spec.is_separate and not test_only:
            RunDirectory(Path(spec.run_directory)).create()
            client = SlurmClient(_SUBMIT_SECONDS)
            job = Together.of(spec, spec.name).submit(client, script, (), cwd=Path.cwd(), environ=_submitted(os.environ))
            print(f"Submitted batch job {job}", flush=True)
            return ExitCode.done
        commands = [["sbatch"]] if not spec.is_separate else Together.of(spec, spec.name).commands()
        try:
            codes = [
                subprocess.run(
                    [*command, *(["--test-only"] if test_only else []), str(script)], env=_submitted(os.environ), timeout=_SUBMIT_SECONDS
                ).returncode
                for command in commands
            ]
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"sbatch did not answer within {_SUBMIT_SECONDS:g} s") from error
    if any(codes):
        raise ConfigError("sbatch refused the job (see above); on a machine outside a cluster use: aligner launch local")
    return ExitCode.done


def _submitted(environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment: names the checkout, or by default the environment that this package is installed in."""
    if home := checkout():
        return {**environ, "ALIGNER_HOME": str(home)}
    names = ("ALIGNER_VENV", "VIRTUAL_ENV", "CONDA_PREFIX", "ALIGNER_CONTAINER")
    return {**environ, **({} if any(environ.get(name) for name in names) else {"ALIGNER_VENV": sys.prefix})}


def write_spec(job: str, name: str, overrides: Sequence[str]) -> Path:
    """Compose the config inside a job and write its spec to `<run>/jobs/<job>/spec.json`. Raises ConfigError as `launch_slurm` does."""
    config = _compose(name, overrides, may_be_incomplete=False)
    folder = RunDirectory(Path(config.run.directory)).create().jobs / job
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(to_json(job_spec(name, config, overrides)))
    return folder / "spec.json"


if __name__ == "__main__":  # the conductor's first step: JOB CONFIG [key=value ...]
    terminal.guard()
    try:
        print(f"{SPEC_LINE}{write_spec(sys.argv[1], sys.argv[2], sys.argv[3:])}", flush=True)
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.refused)
