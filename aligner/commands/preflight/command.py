"""`aligner preflight`: every rank of an allocation calls it, rank 0 prints.

A `Runner` runs the items one after the other on all ranks: each has a deadline, and no failure of one rank leaves another waiting.

A check runs in its own thread. A hanging check (a file system that does not answer, a collective without its partner) is
abandoned and reported with its position in the code; the process ends without it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from aligner.cluster import outcomes
from aligner.cluster.exit_codes import ExitCode
from aligner.commands.preflight import allocation, items
from aligner.commands.preflight.allocation import Abandoned
from aligner.commands.preflight.clock import CLOCK
from aligner.commands.preflight.engine import ENGINE
from aligner.commands.preflight.filesystem import FILESYSTEM
from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.commands.preflight.layers import LAYERS
from aligner.commands.preflight.network import NETWORK
from aligner.commands.preflight.ports import PORTS
from aligner.commands.preflight.ranks import CONFIG, HUB, RANKS, VERSIONS
from aligner.commands.preflight.samples import DATA, REWARD
from aligner.commands.preflight.sizing import DEVICES, PLAN, SPACE
from aligner.commands.preflight.tokenizers import TOKENIZER
from aligner.commands.preflight.weights import WEIGHTS
from aligner.errors import AlignerError, ConfigError, LaunchError
from aligner.parallel import launch

THREAD_MARGIN_SECONDS = 3.0  # waits inside a check end first, and say more
ANSWER_MARGIN_SECONDS = 5.0  # rank 0 waits so much longer for the answers
VERDICT_MARGIN_SECONDS = 15.0  # and the others for rank 0's verdict
GRACE_SECONDS = 5.0  # for the other ranks once one has failed
_POLL_SECONDS = 0.5
_SHOWN = 3  # different failures that a finding lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One rank's answer on an item: an observation, or why there is none."""

    observation: dict[str, Any] | None = None
    failure: str = ""
    abandoned: bool = False  # it stopped because another rank failed


class Runner:
    """Runs items in order and keeps their results."""

    def __init__(self, context: Context, *, timeout_seconds: float = 0.0, progress: Callable[[str, Finding], None] | None = None) -> None:
        """`timeout_seconds` above 0 replaces the items' own; `progress` is called on rank 0 after each."""
        self.context = context
        self.has_hung = False  # a check of this process still runs: leave without waiting for it
        self.lost: list[int] = []  # ranks that did not answer: nothing can be asked of all ranks any more
        self._timeout_seconds = timeout_seconds
        self._progress = progress

    def run(self, items: Sequence[Item]) -> dict[str, Finding]:
        """All items, in order; every rank calls it with the same ones. Raises LaunchError on a rank cut off from rank 0."""
        chosen = {item.name for item in items}
        for item in items:
            missing = [name for name in item.needs if name in chosen and not self._is_passed(name)]
            if missing or self.lost:
                reason = f"needs {', '.join(missing)}" if missing else "a rank was lost"
                finding = Finding(level=Level.not_run, found=reason)
            else:
                finding = self._run(item)
            self.context.findings[item.name] = finding
            if self._progress is not None:
                self._progress(item.name, finding)
        return self.context.findings

    def _is_passed(self, name: str) -> bool:
        return self.context.findings[name].level in (Level.ok, Level.warning)

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
            observed = within(timeout + THREAD_MARGIN_SECONDS, lambda: item.observe(self.context), lambda: here.has("failed"))
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
        return Answer(observation=asdict(observed))

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
            texts.append(f"{who(here, silent)}: no answer (its process is dead, or hangs where it cannot be interrupted)")
        if texts:
            return Finding(level=Level.fatal, found="; ".join(texts), advice=item.advice)
        observations = {rank: item.kind(**answer.observation) for rank, answer in answers.items() if answer.observation is not None}
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
            raise LaunchError(f"rank {here.rank} on {here.node} answered too late for {item.name}; rank 0 went on without it")
        if answer.failure and finding.level is not Level.fatal:
            raise LaunchError(f"rank {here.rank} on {here.node}, of which rank 0 does not know: {answer.failure}")
        return finding


