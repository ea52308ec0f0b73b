"""Format, length and keyword rewards against hand-computed values."""

from __future__ import annotations

import pytest
from fake_parts import written

from aligner.errors import ConfigError
from aligner.rewards import length
from aligner.rewards.builtin import keywords
from aligner.rewards.config import RewardFunctionConfig
from aligner.rewards.format import pattern, sections
from aligner.rewards.forms import OnSamples, Sample
from aligner.rewards.load import build_reward_function


def texts(function, *responses):
    return function([""] * len(responses), list(responses), [None] * len(responses))


def samples(function: OnSamples, *responses):
    """Each response is one token per character."""
    return function([Sample(prompt="", response=text, answer=None, source="f:1", rollout=written(text)) for text in responses])


def test_sections_in_full():
    reward = sections()
    good = "<think>\nI add.\n</think>\n<answer>4</answer>\n"
    twice = "<think>a</think><answer>4</answer><answer>5</answer>"
    before = "Well <think>a</think><answer>4</answer>"
    swapped = "<answer>4</answer><think>a</think>"
    empty = "<think> </think><answer>4</answer>"
    # Half of the fraction of the 4 tags that are there exactly once.
    assert texts(reward, good, twice, before, swapped, empty, "<think>a</think>4", "4", "") == [1, 0.25, 0.5, 0.5, 0.5, 0.25, 0, 0]
    assert texts(sections(partial=False), good, twice, before) == [1, 0, 0]


def test_sections_where_the_prompt_opened_the_first():
    reward = sections(opened=True)
    # </think>, <answer> and </answer>: three tags
    assert texts(reward, "I add.</think><answer>4</answer>", "<think>a</think><answer>4</answer>", "a</think>4") == pytest.approx(
        [1, 1, 1 / 6]
    )
    assert texts(sections(tags=["plan"]), "<plan>a</plan>", "<plan>a") == [1, 0.25]
    with pytest.raises(ValueError, match="tags has 'a b'"):
        sections(tags=["a b"])


def test_pattern():
    assert texts(pattern(r"#### -?\d+"), " #### 42\n", "so #### 42", "####42") == [1, 0, 0]
    assert texts(pattern(r"#### -?\d+", anywhere=True), "so #### 42", "no") == [1, 0]
    assert texts(pattern("a.*b"), "a\n\nb") == [1]
    with pytest.raises(ConfigError, match=r"format:pattern' cannot be made from arguments {'regex': '\('}: .*unterminated"):
        build_reward_function(RewardFunctionConfig(path="aligner.rewards.format:pattern", arguments={"regex": "("}))


def test_keywords():
    reward = keywords(words=["Cat", "c++"], forbidden=["dog"])
    assert texts(reward, "a CAT, and C++!", "a cat", "concatenate", "cat c++ dog", "hotdogs cat") == [1, 0.5, 0, 0, 0.5]
    with pytest.raises(ValueError, match="words is empty"):
        keywords(words=[])


def test_lengths():
    assert samples(length.target(length=4, reach=2), "abcd", "abc", "abcde", "a", "abcdef") == [1, 0.5, 0.5, 0, 0]
    assert samples(length.target(length=2, reach=2, unit="words"), "two words", "one") == [1, 0.5]
    assert samples(length.brevity(limit=10, unit="characters"), "", "abcde", "a" * 20) == [1, 0.5, 0]
    # 10 tokens, of which the last 4 are the buffer: nothing up to 6, -1/4 for each one more.
    assert samples(length.overlong(limit=10, buffer=4), "a" * 6, "a" * 7, "a" * 9, "a" * 10, "a" * 30) == [0, -0.25, -0.75, -1, -1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: length.target(length=0, reach=1), "length is 0"),
        (lambda: length.overlong(limit=4, buffer=5), "buffer is 5, expected at most limit=4"),
        (lambda: length.brevity(limit=4, unit="lines"), "unit is 'lines', expected one of tokens, words, characters"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()
