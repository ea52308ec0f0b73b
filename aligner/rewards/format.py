"""Rewards for the form of a response: a regular expression, or sections between tags."""

from __future__ import annotations

import re

from aligner.rewards.forms import Factory, TextFunction, of_each_response


@Factory
def pattern(regex: str, anywhere: bool = False) -> TextFunction:
    """Factory: 1 if the whole response, without surrounding whitespace, matches `regex` (`.` matches newlines too), else 0.

    With `anywhere`, matching a part is enough. Python cannot interrupt a regular expression: one that backtracks without end hangs.
    """
    compiled = re.compile(regex, re.DOTALL)
    find = compiled.search if anywhere else compiled.fullmatch
    return of_each_response(lambda response: float(find(response.strip()) is not None))


@Factory
def sections(tags: list[str] | None = None, partial: bool = True, opened: bool = False) -> TextFunction:
    """Factory: 1 if the response is `<think>...</think><answer>...</answer>` (or other `tags`, in their order), none of them empty and
    with nothing but whitespace around them.

    With `partial`, any other response gets half of the fraction of the tags (opening and closing) that it has exactly once: a gradient
    for a policy that has never written all of them. `opened`: the prompt ends with the first opening tag.
    """
    names = tags or ["think", "answer"]
    if bad := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:
        raise ValueError(f"tags has {bad[0]!r}, expected names of letters, digits, _ and -")
    marks = [mark for name in names for mark in (f"<{name}>", f"</{name}>")][1 if opened else 0 :]

    def credit(response: str) -> float:
        found = [response.count(mark) == 1 for mark in marks]
        if all(found) and _in_order(response, marks, opened=opened):
            return 1.0
        return 0.5 * sum(found) / len(marks) if partial else 0.0

    return of_each_response(credit)


def _in_order(response: str, marks: list[str], *, opened: bool) -> bool:
    """Whether the response is these marks one after the other, with text inside the sections and none outside. Each occurs once."""
    rest, inside = response, opened
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or bool(before.strip()) != inside:
            return False
        inside = not inside
    return not rest.strip()
