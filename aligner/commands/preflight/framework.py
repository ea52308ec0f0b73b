"""Items of the preflight: what some ranks observe, what rank 0 concludes, and the runner that leaves no rank waiting for another.

An item is a function with the decorator `item`; a second function, with `ITEM.judged`, turns the observations of all ranks into a
`Finding`. Findings are printed as a table for people or as JSON for programs.

The `Runner` runs the items in order on all ranks. A check runs in its own thread and has a deadline. A hanging check (a file system that
does not answer, a collective without its partner) is abandoned and reported with its position in the code; the process ends without it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from functools import partial
from textwrap import shorten
from typing import Any, TypeVar, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aligner.commands.preflight.allocation import Abandoned, Allocation
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.parallel.agreement import rank_list
from aligner.reporting.formats import seconds
from aligner.run.settings import JobRun

T = TypeVar("T")
Judge = TypeVar("Judge", bound=Callable[..., "Finding"])

THREAD_MARGIN_SECONDS = 3.0  # waits inside a check end first, with a more precise message
ANSWER_MARGIN_SECONDS = 5.0  # rank 0 waits this much longer for the answers
VERDICT_MARGIN_SECONDS = 15.0  # the other ranks wait this much longer for rank 0's verdict
GRACE_SECONDS = 5.0  # for the other ranks once one has failed
_POLL_SECONDS = 0.5
_SHOWN_FAILURES = 3  # different ones in a finding
_SHOWN_CHARACTERS = 300  # of a finding in the last line


class Level(str, Enum):
    """The result of an item. Only `fatal` changes the exit code."""

    ok = "ok"
    warning = "warning"
    fatal = "fatal"
    not_run = "not run"


class Where(str, Enum):
    every_rank = "every rank"
    every_node = "every node"  # the first rank of each
    first_rank = "first rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one item: `found` in a few lines, `advice` for the user, `figures` for programs."""

    level: Level
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(slots=True)
class Context:
    """Inputs of a check. `job`, the composed config, is set once the item `config` has run."""

    allocation: Allocation
    name: str  # of the file in conf/
    overrides: tuple[str, ...]
    job: JobRun | None = None
    findings: dict[str, Finding] = field(default_factory=dict)  # of the items before this one

    @property
    def config(self) -> JobRun:
        """The composed config. Raises ConfigError if composing it failed."""
        if self.job is None:
            raise ConfigError(f"the config {self.name} could not be composed")
        return self.job


def _finding(level: Level, found: str, advice: str = "", figures: Mapping[str, float] | None = None) -> Finding:
    return Finding(level=level, found=found, advice=advice, figures=figures or {})


ok, warning, fatal = (partial(_finding, level) for level in (Level.ok, Level.warning, Level.fatal))


@dataclass(slots=True, eq=False)
class Item:
    """One check: some ranks `observe`, and rank 0 judges the observations, by rank. `observe` returns a JSON value or a dataclass of such
    values; any exception is fatal. An item is skipped if one that it `needs` was fatal or skipped for that reason."""

    name: str  # for --only
    where: Where
    observe: Callable[[Context], Any]
    timeout_seconds: float
    needs: tuple[str, ...] = ()
    advice: str = "fix this and start again"  # if a rank fails to observe
    judge: Callable[[Context, Mapping[int, Any]], Finding] = lambda context, seen: ok("")

    def judged(self, judge: Judge) -> Judge:
        """Decorator of the function that judges the observations."""
        self.judge = judge
        return judge

    def loaded(self, observation: Any) -> Any:
        """An observation that has been JSON; `observe`'s return annotation is its type."""
        kind = get_type_hints(self.observe)["return"]
        return kind(**observation) if is_dataclass(kind) else observation


def item(
    name: str, where: Where, *, seconds: float, needs: tuple[str, ...] = (), advice: str = "fix this and start again"
) -> Callable[[Callable[[Context], Any]], Item]:
    """Decorator of the function that observes."""
    return lambda observe: Item(name, where, observe, seconds, needs, advice)


def agree(
    context: Context,
    seen: Mapping[int, T],
    text: Callable[[T, T], str],
    advice: str,
    *,
    of: Callable[[T], Any] = lambda one: one,
    figures: Mapping[str, float] | None = None,
) -> Finding | None:
    """None if what matters `of` the observations is the same on all ranks; else fatal: the ranks, then `text(theirs, rank 0's)`."""
    others = [rank for rank, one in seen.items() if of(one) != of(seen[0])]
    return fatal(f"{who(context.allocation, others)}{text(seen[others[0]], seen[0])}", advice, figures) if others else None


