"""SIGKILL at random moments of saving: the newest visible checkpoint is always whole, and is the one that its step wrote."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SAVER = Path(__file__).parent / "checkpoint_saver.py"
pytestmark = pytest.mark.timeout(400)


class Savers:
    """The parent of all savers, and what they say."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.log = (directory.parent / "saver.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(SAVER), str(directory)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.expect("ready")

    def heard(self) -> tuple[str, int]:
        """The next thing said: a word and a number (0 where there is none)."""
        line = self.process.stdout.readline().split()
        assert line, f"the savers are gone:\n{Path(self.log.name).read_text()[-3000:]}"
        return line[0], int(line[1]) if len(line) > 1 else 0

    def expect(self, word: str) -> int:
        heard, number = self.heard()
        assert heard == word, f"{heard} instead of {word}:\n{Path(self.log.name).read_text()[-3000:]}"
        return number

    def start(self, mode: str) -> tuple[int, int]:
        """(pid, the step that it resumed after and found to be what it must be)."""
        self.process.stdin.write(mode + "\n")
        return self.expect("forked"), self.expect("resumed")

    def kill(self, pid: int) -> int:
        """SIGKILL; returns the last step that it said it had saved (0: none)."""
        os.kill(pid, signal.SIGKILL)
        saved = 0
        while (heard := self.heard())[0] != "ended":
            saved = heard[1] if heard[0] == "saved" else saved
        return saved

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


@pytest.fixture
def savers(tmp_path, clean_environment) -> Iterator[Savers]:
    made = Savers(tmp_path / "run", clean_environment())
    try:
        yield made
    finally:
        made.close()


def seconds_of_a_save(savers: Savers, mode: str) -> float:
    """How long a save takes here, so that kills fall into it. Measured once it is warm."""
    pid, _ = savers.start(mode)
    for _ in range(2):
        savers.expect("saving")
        savers.expect("saved")
    start = time.monotonic()
    savers.expect("saving")
    savers.expect("saved")
    seconds = time.monotonic() - start
    savers.kill(pid)
    return seconds


@pytest.mark.parametrize(("mode", "kills"), [("sync", 50), ("async", 10)])
def test_kills_at_random_moments(mode, kills, savers, tmp_path):
    """Every saver checks the checkpoint that the killed one before it left: all files by their SHA-256, all numbers by their step."""
    moments, folder = random.Random(11), tmp_path / "run" / "checkpoints" / "policy"
    duration = seconds_of_a_save(savers, mode)
    saved, interrupted = 3, 0
    for _ in range(kills):
        pid, resumed = savers.start(mode)
        assert resumed >= saved  # what was said to be saved is there; at most one more than was said
        for _ in range(moments.randint(0, 1)):
            savers.expect("saving")
            savers.expect("saved")
        step = savers.expect("saving")
        time.sleep(moments.uniform(0.0, 1.5 * duration))
        saved = max(step - 1, savers.kill(pid))
        interrupted += bool(list(folder.glob(".writing_*")))
    pid, resumed = savers.start(mode)
    assert resumed >= saved
    savers.kill(pid)
    assert interrupted > 0  # else the kills missed the saves
    print(f"{mode}: {interrupted} of {kills} kills left a checkpoint half written; the last one is of step {resumed}")
