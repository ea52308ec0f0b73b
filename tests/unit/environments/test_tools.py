"""Tool calls in what a policy wrote, arithmetic that is never executed, and the environments that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.algorithms.grpo import TrainGRPO
from aligner.environments.calculator import Calculator, calculate, last_number
from aligner.environments.config import EnvironmentConfig
from aligner.environments.environment import Observation, Turn
from aligner.environments.exchange import build_environment
from aligner.environments.retry_maths import RetryMaths
from aligner.environments.tools import Toolbox, ToolError
from aligner.errors import ConfigError
from aligner.settings.compose import compose
from aligner.types import Prompt

ROOT = Path(__file__).parents[3]


def turn(text: str, number: int = 1, **flags: bool) -> Turn:
    return Turn(text=text, tokens=(1,), number=number, **flags)


def question(answer: str | None) -> Prompt:
    return Prompt(id=0, tokens=(1,), source="data.jsonl:1", text="How many?", answer=answer)


VALUES = {
    "2+3*4": "14",
    " (2 + 3) * -4 ": "-20",
    "7/2": "3.5",
    "6/2": "3",
    "7//2": "3",
    "-7 % 3": "2",
    "2**10": "1024",
    "2**-1": "0.5",
    "1e3": "1000",
    "0.1+0.2": "0.3",
    "10**100": "1" + "0" * 100,
}
REFUSED = {
    "1/0": "division by zero",
    "0.0**-1": "division by zero",
    "9**9**9": "too large",
    "2**512": "too large",
    "1e308*10": "too large",
    "10**400*1.0": "too large",
    "2+": "cannot read '2\\+' as arithmetic",
    "": "cannot read '' as arithmetic",
    "__import__('os').system('true')": "cannot read",
    "x": "cannot read",
    "True + 1": "cannot read",
    "'a'*3": "cannot read",
    "(-8)**0.5": "cannot read",
    "[1,2][0]": "cannot read",
    "1<2": "cannot read",
    "1\x00": "cannot read",
    "+".join("1" * 200): "399 characters, at most 200",
    "(" * 99 + "1" + ")" * 99: "cannot read|^$",
}


def test_arithmetic() -> None:
    assert {expression: calculate(expression) for expression in VALUES} == VALUES
    for expression, message in REFUSED.items():
        if message.endswith("|^$"):  # some versions of Python read as many parentheses
            try:
                calculate(expression)
            except ToolError:
                continue
        else:
            with pytest.raises(ToolError, match=message):
                calculate(expression)
    numbers = {"so 3 - 4 is -1": -1.0, "7-3": 3.0, "1,234.50 dollars.": 1234.5, "of 3,4 and 1,2345": 2345.0, "no": None, ".5": 0.5}
    assert {text: last_number(text) for text in numbers} == numbers
    assert last_number("9" * 400) is None  # infinite


def test_calls_in_both_forms_and_what_is_wrong_with_others() -> None:
    tools = Toolbox({"calculator": calculate, "join": lambda left, right="!": f"{left}{right}"})
    assert tools.answer("no call <tool>calculator: 1+1") is None
    answers = tools.answer(
        'a <tool_call>\n{"name": "join", "arguments": {"left": "x", "right": "<tool>join: y</tool>"}}\n</tool_call> and '
        "<tool>calculator: 2*3</tool>, <tool>join: z</tool>"
    )
    assert answers.text == "x<tool>join: y</tool>\n6\nz!" and answers.counts == {"tool_calls": 3.0, "tool_errors": 0.0}
    wrong = {
        "<tool>2*3</tool>": "error: expected NAME: TEXT with one of the tools calculator, join",
        "<tool>calculator: 2*</tool>": "error: cannot read '2*' as arithmetic",
        "<tool_call>{'name'}</tool_call>": "error: the call is not JSON",
        '<tool_call>["join"]</tool_call>': 'error: expected {"name": NAME',
        '<tool_call>{"name": "join", "arguments": 3}</tool_call>': 'error: expected {"name": NAME',
        '<tool_call>{"name": "open"}</tool_call>': "error: unknown tool 'open'; available: calculator, join",
        '<tool_call>{"name": "join", "arguments": {}}</tool_call>': "error: join: missing a required argument: 'left'",
        '<tool_call>{"name": "join", "arguments": {"left": 1, "middle": 2}}</tool_call>': "error: join: got an unexpected keyword",
        "<tool_call>" + "[" * 100_000 + "</tool_call>": "error: the call is not JSON",
    }
    for text, message in wrong.items():
        answers = tools.answer(text)
        assert answers.text.startswith(message) and (answers.num_calls, answers.num_errors) == (1, 1), (text[:50], answers)
    assert Toolbox({"calculator": calculate}, open="", close="=").answer("1+1=3*3=so").text == "2\n9"  # one tool needs no name
    assert len(Toolbox({"long": lambda text: "x" * 9999}).answer("<tool>long:</tool>").text) == 2000

    for arguments in ({"tools": {}}, {"tools": {"calculator": calculate}, "close": ""}):
        with pytest.raises(ValueError, match="expected"):
            Toolbox(**arguments)


def test_a_calculator() -> None:
    calculator = Calculator()
    state = calculator.reset(question("#### 1,248"))
    asked = calculator.step(state, turn("<tool>1300-52</tool> and <tool>1/0</tool>"))
    assert asked == Observation(text="1248\nerror: division by zero", counts={"tool_calls": 2.0, "tool_errors": 1.0})
    assert calculator.step(state, turn("It is 1248.", 2)) == Observation(done=True, reward=1.0)
    assert calculator.step(state, turn("It is 1249.", 2)) == Observation(done=True, reward=0.0)
    assert calculator.step(state, turn("I do not know.", 2)).reward == 0.0
    last = calculator.step(state, turn("<tool>1300-52</tool> so 1248", 8, is_last=True))
    assert last.done and last.reward == 1.0 and last.counts["tool_calls"] == 1.0
    for answer in (None, "many"):
        with pytest.raises(ValueError, match="has no number in its answer"):
            calculator.reset(question(answer))


def test_an_environment_in_a_file_of_ones_own() -> None:
    settings = {"path": f"{ROOT / 'examples/nlp/environments/guess_number.py'}:GuessNumber", "arguments": {"bonus": 1.0}}
    game = build_environment(EnvironmentConfig(**settings))
    state = game.reset(question("13"))
    assert [game.step(state, turn(text)).text for text in ("5?", "20", "x")] == ["higher", "lower", "That is no number."]
    assert game.step(state, turn("13!", 2)) == Observation(done=True, reward=1.5)
    for preset, turns in (("calculator", 8), ("retry_maths", 3)):
        config = compose(TrainGRPO, "grpo", ["data.train=x", f"+environment={preset}", f"environment.max_turns={turns}"])
        assert build_environment(config.environment) and config.environment.max_turns == turns
        config.check_complete()  # by the environment alone
    config.reward.functions["environment"] = None
    with pytest.raises(ConfigError, match="give it another name"):
        config.check_complete()


def test_trying_again() -> None:
    maths = RetryMaths(attempts=3, hint="no", no_answer="none")
    state = maths.reset(question("7"))
    assert maths.step(state, turn("6")) == Observation(text="no")
    assert maths.step(state, turn("seven", 2)) == Observation(text="none")
    assert maths.step(state, turn("so 7.0", 3)) == Observation(done=True, reward=0.25, counts={"solved": 1.0, "solved_at_once": 0.0})
    state = maths.reset(question("7"))
    assert [maths.step(state, turn("6", number)).done for number in (1, 2, 3)] == [False, False, True]
    assert maths.step(maths.reset(question("7")), turn("7")) == Observation(
        done=True, reward=1.0, counts={"solved": 1.0, "solved_at_once": 1.0}
    )
    for settings in ({"attempts": 0}, {"discount": 1.5}):
        with pytest.raises(ConfigError, match="must be"):
            RetryMaths(**settings)