def who(allocation: Allocation, ranks: Sequence[int]) -> str:
    """Ranks with their nodes, for a person: `rank 3 on n2`, `ranks 0-7 on n1, n2`, `all ranks`."""
    if len(ranks) == allocation.world.world_size > 1:
        return "all ranks"
    nodes = list(dict.fromkeys(allocation.node_of(rank) for rank in sorted(ranks)))
    shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")
    return f"{rank_list(ranks)} on {shown}"


_STYLES = {Level.ok: "green", Level.warning: "yellow", Level.fatal: "bold red", Level.not_run: "dim"}


def show(findings: Mapping[str, Finding], out: Console, *, has_header: bool = True) -> None:
    """Print these rows of the table, one by one or all at once: the columns have fixed widths."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for width, justify in ((10, "left"), (7, "left"), (7, "right")):
        table.add_column(width=width, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(overflow="fold")
    if has_header:
        table.add_row("item", "", "time", "found, and what to do", style="bold")
    for item, finding in findings.items():
        level = Text(finding.level.value, style=_STYLES[finding.level])
        told = Text("\n".join(filter(None, [finding.found, finding.advice and f"-> {finding.advice}"])))
        table.add_row(item, level, seconds(finding.seconds) if finding.seconds else "", told)
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")  # logs keep no columns of blanks
    out.file.flush()


def summary(findings: Mapping[str, Finding]) -> str:
    """One line: `ready`, or every obstacle with its advice."""
    fatal = {name: finding for name, finding in findings.items() if finding.level is Level.fatal}
    warnings = [name for name, finding in findings.items() if finding.level is Level.warning]
    noted = f" ({len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}: {', '.join(warnings)})" if warnings else ""
    told = [f"{name}: {shorten(one.found, _SHOWN_CHARACTERS)}{f' -> {one.advice}' if one.advice else ''}" for name, one in fatal.items()]
    return f"not ready: {'; '.join(told)}{noted}" if fatal else f"ready{noted}"


def to_json(name: str, findings: Mapping[str, Finding]) -> str:
    """Everything. Keys keep their names and meaning in later versions; sizes are in bytes, times in seconds, unless the key has a unit."""
    tree = {
        "config": name,
        "ready": all(finding.level is not Level.fatal for finding in findings.values()),
        "items": {
            item: asdict(finding) | {"level": finding.level.value, "figures": dict(finding.figures)} for item, finding in findings.items()
        },
    }
    return json.dumps(tree, indent=2) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One rank's answer for an item: an observation as a JSON value, or the failure."""

    observation: Any = None
    failure: str = ""
    abandoned: bool = False  # stopped because another rank had failed


