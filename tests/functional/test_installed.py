"""The package as users have it: a wheel in an environment of its own, without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from slurm_cluster import SlurmCluster
from training_jobs import ROOT, read_rows, run_aligner, tiny_settings, write_task

TIMEOUT = 400


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin/ of an environment with a wheel of this checkout. Its dependencies are this environment's, without this one's aligner."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "*.egg-info", ".*_cache", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(source)]
    subprocess.run(command, check=True, timeout=TIMEOUT)
    shutil.rmtree(source)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    packages = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", f"--target={packages}", str(wheel)]
    subprocess.run(install, check=True, timeout=TIMEOUT)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():  # links: PyTriton looks for its libraries beside itself
        if not entry.name.startswith(("aligner", "__editable__", "__pycache__")) and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return folder / "venv" / "bin"


def run(installed: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """What `aligner arguments` prints, started in an empty directory."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(installed / "python"), "-m", "aligner.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_wheel_trains(installed: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    settings = [*tiny_settings(tmp_path), "reward.function.path=aligner.rewards.builtin:length", "loop.max_steps=1", "run.directory=run"]
    settings += ["algorithm.prompts_per_step=4", "algorithm.group_size=2", "algorithm.mini_batch_size=8"]
    assert "actor finished" in run(installed, tmp_path, "launch", "local", "grpo", *settings)
    assert (tmp_path / "run" / "done.json").is_file() and (tmp_path / "run" / "export" / "config.json").is_file()
    run(installed, tmp_path, "report", "run")


@pytest.mark.slow
def test_a_strangers_package_brings_a_recipe_an_estimator_and_a_reward(installed: Path, tmp_path: Path) -> None:
    """As docs/extending.md says: nothing of ours is touched."""
    packages = next(installed.parent.glob("lib/python*/site-packages"))
    source = shutil.copytree(ROOT / "examples" / "extend" / "package", tmp_path / "package")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={packages}", str(source)]
    subprocess.run(install, check=True, timeout=TIMEOUT)
    write_task(tmp_path)
    settings = [one for one in tiny_settings(tmp_path) if one.startswith(("model.", "logging."))] + ["loop.max_steps=1"]
    (tmp_path / "sft.jsonl").write_text('{"prompt": "3+4=", "response": "7"}\n' * 8)
    assert "runs/dft" in run(installed, tmp_path, "train", "dft", "--cfg", "job", "data.train=x")
    assert "trainer on 1 rank" in run(installed, tmp_path, "plan", "dft", "model=qwen2_5_1_5b", "+cluster=dgx_h100", "data.max_length=512")
    run(installed, tmp_path, "launch", "local", "dft", *settings, "data.train=sft.jsonl", "data.max_length=16", "algorithm.batch_size=8")
    assert (tmp_path / "runs" / "dft" / "done.json").is_file()
    settings = [*tiny_settings(tmp_path), "loop.max_steps=1", "run.directory=grpo", "reward.function.path=dft:brief"]
    settings += ["algorithm.prompts_per_step=2", "algorithm.group_size=4", "algorithm.mini_batch_size=8"]
    run(installed, tmp_path, "launch", "local", "grpo", *settings, "algorithm.advantage_estimator=dft:centred")
    assert (tmp_path / "grpo" / "done.json").is_file()


def test_the_first_run_of_readme_works_in_an_empty_directory_and_raises_no_alarm(tmp_path: Path) -> None:
    block = (ROOT / "README.md").read_text().partition("## Quickstart: laptop")[2].partition("\n## ")[0]
    typed = [line.split()[1:] for line in block.splitlines() if line.startswith("    .venv/bin/aligner ")]
    assert [words[0] for words in typed] == ["train", "report", "train"]  # the third is of a model of the reader's
    code, shown = run_aligner(*typed[0], "logging.tensorboard=false", cwd=tmp_path)
    assert code == 0, shown
    records = read_rows(tmp_path / "runs" / "first" / "metrics.jsonl")
    accuracy = [record["validation/reward"] for record in records if "validation/reward" in record]
    assert accuracy[0] < 0.65 and accuracy[-1] > 0.75
    assert "(algorithm." not in run_aligner(*typed[1], cwd=tmp_path)[1]
    assert "nothing found in 41 steps" in run_aligner("diagnose", "runs/first", cwd=tmp_path)[1]


def test_a_wheel_has_configs_scripts_and_examples(installed: Path, tmp_path: Path) -> None:
    script = run(installed, tmp_path, "launch", "slurm", "ppo_70b", "--dry-run")
    conf = Path(run(installed, tmp_path, "where", "conf").strip())
    assert conf.is_relative_to(installed.parent)
    folders = {name: conf.parent / name for name in ("examples", "slurm")}
    shipped = (folders["slurm"] / "ppo_70b.sub").read_text()
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        x for x in shipped.splitlines() if x.startswith("#SBATCH")
    ]
    assert all((folders["examples"] / "nlp" / name).is_file() for name in ("train_grpo.py", "data/gsm8k.py"))


def test_a_wheel_serves_the_studio(installed: Path, tmp_path: Path) -> None:
    """The page, and everything that it loads."""
    pytest.importorskip("nicegui", reason="nicegui is not installed")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(installed / "python"), "-u", "-m", "aligner.cli", "studio", ".", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as server:
        try:
            url = next(line.split()[1] for line in server.stdout or () if line.startswith("open: "))
            opener = build_opener(HTTPCookieProcessor())
            page = opener.open(url, timeout=TIMEOUT).read().decode()
            assert "<title>Runs - aligner studio</title>" in page
            loaded = re.findall(r'(?:src|href)="(/_nicegui/[^"]+)"', page)
            assert len(loaded) > 3 and {opener.open(urljoin(url, path), timeout=TIMEOUT).status for path in loaded} == {200}
        finally:
            server.kill()


@pytest.mark.slow
def test_the_demo_of_a_wheel(installed: Path, tmp_path: Path) -> None:
    """Not to its end: three PPO steps teach nothing, which is an error."""
    out = run(installed, tmp_path, "demo", "--steps", "3", "--directory", "demo", code=1)
    records = read_rows(tmp_path / "demo" / "ppo" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3] and "PPO" in out
    assert out.endswith("the accuracy did not rise: something is wrong\n") and "error" not in out


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.pytriton
@pytest.mark.timeout(900)
def test_a_slurm_job_of_a_wheel(slurm: SlurmCluster, installed: Path, tmp_path: Path) -> None:
    """PPO on three nodes from an empty directory, its preflight included; the environment is the one that ALIGNER_VENV names."""
    directory, script = tmp_path / "run", Path(run(installed, tmp_path, "where", "slurm").strip()) / "smoke_cpu.sub"
    environment = {"ALIGNER_VENV": str(installed.parent), "OMP_NUM_THREADS": "1"}
    place = {"directory": tmp_path, "cwd": tmp_path, "logs": directory / "logs"}
    settings = (f"run.directory={directory}", "loop.max_steps=2")
    job = slurm.submit(script, *settings, options=(f"--output={tmp_path}/%x-%j.out",), environment=environment, **place)
    job.wait("COMPLETED", timeout_seconds=600)
    assert (directory / "done.json").is_file() and job.orphans() == []
