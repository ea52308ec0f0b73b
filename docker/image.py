"""What an image holds: run in its build, so that a version that does not fit ends the build and not a job.

python3 docker/image.py constraints NAME ...   a constraints file for pip: what is installed, and else what docker/versions.txt pins; NAMEs
                                               are as pinned, or free
python3 docker/image.py check NAME ...         these are installed, and so is everything that aligner requires, at a version it allows
python3 docker/image.py needs NAME[EXTRA] ...  the same of what these packages require
python3 docker/image.py imports MODULE ...     these import, each in a process of its own; no GPU is needed
python3 docker/image.py environment NAME=VALUE ...  these variables have these values; prints those that change numbers or memory
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "aligner"
EXTRAS = ("servers",)


PINS = Path(__file__).with_name("versions.txt")
RECORDED = ("TF32", "PIP_", "NCCL_", "NVTE_", "PYTORCH_", "CUDA_", "TORCH_")  # parts of the names of variables that matter
DRIVER = "libcuda.so"  # a build has none


def pinned() -> dict[str, str]:
    """The versions of docker/versions.txt, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in PINS.read_text().splitlines())
    return {canonicalize_name(name): number for name, _, number in (line.partition("==") for line in lines if line)}


def constraints(free: Iterable[str] = ()) -> list[str]:
    """`name==version` of every distribution but the free ones, sorted; of a name that is there twice the first counts, as for imports.

    What is not there, and what is free, has the version that is pinned, if any is.
    """
    found: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(name), distribution.version)
    left_out = {canonicalize_name(name) for name in free}
    kept = pinned() | {name: number for name, number in found.items() if name not in left_out}
    return [f"{name}=={number}" for name, number in sorted(kept.items())]


def not_importable(modules: Iterable[str]) -> list[str]:
    """Which of the modules do not import, and why. Those that only lack the driver cannot be judged in a build: that is printed."""
    found = []
    for module in modules:
        command = [sys.executable, "-c", f"import {module} as m; print(getattr(m, '__version__', ''))"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or [""]
        if done.returncode and DRIVER in last[0]:
            print(f"{module}: not tried, there is no driver ({last[0]})")
        elif done.returncode:
            found.append(f"{module} does not import: {last[0] or f'exit code {done.returncode}'}")
        else:
            print(f"{module} {last[0]}".rstrip())
    return found


def unlike(wanted: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Which of `NAME=VALUE` the environment has otherwise; `NAME=` is met by a variable that is empty or not set."""
    pairs = [line.partition("=")[::2] for line in wanted]
    return [f"{name} is {environ.get(name)!r}, and has to be {value!r}" for name, value in pairs if environ.get(name, "") != value]


def unmet(requirements: Iterable[str], owner: str, extras: Iterable[str]) -> list[str]:
    """Which of the requirements (as in a package's metadata) are not met by what is installed."""
    found = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        number = installed(requirement.name)
        if number is None:
            found.append(f"{requirement.name} is not installed, {owner} needs {requirement}")
        elif not requirement.specifier.contains(number, prereleases=True):  # NVIDIA's builds of torch are named as pre-releases
            found.append(f"{requirement.name} is {number}, {owner} needs {requirement}")
    return found


def installed(name: str) -> str | None:
    """The version of a distribution, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 where something is missing or does not fit, 2 for anything else than these commands."""
    command, names = arguments[:1], arguments[1:]
    if command == ["constraints"]:
        print("\n".join(constraints(names)))
        return 0
    if command == ["check"]:
        found = [f"{name} is not installed" for name in names if installed(name) is None]
        found += unmet(requires(PROJECT) or (), PROJECT, EXTRAS)
    elif command == ["imports"]:
        found = not_importable(names)
    elif command == ["environment"]:
        print("\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if any(part in name for part in RECORDED)))
        found = unlike(names, os.environ)
    elif command == ["needs"]:
        wanted = [Requirement(name) for name in names]
        found = [problem for one in wanted for problem in unmet(requires(one.name) or (), one.name, one.extras)]
    else:
        print(__doc__, file=sys.stderr)
        return 2
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
