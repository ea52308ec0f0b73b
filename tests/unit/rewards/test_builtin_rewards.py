import pytest

from aligner.rewards import builtin


@pytest.mark.parametrize(
    ("reward", "answer", "scores"),
    [
        (builtin.exact_match, "42", {" 42\n": 1.0, "421": 0.0, "": 0.0}),
        (builtin.contains_answer, "42", {"it is 42.": 1.0, "41": 0.0}),
        # happy and fun: 2 of 5; whole words only
        (builtin.happy_words, None, {"": 0.0, "A sad day.": 0.0, "Happy, happy Tim had fun.": 0.4, "unhappy funny": 0.0}),
        (builtin.happy_words, None, {"She smiled and laughed: love, joy, fun, hug, play!": 1.0}),
        (builtin.length, None, {"": 0.0, "x" * 50: 0.25, "x" * 300: 1.0}),
        (builtin.fixed_string("abc"), None, {"xxabcx": 1.0, "ab": 0.0, "ABC": 0.0}),
        (builtin.starts_with("abcd"), None, {" abcd and more": 1.0, "abcx": 0.75, "xabc": 0.0, "ab": 0.5, "": 0.0}),
    ],
)
def test_scores(reward, answer, scores):
    assert reward([""] * len(scores), list(scores), [answer] * len(scores)) == pytest.approx(list(scores.values()))


@pytest.mark.parametrize("reward", [builtin.exact_match, builtin.contains_answer])
def test_a_missing_answer_is_an_error(reward):
    with pytest.raises(ValueError, match="'2 \\+ 2 =' has no answer"):
        reward(["2 + 2 ="], ["4"], [None])


def test_a_blank_answer_stands_in_everything_and_is_an_error():
    with pytest.raises(ValueError, match="answer is ''"):
        builtin.contains_answer([""], ["x"], [""])
