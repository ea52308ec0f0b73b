import pytest

from aligner.rewards import builtin

NONE = [None]


def test_exact_match():
    assert builtin.exact_match(["", "", ""], [" 42\n", "421", ""], ["42", "42", "42"]) == [1.0, 0.0, 0.0]


def test_contains_answer():
    assert builtin.contains_answer(["", ""], ["it is 42.", "41"], ["42", "42"]) == [1.0, 0.0]


@pytest.mark.parametrize("reward", [builtin.exact_match, builtin.contains_answer])
def test_a_missing_answer_is_an_error(reward):
    with pytest.raises(ValueError, match="'2 \\+ 2 =' has no answer"):
        reward(["2 + 2 ="], ["4"], NONE)


def test_a_blank_answer_stands_in_everything_and_is_an_error():
    with pytest.raises(ValueError, match="answer is ''"):
        builtin.contains_answer([""], ["x"], [""])


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        ("A sad day.", 0.0),
        ("Happy, happy Tim had fun.", 0.4),  # happy and fun: 2 of 5
        ("unhappy funny", 0.0),  # whole words only
        ("She smiled and laughed: love, joy, fun, hug, play!", 1.0),
    ],
)
def test_happy_words(response, score):
    assert builtin.happy_words([""], [response], NONE) == pytest.approx([score])


def test_length():
    assert builtin.length([""] * 3, ["", "x" * 50, "x" * 300], NONE * 3) == [0.0, 0.25, 1.0]


def test_fixed_string():
    assert builtin.fixed_string("abc")([""] * 3, ["xxabcx", "ab", "ABC"], NONE * 3) == [1.0, 0.0, 0.0]


def test_starts_with():
    responses = [" abcd and more", "abcx", "xabc", "ab", ""]
    assert builtin.starts_with("abcd")([""] * 5, responses, NONE * 5) == [1.0, 0.75, 0.0, 0.5, 0.0]
