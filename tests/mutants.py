"""Plants faults, one at a time, and says which test notices: `make mutants`.

The faults are data (tests/faults/AREA.yaml): the exact text of a file and what to put in its place. Each is planted in a copy of the
checkout, its tests run there, and the first one that fails has killed it. A test process is a fork of this one, which has torch and
Megatron-Core imported; the package itself is imported afresh, from the copy. The table is tests/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.md"
AREAS = tuple(
    (
        "losses masks data sampling optimizer checkpoints layouts refit servers config rewards algorithms guards families traces planner "
        "wiring"
    ).split()
)
COPIED = "aligner tests conf examples slurm docker docs benchmarks tools pyproject.toml setup.py README.md Makefile".split()
_SURVIVED, _NOT_RUN = "**survived**", "not run yet"  # in the table
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "--tb=short", "-m", "not slow")  # what `make test` runs must notice
# What Megatron-Core was patched from: can be imported once in a process. A fault in one of these gets an interpreter of its own.
ONCE = ("aligner/parallel/mcore.py", "aligner/parallel/cpu_platform.py")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One line of tests/faults: in `file`, `was` (which stands there once) becomes `now`; `tests` are files or node ids of pytest."""

    id: str
    area: str
    file: str
    was: str
    now: str
    breaks: str
    tests: tuple[str, ...]

    def plant(self, source: str) -> str:
        """The source with the fault in it. Raises ValueError where the fault does not fit the source."""
        if source.count(self.was) != 1:
            raise ValueError(f"{self.id}: the text to replace stands {source.count(self.was)} times in {self.file}, not once")
        planted = source.replace(self.was, self.now)
        if self.file.endswith(".py") and ast.dump(ast.parse(planted)) == ast.dump(ast.parse(source)):
            raise ValueError(f"{self.id}: changes nothing in {self.file}")
        return planted


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests said of a fault; `killed_by` is empty where it survived."""

    fault: Fault
    killed_by: str
    seconds: float
    log: str


def read_faults() -> list[Fault]:
    read = []
    for area in AREAS:
        for entry in yaml.load((ROOT / "tests" / "faults" / f"{area}.yaml").read_text(), yaml.CSafeLoader):
            read.append(Fault(area=area, **{**entry, "tests": tuple(entry["tests"])}))
    return read


def killer(code: int, log: str) -> str:
    """The test that noticed, out of pytest's summary. Raises RuntimeError where no test ran: that says nothing of the tests."""
    if code == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+::\S+)", log, re.MULTILINE)
    if code == 1 and found:
        return found[1]
    if code < 0:
        return f"process ended by {signal.Signals(-code).name}"
    raise RuntimeError(f"pytest ended with {code} and without a failed test:\n{log[-3000:]}")


class Copies:
    """Runs tests in copies of the checkout, one at a time in each."""

    def __init__(self, folder: Path, number: int, timeout: float) -> None:
        self._timeout = timeout
        self._free = [folder / f"copy{index}" for index in range(number)]
        for copy in self._free:
            for name in COPIED:
                there, make = ROOT / name, shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
                make(there, copy / name, **({"ignore": shutil.ignore_patterns("__pycache__")} if there.is_dir() else {}))
        shared = ROOT.parent / "shared"
        if shared.is_dir():
            (folder / "shared").symlink_to(shared)
        self._running: dict[int, tuple[Path, Fault, str, float]] = {}  # by process: copy, fault, the file as it was, since when

    def run(self, faults: Sequence[Fault]) -> Iterator[Outcome]:
        """Each fault's outcome, as they come."""
        waiting = list(faults)
        while waiting or self._running:
            if waiting and self._free:
                self._start(waiting.pop(0), self._free.pop())
            elif (ended := self._ended()) is not None:
                yield ended
            else:
                time.sleep(0.02)

    def passes(self, tests: Sequence[str]) -> None:
        """Raise RuntimeError unless these tests pass where nothing is planted."""
        pid = _fork(self._free[0], [*tests], alone=False)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise RuntimeError(f"tests fail without any fault:\n{_log(self._free[0]).read_text(errors='replace')[-6000:]}")

    def _start(self, fault: Fault, copy: Path) -> None:
        source = (copy / fault.file).read_text()
        _write(copy / fault.file, fault.plant(source))
        pid = _fork(copy, fault.tests, alone=fault.file in ONCE)
        self._running[pid] = (copy, fault, source, time.monotonic())

    def _ended(self) -> Outcome | None:
        for pid, (copy, fault, source, since) in self._running.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - since
            if not done and seconds < self._timeout:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not done:
                os.waitpid(pid, 0)
            del self._running[pid]
            _write(copy / fault.file, source)
            self._free.append(copy)
            log = _log(copy).read_text(errors="replace")
            by = killer(os.waitstatus_to_exitcode(status), log) if done else f"no end within {self._timeout:.0f} s"
            return Outcome(fault=fault, killed_by=by, seconds=seconds, log=log)
        return None


