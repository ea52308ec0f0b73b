"""Parts of a Slurm job that need no job: settings, spec, commands, what Slurm's commands print, outcomes, the checked-in scripts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from aligner.algorithms.registry import recipe_of, recipes
from aligner.cluster import outcomes
from aligner.cluster.outcomes import Outcome
from aligner.cluster.slurm import steps
from aligner.cluster.slurm.allocation import export_option, step_environment, submission_environment
from aligner.cluster.slurm.client import SlurmClient
from aligner.cluster.slurm.spec import (
    ComponentSpec,
    ContainerConfig,
    ContainerGpu,
    GpuRequest,
    JobSpec,
    OnFailure,
    SlurmConfig,
    from_json,
    render,
    to_json,
)
from aligner.cluster.slurm.steps import runtime, srun_command
from aligner.commands.parts import LaunchOptions
from aligner.commands.slurm import job_spec, launch_slurm
from aligner.errors import ConfigError, LaunchError
from aligner.settings.compose import compose

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sub"))
ACTOR = ComponentSpec(name="actor", program=("train.py", "a=1"), num_nodes=2, ranks_per_node=8, gpus_per_node=8)


def step(site: SlurmConfig, container: str = "", component: ComponentSpec = ACTOR, log: str = "x") -> list[str]:
    """The command of a component's step."""
    where = runtime({"ALIGNER_CONTAINER": container}, home=Path("/me"), directory=Path("/d"))
    return srun_command(component, site, where, on=[], log=log)


@cache  # a composition takes a second
def spec(name: str, *overrides: str) -> JobSpec:
    overrides = ("data.train=x", *overrides)
    return job_spec(name, compose(recipes()[recipe_of(name).name].config, name, overrides), overrides)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"time_limit": "a day"}, "slurm.time_limit=a day: must be minutes, hh:mm:ss or days-hh:mm:ss"),
        ({"abandon_seconds": 600.0}, "slurm.abandon_seconds=600: must be below signal_seconds_before_end=600"),
        ({"max_server_restarts": -1}, "slurm.max_server_restarts=-1: must not be negative"),
        ({"lease_seconds": 0.0}, "slurm.lease_seconds=0.0: must be above 0"),
        ({"options": ["mem=0"]}, "slurm.options has 'mem=0'; allowed: sbatch options such as --mem=0"),
        ({"srun_options": ["cpu-bind=none"]}, "slurm.srun_options has 'cpu-bind=none'; allowed: srun options"),
        ({"gpu_request": GpuRequest.none, "exclusive": False}, "slurm.gpu_request=none: Slurm then gives GPUs to nobody in particular"),
        ({"gpu_type": "gpu:h100"}, "slurm.gpu_type=gpu:h100: must be a type as sinfo shows it"),
        ({"memory": "half"}, "slurm.memory=half: must be 0 (all of a node), auto, or a number with K, M, G or T"),
        ({"signal_seconds_before_end": 70000}, "sbatch takes at most 65535"),
    ],
)
def test_settings_are_checked(setting, text) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        SlurmConfig(**setting)


@pytest.mark.parametrize("limit", ["", "90", "12:30", "24:00:00", "7-0", "2-12:00", "2-12:00:00"])
def test_time_limits(limit: str) -> None:
    assert SlurmConfig(time_limit=limit).time_limit == limit


def test_the_spec_survives_json() -> None:
    made = spec("dpo_70b", "slurm.on_actor_failure=end", "slurm.options=['--mem=0']")
    assert made.slurm.on_actor_failure is OnFailure.end
    back = from_json(to_json(made))
    assert back == made and back.slurm.gpu_request is GpuRequest.auto and back.container.gpu is ContainerGpu.nvidia
    with pytest.raises(LaunchError, match="another version"):
        from_json(to_json(made).replace('"format": 4', '"format": 0'))
    with pytest.raises(LaunchError, match="cannot be read"):
        from_json("{}")


