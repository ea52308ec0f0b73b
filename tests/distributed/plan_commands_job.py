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


def main() -> None:
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