def _log(copy: Path) -> Path:
    return copy.with_suffix(".log")


def _write(path: Path, text: str) -> None:
    """Write a module so that no compiled one of before is taken for it (two of one size may be written in one second)."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _fork(copy: Path, tests: Sequence[str], *, alone: bool) -> int:
    """Start pytest in `copy`; `alone`: in an interpreter that has imported nothing."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        log = os.open(_log(copy), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target in (1, 2):
            os.dup2(log, target)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        if alone:
            os.execv(sys.executable, [sys.executable, "-m", "pytest", *PYTEST, *tests])
        _import_from(copy)
        import pytest

        code = int(pytest.main([*PYTEST, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Import what the package imports of others."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import aligner.commands.convert
    import aligner.commands.programs
    import aligner.jobs.agents
    import aligner.jobs.samples
    import aligner.rewards.compose  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks


def _import_from(copy: Path) -> None:
    """Forget the package, but for what cannot be imported twice; from now on it is imported from `copy`."""
    kept = {name.removesuffix(".py").replace("/", ".") for name in ONCE} | {"aligner", "aligner.parallel"}
    for name in [name for name in sys.modules if name.partition(".")[0] == "aligner" and name not in kept]:
        parent, _, child = name.rpartition(".")
        if parent in kept:
            delattr(sys.modules[parent], child)
        del sys.modules[name]
    for package in ("aligner", "aligner.parallel"):
        sys.modules[package].__path__ = [str(copy / package.replace(".", "/"))]
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "tests"))]


def table(faults: Sequence[Fault], killed_by: Mapping[str, str]) -> str:
    """tests/mutants.md: by a fault's id, which test killed it ('' if it survived); faults that were not run have no entry."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    killed = sum(bool(killed_by.get(fault.id)) for fault in faults)
    lines = [
        "# Planted faults",
        "",
        f"Written by `make mutants`, last on {datetime.date.today()} at {commit}: {killed} of {len(faults)} killed.",
        "The faults are in `tests/faults/`; what runs them is `tests/mutants.py`.",
    ]
    for area in AREAS:
        lines += ["", f"## {area}", "", "| fault | what breaks | file | killed by |", "|---|---|---|---|"]
        for fault in faults:
            if fault.area == area:
                by = killed_by.get(fault.id, _NOT_RUN)
                by = by if by == _NOT_RUN else f"`{by}`".replace("|", "\\|") if by else _SURVIVED
                lines.append(f"| {fault.id} | {fault.breaks} | `{fault.file}` | {by} |")
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, str]:
    """What `table` wrote of the faults that were run."""
    rows = re.findall(r"^\| (\S+) \| .* \| `\S+` \| (.+) \|$", text, re.MULTILINE)
    return {id_: "" if by == _SURVIVED else by.strip("`").replace("\\|", "|") for id_, by in rows if by != _NOT_RUN}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults or areas only; tests/mutants.md keeps its other rows")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a fault's tests; one that takes longer counts as killed")
    chosen = parser.parse_args(argv)
    faults = [fault for fault in read_faults() if not chosen.only or fault.id in chosen.only or fault.area in chosen.only]
    if not faults:
        parser.error(f"no fault is called {chosen.only}")
    preload()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(Path(folder), chosen.jobs, chosen.timeout)
        since = time.monotonic()
        copies.passes(sorted({test for fault in faults for test in fault.tests}))
        print(f"the tests pass without a fault ({time.monotonic() - since:.0f} s)", flush=True)
        for outcome in copies.run(faults):
            outcomes.append(outcome)
            by = outcome.killed_by or "SURVIVED"
            print(f"{len(outcomes):3}/{len(faults)} {outcome.fault.id}: {by} ({outcome.seconds:.1f} s)", flush=True)
    before = read_table(TABLE.read_text()) if chosen.only and TABLE.exists() else {}
    TABLE.write_text(table(read_faults(), before | {outcome.fault.id: outcome.killed_by for outcome in outcomes}))
    survived = [outcome.fault.id for outcome in outcomes if not outcome.killed_by]
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} killed" + (f"; survived: {', '.join(survived)}" if survived else ""))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
