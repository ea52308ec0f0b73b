import math
import os
import sys

import pytest

from aligner.cluster.outcomes import ExitCode, exit_code_of
from aligner.errors import AlignerError, ConfigError, UserCodeError
from aligner.rewards.builtin import exact_match
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.load import UserFunction, build_reward_function, load_reward_function, may_pass


@pytest.fixture
def file(tmp_path):
    """A file of the user's, with a dataclass (whose module must be findable)."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass(slots=True)\nclass Score:\n    value: float = 2.0\n\n"
        "def reward(prompts, responses, answers):\n    return [Score().value for _ in responses]\n\nNUMBER = 3\n"
    )
    return path


@pytest.mark.parametrize("spec", ["aligner.rewards.builtin:exact_match", "aligner.rewards.builtin.exact_match"])
def test_from_a_module(spec):
    assert load_reward_function(spec) is exact_match


def test_from_a_file_absolute_and_relative(file, monkeypatch):
    assert load_reward_function(f"{file}:reward")(["p"], ["r"], [None]) == [2.0]
    monkeypatch.chdir(file.parent)
    assert load_reward_function("mine.py:reward")(["p"], ["r"], [None]) == [2.0]


def test_a_file_is_read_as_it_is_now(file, monkeypatch):
    """Also if another one of the same second and size was loaded before, by any process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (2.0, 5.0):
        file.write_text(file.read_text().replace("2.0", str(value)))
        os.utime(file, (1, 1))
        assert load_reward_function(f"{file}:reward")(["p"], ["r"], [None]) == [value]
    assert not (file.parent / "__pycache__").exists()


def test_files_of_one_name_are_two_modules(file, tmp_path):
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text("def reward(prompts, responses, answers):\n    return [7.0]\n")
    first, second = load_reward_function(f"{file}:reward"), load_reward_function(f"{other}:reward")
    assert (first(["p"], ["r"], [None]), second(["p"], ["r"], [None])) == ([2.0], [7.0])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected package.module:name"),
        ("reward", "expected package.module:name"),
        (":reward", "expected package.module:name"),
        ("aligner.rewards.builtin:", "expected package.module:name"),
        ("rewards/mine.py", "expected package.module:name"),
        ("no_such_module:reward", "cannot import 'no_such_module': ModuleNotFoundError"),
        ("aligner.rewards.builtin:exact_mach", "has no 'exact_mach'; did you mean 'exact_match'?"),
        ("aligner.rewards.builtin:HAPPY_WORDS", "HAPPY_WORDS is a frozenset, expected a function"),
        ("nowhere/mine.py:reward", "no such file: /.*nowhere/mine.py"),
    ],
)
def test_a_wrong_spec_is_named(spec, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_reward_function(spec)
    assert repr(spec) in str(caught.value)


def test_a_file_that_cannot_be_imported(tmp_path):
    path = tmp_path / "half_made.py"
    path.write_text("import not_installed_here\n")
    with pytest.raises(ConfigError, match="half_made.py: ModuleNotFoundError: No module named 'not_installed_here'"):
        load_reward_function(f"{path}:reward")
    assert not [name for name in sys.modules if name.startswith("reward_function_half_made")]  # no half-made module is left


def test_a_factory_gets_its_arguments():
    reward = build_reward_function(RewardFunctionConfig(path="aligner.rewards.builtin:fixed_string", arguments={"target": "hi"}))
    assert reward(["", ""], ["oh hi", "no"], [None, None]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("aligner.rewards.builtin:fixed_string", {"traget": "hi"}, "cannot be made from arguments.*unexpected keyword argument 'traget'"),
        ("aligner.rewards.builtin:fixed_string", {"target": " "}, "target is ' '"),
        ("builtins:dict", {"a": 1}, "returned a dict for its arguments"),
    ],
)
def test_a_factory_that_fails_is_named(function, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_reward_function(RewardFunctionConfig(path=function, arguments=arguments))


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_config_refuses_a_timeout(timeout):
    with pytest.raises(ConfigError, match="timeout_seconds="):
        RewardFunctionConfig(timeout_seconds=timeout)


def test_config_refuses_arguments_for_nothing():
    with pytest.raises(ConfigError, match="requires path, the factory that accepts them"):
        RewardFunctionConfig(arguments={"target": "x"})


@pytest.mark.parametrize("text", ["import sys\n\nsys.exit(0)", "raise SystemExit"])
def test_a_file_that_ends_the_program_when_it_is_imported_is_refused(tmp_path, text):
    (tmp_path / "mine.py").write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"cannot import .*mine.py: SystemExit: it ended the program .* at .*mine.py:[13]\)"):
        load_reward_function(f"{tmp_path}/mine.py:reward")


def test_a_factory_that_ends_the_program_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def make(target):\n    raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"cannot be made from arguments {'target': 'a'}: SystemExit: it ended .*\(sys.exit\(0\)"):
        build_reward_function(RewardFunctionConfig(path=f"{tmp_path}/mine.py:make", arguments={"target": "a"}))


class Library(Exception):
    """As one of a library's, whose module is neither Python's own nor the user's file."""


def test_what_a_users_function_raises_names_setting_and_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\nclass Own(Exception): pass\ndef f(x):\n    return 1 / x\ndef own():\n    raise Own('no')\n")
    call = UserFunction(f"algorithm.loss={file}:f", load_reward_function(f"{file}:f"))
    assert call(2) == 0.5
    with pytest.raises(UserCodeError, match=rf"^algorithm.loss={file}:f raised ZeroDivisionError: division by zero \(at {file}:4, in f\)$"):
        call(0)
    with pytest.raises(UserCodeError, match="raised Own: no"):
        UserFunction("x", load_reward_function(f"{file}:own"))()
    assert exit_code_of(UserCodeError("")) == ExitCode.refused


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((ConnectionError("gone"), True), (TimeoutError(), True), (Library(), True), (MemoryError(), True)),
        *((ValueError(), False), (FileNotFoundError(), False), (RuntimeError("x"), False), (KeyError("a"), False)),
    ],
)
def test_what_may_not_come_again(error, passes):
    def raising():
        raise error

    assert may_pass(error) == passes
    with pytest.raises(AlignerError) as caught:
        UserFunction("algorithm.loss=mine.py:f", raising)()
    assert isinstance(caught.value, UserCodeError) != passes
    try:
        try:
            raise ConnectionError("gone")
        except ConnectionError as cause:
            raise RuntimeError("no answer") from cause
    except RuntimeError as outer:
        assert may_pass(outer)
