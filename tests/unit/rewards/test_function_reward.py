import asyncio
import re
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_parts import written

from aligner.errors import AlignerError, ConfigError
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.local import FunctionReward, RewardError, function_reward
from aligner.settings.user_code import was_calling

END = 0


def decode(tokens):
    """Characters of code points, without the end-of-sequence token."""
    return "".join(chr(t) for t in tokens if t != END)


def rollout(i, response, text="", answer=None):
    return written(response + chr(END), i, tokens=tuple(map(ord, f"ask {i}")), text=text, answer=answer)


ROLLOUTS = [rollout(0, "one", answer="1"), rollout(1, "two", text="a prompt"), rollout(2, "x" * 500)]


def score(function, rollouts=ROLLOUTS, timeout_seconds=20.0):
    model = FunctionReward(function, decode, timeout_seconds, name="mine.py:reward")
    try:
        return model.score(rollouts).result(timeout=60).rewards
    finally:
        model.close()


def failure(function, timeout_seconds=20.0):
    """The message of the RewardError that scoring raises."""
    with pytest.raises(RewardError) as caught:
        score(function, timeout_seconds=timeout_seconds)
    assert isinstance(caught.value, AlignerError)
    message = str(caught.value)
    assert "mine.py:reward" in message
    return message


def test_scores_and_what_the_function_is_given():
    seen = []

    def reward(prompts, responses, answers):
        seen.append((prompts, responses, answers))
        return [1, 0.5, True]

    scores = score(reward)
    assert scores.dtype == torch.float32 and scores.tolist() == [1.0, 0.5, 1.0]
    assert seen == [(["ask 0", "a prompt", "ask 2"], ["one", "two", "x" * 500], ["1", None, None])]


def test_async_function():
    async def reward(prompts, responses, answers):
        return await asyncio.gather(*(asyncio.sleep(0, float(len(r))) for r in responses))

    assert score(reward).tolist() == [3.0, 3.0, 500.0]


def test_no_rollouts_no_call():
    assert score(lambda *_: pytest.fail("called"), rollouts=[]).shape == (0,)


def test_scoring_does_not_block_the_caller():
    go = threading.Event()

    def reward(prompts, responses, answers):
        assert go.wait(20)
        return [0.0] * len(responses)

    model = FunctionReward(reward, decode, 30.0)
    first, second = model.score(ROLLOUTS[:1]), model.score(ROLLOUTS[1:])
    assert not first.done()
    go.set()
    assert first.result(30).rewards.shape == (1,) and second.result(30).rewards.shape == (2,)
    model.close()


def test_an_exception_names_the_sample_that_causes_it():
    def reward(prompts, responses, answers):
        return [float({"one": 1.0, "x" * 500: 2.0}[r]) for r in responses]

    message = failure(reward)
    assert "raised KeyError: 'two'" in message
    assert "it fails for sample 1 of 3 (prompt train.jsonl:2, response 'two')" in message


def test_an_exception_keeps_its_cause_and_shortens_the_response():
    def reward(prompts, responses, answers):
        if len(responses[-1]) > 100:
            raise OSError("judge is down")
        return [0.0] * len(responses)

    with pytest.raises(RewardError) as caught:
        score(reward)
    assert isinstance(caught.value.__cause__, OSError)
    assert f"sample 2 of 3 (prompt train.jsonl:3, response '{'x' * 120}...')" in str(caught.value)


def test_an_exception_that_no_sample_causes_alone():
    def reward(prompts, responses, answers):
        if len(responses) > 1:
            raise ValueError("one at a time")
        return [0.0]

    message = failure(reward)
    assert "for no single sample, only for the 3 together, from sample 0 of 3 (prompt train.jsonl:1, response 'one')" in message


def test_an_exception_of_an_async_function():
    async def reward(prompts, responses, answers):
        raise ConnectionError("no judge")

    assert re.search(r"raised ConnectionError: no judge \(at .*, in reward\); it fails for sample 0", failure(reward))


def test_exit_is_not_silent():
    assert "SystemExit" in failure(lambda *_: sys.exit(3))


def test_a_hanging_function():
    release = threading.Event()

    def hangs(prompts, responses, answers):
        release.wait(60)
        return [0.0] * len(responses)

    message = failure(hangs, timeout_seconds=0.2)
    release.set()
    assert "returned nothing within timeout_seconds=0.2" in message
    assert re.search(r"it was at \S+\.py:\d+ \(wait\)", message)  # where it hangs: threading.Event.wait
    assert "3 samples, from sample 0 of 3 (prompt train.jsonl:1" in message


def test_a_hanging_async_function():
    async def hangs(prompts, responses, answers):
        await asyncio.sleep(5)

    assert "returned nothing within timeout_seconds=0.2" in failure(hangs, timeout_seconds=0.2)


