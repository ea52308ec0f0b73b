"""An environment with one tool: the policy may calculate before it answers.

The arithmetic that a policy wrote is parsed, never executed, and never larger than a few lines of digits.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from aligner.environments.environment import Observation, Turn
from aligner.environments.tools import CLOSE, OPEN, Toolbox, ToolError
from aligner.types import Prompt

MOST_CHARACTERS = 200
MOST_BITS = 512  # of an integer
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)")  # `7-3` has two, neither of them negative


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and parentheses, as text: `7`, `2.5`.

    Raises ToolError if it is something else, too long or too large, or has no value.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {MOST_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"cannot read {expression.strip()!r} as arithmetic") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def last_number(text: str) -> float | None:
    """The last number in a text (`1,234.5` is one number); None if it is missing or not finite."""
    found = _NUMBER.findall(text)
    value = float(found[-1].replace(",", "")) if found else math.inf
    return value if math.isfinite(value) else None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        # Before computing: an integer's power may have more digits than fit in memory.
        are_whole = isinstance(left, int) and isinstance(right, int)
        if isinstance(node.op, ast.Pow) and are_whole and right > 0 and left.bit_length() * right > MOST_BITS:
            raise OverflowError
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _bounded(value: object) -> float:
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise OverflowError
        return value
    if not isinstance(value, float):  # a root of a negative number is complex
        raise ValueError(f"{type(value).__name__} is not a real number")
    if not math.isfinite(value):
        raise OverflowError
    return value


class Calculator:
    """A turn with calls (`<tool>calculator: 3*4</tool>`, or JSON in `<tool_call>`) is answered with their values. The first turn
    without a call is the answer: reward 1 if its last number is the prompt's, else 0. `open` and `close`: see `Toolbox`.

    A truncated turn, or the last possible one, is also judged as an answer, even with calls.
    """

    def __init__(self, *, open: str = OPEN, close: str = CLOSE, tolerance: float = 1e-6) -> None:
        self._tools = Toolbox({"calculator": calculate}, open=open, close=close)
        self._tolerance = tolerance

    def reset(self, prompt: Prompt) -> float:
        """The state is the right number. Raises ValueError for a prompt without one."""
        return right_answer(prompt)

    def step(self, state: float, turn: Turn) -> Observation:
        answers = self._tools.answer(turn.text)
        counts = answers.counts if answers is not None else {}
        if answers is not None and not turn.is_last:
            return Observation(text=answers.text, counts=counts)
        is_right = is_close(last_number(turn.text), state, self._tolerance)
        return Observation(done=True, reward=float(is_right), counts=counts)


def right_answer(prompt: Prompt) -> float:
    """The last number of the prompt's answer. Raises ValueError if there is none."""
    number = last_number(prompt.answer or "")
    if number is None:
        raise ValueError(f"the prompt {prompt.text[:80]!r} has no number in its answer ({prompt.answer!r}) to compare with")
    return number


def is_close(number: float | None, wanted: float, tolerance: float) -> bool:
    """Whether there is a number that equals the wanted one up to `tolerance` times its size (at least 1)."""
    return number is not None and abs(number - wanted) <= tolerance * max(1.0, abs(wanted))
