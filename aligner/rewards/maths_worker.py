"""A process that checks mathematical answers with math-verify, one at a time: the only importer of math-verify.

math-verify's own time limits need the main thread of a process, and sympy can be stuck in one long computation: whoever asks kills this
process if no answer comes. Nothing heavy is imported here, torch least of all.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import signal
from functools import lru_cache
from multiprocessing.connection import Connection

from math_verify import parse, verify

MEMORY_BYTES = 4 * 2**30  # of address space: 9^9^9 would ask for more than there is

NUMBER = r"[-+]?[\d.,/]+\s*(%|[A-Za-z .]+)?"  # `3/4`, `1,000`, `18 dollars`


class OutOfTime(BaseException):
    """Not an Exception: math-verify catches those."""


def main(descriptor: int) -> None:
    """Answer {"gold", "response", "seconds"} with {"right": true or false}, {"undecided": why} or {"bad_gold": text}, until the connection
    ends.

    `seconds` are of computing, so the result does not depend on the machine's load.
    """
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes the connection
    signal.signal(signal.SIGPROF, _raise)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_judged(**connection.recv()))


def _judged(gold: str, response: str, seconds: float) -> dict[str, object]:
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        wanted = _gold(gold)
        if not wanted:
            return {"bad_gold": gold}
        return {"right": bool(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))}
    except (OutOfTime, MemoryError, RecursionError) as error:
        return {"undecided": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@lru_cache(maxsize=4096)
def _gold(text: str) -> list:
    """The parsed gold answer: a number, perhaps with a unit, or an expression, which is LaTeX without the dollars that say so."""
    forms = [text] if re.fullmatch(NUMBER, text) or "$" in text else [f"${text}$", text]
    found = (parse(form, parsing_timeout=None, fallback_mode="no_fallback") for form in forms)
    return next(filter(None, found), [])


def _raise(*_: object) -> None:
    raise OutOfTime
