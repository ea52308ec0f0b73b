"""Every parser of what a model wrote, with random and adversarial text: it ends, with a result of the right type or its documented error.

Sizes are such that a parser that is not linear needs hours, so the limit of a test's time is what fails it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest

from aligner.algorithms.judge import TEMPLATE, Rubric, score_pattern
from aligner.algorithms.self_rewarding import SelfRewardingConfig
from aligner.environments.calculator import Calculator, calculate, last_number
from aligner.environments.environment import Observation, Turn
from aligner.environments.retry_maths import RetryMaths
from aligner.environments.tools import ToolAnswers, Toolbox, ToolError
from aligner.errors import ConfigError
from aligner.rewards import builtin, length
from aligner.rewards.code import program_of, python_tests
from aligner.rewards.format import pattern, sections
from aligner.rewards.maths import final_answer, maths
from aligner.types import FinishReason, Prompt, Rollout

pytestmark = pytest.mark.timeout(300)
MANY = 200_000
MARKS = (
    *("<tool>", "</tool>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "calculator:", "join:"),
    *("####", "\\boxed{", "$", "}", "{", "[", "]", '"', ":", ",", "```python\n", "```", "Score: ", "score:\n", "\\frac{", "^", "(", ")"),
    *("9" * 50, "1,234", "1.5", "-", ".", "1e999", "NaN", "null", "true", "\\ud800", '{"name": "join", "arguments": {"left": 1}}'),
    *("\ud800", "\udc00", "\0", "\u202e", "\u0301", "שלום", "٣", "\x1b[2J", "🙂", " ", "\n", "\t", "a", "love ", "İ", "ß"),
)
LONG = [
    *(mark * (MANY // len(mark)) for mark in (*MARKS, "<tool_call><tool>", "<tool><tool_call>", "1,", "score: ", '<tool_call>{"a":')),
    *("<tool>" * MANY + "</tool>", "<tool></tool>" * 5_000, "<tool_call></tool_call>" * 5_000),
    *("<tool_call>" + "[" * MANY + "</tool_call>", '<tool_call>{"a":' * 20_000 + "</tool_call>"),
    *(f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {mark}{"9" * MANY}{mark}}}}}</tool_call>' for mark in ("", '"')),
    *("-" * MANY + "1", "0." + "1" * MANY, "score: " + " " * MANY, "```" + " " * MANY),
]


def texts(count: int) -> list[str]:
    draws = random.Random(0)
    return ["".join(draws.choice(MARKS) for _ in range(draws.randrange(12))) for _ in range(count)]


def join(left: str, right: Literal["!", "?"] = "!", *, times: int = 1, weights: list[float] | None = None, **more: bool) -> str:
    return f"{left}{right}" * min(times, 9) + "".join(map(str, weights or ())) + "".join(more)


def make_toolbox() -> Toolbox:
    return Toolbox({"calculator": calculate, "join": join})


RUBRIC = Rubric(template=TEMPLATE, pattern=score_pattern(SelfRewardingConfig().score_pattern), lowest=0.0, highest=5.0)
PROMPT = Prompt(id=0, tokens=(1,), source="data.jsonl:1", text="How many?", answer="#### 7")


def rewarded(function: Any) -> Callable[[str], bool]:
    return lambda text: isinstance(score := function(["p"], [text], ["7"])[0], float) and math.isfinite(score)


def stepped(environment: Any) -> Callable[[str], bool]:
    turn = {"tokens": (1,), "number": 1}
    return lambda text: all(
        isinstance(environment.step(environment.reset(PROMPT), Turn(text=text, is_last=last, **turn)), Observation)
        for last in (False, True)
    )


def measured(reward: Any) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        fields = {"logprobs": (0.0,), "finish_reason": FinishReason.stop, "policy_version": 0, "seed": 0}
        rollout = Rollout(prompt=PROMPT, response=(1,), **fields)
        sample = length.Sample(prompt="p", response=text, answer="7", source="a:1", rollout=rollout)
        return math.isfinite(reward.function([sample])[0])

    return check


def calculated(text: str) -> bool:
    try:
        return isinstance(calculate(text), str)
    except ToolError:
        return True


def answered(text: str) -> bool:
    answers = make_toolbox().answer(text)
    if answers is None:
        return True
    return isinstance(answers, ToolAnswers) and 0 <= answers.num_errors <= answers.num_calls and answers.text.encode() is not None


PARSERS: dict[str, Callable[[str], bool]] = {
    "tools": answered,
    "calculate": calculated,
    "last number": lambda text: (found := last_number(text)) is None or math.isfinite(found),
    "calculator": stepped(Calculator()),
    "retry maths": stepped(RetryMaths()),
    "judge's score": lambda text: (found := RUBRIC.score(text)) is None or 0 <= found <= 5,
    "judge's question": lambda text: text in RUBRIC.ask(text, text),
    "program": lambda text: isinstance(program_of(text), str),
    "final answer": lambda text: isinstance(final_answer(text), str),
    "pattern": rewarded(pattern(r"<think>.*</think>\s*<answer>.*</answer>")),
    "sections": rewarded(sections()),
    "sections, opened": rewarded(sections(opened=True)),
    "exact match": rewarded(builtin.exact_match),
    "contains answer": rewarded(builtin.contains_answer),
    "happy words": rewarded(builtin.happy_words),
    "characters": rewarded(builtin.length),
    "fixed string": rewarded(builtin.fixed_string("7-")),
    "starts with": rewarded(builtin.starts_with("7-")),
    "keywords": rewarded(builtin.keywords(["love", "a b"], ["hate"])),
    "words": measured(length.target(10, 5, unit="words")),
}


@pytest.mark.parametrize("name", PARSERS)
def test_parsers(name: str) -> None:
    parse = PARSERS[name]
    assert [text for text in texts(3_000) if not parse(text)] == []
    assert [text[:40] for text in LONG if not parse(text)] == []


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_maths() -> None:
    check, some = maths(timeout_seconds=0.5, num_workers=2), [*texts(60), *LONG[::6]]
    assert set(check([""] * len(some), some, ["7"] * len(some))) <= {0.0, 1.0}


def test_programs() -> None:
    some = ["\ud800", "\0", "print(1)\0", "(" * MANY, "```python\n" * 20_000, "\u202e"]
    try:
        run = python_tests(timeout_seconds=1.0)
    except ConfigError as error:
        pytest.skip(str(error))
    assert set(run([""] * len(some), some, ["assert True"] * len(some))) <= {0.0, 1.0}


def test_calls_are_found_as_by_a_regular_expression() -> None:
    """What the scan replaced: lazy expressions, the JSON form first, whose calls are blank for the other."""
    pieces = ("<tool>", "</tool>", "<tool_call>", "</tool_call>", "<tool", "a", " ", "1", "\n", "=")
    draws = random.Random(1)
    for open_, close in (("<tool>", "</tool>"), ("", "="), ("<tool>", "<tool>"), ("=", "1")):
        heard: list[str] = []
        toolbox = Toolbox({"only": lambda text, heard=heard: heard.append(text)}, open=open_, close=close)
        for _ in range(4_000):
            text = "".join(draws.choice(pieces) for _ in range(draws.randrange(14)))
            json_calls = list(re.finditer(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL))
            blank = re.sub(r"<tool_call>(.*?)</tool_call>", lambda match: " " * len(match[0]), text, flags=re.DOTALL)
            plain = re.findall(re.escape(open_) + "(.*?)" + re.escape(close), blank, re.DOTALL)
            heard.clear()
            answers = toolbox.answer(text)
            assert heard == [body.strip() for body in plain], text
            assert (answers.num_calls if answers else 0) == len(json_calls) + len(plain), text


def call(**arguments: Any) -> str:
    return f'<tool_call>{{"name": "join", "arguments": {json.dumps(arguments)}}}</tool_call>'


ARGUMENTS = {
    call(left="x"): "x!",
    call(left="x", right="?", times=2, weights=[1, 2.5], big=True): "x?x?12.5big",
    call(left="x", weights=None): "x!",
    call(): "error: join: missing a required argument: 'left'",
    call(left=5): "error: join: left is 5, expected str",
    call(left=["x"]): "error: join: left is ['x'], expected str",
    call(left="x", right="."): "error: join: right is '.', expected Literal['!', '?']",
    call(left="x", times=True): "error: join: times is True, expected int",
    call(left="x", times=1.0): "error: join: times is 1.0, expected int",
    call(left="x", weights=[1, [2]]): "error: join: weights is [1, [2]], expected list[float] | None",
    call(left="x", weights=[math.nan]): "error: join: weights is [nan], expected list[float] | None",
    call(left="x", weights=True): "error: join: weights is True, expected list[float] | None",
    call(left="x", more=1): "error: join: more is 1, expected bool",
    call(left="x").replace("}}", ', "left": "y"}}'): "error: the call is not JSON (an object has a name twice)",
    call(left="x").replace('"x"', "9" * 5000): "error: the call is not JSON (Exceeds the limit",
    call(left="x").replace('"x"', "[" * 400 + "]" * 400): "error: join: left is [[[[[[[...]]]]]]], expected str",
    call(left="\ud800"): "\ufffd!",
    '<tool_call>{"name": "join", "arguments": "x"}</tool_call>': "x!",  # one text
    "<tool>join: 5</tool>": "5!",
}


def test_arguments_are_checked_against_a_tools_hints() -> None:
    toolbox = make_toolbox()
    for text, wanted in ARGUMENTS.items():
        answers = toolbox.answer(text)
        assert answers is not None and answers.text.startswith(wanted), (text[:80], answers)
        assert (answers.num_calls, answers.num_errors) == (1, int(wanted.startswith("error"))), text[:80]


def test_hints_of_other_kinds() -> None:
    def tool(a: Annotated[int, "a count"], b: Optional[str] = None, c: dict[str, int] = {}, d: Any = 0, e: bytes = b"", f: int = None):  # noqa: B006, RUF013, UP045
        return "called"

    def lost(a: nobody_knows) -> str:  # noqa: F821
        return "called"

    tools = Toolbox({"tool": tool, "lost": lost, "int": int, "max": max, "len": len})
    for name, arguments, wanted in (
        ("tool", {"a": 1, "b": None, "c": {"x": 1}, "d": [math.inf], "e": "anything", "f": None}, "called"),
        ("tool", {"a": "1"}, "error: tool: a is '1', expected "),
        ("tool", {"a": 1, "c": {"x": "1"}}, "error: tool: c is {'x': '1'}, expected dict[str, int]"),
        ("tool", {"a": 1, "f": "1"}, "error: tool: f is '1', expected int"),
        ("lost", {"a": 1}, "called"),
        ("lost", {"b": 1}, "error: lost: TypeError: "),
        ("int", "7", "7"),
        ("max", "abc", "c"),
        ("max", {"a": 1}, "error: max: TypeError: "),
        ("len", {"obj": "abc"}, "error: len: "),
    ):
        answers = tools.answer(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
        assert answers is not None and answers.text.startswith(wanted), (name, arguments, answers)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_whatever_a_tool_raises_is_an_answer_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    def recurse(text: str) -> str:
        return recurse(text)

    def fail(error: BaseException) -> Callable[[str], str]:
        def tool(text: str) -> str:
            raise error

        return tool

    errors = {
        "type": TypeError("object of type 'int' has no len()"),
        "lost": ConnectionError("connection lost"),
        "memory": MemoryError(),
        "stop": StopIteration(),
        "silent": Silent(),
        "text": ValueError("\ud800"),
    }
    tools: dict[str, Callable[[str], Any]] = {name: fail(error) for name, error in errors.items()}
    tools |= {
        "deep": recurse,
        "unprintable": lambda text: Unprintable(),
        "digits": lambda text: 10**5000,
        "half": lambda text: "\udc00" * 9999,
    }
    toolbox = Toolbox(tools)
    for name in [*tools, *tools]:
        answers = toolbox.answer(f"<tool>{name}: x</tool>")
        assert answers is not None and answers.text.encode() and len(answers.text) <= 2000
        assert (answers.num_calls, answers.num_errors) == (1, int(name != "half")), name
    said = capsys.readouterr().out
    assert said.count("warning: tool ") == len(tools) - 1 and said.count("warning: tool lost raised ConnectionError") == 1
    assert "in tool\n    raise error" in said
    for ends in (KeyboardInterrupt(), SystemExit(1), GeneratorExit()):  # not what a policy's call may be answered with
        with pytest.raises(type(ends)):
            Toolbox({"ends": fail(ends)}).answer("<tool>x</tool>")
