"""An environment with one tool: the policy may calculate before it answers."""

from __future__ import annotations

from aligner.environments.arithmetic import calculate, last_number
from aligner.environments.environment import Observation, Turn
from aligner.environments.tools import CLOSE, OPEN, Toolbox
from aligner.types import Prompt


class Calculator:
    """A turn with calls (`<tool>calculator: 3*4</tool>`, or JSON in `<tool_call>`) is answered with their values; the first one without a
    call is the answer: 1 where its last number is the prompt's answer, else 0. `open` and `close`: see `Toolbox`.

    A turn that was cut, or that no other can follow, is judged as an answer too, calls or not.
    """

    def __init__(self, *, open: str = OPEN, close: str = CLOSE, tolerance: float = 1e-6) -> None:
        self._tools = Toolbox({"calculator": calculate}, open=open, close=close)
        self._tolerance = tolerance

    def reset(self, prompt: Prompt) -> float:
        """The state is the number that is right. Raises ValueError for a prompt without one."""
        return right_answer(prompt)

    def step(self, state: float, turn: Turn) -> Observation:
        """See the class."""
        answers = self._tools.answer(turn.text)
        counts = answers.counts if answers is not None else {}
        if answers is not None and not turn.is_last:
            return Observation(text=answers.text, counts=counts)
        is_right = is_close(last_number(turn.text), state, self._tolerance)
        return Observation(done=True, reward=float(is_right), counts=counts)


def right_answer(prompt: Prompt) -> float:
    """The last number of the prompt's answer. Raises ValueError where there is none."""
    number = last_number(prompt.answer or "")
    if number is None:
        raise ValueError(f"the prompt {prompt.text[:80]!r} has no number as its answer ({prompt.answer!r}) to compare with")
    return number


def is_close(number: float | None, wanted: float, tolerance: float) -> bool:
    """Whether there is a number, and it is the wanted one up to `tolerance` times its size (of 1 at least)."""
    return number is not None and abs(number - wanted) <= tolerance * max(1.0, abs(wanted))
