"""How each rank of a component ended, as the ranks themselves say it. Standard library only.

`srun` reports one code for all tasks of a step: with `--kill-on-bad-exit` mostly 137, of a task that it killed itself, and after the loss
of a node even 0. So a rank that leaves writes `<rank>.json` into the directory that ALIGNER_OUTCOMES names (set by the conductor, new for
every start of a component). A rank that was killed leaves nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.cluster.exit_codes import ExitCode

VARIABLE = "ALIGNER_OUTCOMES"
# What one rank says outweighs what the others made of its end: a refusal explains the broken connections around it.
_PRECEDENCE = (ExitCode.refused, ExitCode.halted, ExitCode.failed, ExitCode.stopped, ExitCode.done)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One rank's end: exit code, the message of its error (empty without one), Unix time."""

    rank: int
    code: int
    message: str = ""
    time: float = 0.0


def record(environ: Mapping[str, str], code: int, message: str = "") -> None:
    """Write this rank's outcome where ALIGNER_OUTCOMES asks for it. A directory that cannot be written is reported, and nothing more."""
    if not environ.get(VARIABLE):
        return
    rank = int(environ.get("SLURM_PROCID", environ.get("RANK", "0")))
    outcome = Outcome(rank=rank, code=int(code), message=message, time=time.time())
    path = Path(environ[VARIABLE]) / f"{rank}.json"
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(outcome)) + "\n")
        os.replace(temporary, path)
    except OSError as error:  # the process is leaving with an error of its own, which must be what is seen
        print(f"warning: {path}: cannot record this rank's end: {error}", flush=True)


def read(directory: Path) -> list[Outcome]:
    """What the ranks wrote, by rank; a file that is not whole (a full disk) counts as nothing said."""
    found = []
    for path in directory.glob("*.json"):
        try:
            found.append(Outcome(**json.loads(path.read_text())))
        except (ValueError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.rank)


def decisive(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome that explains a component's end: the gravest code, of those the first in time; None where nothing was said."""
    ranked = {code: place for place, code in enumerate(_PRECEDENCE)}
    return min(outcomes, key=lambda outcome: (ranked.get(outcome.code, ranked[ExitCode.failed]), outcome.time), default=None)
