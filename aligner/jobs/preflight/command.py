"""`aligner preflight`: every rank of an allocation calls it, rank 0 prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.cluster.exit_codes import ExitCode
from aligner.errors import ConfigError
from aligner.jobs.preflight import allocation, table
from aligner.jobs.preflight.clock import CLOCK
from aligner.jobs.preflight.devices import DEVICES
from aligner.jobs.preflight.engine import ENGINE
from aligner.jobs.preflight.filesystem import FILESYSTEM
from aligner.jobs.preflight.items import Context, Finding, Item, Level
from aligner.jobs.preflight.network import NETWORK
from aligner.jobs.preflight.ports import PORTS
from aligner.jobs.preflight.ranks import CONFIG, RANKS
from aligner.jobs.preflight.runner import Runner
from aligner.jobs.preflight.samples import DATA, REWARD
from aligner.jobs.preflight.sizing import PLAN, SPACE
from aligner.jobs.preflight.tokenizers import TOKENIZER
from aligner.jobs.preflight.versions import VERSIONS
from aligner.jobs.preflight.weights import WEIGHTS
from aligner.parallel import launch

ITEMS = (RANKS, CONFIG, VERSIONS, DEVICES, CLOCK, NETWORK, FILESYSTEM, PORTS, TOKENIZER, DATA, REWARD, WEIGHTS, PLAN, SPACE, ENGINE)
ALWAYS = ("ranks", "config")  # the others stand on them


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run of the preflight, and where to write it."""

    only: tuple[str, ...] = ()  # names of items; empty: all
    with_engine: bool = False
    timeout_seconds: float = 0.0  # of every item; 0: each one's own
    json_path: Path | None = None

    def __post_init__(self) -> None:
        names = [item.name for item in ITEMS]
        for name in self.only:
            if name not in names:
                raise ConfigError(f"--only {name}: there is no such item; allowed: {', '.join(names)}")
        if self.timeout_seconds < 0:
            raise ConfigError(f"--timeout {self.timeout_seconds:g}: must not be negative (0: each item's own)")

    def items(self) -> list[Item]:
        """The chosen items in their order; the engine only where it was asked for."""
        with_engine = self.with_engine or "engine" in self.only
        chosen = [item for item in ITEMS if not self.only or item.name in (*ALWAYS, *self.only)]
        return [item for item in chosen if with_engine or item is not ENGINE]


def preflight(name: str, overrides: Sequence[str], options: Options, *, end: Callable[[int], Any] = os._exit) -> int:
    """Check what `conf/<name>.yaml` with `overrides` will need, on the ranks that were started. Returns 0, or 2 where something is fatal.

    Every rank calls it. Where an orderly end could wait for ever (a check hangs in a call that cannot be interrupted, another rank may hang
    in a collective) `end` is called with the exit code. Raises LaunchError where rank 0 cannot be reached.
    """
    here = allocation.join(options.timeout_seconds or RANKS.timeout_seconds, os.environ)
    context = Context(allocation=here, name=name, overrides=tuple(overrides), with_engine=options.with_engine)
    runner = Runner(context, timeout_seconds=options.timeout_seconds, progress=_progress if here.rank == 0 else None)
    findings = runner.run(options.items())
    code = ExitCode.refused if any(finding.level is Level.fatal for finding in findings.values()) else ExitCode.done
    if here.rank == 0:
        _report(name, findings, options)
    here.leave([rank for rank in range(here.size) if rank not in runner.lost])
    if runner.has_hung or runner.lost or (code and here.size > 1):
        sys.stdout.flush()
        sys.stderr.flush()
        end(code)
    launch.shutdown()
    return code


def _report(name: str, findings: dict[str, Finding], options: Options) -> None:
    shown = dict(findings)
    if not options.only and "engine" not in shown:
        shown["engine"] = Finding(level=Level.not_run, found="builds the model and samples from it", advice="ask for it with --engine")
    table.show(name, shown, table.console())
    if options.json_path is not None:
        options.json_path.write_text(table.to_json(name, shown))


def _progress(name: str, finding: Finding) -> None:
    """So that somebody who waits, or reads the log of a job that was killed, sees where it is."""
    print(f"preflight: {name}: {finding.level.value} ({finding.seconds:.1f} s)", file=sys.stderr, flush=True)
