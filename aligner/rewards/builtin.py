"""Reward functions ready for use, and examples to copy: `aligner.rewards.builtin:<name>`. Others are in maths, code, format and length.

A factory (marked as such) is used with `arguments`; the others are reward functions themselves. All scores lie in [0, 1].
"""

from __future__ import annotations

import os.path
import re

from aligner.rewards.forms import Factory, TextFunction, of_each_response

HAPPY_WORDS = frozenset(
    "cheerful excited friend friends fun glad happily happy hug hugged joy joyful kind laugh laughed love loved".split()
    + "nice play proud smile smiled".split()
)
MOST_HAPPY_WORDS = 5  # distinct ones; more earn nothing, so that a list of them is not the best story
LONGEST_CHARACTERS = 200


def exact_match(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """1 if the response, without surrounding whitespace, is the answer. Raises ValueError for a prompt without one."""
    return [
        float(response.strip() == _needed(answer, prompt).strip())
        for prompt, response, answer in zip(prompts, responses, answers, strict=True)
    ]


def contains_answer(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """1 if the response contains the answer. Raises ValueError for a prompt without one, or with a blank one."""
    return [
        float(_not_blank(_needed(answer, prompt), "answer").strip() in response)
        for prompt, response, answer in zip(prompts, responses, answers, strict=True)
    ]


def happy_words(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """How many distinct words of HAPPY_WORDS the response has, as a fraction of MOST_HAPPY_WORDS, at most 1."""
    found = [len(HAPPY_WORDS.intersection(re.findall(r"[a-z]+", response.lower()))) for response in responses]
    return [min(count / MOST_HAPPY_WORDS, 1.0) for count in found]


def length(prompts: list[str], responses: list[str], answers: list[str | None]) -> list[float]:
    """The response's characters as a fraction of LONGEST_CHARACTERS, at most 1."""
    return [min(len(response) / LONGEST_CHARACTERS, 1.0) for response in responses]


@Factory
def fixed_string(target: str) -> TextFunction:
    """Factory: 1 if the response contains `target`, else 0 (the sanity run of the field)."""
    wanted = _not_blank(target, "target")
    return of_each_response(lambda response: float(wanted in response))


@Factory
def starts_with(target: str) -> TextFunction:
    """Factory: the fraction of `target` with which the response, without leading whitespace, starts: 1 for all of it.

    The partial credit lets a policy that has never produced the whole string learn it from the left.
    """
    wanted = _not_blank(target, "target").lstrip()
    return of_each_response(lambda response: len(os.path.commonprefix([wanted, response.lstrip()])) / len(wanted))


@Factory
def keywords(words: list[str], forbidden: list[str] | None = None) -> TextFunction:
    """Factory: the fraction of `words` that the response has, whole and in any case; 0 if it has one of the `forbidden`."""
    wanted = [_whole_word(word) for word in words]
    unwanted = [_whole_word(word) for word in forbidden or ()]
    if not wanted:
        raise ValueError("words is empty")

    def credit(response: str) -> float:
        return 0.0 if any(word.search(response) for word in unwanted) else sum(bool(word.search(response)) for word in wanted) / len(wanted)

    return of_each_response(credit)


def _whole_word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(_not_blank(word, 'a keyword'))}(?!\w)", re.IGNORECASE)


def _not_blank(text: str, field: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{field} is {text!r}, expected a string with something in it")
    return text


def _needed(answer: str | None, prompt: str) -> str:
    if answer is None:
        raise ValueError(f"the prompt {prompt[:80]!r} has no answer to compare with")
    return answer
