"""Runs `aligner plan` commands one after the other in a process of their own; writes what each printed and returned.

usage: plan_commands_job.py COMMANDS OUTPUT      (COMMANDS: a JSON object of argument lists by name)
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from aligner import cli


def weigh_once() -> None:
    """What one command has built and weighed the next one need not: most are of the same model. The planner's own cache, and its key for
    layers, which a command forgets at its end."""
    from aligner.planner import dry_run
    from aligner.planner.estimate import Scales

    known: dict[str, dict] = {}
    begin, build = Scales.__init__, dry_run.shard_parameters

    def begin_knowing(self: Scales, device) -> None:
        begin(self, device)
        self._known = known.setdefault(device.value, {})

    def build_once(component, stage: int):
        key = repr((component.architecture, component.head, component.model, component.parallel, stage))
        return built[key] if key in built else built.setdefault(key, build(component, stage))

    built: dict[str, list] = {}
    Scales.__init__, dry_run.shard_parameters = begin_knowing, build_once


def main() -> None:
    weigh_once()
    results = {}
    for name, arguments in json.loads(sys.argv[1]).items():
        out, err = io.StringIO(), io.StringIO()
        report = Path(sys.argv[2]).with_name(f"{name}.json")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["plan", *arguments, "--json", str(report)])
        plan = json.loads(report.read_text()) if report.exists() else None
        results[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "plan": plan}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
