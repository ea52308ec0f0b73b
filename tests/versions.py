"""Does every recipe run with the oldest and the newest of what it stands on? `make test-versions`; standard library only.

    python tests/versions.py [ENVIRONMENT ...] [--only CASE ...] [--keep]

Each environment is made below build/versions (two gigabytes, deleted again without --keep), runs a few steps of every recipe, in one
process and in two ranks, and resumes; then comes a table. What cannot be had here (an interpreter, a wheel) is in it as not run, with the
reason, and is no failure. torch's CUDA build comes without NVIDIA's libraries, which are gigabytes: stand-ins are compiled in their place
(gcc, binutils).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))

from preloaded import preloaded  # noqa: E402

FOLDER = ROOT / "build" / "versions"
SHOWN = ("torch", "transformers", "megatron-core", "numpy", "nvidia-pytriton")
LEFT_OUT = {"simpo", "dpo_precomputed", "kto_precomputed", "remax"}  # other settings of recipes that run all the same
RESUMED = ("sft", "sft_pp2", "sft_muon", "sft_nvme_dp2", "sft_int8", "grpo_dp2", "ppo_head")
TORCH = {"sft_muon": (2, 9)}  # the oldest release that has what a case needs
STEPS, MORE_STEPS = 3, 2  # of a case, and after the resume


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip is asked for; a package that is not named gets the newest version that fits."""

    python: str
    packages: tuple[str, ...] = ()
    extras: str = ""


OLDEST = ("torch==2.6.0", "transformers==4.55.0")
ENVIRONMENTS = {
    "oldest-3.10": Environment("3.10", (*OLDEST, "megatron-core==0.16.1", "numpy<2")),
    "newest-3.10": Environment("3.10", ("numpy>=2",)),
    "oldest-3.11": Environment("3.11", (*OLDEST, "megatron-core==0.16.1", "numpy>=2")),
    "newest-3.11": Environment("3.11", ("megatron-core==0.16.1", "numpy>=2")),
    "servers-3.11": Environment("3.11", ("numpy<2",), extras="[servers]"),
    "oldest-3.12": Environment("3.12", (*OLDEST, "megatron-core==0.16.1", "numpy<2", "pyarrow<26")),
    "newest-3.12": Environment("3.12", ("megatron-core==0.19.*", "numpy>=2")),
    "oldest-3.13": Environment("3.13", ("torch==2.7.1", "transformers==4.55.0", "megatron-core==0.19.0", "numpy>=2")),
    "newest-3.13": Environment("3.13", ("megatron-core==0.19.*", "numpy>=2")),
}


class NotToBeHad(Exception):
    """An environment cannot be made here; the text says why."""


