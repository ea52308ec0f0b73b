"""The two tiers of tests: `make test` leaves the mark `slow` out and says so, `make test-all` runs everything and records its seconds.

With `--record-durations` a run writes tests/durations.json and the table of the slowest in CONTRIBUTING.md.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from preloaded import preloaded

ROOT = Path(__file__).resolve().parents[1]
DURATIONS, PAGE = ROOT / "tests" / "durations.json", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- table: tests/tiers.py -->", "<!-- end of table -->"
SLOW = "slow"
LIMIT_SECONDS = 60.0  # a test that costs more has the mark
RECORDED_SECONDS = 5.0  # less is not recorded
NUM_SHOWN = 30
_TICKS = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS = slice(11, 15)  # of /proc/PID/stat, after the name: user and system time of the process and of its children that have ended


def cases(names: Iterable[str], *, fast: Collection[str]) -> list[Any]:
    """The names as parameters of a test: those that are not `fast` have the mark."""
    assert set(fast) <= set(names := list(names)), fast
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def cost(test: str, wall: float, cpu: float) -> float:
    """Seconds of a core that a test costs, however busy the machine was. What Slurm's nodes compute is not seen: half of what they last."""
    return max(cpu, wall / 2) if "test_slurm_" in test else cpu


def durations() -> dict[str, tuple[float, float]]:
    """Seconds of each recorded test, setup included, by node id: on the clock, and of the CPU."""
    return {test: (wall, cpu) for test, (wall, cpu) in json.loads(DURATIONS.read_text()).items()}


def last_whole_run() -> str:
    """When all tests of both tiers were last run, at which commit, and how many passed."""
    return PAGE.read_text().partition(f"{BEGIN}\n\nThe last whole run: ")[2].partition(".\n")[0] or "none yet"


def seconds_of_files() -> defaultdict[str, float]:
    """What the recorded tests of each file cost together."""
    spent: defaultdict[str, float] = defaultdict(float)
    for test, (wall, cpu) in durations().items():
        spent[test.partition("::")[0]] += cost(test, wall, cpu)
    return spent


def cpu_seconds() -> float:
    """Of this process and of what it has started that has ended. Slurm's nodes reap their own processes: those are not in it."""
    total = sum(os.times()[:4])
    status = Path(f"/proc/{preloaded().pid}/stat") if preloaded.cache_info().currsize else None
    if status is not None and status.exists():
        total += sum(map(int, status.read_text().rpartition(")")[2].split()[_CPU_FIELDS])) / _TICKS
    return total


class Tiers:
    """The plugin: counts what a tier leaves out, and adds up seconds. Under xdist a worker counts, and the process that reports has all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left_out = 0
        self._before = cpu_seconds()
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if SLOW in self._config.option.markexpr:
            self._left_out += sum(item.get_closest_marker(SLOW) is not None for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = cpu_seconds()
        # At the end of a session its last test would get all that servers and Slurm's nodes have computed for the others.
        report.cpu_seconds = now - self._before if report.when != "teardown" else 0.0
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        for index, seconds in enumerate((report.duration, getattr(report, "cpu_seconds", 0.0))):
            self._seconds[report.nodeid][index] += seconds

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out"] = self._left_out
        elif self._config.option.record_durations:
            options, counted = self._config.option, self._config.pluginmanager.get_plugin("terminalreporter").stats
            whole = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS and not options.keyword and not self._left_out
            told = ", ".join(f"{len(counted[kind])} {kind}" for kind in ("passed", "failed", "error", "skipped") if counted.get(kind))
            record(self._seconds, f"{datetime.date.today()} at {commit()}: {told}" if whole else last_whole_run())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get("left_out", 0))  # each has collected everything

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left_out:
            terminalreporter.line(f"not run: {self._left_out} tests of the tier `{SLOW}`; `make test-all` runs them", yellow=True)
        reasons: Counter[str] = Counter()
        for report in terminalreporter.stats.get("skipped", ()):
            reasons[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")] += 1
        for reason, count in reasons.most_common():
            terminalreporter.line(f"not run: {count} tests that need what is not here: {reason}", yellow=True)


def commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def record(found: Mapping[str, list[float]], last: str) -> None:
    """Write what was found, beside what is known of other tests that still exist, into tests/durations.json and CONTRIBUTING.md."""
    rounded = {test: [round(seconds, 1) for seconds in pair] for test, pair in found.items() if cost(test, *pair) >= RECORDED_SECONDS}
    kept = {test: list(pair) for test, pair in durations().items() if test not in found and exists(test)}
    lines = [f"{json.dumps(test)}: {json.dumps(pair)}" for test, pair in sorted((kept | rounded).items())]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page(PAGE.read_text(), last, durations()))


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def table(found: Mapping[str, tuple[float, float]]) -> str:
    slowest = sorted(found.items(), key=lambda one: -cost(one[0], *one[1]))[:NUM_SHOWN]
    lines = [f"| `{test.removeprefix('tests/')}` | {wall:.0f} | {cpu:.0f} |" for test, (wall, cpu) in slowest]
    return "\n".join(["| test | seconds | of the CPU |", "|---|---|---|", *lines])


def page(text: str, last: str, found: Mapping[str, tuple[float, float]]) -> str:
    """CONTRIBUTING.md with the last whole run and the table of today."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\nThe last whole run: {last}.\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}"
