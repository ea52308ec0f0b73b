"""What a transform knows of the whole input, and what it says of one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Meaning:
    """Of one key: the settings of ours that follow, and what there is to say."""

    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    differs: bool = False  # ours is not quite the same
    absent: bool = False  # there is none here
    part: bool = False  # another key's setting has it in it
    severity: str = ""  # of what is not carried over, in place of the entry's


@dataclass(kw_only=True, slots=True)
class Context:
    """Every key's value, given or by default, and what was said beside them."""

    values: dict[str, Any]
    given: set[str]
    recipe: str
    ranks: int  # 0: not known
    examples: int  # of the training data; 0: not known
    model: str = ""  # the one that is trained, as it was given
    questions: list[str] = field(default_factory=list)  # without an answer it is another experiment, or does not run
    remarks: list[str] = field(default_factory=list)  # it is the same experiment, but this wants to be said

    def value(self, key: str) -> Any:
        return self.values.get(key)

    def number(self, key: str) -> float:
        """0 where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

    def product(self, keys: Sequence[str]) -> float:
        """Of other keys; `ranks` is the number of ranks, 1 (and a question) if nobody said it."""
        result: float = 1
        for key in keys:
            result *= self.known_ranks() if key == "ranks" else 1 if self.values.get(key) is None else self.number(key)
        return result

    def known_ranks(self) -> int:
        if not self.ranks:
            self.ask("the number of ranks, on which batch sizes depend, was not given: taken as 1; say --ranks N")
        return self.ranks or 1

    def ask(self, question: str) -> None:
        self.questions.append(question)
