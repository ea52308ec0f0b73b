"""Two threads at a gate: the one that generates stands where it is held, and nobody waits for ever or for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from aligner.errors import EngineError
from aligner.rollout.engine.gate import Gate, Stopped


class Worker:
    """A thread that runs generations of `steps` steps at a gate, and writes down the version that each step is of."""

    def __init__(self, gate: Gate, *, generations: int = 1, steps: int | None = None) -> None:
        self.gate = gate
        self.seen: list[int] = []
        self.settled = 0
        self.error: Exception | None = None
        gate.expect(generations)
        self._thread = threading.Thread(target=self._run, args=(generations, steps), daemon=True)
        self._thread.start()

    def _run(self, generations: int, steps: int | None) -> None:
        version = 0
        for _ in range(generations):
            try:
                count = 0
                while steps is None or count < steps:
                    version = self.gate.between_steps(self._settle) or version
                    self.seen.append(version)
                    time.sleep(0.0005)
                    count += 1
            except EngineError as error:
                self.error = error
            finally:
                self.gate.ended()

    def _settle(self) -> None:
        self.settled += 1

    def reached(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline and self._thread.is_alive()
            time.sleep(0.0005)

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_a_held_generation_stands_and_goes_on_with_the_new_version():
    gate = Gate()
    worker = Worker(gate)
    for version in (4, 9):
        worker.reached(lambda: len(worker.seen) > 2)
        gate.hold()
        steps = len(worker.seen)
        time.sleep(0.01)
        assert len(worker.seen) == steps and worker.settled == (1 if version == 4 else 2)
        gate.release(version)
        worker.reached(lambda steps=steps: len(worker.seen) > steps)
        assert worker.seen[steps:] == [version] * len(worker.seen[steps:])
    gate.stop()
    worker.join()
    assert isinstance(worker.error, Stopped) and worker.seen == sorted(worker.seen)


def test_with_nothing_to_do_nobody_is_waited_for():
    gate = Gate(timeout_seconds=20)
    gate.drain()
    gate.hold()
    gate.release(1)
    worker = Worker(gate, generations=3, steps=2)
    gate.drain()
    assert len(worker.seen) == 6 and worker.seen[0] == 1  # what was changed before it began
    gate.hold()
    gate.release(2)
    worker.join()


def test_a_generation_that_is_about_to_begin_is_waited_for():
    gate = Gate(timeout_seconds=20)
    gate.expect()
    held = threading.Event()
    main = threading.Thread(target=lambda: (gate.hold(), held.set(), gate.release(3)), daemon=True)
    main.start()
    assert not held.wait(0.02)  # the thread that is to generate has not come yet: it could begin any moment
    assert gate.between_steps(lambda: None) == 3 and held.is_set()
    gate.ended()
    main.join(20)


def test_without_whole_weights_it_ends():
    gate = Gate()
    worker = Worker(gate)
    gate.hold()
    gate.release(2, broken="layer 3 is not finite")
    worker.join()
    assert "no whole weights to continue with: layer 3 is not finite" in str(worker.error)
    gate.drain()


def test_every_wait_ends_and_says_what_for():
    gate = Gate(timeout_seconds=0.02)
    gate.expect()
    for wait, what in ((gate.hold, "a step of the generation"), (gate.drain, "the generations in the background to end")):
        with pytest.raises(EngineError, match=f"waited 0.02 s for {what}.*rollout.asynchronous.timeout_seconds"):
            wait()
    with pytest.raises(EngineError, match="for new weights for the generation"):
        gate.between_steps(lambda: None)  # held above, and never released
