"""`aligner preflight`: every rank of an allocation calls it; rank 0 prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from aligner.cluster import outcomes
from aligner.cluster.outcomes import ExitCode
from aligner.commands.parts import PreflightOptions
from aligner.commands.preflight import allocation, cluster, framework, models, ranks, samples, sizing
from aligner.commands.preflight.framework import Context, Finding, Level, Runner
from aligner.errors import ConfigError
from aligner.parallel import launch
from aligner.planner.report import console

ITEMS = (
    *(ranks.meet, ranks.compose, ranks.fetch, ranks.versions, sizing.devices),
    *(cluster.clock, cluster.network, cluster.filesystem, cluster.ports),
    *(models.tokenizer, samples.data, samples.reward, models.weights, models.layers),
    *(sizing.plan, sizing.space, samples.engine),
)
ALWAYS = ("ranks", "config", "hub")  # all others need them


def chosen(options: PreflightOptions) -> list[framework.Item]:
    """The requested items in their order; the engine only on request. Raises ConfigError for an item that does not exist."""
    only, names = list(filter(None, options.only.split(","))), [item.name for item in ITEMS]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: not an item; allowed: {', '.join(names)}")
    with_engine = options.engine or "engine" in only
    found = [item for item in ITEMS if not only or item.name in (*ALWAYS, *only)]
    return [item for item in found if with_engine or item is not samples.engine]


def preflight(name: str, overrides: Sequence[str], options: PreflightOptions, *, end: Callable[[int], Any] = os._exit) -> int:
    """Check the requirements of the config `name` on the started ranks; 0 if the job may start. Rank 0 prints a row as soon as an item has
    ended, so that the log of a killed job has it too. Raises ConfigError with the fatal findings; if a normal exit could block for ever (a
    check hangs in an uninterruptible call, another rank in a collective), rank 0 prints the same and `end` is called with the code."""
    items = chosen(options)
    here = allocation.join(options.timeout or ranks.meet.timeout_seconds, os.environ)
    context = Context(allocation=here, name=name, overrides=tuple(overrides))
    out = console(width=160)

    def progress(item: str, finding: Finding) -> None:
        framework.show({item: finding}, out, has_header=item == ITEMS[0].name)

    runner = Runner(context, timeout_seconds=options.timeout, progress=progress if here.rank == 0 else None)
    findings = dict(runner.run(items))
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
