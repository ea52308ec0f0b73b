"""Episodes whose state is in another process, which may die: they are played again where that process has a successor.

The turns of an episode so far are repeated; what the environment then says must be what it said before. A call during which its process
died is made a second time, alone among such calls; an episode whose call ends a process twice is the culprit, and fails.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Generic, TypeVar

from aligner.environments.environment import Observation, Turn
from aligner.types import Prompt

MOST_DEATHS = 2  # of processes during one call, unless something else was their end


class FailedElsewhere(Exception):
    """A call failed in the place of its episode; the text goes behind the environment's name. `passes`: it may be temporary."""

    def __init__(self, text: str, *, passes: bool = True) -> None:
        super().__init__(text)
        self.text, self.passes = text, passes


class Died(Exception):
    """The place has gone, with all of its episodes. `is_culprit`: perhaps because of the call that was under way."""

    def __init__(self, how: str, *, is_culprit: bool = True) -> None:
        super().__init__(how)
        self.is_culprit = is_culprit


class Place(ABC):
    """Where states of episodes are; it may have gone, and then stays gone."""

    @abstractmethod
    def ask(self, episode: Held, call: Prompt | Turn, seconds: float) -> Observation | None:
        """Begin the episode with its prompt, or answer its turn. Raises FailedElsewhere for the call alone, Died for the place."""

    @abstractmethod
    def forget(self, episode: Held) -> None:
        """Drop the state of an episode, if there is one. Called at any moment, from any thread: must not block."""


@dataclass(eq=False)
class Held:
    """An episode, as it is known on this side."""

    slot: Slot[Any]
    prompt: Prompt
    place: Place | None = None
    first: Observation | None = None  # what the environment showed at the beginning, if anything
    said: list[tuple[Turn, Observation]] = field(default_factory=list)
    left: float = 0.0  # seconds of the first step's time that the reset has not used
    number: int = field(default_factory=count().__next__)

    def __del__(self) -> None:
        if self.place is not None and not sys.is_finalizing():
            self.place.forget(self)


PlaceT = TypeVar("PlaceT", bound=Place)


class Slot(Generic[PlaceT]):
    """A place, and its successors: `succeed` returns the one that it is given if that is still there, else another, which may be the first.
    It raises FailedElsewhere, and is called with the lock held."""

    def __init__(self, succeed: Callable[[PlaceT | None], PlaceT]) -> None:
        self._succeed = succeed
        self.place: PlaceT | None = None
        self.lock = threading.Lock()  # of the place
        self.alone = threading.Lock()  # held by a call that is made again
        self.episodes: weakref.WeakSet[Held] = weakref.WeakSet()  # that have begun here and not ended

    def now(self) -> PlaceT:
        """The place that is there now."""
        with self.lock:
            self.place = self._succeed(self.place)
            return self.place


class Elsewhere:
    """`aligner.environments.environment.Environment` over slots; episodes are spread over them."""

    def __init__(self, slots: Sequence[Slot[Any]], timeout_seconds: float) -> None:
        self.slots = slots
        self._seconds = timeout_seconds
        self._lock = threading.Lock()

    def reset(self, prompt: Prompt) -> Held:
        """Begin an episode where there are the fewest."""
        with self._lock:
            held = Held(min(self.slots, key=lambda one: len(one.episodes)), prompt)
            held.slot.episodes.add(held)
        started = time.monotonic()
        try:
            held.first = self._called(held, prompt)
        except BaseException:
            self.drop(held)
            raise
        held.left = max(0.0, self._seconds - (time.monotonic() - started))
        return held

    def step(self, held: Held, turn: Turn) -> Observation:
        """What follows this turn."""
        try:
            observation = self._called(held, turn)
        except BaseException:
            self.drop(held)
            raise
        assert observation is not None
        held.said.append((turn, observation))
        if observation.done or turn.is_last:
            self.drop(held)
        return observation

    def _called(self, held: Held, call: Prompt | Turn) -> Observation | None:
        deaths = 0
        while True:
            with held.slot.alone if deaths else contextlib.nullcontext():
                place = held.slot.now()
                try:
                    if held.place is not place:
                        held.place = place
                        if isinstance(call, Turn):
                            self._repeat(held, place)
                    is_first = isinstance(call, Turn) and not held.said
                    answer: Observation | None = place.ask(held, call, held.left if is_first and not deaths else self._seconds)
                    return answer
                except Died as death:
                    held.place = None
                    deaths += death.is_culprit
                    if deaths >= MOST_DEATHS:
                        raise FailedElsewhere(f"ended its process in this step, {deaths} times: {death}") from death

    def _repeat(self, held: Held, place: Place) -> None:
        """Bring the episode to where it was."""
        place.ask(held, held.prompt, self._seconds)
        for turn, said in held.said:
            again = place.ask(held, turn, self._seconds)
            if again is None or replace(again, counts=said.counts) != said:  # counts may be of time
                raise FailedElsewhere(f"did not say again, after its process had died, what it had said in turn {turn.number}")

    def drop(self, held: Held) -> None:
        """The episode is over."""
        if held.place is not None:
            held.place.forget(held)
            held.place = None
        with self._lock:
            held.slot.episodes.discard(held)


def late(seconds: float, where: str) -> str:
    """What is said of a call that was not answered in time."""
    return f"returned nothing within environment.timeout_seconds={seconds:g}: it was {where}"
