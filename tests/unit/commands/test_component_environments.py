"""`<component>.environment`: each component runs on the interpreter of its own virtual environment, under either launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from aligner.algorithms.registry import recipes
from aligner.cluster.component import Component, activated, check_installed, interpreter, rank_environment
from aligner.cluster.slurm.spec import from_json, to_json
from aligner.cluster.slurm.steps import runtime, srun_command
from aligner.commands import programs
from aligner.commands.slurm import job_spec
from aligner.errors import ConfigError
from aligner.online.config import OnlineRun
from aligner.settings.compose import compose
from aligner.version import __version__

ROOT = Path(__file__).parents[3]
SERVED = ["data.train=x", "model.path=x", "reward.serve=true", "reward.function.path=a:b", "num_processes=2"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Without packages: what a component needs would be installed there."""
    folder = tmp_path_factory.mktemp("environments") / "servers"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


def composed(*settings: str) -> tuple[OnlineRun, list[str]]:
    overrides = [*SERVED, *settings]
    return compose(recipes()["ppo"].config, "ppo", overrides), overrides


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The components that the local launcher would start, by name."""

    def components(*settings: str) -> dict[str, Component]:
        config, overrides = composed(*settings, f"run.directory={tmp_path}")
        found: list[Component] = []
        monkeypatch.setattr(programs, "composed", lambda name, given: config)
        monkeypatch.setattr(programs, "launch", lambda components, **options: found.extend(components) or 0)
        assert programs.launch_local("ppo", overrides) == 0
        return {component.name: component for component in found}

    monkeypatch.chdir(ROOT)  # where the environment finds this package
    return components


def test_each_component_starts_in_its_own(started, environment):
    found = started(f"critic.environment={environment}", f"reward.environment={environment / 'bin' / 'python'}")
    python = str(environment / "bin" / "python")
    assert {name: one.command[0] for name, one in found.items()} == {"actor": sys.executable, "critic": python, "reward": python}
    assert started(f"actor.environment={environment}")["actor"].command[:4] == (python, "-u", "-m", "aligner.cli")
    # What the process sees: its own prefix, and its environment's programs first.
    variables = rank_environment(found["critic"], 0, 1234, dict(os.environ))
    show = [python, "-c", "import sys, os; print(sys.prefix, os.environ['VIRTUAL_ENV'], os.environ['PATH'].split(':')[0])"]
    shown = subprocess.run(show, env=variables, capture_output=True, text=True, check=True).stdout.split()
    assert shown == [str(environment), str(environment), str(environment / "bin")]
    assert activated(sys.executable, os.environ) == {} == activated("/bin/sh", os.environ)


def test_a_path_without_python_is_refused(started, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, looked in ((tmp_path / "none", "none"), (tmp_path / "empty", "empty/bin/python")):
        message = f"critic.environment={path}: no Python interpreter at {tmp_path / looked}; allowed: a virtual environment"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            started(f"critic.environment={path}")
    (tmp_path / "text").write_text("not to be run")
    with pytest.raises(ConfigError, match="^reward.environment=.*text: no Python interpreter"):
        started(f"reward.environment={tmp_path / 'text'}")
    assert interpreter("actor", "") == sys.executable


def test_an_environment_without_this_version_is_refused(environment, monkeypatch, tmp_path):
    python = str(environment / "bin" / "python")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^critic.environment: {python} cannot import aligner \(ModuleNotFoundError.*\); install aligner 1\.2"
    ):
        check_installed("critic", python, "1.2")
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=f"has aligner {__version__}, and the launcher 1.2; allowed: the same version"):
        check_installed("critic", python, "1.2")
    check_installed("critic", python, __version__)
    with pytest.raises(ConfigError, match="critic.environment: .* cannot be run"):
        check_installed("critic", str(tmp_path), __version__)


def test_under_slurm_each_step_has_its_own(environment, monkeypatch, tmp_path):
    config, overrides = composed(f"critic.environment={environment}", "cluster.gpus_per_node=2")
    spec = job_spec("ppo", config, overrides)
    python = str(environment / "bin" / "python")
    assert {one.name: one.python for one in spec.components} == {"actor": "", "critic": python, "reward": ""}
    assert from_json(to_json(spec)) == spec
    plain = runtime({"VIRTUAL_ENV": str(environment.parent / "servers")}, home=None, directory=tmp_path)
    for one in spec.components:
        command = srun_command(one, config.slurm, plain, on=[], log="x")
        assert command[command.index("-u") - 1] == (one.python or plain.python)
    image = runtime({"ALIGNER_CONTAINER": "apptainer:/images/a.sif"}, home=None, directory=tmp_path)
    command = srun_command(spec.components[1], config.slurm, image, on=[], log="x")
    assert command[command.index("/images/a.sif") + 1] == python


def test_a_containers_environment_is_looked_for_inside(monkeypatch, tmp_path):
    config, overrides = composed("critic.environment=/opt/servers", "cluster.gpus_per_node=2")
    monkeypatch.setenv("ALIGNER_CONTAINER", "apptainer:/images/a.sif")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    job_spec("ppo", config, overrides)  # on the login node
    for set_up in (lambda: monkeypatch.setenv("SLURM_JOB_ID", "7"), lambda: monkeypatch.delenv("ALIGNER_CONTAINER")):
        set_up()
        with pytest.raises(ConfigError, match="^critic.environment=/opt/servers: no Python interpreter at /opt/servers; allowed"):
            job_spec("ppo", config, overrides)
