"""Stop strings: found at the token that completes one, with decoders as tokenizers have them, at a cost that does not grow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from aligner.rollout.builtin.stopping import StopStrings

Decode = Callable[[Sequence[int]], str]


def byte_level(ids: Sequence[int]) -> str:
    """A token is a byte; what is no character becomes U+FFFD (GPT-2's, Llama 3's and Qwen's decoders)."""
    return bytes(ids).decode("utf-8", "replace")


def byte_fallback(ids: Sequence[int]) -> str:
    """A run of bytes above 127 is decoded as a whole or not at all, and a space at the very start is dropped (Llama 2's decoder)."""
    text, run = "", bytearray()
    for i in [*ids, 0]:
        if i >= 128:
            run.append(i)
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run.clear()
        text += chr(i)
    return text[:-1].removeprefix(" ")


def first_end(strings: Sequence[str], decode: Decode, prompt: Sequence[int], response: Sequence[int], start: int = 1) -> int | None:
    """The number of response tokens, at least `start`, after which a string is complete."""
    stops = StopStrings(strings, decode)
    context = stops.context(prompt)
    tokens = context + list(response)
    return next((n for n in range(start, len(response) + 1) if stops.completes(tokens[: len(context) + n], len(context))), None)


def test_a_string_that_was_passed_over_ends_nothing_later():
    """Before the least length a stop string ends nothing: a later token must complete one itself, though it could belong to one."""
    stops = StopStrings(["END"], byte_level)
    assert stops.completes(list(b"xEND"), 0)
    assert not stops.completes(list(b"xENDD"), 0)
    assert stops.completes(list(b"xENDDEND"), 0)


@pytest.mark.parametrize("decode", [byte_level, byte_fallback])
def test_the_token_that_completes_the_first_string(decode):
    """Random texts with characters of one to four bytes, against a search in the whole text."""
    draw = random.Random(4)
    found = 0
    for _ in range(200):
        text = "".join(draw.choice(" ab日本é✓😀") for _ in range(40))
        cut = draw.randrange(1, 12)
        prompt, response = text[:cut], text[cut:]
        strings = ["".join(draw.choice(" ab日本é✓😀") for _ in range(draw.randrange(1, 5))) for _ in range(2)]
        ends = [response.find(string) + len(string) for string in strings if string in response]
        expected = len(response[: min(ends)].encode()) if ends else None
        assert first_end(strings, decode, list(prompt.encode()), list(response.encode())) == expected
        found += bool(ends)
    assert 40 < found < 200


WORDS = ["", "Us", "er", ":", "\n", "\nUser", "a ", "User: b", "x\n\nU", "ser"]


def words(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def test_strings_across_tokens_by_hand():
    def ends(strings: list[str], response: list[int], prompt: Sequence[int] = (6,), start: int = 1) -> int | None:
        return first_end(strings, words, prompt, response, start)

    assert ends(["User:"], [6, 1, 2, 3, 6]) == 4  # "a |Us|er|:"
    assert ends(["User:"], [6, 1, 0, 2, 0, 3]) == 6  # tokens without a text (special ones) between
    assert ends(["User:"], [1, *[0] * 50, 2, 3]) == 53
    assert ends(["User:"], [6, 7]) == 2  # within one token
    assert ends(["\n\nUser:"], [8, 9, 3]) == 3
    assert ends(["\n\nUser:"], [4, 5, 3]) == 3
    assert ends(["User:"], [2, 3], prompt=[6, 1]) is None  # its beginning is the prompt's
    assert ends(["a"], [1, 2]) is None
    assert ends(["r", "User:"], [1, 2, 3]) == 2  # the one that is complete first
    assert ends(["er"], [1, 2, 3, 4, 1, 2], start=3) == 6  # one that was complete before is no longer looked for
    assert ends(["User:"], [1, 2, 3], prompt=[]) == 3


def test_a_long_response_costs_no_more_than_a_short_one():
    """At most a few tokens are decoded for each one drawn, and nothing for a token that cannot complete a string."""
    decoded = []

    def counting(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return byte_fallback(ids)

    text = "日本a: é" * 500
    response = list(text.encode())
    stops = StopStrings(["User:", "日日本"], counting)
    for end in range(1, len(response) + 1):
        assert not stops.completes(response[:end], 0)
    assert max(decoded) < 40 and sum(decoded) < 250 * len(response)
    decoded.clear()
    assert not stops.completes([*response, ord("a")], 0) and not decoded  # no string ends with an a
    assert stops.completes([*response, *b" User:"], 0)


@pytest.mark.shared
def test_a_real_tokenizer(shared_data):
    """stories260k's: words with their space, single letters, and characters of which it has only the bytes."""
    from aligner.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shared_data / "stories260k")
    prompt = tokenizer.encode("Once upon a time, there was a boy", add_special=True)
    text = " who said: “日本 ✓” to his dog. The end. Once more"
    response = tokenizer.continuation("Once upon a time, there was a boy", text)
    assert tokenizer.decode(prompt + response).endswith(text) and len(response) > 30

    def stopped(*strings: str) -> str | None:
        """The text of the tokens that are kept."""
        end = first_end(strings, tokenizer.decode, prompt, response)
        return None if end is None else tokenizer.decode(prompt + response[:end])[len(tokenizer.decode(prompt)) :]

    assert stopped("said:") == " who said:"
    assert stopped("d: “日") == " who said: “日"
    assert stopped("本 ✓”") == " who said: “日本 ✓”"
    assert stopped("The end.", "dog") == " who said: “日本 ✓” to his dog"
    assert stopped(". The e") == " who said: “日本 ✓” to his dog. The e"
    assert stopped(" who s").startswith(" who s")
    assert stopped("boy who") is None and stopped("The End") is None