def interpreter(version: str) -> str:
    """A Python of this version: on PATH, or one that pyenv has installed. Raises NotToBeHad."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(name), *sorted(map(str, pyenv.glob(f"{version}.*/bin/{name}")), reverse=True)):
        # A shim of pyenv's is on PATH for interpreters that are switched off.
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found
    raise NotToBeHad(f"no {name} on PATH or among pyenv's")


def make(environment: Environment, folder: Path) -> Path:
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if done.exists() and done.read_text(encoding="utf-8") == repr(environment):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run(interpreter(environment.python), "-m", "venv", str(folder))
    torch = next((package for package in environment.packages if package.startswith("torch==")), "torch")
    _pip(python, "--no-deps", torch)
    _without_nvidia(Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()))
    _pip(python, "--editable", f"{ROOT}{environment.extras}", "pytest", *environment.packages)
    done.write_text(repr(environment), encoding="utf-8")
    return python


def _without_nvidia(packages: Path) -> None:
    """Nothing to do for a CPU build of torch."""
    if "\ncuda: Optional[str] = None" in (packages / "torch" / "version.py").read_text(encoding="utf-8"):
        return
    from simulated_cuda.build_libraries import build_libraries
    from simulated_cuda.environment import forget_requirements

    forget_requirements(packages)
    libraries = packages / "torch" / "lib"
    try:
        build_libraries(libraries, None, libraries)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotToBeHad(f"stand-ins for NVIDIA's libraries cannot be compiled: {error}") from error


def _pip(python: Path, *arguments: str) -> None:
    # A constraint of this machine's is not what users have.
    given = {"PIP_CONSTRAINT": os.devnull, "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    _run(str(python), "-m", "pip", "install", "--quiet", *arguments, **given)


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise NotToBeHad(f"{' '.join(command[1:5])} ... ended with {done.returncode}: {' '.join(errors)[-400:]}")
    return done.stdout


def smoke(folder: Path, only: Sequence[str]) -> int:
    """Run inside an environment: every case, and those that are resumed. Returns how many failed."""
    import torch
    from same_numbers import CASES, TIMEOUT_SECONDS, arguments, run, write_data

    folder.mkdir(parents=True)
    write_data(folder)
    needed = {other for name in only for other in _needs(CASES[name].settings, CASES)}
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    possible = {name: case for name, case in CASES.items() if TORCH.get(name, release) <= release}
    cases = {name: case for name, case in possible.items() if (name in {*only, *needed} if only else name not in LEFT_OUT)}
    failed: list[str] = []
    for number, (name, case) in enumerate(cases.items()):
        begun, directory = time.monotonic(), folder / "runs" / name
        longer = replace(case, settings=[*case.settings, f"loop.max_steps={STEPS + MORE_STEPS}"])
        try:
            if number == 0:
                run(ROOT, case, folder, directory)  # as users start one; the others are forks of one process
            for one in ([case] if number else []) + ([longer] if name in RESUMED else []):
                code, output = preloaded().run(arguments(one, folder, directory), os.environ, ROOT, timeout=TIMEOUT_SECONDS)
                if code:
                    raise RuntimeError(f"exit code {code}\n{output[-3000:]}")
            if name in RESUMED:
                _check_steps(directory)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            print(f"  {name}: FAILED\n{error}", flush=True)
        else:
            print(f"  {name}: {time.monotonic() - begun:.0f} s{', resumed' if name in RESUMED else ''}", flush=True)
    print(json.dumps({"ran": len(cases), "failed": failed}), flush=True)
    return len(failed)


def _needs(settings: Sequence[str], cases: Iterable[str]) -> list[str]:
    return [name for name in cases if any(f"{{runs}}/{name}/" in setting for setting in settings)]


def _check_steps(directory: Path) -> None:
    """Those of both runs, with finite losses."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    logs = "".join(path.read_text(encoding="utf-8", errors="replace") for path in (directory / "logs").glob("*.log"))
    steps = sorted({line["step"] for line in lines})
    if steps[-1] != STEPS + MORE_STEPS or f"resumed after step {STEPS}" not in logs:
        raise RuntimeError(f"steps {steps}, expected {STEPS} and, resumed, {MORE_STEPS} more")
    if wrong := {name: value for line in lines for name, value in line.items() if "loss" in name and not math.isfinite(value)}:
        raise RuntimeError(f"losses that are no numbers: {wrong}")


def check(name: str, environment: Environment, inside: Sequence[str], keep: bool) -> tuple[str, str]:
    """One environment from nothing to its end: its versions, and what came of it ("not run: ..." if it cannot be had)."""
    folder, runs = FOLDER / name, FOLDER / f"{name}-runs"
    shutil.rmtree(runs, ignore_errors=True)
    begun = time.monotonic()
    versions = f"Python {environment.python}"
    print(f"== {name}", flush=True)
    try:
        python = make(environment, folder)
        listed = json.loads(_run(str(python), "-m", "pip", "list", "--format=json"))
        found = {package["name"].lower().replace("_", "-"): package["version"] for package in listed}
        versions += "".join(f", {package} {found[package]}" for package in SHOWN if package in found)
        print(f"  {versions}: made in {time.monotonic() - begun:.0f} s", flush=True)
        command = [str(python), __file__, "--inside", str(runs), *inside]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | hidden) as process:
            line = ""
            for line in process.stdout:
                print(line, end="", flush=True)
        outcome = json.loads(line) if line.startswith("{") else {"ran": 0, "failed": ["everything"]}
        told = f"{outcome['ran']} runs passed" if not outcome["failed"] else f"FAILED: {', '.join(outcome['failed'])}"
        return versions, f"{told}, {time.monotonic() - begun:.0f} s"
    except NotToBeHad as reason:
        return versions, f"not run: {reason}"
    finally:
        shutil.rmtree(runs, ignore_errors=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """1 if something that could run failed, or if nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help=f"of {', '.join(ENVIRONMENTS)} (all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="of tests/same_numbers.py, with what they need")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.inside:
        return 1 if smoke(chosen.inside, chosen.only) else 0
    unknown = [name for name in chosen.environments if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(ENVIRONMENTS)}")
    inside = ["--only", *chosen.only] if chosen.only else []
    names = chosen.environments or ENVIRONMENTS
    rows = {name: check(name, ENVIRONMENTS[name], inside, chosen.keep) for name in names}
    print("\n| environment | versions | outcome |\n|---|---|---|")
    for name, (versions, outcome) in rows.items():
        print(f"| {name} | {versions} | {outcome} |")
    outcomes = [outcome for _, outcome in rows.values()]
    return 1 if any("FAILED" in outcome for outcome in outcomes) or all(outcome.startswith("not run") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