class Runner:
    def __init__(self, context: Context, *, timeout_seconds: float = 0.0, progress: Callable[[str, Finding], None] | None = None) -> None:
        """`timeout_seconds` above 0 replaces the timeout of every item; `progress` is called on rank 0 after each item."""
        self.context = context
        self.has_hung = False  # a check of this process is still running: exit without waiting for it
        self.lost: list[int] = []  # ranks that did not answer; no further item can run on all ranks
        self._timeout_seconds = timeout_seconds
        self._progress = progress

    def run(self, items: Sequence[Item]) -> dict[str, Finding]:
        """All items, in order; every rank calls it with the same items. Raises LaunchError on a rank that has lost rank 0."""
        chosen, findings = {item.name for item in items}, self.context.findings
        for item in items:
            missing = [name for name in item.needs if name in chosen and findings[name].level in (Level.fatal, Level.not_run)]
            if missing or self.lost:
                reason = f"needs {', '.join(missing)}" if missing else "a rank was lost"
                finding = Finding(level=Level.not_run, found=reason)
            else:
                finding = self._run(item)
            findings[item.name] = finding
            if self._progress is not None:
                self._progress(item.name, finding)
        return findings

    def _run(self, item: Item) -> Finding:
        here, started = self.context.allocation, time.monotonic()
        timeout = self._timeout_seconds or item.timeout_seconds
        here.begin(item.name, timeout)
        takes_part = here.rank in participants(self.context, item)
        answer = self._observe(item, timeout) if takes_part else Answer()
        if answer.failure:
            here.put("failed", here.rank)
        if takes_part:
            here.put(f"answer/{here.rank}", asdict(answer))
        if here.rank == 0:
            finding = replace(self._conclude(item), seconds=time.monotonic() - started)
            here.put("verdict", asdict(finding) | {"lost": self.lost})
            return finding
        return self._await_verdict(item, answer)

    def _observe(self, item: Item, timeout: float) -> Answer:
        here = self.context.allocation
        try:
            observed = within(timeout + THREAD_MARGIN_SECONDS, partial(item.observe, self.context), partial(here.has, "failed"))
        except Abandoned:
            return Answer(abandoned=True)
        except Hung as error:
            self.has_hung = True
            return Answer(failure=str(error), abandoned=error.after_failure)
        except (AlignerError, OSError) as error:
            return Answer(failure=str(error))
        except Exception as error:  # not swallowed: it is fatal, and shown with its place
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Answer(failure=f"{type(error).__name__}: {error} (at {last.filename}:{last.lineno})")
        return Answer(observation=asdict(observed) if is_dataclass(observed) else observed)

    def _conclude(self, item: Item) -> Finding:
        """On rank 0: collect the answers and judge."""
        here = self.context.allocation
        expected = participants(self.context, item)
        deadline = here.deadline + THREAD_MARGIN_SECONDS + ANSWER_MARGIN_SECONDS
        found = here.answers(expected, deadline=deadline, grace_seconds=GRACE_SECONDS)
        answers = {rank: Answer(**value) for rank, value in found.items()}
        self.lost = silent = [rank for rank in expected if rank not in answers]
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure and not answer.abandoned}
        if not failures:
            failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        texts = _grouped(self.context, failures)
        if silent and here.nodes:  # else they have not met, and the failure says who is missing
            texts.append(f"{who(here, silent)}: no answer (its process is dead, or hangs in an uninterruptible call)")
        if texts:
            return Finding(level=Level.fatal, found="; ".join(texts), advice=item.advice)
        observations = {rank: item.loaded(answer.observation) for rank, answer in answers.items() if not answer.abandoned}
        try:
            return item.judge(self.context, observations)
        except AlignerError as error:
            return Finding(level=Level.fatal, found=str(error), advice=item.advice)

    def _await_verdict(self, item: Item, answer: Answer) -> Finding:
        here = self.context.allocation
        margin = THREAD_MARGIN_SECONDS + ANSWER_MARGIN_SECONDS + VERDICT_MARGIN_SECONDS
        verdict = here.get("verdict", deadline=here.deadline + margin, what=f"rank 0's verdict on {item.name}", heeds_failure=False)
        self.lost = verdict.pop("lost")
        finding = Finding(**verdict | {"level": Level(verdict["level"])})
        if here.rank in self.lost:
            raise LaunchError(f"rank {here.rank} on {here.node} timed out in {item.name}; rank 0 continued without it")
        if answer.failure and finding.level is not Level.fatal:
            raise LaunchError(f"rank {here.rank} on {here.node}, failed, and rank 0 did not notice: {answer.failure}")
        return finding


def participants(context: Context, item: Item) -> list[int]:
    if item.where is Where.first_rank:
        return [0]
    return context.allocation.leaders() if item.where is Where.every_node else list(range(context.allocation.size))


def _grouped(context: Context, failures: Mapping[int, str]) -> list[str]:
    """Equal failures in one line, with the ranks that had them."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    is_plain = context.allocation.size == 1 or not context.allocation.nodes
    lines = [text if is_plain else f"{who(context.allocation, members)}: {text}" for text, members in ranks.items()]
    return lines[:_SHOWN_FAILURES] + ([f"and {len(lines) - _SHOWN_FAILURES} other failures"] if len(lines) > _SHOWN_FAILURES else [])


class Hung(Exception):
    """A check that did not return; `after_failure` if another rank had failed before."""

    def __init__(self, text: str, *, after_failure: bool) -> None:
        super().__init__(text)
        self.after_failure = after_failure


def within(seconds: float, action: Callable[[], Any], has_failed_elsewhere: Callable[[], bool]) -> Any:
    """Run `action` in a thread; returns or raises as it does. Raises Hung on timeout, or soon after another rank's failure."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # handed to the waiting thread, which raises it
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="preflight", daemon=True)  # a daemon: one that hangs does not keep the process alive
    started = time.monotonic()
    deadline, failed = started + seconds, False
    thread.start()
    while True:
        if wait([outcome], max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))).done:
            return outcome.result()
        if not failed and has_failed_elsewhere():
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() >= deadline:
            raise Hung(f"did not finish within {time.monotonic() - started:.0f} s; it was {position(thread)}", after_failure=failed)


def position(thread: threading.Thread) -> str:
    """A running thread's position: its innermost frame, and the innermost one of this package."""
    frame = sys._current_frames().get(thread.ident)  # type: ignore[arg-type]
    if frame is None:
        return "about to return"
    stack = traceback.extract_stack(frame)
    ours = [place for place in stack if "/aligner/" in place.filename and place.filename != __file__]
    places = dict.fromkeys(f"at {place.filename}:{place.lineno} ({place.name})" for place in (stack[-1], *ours[-1:]))
    return ", called ".join(places)
