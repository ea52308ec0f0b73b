"""What an image holds: run in its build, so that a version that does not fit ends the build and not a job.

python3 docker/image.py constraints NAME ...   the versions that are installed, as a constraints file for pip; NAMEs are left free
python3 docker/image.py check NAME ...         these are installed, and so is everything that aligner requires, at a version it allows
python3 docker/image.py needs NAME[EXTRA] ...  the same of what these packages require
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "aligner"
EXTRAS = ("servers",)


def constraints(free: Iterable[str] = ()) -> list[str]:
    """`name==version` of every distribution but the free ones, sorted; of a name that is there twice the first counts, as for imports."""
    found: dict[str, str] = {}
    for distribution in distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(name), distribution.version)
    left_out = {canonicalize_name(name) for name in free}
    return [f"{name}=={number}" for name, number in sorted(found.items()) if name not in left_out]


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
    """The exit code: 1 where something is missing or does not fit, 2 for anything else than the three commands."""
    command, names = arguments[:1], arguments[1:]
    if command == ["constraints"]:
        print("\n".join(constraints(names)))
        return 0
    if command == ["check"]:
        found = [f"{name} is not installed" for name in names if installed(name) is None]
        found += unmet(requires(PROJECT) or (), PROJECT, EXTRAS)
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