def participants(context: Context, item: Item) -> list[int]:
    """The ranks that observe."""
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
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} other failures"] if len(lines) > _SHOWN else [])


class Hung(Exception):
    """A check that did not return; `after_failure` if another rank had failed before."""

    def __init__(self, text: str, *, after_failure: bool) -> None:
        super().__init__(text)
        self.after_failure = after_failure


def within(seconds: float, action: Callable[[], Any], has_failed_elsewhere: Callable[[], bool]) -> Any:
    """Run `action` in a thread; returns or raises as it does. Raises Hung on timeout, or soon after another rank's failure."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((action(), None))
        except BaseException as error:  # handed to the waiting thread, which raises it
            outcome.put((None, error))

    thread = threading.Thread(target=run, name="preflight", daemon=True)  # a daemon: one that hangs does not keep the process alive
    started = time.monotonic()
    deadline, failed = started + seconds, False
    thread.start()
    while True:
        try:
            result, error = outcome.get(timeout=max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))
            break
        except queue.Empty:
            if not failed and has_failed_elsewhere():
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() >= deadline:
                text = f"did not finish within {time.monotonic() - started:.0f} s; it was {position(thread)}"
                raise Hung(text, after_failure=failed) from None
    if error is not None:
        raise error
    return result


def position(thread: threading.Thread) -> str:
    """A running thread's position: its innermost frame, and the innermost one of this package."""
    frame = sys._current_frames().get(thread.ident)  # type: ignore[arg-type]
    if frame is None:
        return "about to return"
    stack = traceback.extract_stack(frame)
    ours = [place for place in stack if "/aligner/" in place.filename and "/preflight/runner" not in place.filename]
    places = dict.fromkeys(f"at {place.filename}:{place.lineno} ({place.name})" for place in (stack[-1], *ours[-1:]))
    return ", called ".join(places)


ITEMS = (
    RANKS,
    CONFIG,
    HUB,
    VERSIONS,
    DEVICES,
    CLOCK,
    NETWORK,
    FILESYSTEM,
    PORTS,
    TOKENIZER,
    DATA,
    REWARD,
    WEIGHTS,
    LAYERS,
    PLAN,
    SPACE,
    ENGINE,
)
ALWAYS = ("ranks", "config", "hub")  # the others stand on them


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

    def items(self) -> list[Item]:
        """The chosen items in their order; the engine only where it was asked for."""
        with_engine = self.with_engine or "engine" in self.only
        chosen = [item for item in ITEMS if not self.only or item.name in (*ALWAYS, *self.only)]
        return [item for item in chosen if with_engine or item is not ENGINE]


def preflight(name: str, overrides: Sequence[str], options: Options, *, end: Callable[[int], Any] = os._exit) -> int:
    """Check the requirements of the config `name` with `overrides` on the started ranks; 0 if the job may start.

    Every rank calls it. Rank 0 prints a row of the table as soon as an item has ended, for whoever waits and for the log of a killed job.
    Raises ConfigError, exit code 2, that names the fatal findings; if a normal exit could block for ever (a check hangs in an
    uninterruptible call, another rank may hang in a collective), rank 0 says the same and `end` is called with the code. Raises
    LaunchError if rank 0 is unreachable.
    """
    here = allocation.join(options.timeout_seconds or RANKS.timeout_seconds, os.environ)
    context = Context(allocation=here, name=name, overrides=tuple(overrides), with_engine=options.with_engine)
    out = items.console()

    def progress(item: str, finding: Finding) -> None:
        items.show({item: finding}, out, has_header=item == ITEMS[0].name)

    runner = Runner(context, timeout_seconds=options.timeout_seconds, progress=progress if here.rank == 0 else None)
    findings = dict(runner.run(options.items()))
    if not options.only and "engine" not in findings:
        findings["engine"] = Finding(level=Level.not_run, found="builds the model and samples from it", advice="ask for it with --engine")
        if here.rank == 0:
            progress("engine", findings["engine"])
    if here.rank == 0 and options.json_path is not None:
        options.json_path.write_text(items.to_json(name, findings))
    verdict = f"{name}: {items.summary(findings)}"
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
