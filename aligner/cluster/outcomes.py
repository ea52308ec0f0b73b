"""How each rank of a component ended, by its own record, and what a run's exit code means to its launcher. Standard library only.

`srun` reports one code for all tasks of a step: mostly 137 from a task that it killed itself, and 0 after the loss of a node. So a rank
that exits writes `<rank>.json` into the directory ALIGNER_OUTCOMES, new for every start of a component. A killed rank leaves nothing.

A program succeeds only if its function returns: see `unless_ended_early`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from aligner.errors import AlignerError, ConfigError, DataError, RunHalted
from aligner.files import publish


class ExitCode(IntEnum):
    """Codes of a component's processes, of the local launcher and of a Slurm job. Any other code is a crash: restart, within the limits."""

    done = 0
    failed = 1  # a crash, or an error that a restart may fix
    refused = 2  # a mistake in the request (settings, data, preflight): a restart would meet it again
    stopped = 75  # stopped in order before the last step, with a checkpoint: start again to continue
    halted = 78  # ended for good before the last step (numbers went bad, no progress): a person has to look


def exit_code_of(error: AlignerError) -> ExitCode:
    """The exit code of a program ended by this error."""
    if isinstance(error, (ConfigError, DataError)):
        return ExitCode.refused
    return ExitCode.halted if isinstance(error, RunHalted) else ExitCode.failed


VARIABLE = "ALIGNER_OUTCOMES"
_FIRST_RANK_SECONDS = 3.0
# Of a process that trains or writes, in a message about its end.
TOO_EARLY = "by itself before the last step, without done.json: user code, such as a reward function, most likely called exit"
# One rank's own record outweighs the reactions of others: a refusal explains the broken connections around it.
_PRECEDENCE = (ExitCode.refused, ExitCode.halted, ExitCode.failed, ExitCode.stopped, ExitCode.done)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One rank's end: exit code, the message of its error (empty without one), Unix time."""

    rank: int
    code: int
    message: str = ""
    time: float = 0.0


def record(environ: Mapping[str, str], code: int, message: str = "") -> None:
    """Write this rank's outcome to ALIGNER_OUTCOMES, if set. A write failure is only reported."""
    if not environ.get(VARIABLE):
        return
    outcome = Outcome(rank=rank_of(environ), code=int(code), message=message, time=time.time())
    path = Path(environ[VARIABLE]) / f"{outcome.rank}.json"
    try:
        publish(path, lambda new: new.write_text(json.dumps(asdict(outcome)) + "\n"))
    except OSError as error:  # the process is leaving with an error of its own, which must be what is seen
        print(f"warning: {path}: cannot record this rank's end: {error}", flush=True)


def fail(environ: Mapping[str, str], code: int, message: str) -> None:
    """Print on stderr why this rank ends, and record it. Of the ranks that torchrun started on a machine, the first one prints: the others
    mostly end for the same reason, and wait until torchrun ends them."""
    if collected := environ.get("TORCHELASTIC_ERROR_FILE"):
        if environ.get("LOCAL_RANK", "0") != "0":
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_FIRST_RANK_SECONDS)
        # In whole seconds, of which the earliest is the cause: before those of the ranks that are ended because of it.
        reason = {"message": {"message": message, "extraInfo": {"timestamp": f"{int(time.time()) - 1}"}}}
        try:
            Path(collected).write_text(json.dumps(reason))
        except OSError as error:
            print(f"warning: {collected}: cannot record for torchrun why this rank ends: {error}", file=sys.stderr, flush=True)
    print(f"error: {message}", file=sys.stderr, flush=True)
    record(environ, code, message)


@contextmanager
def unless_ended_early(environ: Mapping[str, str]) -> Iterator[None]:
    """Meanwhile an exit with code 0 by user code becomes one with code 1; its place is printed and recorded. Exits by native code are
    invisible here: launchers look for `done.json`."""
    process, leave = os.getpid(), os._exit

    def refuse(where: str) -> int:
        message = f"rank {rank_of(environ)} was ended with exit code 0 before its work was done, by {where}"
        print(f"error: {message}", file=sys.stderr, flush=True)
        record(environ, ExitCode.failed, message)
        return ExitCode.failed

    def leave_early(status: int) -> None:
        if status == 0 and os.getpid() == process:
            caller = sys._getframe(1)
            status = int(refuse(f"os._exit in {caller.f_code.co_filename}:{caller.f_lineno} ({caller.f_code.co_name})"))
        leave(status)

    os._exit = leave_early
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            record(environ, end.code if isinstance(end.code, int) else ExitCode.failed)
            raise
        last = traceback.extract_tb(end.__traceback__)[-1]
        raise SystemExit(int(refuse(f"sys.exit in {last.filename}:{last.lineno} ({last.name})"))) from end
    finally:
        os._exit = leave


def rank_of(environ: Mapping[str, str]) -> int:
    """This process's rank, by its launcher's variables."""
    return int(environ.get("SLURM_PROCID", environ.get("RANK", "0")))


def read(directory: Path) -> list[Outcome]:
    """The ranks' outcomes, by rank; an incomplete file (a full disk) counts as missing."""
    found = []
    for path in directory.glob("*.json"):
        try:
            found.append(Outcome(**json.loads(path.read_text())))
        except (ValueError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.rank)


def decisive(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome that explains a component's end: the gravest code, the earliest among equals; None without outcomes."""
    ranked = {code: place for place, code in enumerate(_PRECEDENCE)}
    return min(outcomes, key=lambda outcome: (ranked.get(outcome.code, ranked[ExitCode.failed]), outcome.time), default=None)
