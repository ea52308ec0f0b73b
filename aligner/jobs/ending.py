"""How a component that trains ends: done, or stopped before its last step."""

from __future__ import annotations

import json
import os
import time

from aligner.cluster.exit_codes import ExitCode
from aligner.files import publish
from aligner.jobs.session import Session
from aligner.parallel.collectives import from_rank_0


def conclude(here: Session, last_step: int, max_steps: int) -> ExitCode:
    """The exit code of a run that came to `last_step` and has exported its result; `done.json` after the last one. Every rank calls it."""
    if last_step < max_steps:
        return ExitCode.stopped
    from_rank_0(lambda: _write_done(here, last_step))
    return ExitCode.done


def _write_done(here: Session, step: int) -> None:
    record = {"step": step, "run_id": here.directory.run_id(), "attempt": os.environ.get("ALIGNER_ATTEMPT", ""), "time": time.time()}
    publish(here.directory.done, lambda new: new.write_text(json.dumps(record) + "\n"))
