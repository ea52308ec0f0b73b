"""Rewards for mathematical answers (GSM8K, MATH and similar sets), checked by math-verify (https://github.com/huggingface/Math-Verify).

Separate processes check (aligner.rewards.maths_worker), because a thread cannot be interrupted. Requires `aligner[rewards]`.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path

from aligner.errors import ConfigError
from aligner.rewards.forms import Factory, TextFunction

MARK = "####"  # in GSM8K the answer follows it
START = "import sys; sys.path.insert(0, {package!r}); from aligner.rewards.maths_worker import main; main({descriptor})"
START_SECONDS = 120.0  # sympy takes seconds to import, more where many start at once
WALL_TIMES, GRACE_SECONDS = 10, 10.0  # time for a process that ignores its own alarm, on a machine under load, before it is killed
EXCERPT_CHARACTERS = 120


class CheckFailed(Exception):
    """A checking process ended or hung, with the reason."""


@Factory
def maths(timeout_seconds: float = 2.0, num_workers: int = 2) -> TextFunction:
    """Factory: 1 if the response's final answer equals the prompt's, else 0.

    The prompt's answer is the text after its last `####`, else all of it: a number (with commas, a currency, a unit or `%`) or a LaTeX
    expression. The response's is the text after its last `####`, else its last `\\boxed{...}`, else the last number or expression.
    An answer whose check takes more than `timeout_seconds` of CPU time, or gigabytes of memory, counts as wrong and is reported: the
    policy wrote it, so it must not be able to stop the run or to exclude its sample.

    Raises ValueError for a prompt without a valid answer, ConfigError without math-verify.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("aligner.rewards.maths requires math-verify, which is not installed: pip install 'aligner[rewards]'")
    if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
        raise ValueError(f"timeout_seconds is {timeout_seconds}, expected a finite number above 0")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}, expected at least 1")
    checkers = _Checkers(num_workers, timeout_seconds)

    def reward(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
        golds = [final_answer(answer) if answer is not None else "" for answer in answers]
        if missing := [prompt for prompt, gold in zip(prompts, golds, strict=True) if not gold]:
            raise ValueError(f"the prompt {missing[0][:EXCERPT_CHARACTERS]!r} has no answer to compare with")
        return checkers.check(golds, responses)

    return reward


def final_answer(text: str) -> str:
    """The text after the last `####`, else all of it; numbers without commas and currency."""
    answer = text.rpartition(MARK)[2].strip()
    number = answer.replace(",", "").lstrip("$").strip()
    return number if re.fullmatch(r"[-+]?\d+(\.\d+)?", number) else answer


class _Checkers:
    """Checking processes, started on demand; thread-safe."""

    def __init__(self, count: int, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._idle: queue.SimpleQueue[_Checker | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)  # a place for a process
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="maths")

    def check(self, golds: list[str], responses: list[str]) -> list[float]:
        """1 or 0 each."""
        verdicts = list(self._threads.map(self._check, golds, responses))
        undecided = [i for i, verdict in enumerate(verdicts) if verdict is None]
        if undecided:
            excerpt = responses[undecided[0]][-EXCERPT_CHARACTERS:]
            print(
                f"maths: {len(undecided)} of {len(golds)} answers could not be checked within "
                f"timeout_seconds={self._timeout_seconds:g} and count as wrong; the first response ends {excerpt!r}",
                flush=True,
            )
        return [float(bool(verdict)) for verdict in verdicts]

    def _check(self, gold: str, response: str) -> bool | None:
        """Whether it is right; None if undecided in time. Raises ValueError for an invalid gold answer."""
        checker = self._idle.get()
        try:
            if checker is None:
                checker = _Checker()
            text = response.rpartition(MARK)[2] if MARK in response else response
            verdict = checker.ask(
                {"gold": gold, "response": text, "seconds": self._timeout_seconds}, WALL_TIMES * self._timeout_seconds + GRACE_SECONDS
            )
        except CheckFailed as error:
            if checker is None or not checker.has_answered:  # it never worked, so the policy is not to blame
                raise
            print(f"maths: {error}; a new checking process takes its place", flush=True)
            checker.kill()
            checker, verdict = None, {"undecided": str(error)}
        except BaseException:
            if checker is not None:
                checker.kill()
            checker = None
            raise
        finally:
            self._idle.put(checker)
        if "bad_gold" in verdict:
            raise ValueError(f"the prompt's answer {gold[:EXCERPT_CHARACTERS]!r} is neither a number nor an expression")
        return verdict.get("right")


class _Checker:
    """One process. It ends with this one, when its connection is closed."""

    def __init__(self) -> None:
        """Raises CheckFailed if it does not come up."""
        package = str(Path(__file__).resolve().parents[2])
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", START.format(package=package, descriptor=theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.has_answered = False
        try:
            self.ask({"gold": "1", "response": "\\boxed{\\frac{1}{2}}", "seconds": START_SECONDS}, START_SECONDS)  # loads what is needed
        except CheckFailed:
            self.kill()
            raise
        self.has_answered = True

    def ask(self, question: dict[str, object], seconds: float) -> dict[str, bool | str]:
        """Its answer. Raises CheckFailed if none comes in time."""
        try:
            self._connection.send(question)
            if self._connection.poll(seconds):
                answer: dict[str, bool | str] = self._connection.recv()
                return answer
        except (OSError, EOFError) as error:
            raise CheckFailed("the checking process ended without an answer") from error
        raise CheckFailed(f"the checking process gave no answer within {seconds:g} s")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