def test_the_components_of_a_job() -> None:
    actor, critic, reward = spec("ppo_70b").components
    assert (actor.num_nodes, actor.ranks_per_node, actor.gpus_per_node) == (16, 8, 8) and reward.num_nodes == 8
    assert actor.program[:4] == ("-m", "aligner.cli", "train", "ppo_70b")
    assert critic.program[:5] == ("-m", "aligner.cli", "serve", "critic", "ppo_70b")
    assert actor.program[4:] == critic.program[5:] == reward.program[5:] == ("data.train=x", *_EVERYWHERE)
    assert spec("ppo_70b").checkpoints == ("policy", "critic") and spec("rm_70b").checkpoints == ("reward_model",)
    assert [one.name for one in spec("grpo_70b").components] == ["actor"] and [one.name for one in spec("rm_70b").components] == [
        "reward_model"
    ]
    assert "critic.server.host=0.0.0.0" not in spec("ppo_70b", "critic.server.host=10.0.0.7").components[0].program
    with pytest.raises(ConfigError, match="dpo has 12 ranks: they must fill nodes of cluster.gpus_per_node=8"):
        spec("dpo_70b", "num_processes=12", "parallel.tp=4", "parallel.pp=1", "parallel.vpp=1")


_EVERYWHERE = ("critic.server.host=0.0.0.0", "reward.server.host=0.0.0.0")


@pytest.mark.parametrize(
    ("variables", "options", "command"),
    [
        ({}, [], ["python3", "-u", "train.py", "a=1"]),
        (
            {"ALIGNER_CONTAINER": "pyxis:nvcr.io#nvidia/pytorch:25.01-py3", "ALIGNER_MOUNTS": "/data,/m:/models:ro"},
            [
                "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
                "--container-mounts=/home/me/aligner:/home/me/aligner,/work/dir:/work/dir,/data:/data,/m:/models:ro",
                "--container-workdir=/work/dir",
                "--container-env=PYTHONPATH",
            ],
            ["python3", "-u", "train.py", "a=1"],
        ),
        (
            {"ALIGNER_CONTAINER": "apptainer:/images/aligner.sif"},
            [],
            ["apptainer", "exec", "--nv", "--bind", "/home/me/aligner:/home/me/aligner", "--bind", "/work/dir:/work/dir"]
            + ["--pwd", "/work/dir", "/images/aligner.sif", "python3", "-u", "train.py", "a=1"],
        ),
    ],
    ids=["environment", "pyxis", "apptainer"],
)
def test_srun_of_a_component(variables, options, command) -> None:
    where = runtime(variables, home=Path("/home/me/aligner"), directory=Path("/work/dir"))
    made = srun_command(ACTOR, SlurmConfig(mpi="pmix", cpus_per_rank=14), where, on=["--het-group=1"], log="/run/actor")
    assert made == [
        *(
            "srun",
            "--het-group=1",
            "--export=ALL",
            "--job-name=actor",
            "--nodes=2",
            "--ntasks=16",
            "--ntasks-per-node=8",
            "--gpus-per-node=8",
        ),
        *("--cpus-per-task=14", "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=600", "--input=none", "--output=/run/actor.step.log"),
        *("--open-mode=append", "--chdir=/work/dir", *options, "sh", "-c", steps._LOG, "/run/actor", *command),
    ]


@pytest.mark.parametrize(
    ("site", "options", "script"),
    [
        (SlurmConfig(), ["--gpus-per-node=8"], "--ntasks-per-node=8 --gpus-per-node=8 --mem=0 --exclusive"),
        (SlurmConfig(gpu_type="h100"), ["--gpus-per-node=h100:8"], "--ntasks-per-node=8 --gpus-per-node=h100:8 --mem=0 --exclusive"),
        (
            SlurmConfig(gpu_request=GpuRequest.gres, gpu_type="h100"),
            ["--gres=gpu:h100:8"],
            "--ntasks-per-node=8 --gres=gpu:h100:8 --mem=0 --exclusive",
        ),
        (SlurmConfig(gpu_request=GpuRequest.none), [], "--ntasks-per-node=8 --mem=0 --exclusive"),
        (SlurmConfig(memory=""), ["--gpus-per-node=8"], "--ntasks-per-node=8 --gpus-per-node=8 --exclusive"),
        (SlurmConfig(exclusive=False), ["--gpus-per-node=8"], "--ntasks-per-node=8 --gpus-per-node=8\n"),
    ],
)
def test_how_gpus_are_asked_for(site: SlurmConfig, options: list[str], script: str) -> None:
    assert [option for option in step(site) if "gpu" in option] == options
    assert script in render("grpo_70b", replace(spec("grpo_70b"), slurm=site), title="t")