def test_a_hanging_function_does_not_keep_the_process_alive():
    script = (
        "import time\nfrom aligner.rewards.local import FunctionReward, RewardError\nfrom aligner.types import *\n"
        "prompt = Prompt(id=0, tokens=(), source='f:1')\n"
        "r = Rollout(prompt=prompt, response=(), logprobs=(), finish_reason=FinishReason.stop, policy_version=0, seed=0)\n"
        "model = FunctionReward(lambda *a: time.sleep(1000), lambda t: '', 0.2)\n"
        "try:\n    model.score([r]).result(60)\nexcept RewardError:\n    print('raised')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "raised\n"), done.stderr


def test_numbers_that_float32_does_not_hold_are_infinite_or_nan():
    model = FunctionReward(lambda *_: [float("nan"), 1e39, -(10**400)], decode, 20.0)
    assert str(model.score(ROLLOUTS).result(30).rewards.tolist()) == "[nan, inf, -inf]"
    model.close()


@pytest.mark.parametrize(
    "result",
    [
        np.array([1, 0, 0.5], dtype=np.float32),
        np.array([1, 0, 0.5], dtype=np.float64),
        torch.tensor([1, 0, 0.5]),
        torch.tensor([1, 0, 0.5], dtype=torch.bfloat16, requires_grad=True),
        (np.float32(1), np.int64(0), np.float16(0.5)),
        [torch.tensor(1.0), torch.tensor(False), torch.tensor([0.5])],
        [np.bool_(True), False, np.array([[0.5]])],
        [True, 0, Fraction(1, 2)],
    ],
    ids=lambda result: f"{type(result).__name__} {getattr(result, 'dtype', '')}",
)
def test_values_of_numpy_and_tensors_are_numbers(result):
    model = FunctionReward(lambda *_: result, decode, 20.0)
    assert model.score(ROLLOUTS).result(30).rewards.tolist() == [1.0, 0.0, 0.5]
    model.close()


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.zeros(2), "returned 2 numbers for 3 responses"),
        (np.float32(1.0), "returned a float, expected a list of 3 numbers"),
        (np.zeros((3, 2)), "returned [0.0, 0.0] (list), expected a number"),
        (np.array(["a", "b", "c"]), "returned 'a' (str), expected a number"),
        ([1.0, torch.zeros(2), 1.0], "returned tensor([0., 0.]) (Tensor), expected a number"),
        ([1.0, np.array([]), 1.0], "expected a number"),
        ([1.0, 1 + 1j, 1.0], "(complex), expected a number"),
        ([1.0, None, 2.0], "returned None (NoneType), expected a number, for sample 1 of 3 (prompt train.jsonl:2, response 'two')"),
        ([1.0, "1.0", 2.0], "returned '1.0' (str), expected a number, for sample 1 of 3"),
        *(([0.0] * n, f"returned {n} numbers for 3 responses, from sample 0 of 3 (prompt train.jsonl:1") for n in (0, 2, 4)),
        *((one, f"returned a {type(one).__name__}, expected a list of 3 numbers") for one in (None, 1.0, {1: 2}, "abc")),
    ],
)
def test_what_is_not_one_number_for_each(result, said):
    assert said in failure(lambda *_: result)


def test_a_process_that_dies_says_in_which_function(tmp_path):
    """The record outlives the process; it is empty again once the function has returned."""
    path = tmp_path / "calls"
    code = (
        "import ctypes, sys, pathlib\n"
        "from aligner.settings import user_code\n"
        "from aligner.rewards.local import FunctionReward\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_function_reward import ROLLOUTS, decode\n"
        f"path = pathlib.Path({str(path)!r})\n"
        "user_code.record_in(path)\n"
        "FunctionReward(lambda *_: [1.0] * 3, decode, 20.0, name='good.py:fine').score(ROLLOUTS).result()\n"
        "assert user_code.was_calling(path) == ''\n"
        "FunctionReward(lambda *_: ctypes.string_at(0), decode, 20.0, name='bad.py:crashes').score(ROLLOUTS).result()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -signal.SIGSEGV
    assert was_calling(path) == "reward function bad.py:crashes"
    assert was_calling(tmp_path / "nothing") == ""


def test_a_failure_does_not_poison_the_next_call():
    calls = []

    def reward(prompts, responses, answers):
        calls.append(responses)
        return [None] if len(calls) == 1 else [4.0]

    model = FunctionReward(reward, decode, 20.0)
    first, second = model.score(ROLLOUTS[:1]), model.score(ROLLOUTS[:1])
    with pytest.raises(RewardError):
        first.result(30)
    assert second.result(30).rewards.tolist() == [4.0]
    model.close()


def test_a_failing_decoder_is_raised():
    def broken(tokens):
        raise UnicodeError("no such token")

    model = FunctionReward(lambda *_: [1.0], broken, 20.0)
    with pytest.raises(UnicodeError, match="no such token"):
        model.score(ROLLOUTS[:1]).result(30)
    model.close()


def test_from_a_config():
    model = function_reward(RewardFunctionConfig(path="aligner.rewards.builtin:length"), decode)
    assert model.score(ROLLOUTS).result(30).rewards.tolist() == pytest.approx([3 / 200, 3 / 200, 1.0])
    model.close()
    with pytest.raises(ConfigError, match="reward.function.path='': name a reward function, or use a reward model"):
        function_reward(RewardFunctionConfig(), decode)
