"""Strings that end a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTIAL = "\ufffd"  # what bytes that are not a whole character decode to
MOST_BYTES = 4  # of a character, so the most tokens over which one can be split


class StopStrings:
    """Strings that end a response: found the moment a token completes one, at a cost that does not grow with the response.

    The text of a token depends on its neighbours: a character of several bytes may be split over tokens, and some tokenizers drop the space
    before the first word of what they decode. So a few earlier tokens are always decoded too (at the start of a response, the end of its
    prompt), and nothing is decoded if the newest token cannot complete a string.

    `decode` (ids to text) must concatenate: apart from partial characters, the text of more tokens begins with the text of fewer. A special
    token that `decode` leaves out is part of no string.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._longest = max(map(len, strings))
        self._candidates: dict[int, bool] = {}  # by token: whether it can complete a string

    def context(self, prompt: Sequence[int]) -> list[int]:
        """The end of a prompt, which is decoded in front of its response."""
        return list(prompt[self._boundary(prompt, len(prompt) - MOST_BYTES, 0) :])

    def completes(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the last of `tokens` completes a string in the text of `tokens[start:]`; the tokens before are its prompt's `context`."""
        if (token := tokens[-1]) not in self._candidates:
            self._candidates[token] = self._ends_one(self._decode([token]))
        if not self._candidates[token]:
            return False
        count, end = self._longest, len(tokens)
        while True:
            first = self._boundary(tokens, max(start, end - 1 - count), start)
            before = self._text(tokens, first, start, end - 1)
            if first == start or len(before) >= self._longest:
                break
            count *= 2  # tokens without a text, or with less than a character
        text = self._text(tokens, first, start, end)
        return any(text.find(string, max(0, len(before) + 1 - len(string))) >= 0 for string in self._strings)

    def _ends_one(self, text: str) -> bool:
        """Whether a string can end inside a token of this text; by itself it may have lost a leading space, or be part of a character."""
        if PARTIAL in text:
            return True
        return any(
            string in own or any(own.startswith(string[i:]) for i in range(1, len(string)))
            for own in (text, " " + text)
            for string in self._strings
        )

    def _boundary(self, tokens: Sequence[int], first: int, start: int) -> int:
        """The nearest place at or before `first` where a character begins: some tokenizers decode nothing of a run of bytes that begins
        inside one. `first` itself if there is none, as with bytes that are no characters."""
        for place in range(first, first - MOST_BYTES, -1):
            if place <= start:
                return start
            if any(not self._decode(tokens[place : place + n]).startswith(PARTIAL) for n in range(1, MOST_BYTES + 1)):
                return place
        return first

    def _text(self, tokens: Sequence[int], first: int, start: int, end: int) -> str:
        """The text of `tokens[first:end]` up to its last whole character, wherever among the last tokens that ends."""
        longest = ""
        for stop in range(end, max(first, end - MOST_BYTES), -1):
            text = self._decode(tokens[first:stop]) if first > start else self._continuation(tokens[:stop], start)
            whole = text.rstrip(PARTIAL)
            longest = max(longest, whole, key=len)
            if whole == text:
                break
        return longest

    def _continuation(self, tokens: Sequence[int], start: int) -> str:
        """The text of `tokens[start:]` after the text of the others."""
        prompt = self._decode(tokens[:start]).rstrip(PARTIAL) if start else ""
        return self._decode(tokens)[len(prompt) :]