def test_every_rank_writes_to_a_log_of_its_own(tmp_path: Path) -> None:
    """By Slurm's variable, whatever srun takes for a pattern in its options."""
    made = step(SlurmConfig(), log=f"{tmp_path}/actor")
    command = [*made[made.index("sh") : made.index(f"{tmp_path}/actor") + 1], "sh", "-c", "echo out; echo err >&2"]
    for rank in ("0", "13", "13"):
        subprocess.run(command, env={"PATH": os.environ["PATH"], "SLURM_PROCID": rank}, check=True, timeout=60)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"actor.0.log": "out\nerr\n", "actor.13.log": "out\nerr\n" * 2}


@pytest.mark.parametrize(("given", "seen"), [("4,5,6,7", "6,7"), (None, "2,3")])
def test_components_of_a_node_share_gpus_that_slurm_does_not_count(given: str | None, seen: str) -> None:
    sharing = replace(ACTOR, gpus="3-4", gpus_per_node=4)
    command = step(SlurmConfig(gpu_request=GpuRequest.none), component=sharing)
    command = [*command[command.index("x") + 1 : -4], "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"']
    environ = {"PATH": os.environ["PATH"], **({"CUDA_VISIBLE_DEVICES": given} if given else {})}
    assert subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60).stdout == f"{seen}\n"


