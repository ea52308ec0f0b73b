"""`aligner preflight`: every rank of an allocation calls it; rank 0 prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode
from aligner.commands.preflight import allocation, cluster, framework, models, ranks, samples, sizing
from aligner.commands.preflight.framework import Context, Finding, Level, Runner
from aligner.errors import ConfigError
from aligner.parallel import launch

ITEMS = (
    *(ranks.meet, ranks.compose, ranks.fetch, ranks.versions, sizing.devices),
    *(cluster.clock, cluster.network, cluster.filesystem, cluster.ports),
    *(models.tokenizer, samples.data, samples.reward, models.weights, models.layers),
    *(sizing.plan, sizing.space, samples.engine),
)
ALWAYS = ("ranks", "config", "hub")  # all others need them


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The items to run, and the output file."""

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

    def items(self) -> list[framework.Item]:
        """The chosen items in their order; the engine only where it was asked for."""
        with_engine = self.with_engine or "engine" in self.only
        chosen = [item for item in ITEMS if not self.only or item.name in (*ALWAYS, *self.only)]
        return [item for item in chosen if with_engine or item is not samples.engine]


def preflight(name: str, overrides: Sequence[str], options: Options, *, end: Callable[[int], Any] = os._exit) -> int:
    """Check the requirements of the config `name` with `overrides` on the started ranks; 0 if the job may start.

    Every rank calls it. Rank 0 prints a row of the table as soon as an item has ended, for whoever waits and for the log of a killed job.
    Raises ConfigError, exit code 2, that names the fatal findings; if a normal exit could block for ever (a check hangs in an
    uninterruptible call, another rank may hang in a collective), rank 0 says the same and `end` is called with the code. Raises
    LaunchError if rank 0 is unreachable.
    """
    here = allocation.join(options.timeout_seconds or ranks.meet.timeout_seconds, os.environ)
    context = Context(allocation=here, name=name, overrides=tuple(overrides), with_engine=options.with_engine)
    out = framework.console()

    def progress(item: str, finding: Finding) -> None:
        framework.show({item: finding}, out, has_header=item == ITEMS[0].name)

    runner = Runner(context, timeout_seconds=options.timeout_seconds, progress=progress if here.rank == 0 else None)
    findings = dict(runner.run(options.items()))
    if not options.only and "engine" not in findings:
        findings["engine"] = Finding(level=Level.not_run, found="builds the model and samples from it", advice="ask for it with --engine")
        if here.rank == 0:
            progress("engine", findings["engine"])
    if here.rank == 0 and options.json_path is not None:
        options.json_path.write_text(framework.to_json(name, findings))
    verdict = f"{name}: {framework.summary(findings)}"
    is_fatal = any(finding.level is Level.fatal for finding in findings.values())
    here.leave([rank for rank in range(here.size) if rank not in runner.lost])
    code = ExitCode.refused if is_fatal else ExitCode.done
    if runner.has_hung or runner.lost or (is_fatal and here.size > 1):
        sys.stdout.flush()
        (outcomes.fail if is_fatal and here.rank == 0 else outcomes.record)(os.environ, code, verdict)
        sys.stderr.flush()
        end(code)
    elif is_fatal:
        raise ConfigError(verdict)
    elif here.rank == 0:
        out.print(Text(verdict))
    launch.shutdown()
    return code