def old_python(folder: Path, name: str, version: str) -> None:
    """An interpreter of RHEL 8 or 9, as far as scripts can tell."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n')
    (folder / name).chmod(0o755)


def body(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The batch script up to the conductor, in whose place the interpreter's path is printed."""
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "aligner").unlink(missing_ok=True)
    (tmp_path / "home" / "aligner").symlink_to(ROOT / "aligner")
    text = render("ppo_smoke_cpu", spec("ppo_smoke_cpu"), title="t")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    environ = {"PATH": path, "SLURM_SUBMIT_DIR": str(tmp_path / "home"), **variables}
    return subprocess.run(
        ["bash", "-c", text.replace("exec ", 'echo "$python"; exit; ')], env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("version", ["3.6.8", "3.9.18"])
def test_a_script_finds_a_fitting_interpreter(tmp_path: Path, version: str) -> None:
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        old_python(tmp_path / "bin", name, version)
    said = f"error: no Python 3.10 or newer with aligner on {os.uname().nodename} (python3 is Python {version}): "
    none = body(tmp_path)
    assert none.returncode == 2 and none.stdout == f"{said}set ALIGNER_PYTHON to one, or load a module in slurm.setup\n"
    (tmp_path / "bin" / "python3.11").unlink()
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    assert body(tmp_path).stdout == "python3.11\n"
    assert body(tmp_path, ALIGNER_VENV=sys.prefix).stdout == f"{sys.prefix}/bin/python\n"
    named = body(tmp_path, ALIGNER_PYTHON=str(tmp_path / "bin" / "python3"), ALIGNER_VENV=sys.prefix)
    assert named.returncode == 2 and f"({tmp_path}/bin/python3 is Python {version})" in named.stdout


def test_a_sites_lines_run_before_every_step() -> None:
    """On the node itself: outside of a container that the step starts, and not in one that Slurm starts."""
    site = SlurmConfig(setup="module load cuda", srun_options=["--cpu-bind=none", "--mpi=pmi2"])
    own = step(site)
    assert own.index("--mpi=pmi2") == own.index("--cpu-bind=none") + 1 < own.index("bash")
    assert own[own.index("bash") + 3 :] == ["bash", "module load cuda", "python3", "-u", "train.py", "a=1"]
    apptainer = step(site, "apptainer:x.sif")
    assert apptainer.index("module load cuda") + 1 == apptainer.index("apptainer")
    pyxis = step(site, "pyxis:x")
    assert "module load cuda" not in pyxis and "--cpu-bind=none" in pyxis


def run_setup(setup: str) -> subprocess.CompletedProcess[str]:
    """A step's command, with `env` in the program's place."""
    command = step(SlurmConfig(setup=setup))
    command = [*command[command.index("bash") : -4], "sh", "-c", 'echo "$SITE $1"', "sh", "two words"]
    return subprocess.run(command, env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": "n7"}, capture_output=True, text=True, timeout=60)


def test_a_sites_lines_are_bash() -> None:
    assert run_setup("module() { export SITE=$2; }\nmodule load cuda").stdout == "cuda two words\n"
    failed = run_setup("source /no/such/site.sh")
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr.endswith("error: slurm.setup ended with exit code 1 on n7\n")


def test_which_environment_is_used(tmp_path: Path) -> None:
    for name in ("named", "active"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").write_text("")
        (tmp_path / name / "bin" / "python").chmod(0o755)
    named, active = {"ALIGNER_VENV": str(tmp_path / "named")}, {"VIRTUAL_ENV": str(tmp_path / "active")}
    assert runtime({**named, **active}, home=tmp_path, directory=tmp_path).python == str(tmp_path / "named" / "bin" / "python")
    assert runtime(active, home=tmp_path, directory=tmp_path).python == str(tmp_path / "active" / "bin" / "python")
    (tmp_path / "active").rename(tmp_path / ".venv")
    assert runtime({}, home=tmp_path, directory=tmp_path).python == str(tmp_path / ".venv" / "bin" / "python")
    with pytest.raises(ConfigError, match="ALIGNER_VENV=.*/gone/bin/python does not exist; name an environment that all nodes see"):
        runtime({"ALIGNER_VENV": str(tmp_path / "gone")}, home=tmp_path, directory=tmp_path)
    with pytest.raises(ConfigError, match="ALIGNER_CONTAINER='docker:x'; allowed: pyxis:IMAGE, apptainer:IMAGE.sif, or empty"):
        runtime({"ALIGNER_CONTAINER": "docker:x"}, home=tmp_path, directory=tmp_path)


def test_environments_of_steps_and_of_following_jobs() -> None:
    batch = {
        "HOSTNAME": "n1",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/etc/slurm.conf",
        "ALIGNER_ATTEMPT": "6.0",
        "ALIGNER_CONTAINER": "x",
        "A": "b",
    }
    assert step_environment({**batch, "PYTHONPATH": "/me:/more", "SLURM_EXPORT_ENV": "NONE"}, Path("/me")) == {
        **{"PATH": os.defpath, "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "ALIGNER_CONTAINER": "x", "A": "b"},
        **{"PYTHONPATH": "/me:/more", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    }
    assert submission_environment(batch, "7") == {
        **{"HOSTNAME": "n1", "SLURM_CONF": "/etc/slurm.conf", "ALIGNER_CONTAINER": "x", "A": "b", "ALIGNER_CONTINUES": "7"}
    }
    assert export_option({"A": "b"}) == export_option({"SLURM_EXPORT_ENV": "ALL,A=b"}) == "--export=ALL"
    batch = {"SLURM_EXPORT_ENV": "NONE", "ALIGNER_MOUNTS": "/a,/b", "ALIGNER_ATTEMPT": "6.0", "A": "b"}
    assert export_option(batch) == "--export=ALIGNER_MOUNTS,ALIGNER_CONTINUES"
    # A container shares the checkout, which is mounted; not the host's packages, which were built for another Python.
    batch = {"PYTHONPATH": "/me:/host/packages", "HOME": "/home/me", "PATH": "/bin"}
    inside = step_environment(batch, Path("/me"), in_container=True)
    assert (inside["PYTHONPATH"], inside["PYTHONNOUSERSITE"], inside["HOME"]) == ("/me", "1", "/home/me")
    assert step_environment(batch, None, in_container=True)["PYTHONPATH"] == ""
    assert "PYTHONNOUSERSITE" not in step_environment(batch, Path("/me"))


@pytest.mark.parametrize(("gpu", "shown"), [(ContainerGpu.nvidia, ["--nv"]), (ContainerGpu.rocm, ["--rocm"]), (ContainerGpu.none, [])])
def test_options_of_containers(gpu: ContainerGpu, shown: list[str]) -> None:
    container = ContainerConfig(gpu=gpu, options=["--writable-tmpfs"])

    def made(kind: str, component: ComponentSpec = ACTOR) -> list[str]:
        where = runtime({"ALIGNER_CONTAINER": kind}, home=None, directory=Path("/d"))
        return srun_command(component, SlurmConfig(), where, on=[], log="x", container=container)

    apptainer = made("apptainer:x.sif")
    assert apptainer[apptainer.index("exec") + 1 : apptainer.index("x.sif")] == [
        *shown,
        "--bind",
        "/d:/d",
        "--pwd",
        "/d",
        "--writable-tmpfs",
    ]
    assert not {"--nv", "--rocm"} & set(made("apptainer:x.sif", replace(ACTOR, gpus_per_node=0)))
    pyxis = made("pyxis:x")
    assert pyxis.index("--writable-tmpfs") < pyxis.index("python3") and not {"--nv", "--rocm"} & set(pyxis)
    with pytest.raises(ConfigError, match="container.options has 'writable'; allowed: options such as --writable-tmpfs"):
        ContainerConfig(options=["writable"])


def command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_slurms_commands_print(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    client = SlurmClient(20.0)
    line = (
        "JobId=23 HetJobId=23 JobName=demo Account=(null) QOS=normal JobState=RUNNING Reason=None TimeLimit=00:10:00 "
        "EndTime=2026-11-21T16:19:03 Partition=batch Command=/a b c=d StdOut=/r/demo-23.out"
    )
    command(tmp_path, "scontrol", f"echo '{line}'\necho '{line.replace('=RUNNING', '=FAILED').replace('JobId=23 ', 'JobId=24 ')}'")
    leader, other = client.show("23")
    assert leader.options == ("--partition=batch", "--qos=normal", "--time=00:10:00", "--output=/r/demo-%j.out")
    assert leader.end_time == time.mktime((2026, 11, 21, 16, 19, 3, 0, 0, -1))
    assert (leader.state, other.state, client.is_over("23")) == ("RUNNING", "FAILED", False)
    command(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert client.show("23") == [] and client.is_over("23")
    command(tmp_path, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="failed with exit code 1: Unable to contact slurm controller"):
        client.is_over("23")
    command(tmp_path, "scontrol", "sleep 20")
    with pytest.raises(LaunchError, match=r"scontrol did not answer within 0.1 s \(scontrol show job -o 23\)"):
        SlurmClient(0.1).show("23")
    command(tmp_path, "squeue", "printf '23.batch|batch\\n23.0|actor\\n24.1|critic\\n99.1|other\\n'")
    assert client.steps(("23", "24")) == {"23.batch": "batch", "23.0": "actor", "24.1": "critic"}
    command(tmp_path, "sbatch", "echo '31;cluster'")
    assert client.submit([], Path("x.sub"), [], cwd=tmp_path, environ={"PATH": f"{tmp_path}:/bin:/usr/bin"}) == "31"


def test_what_ranks_say_of_their_end(tmp_path: Path) -> None:
    outcomes.record({}, 1, "nobody asked")
    for rank, code, message in ((0, 1, "connection closed"), (3, 2, "bad setting"), (1, 75, "")):
        outcomes.record({"ALIGNER_OUTCOMES": str(tmp_path), "SLURM_PROCID": str(rank)}, code, message)
    (tmp_path / "2.json").write_text("{half")
    found = outcomes.read(tmp_path)
    assert [(outcome.rank, outcome.code) for outcome in found] == [(0, 1), (1, 75), (3, 2)]
    assert outcomes.decisive(found).message == "bad setting"
    assert outcomes.decisive([Outcome(rank=0, code=1, time=2.0), Outcome(rank=1, code=1, time=1.0)]).rank == 1
    assert outcomes.decisive([Outcome(rank=0, code=75), Outcome(rank=1, code=3)]).code == 3  # a crash spoils an orderly stop
    assert outcomes.decisive([]) is None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_checked_in_scripts_are_what_their_configs_say(script: Path, tmp_path: Path, monkeypatch) -> None:
    """Made anew by the command that the script names: change the config, then make the script again with that command."""
    text = script.read_text()
    made = shlex.split(re.search(r"# Made by `aligner launch slurm (.*)`", text)[1])
    assert made[-2:] == ["--output", f"slurm/{script.name}"]
    monkeypatch.chdir(tmp_path)
    launch_slurm(made[0], made[1:-2], LaunchOptions(output=Path("slurm") / script.name))
    assert (tmp_path / "slurm" / script.name).read_text() == text


def test_the_conductor_needs_nothing_but_python() -> None:
    """It runs on the batch host, outside the container: -S leaves out everything that was installed."""
    code = "import aligner.cluster.slurm.__main__, sys; sys.exit(any(name in sys.modules for name in ('torch', 'hydra', 'numpy')))"
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_which_scripts_are_checked_in() -> None:
    of_70b = {"ppo", "grpo", "sft", "rm", "dpo", "steerlm"}
    assert {script.stem for script in SCRIPTS} == {f"{name}_70b" for name in of_70b} | {"ppo_long_context", "smoke_cpu"}


def test_a_script_of_other_settings_carries_them(capsys) -> None:
    settings = ["cluster.gpus_per_node=4", "slurm.account=lab", "run.directory=runs/a b", "slurm.options=['--nice']"]
    settings += ["slurm.setup='module load cuda'"]
    assert launch_slurm("dpo_70b", settings, LaunchOptions(dry_run=True)) == 0
    text = capsys.readouterr().out
    size = "#SBATCH --nodes=16 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=28 --mem=0 --exclusive"
    assert f"{size}\n#SBATCH --account=lab\n#SBATCH --nice\n" in text
    assert "--config dpo_70b --set cluster.gpus_per_node=4 --set slurm.account=lab --set 'run.directory=runs/a b'" in text
    assert text.endswith(' -- "$@"\n')
    before, _, after = text.partition("\n# slurm.setup\nmodule load cuda\n")
    assert "#SBATCH" in before and "#SBATCH" not in after and "python3" in after


def test_a_script_keeps_choices_that_could_not_be_exported() -> None:
    choices = {"ALIGNER_CONTAINER": 'apptainer:/my "own" $image.sif', "ALIGNER_MOUNTS": "/a,/b"}
    text = render("ppo_smoke_cpu", spec("ppo_smoke_cpu"), title="t", variables=choices)
    said = 'echo "$ALIGNER_CONTAINER|$ALIGNER_MOUNTS"; exit'
    script = text.replace('home="${', f'{said}\nhome="${{', 1)
    for given, expected in (({}, 'apptainer:/my "own" $image.sif|/a,/b'), ({"ALIGNER_CONTAINER": "pyxis:x"}, "pyxis:x|/a,/b")):
        done = subprocess.run(["bash", "-c", script], env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{expected}\n"


ASKED = (
    "JobId=7 HetJobId=6 JobName=demo Nice=5 Account=lab QOS=(null) JobState=RUNNING Reason=None TimeLimit=1-00:00:00 TimeMin=N/A "
    "EndTime=Unknown Partition=gpu ReqNodeList=(null) ExcNodeList=n[2-3] NumNodes=1 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:* CoreSpec=* "
    "MinCPUsNode=1 {memory} MinTmpDiskNode=0 Features=a100&ib OverSubscribe=NO Contiguous=1 Licenses=matlab:2 "
    "Network=(null) Command=/d/a b.sub WorkDir=/d Comment=two words  StdErr=/d/demo-7.out StdOut=/d/demo-7.out Power= "
    "MailUser=me@site MailType=END,FAIL {tres}"
)
KEPT = {
    "--account=lab",
    "--comment=two words",
    "--constraint=a100&ib",
    "--contiguous",
    "--exclude=n[2-3]",
    "--exclusive",
    "--licenses=matlab:2",
}
KEPT |= {"--mail-type=END,FAIL", "--mail-user=me@site", "--nice=5", "--output=/d/demo-%j.out", "--partition=gpu", "--time=1-00:00:00"}


@pytest.mark.parametrize(
    ("memory", "tres", "more"),
    [
        ("MinMemoryNode=0", "TresPerNode=gres:gpu:h100:8", {"--mem=0", "--gpus-per-node=h100:8"}),
        ("MinMemoryCPU=10M", "TresPerNode=gres/gpu:8,gres/nvme:1", {"--mem-per-cpu=10M", "--gpus-per-node=8", "--gres=nvme:1"}),
        ("MinMemoryCPU=10M", "MemPerTres=gres:gpu:100 TresPerJob=gres:gpu:2", {"--mem-per-gpu=100", "--gpus=2"}),
    ],
)
def test_what_a_job_has_asked_for(memory: str, tres: str, more: set[str]) -> None:
    client = SlurmClient(10.0)
    client.run = lambda *command: ASKED.format(memory=memory, tres=tres) + "\n"
    (record,) = client.show("7")
    assert set(record.options) == KEPT | more
