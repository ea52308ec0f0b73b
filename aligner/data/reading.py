"""What every `load_*` that reads records for training shares: one path or a mixture of sources, and the cache of tokenized data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from aligner.data.cache import load_cached
from aligner.data.folders import left_out, located
from aligner.data.mixture import Location, Mixture, Source, sources
from aligner.data.report import LoadReport, combined
from aligner.data.stored import row_counts, rows_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt

Example = TypeVar("Example")
Other = TypeVar("Other")


class Mixed(Sequence[Example]):
    """The examples of several sources, numbered through; prompts have ids as if the sources were one data set."""

    def __init__(self, mixture: Mixture, parts: Sequence[Sequence[Example]], num_records: Sequence[int]) -> None:
        self.mixture = mixture
        self.parts = parts
        self._starts = [0, *accumulate(mixture.sizes)]
        self._first_ids = [0, *accumulate(num_records)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        part = bisect_right(self._starts, number) - 1
        return _renumbered(self.parts[part][number - self._starts[part]], self._first_ids[part])

    def __iter__(self) -> Iterator[Example]:
        for part, first_id in zip(self.parts, self._first_ids, strict=False):
            for example in part:
                yield _renumbered(example, first_id)

    def shares(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """The share of each source in these prompts, which are its own."""
        parts = [bisect_right(self._first_ids, prompt.id) - 1 for prompt in prompts]
        return {f"data/share/{one.name}": parts.count(number) / len(parts) for number, one in enumerate(self.mixture.sources)}

    def map(self, change: Callable[[Example], Other]) -> Mixed[Other]:
        """`change` of every example, as a mixture of the same shares."""
        return Mixed(self.mixture, [[change(example) for example in part] for part in self.parts], np.diff(self._first_ids).tolist())

    def row_counts(self) -> np.ndarray[Any, Any]:
        """As `StoredExamples.row_counts`."""
        return np.concatenate([row_counts(part) for part in self.parts])


def reads_sources(load: Callable[..., tuple[Sequence[Example], LoadReport]]) -> Callable[..., tuple[Sequence[Example], LoadReport]]:
    """A `load_*` of one path as one of lists of sources too, with the cache that the settings name.

    What it returns for a list is a `Mixed`; `options` are for the `load_*` itself. Raises ConfigError for a list that cannot be used,
    DataError for sources that do not match.
    """

    @wraps(load)
    def read(
        location: Location,
        config: Any,
        tokenizer: Tokenizer,
        *,
        first: int | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> tuple[Sequence[Example], LoadReport]:
        def read_one(path: str, own: Any, tokenizer: Tokenizer, most: int | None) -> tuple[Sequence[Example], LoadReport]:
            path = located(path, location, config)
            if own.cache and first is None:
                examples, report = load_cached(load, path, own, tokenizer, heartbeat=heartbeat, first=most, **options)
            else:
                least = min((one for one in (first, most) if one is not None), default=None)
                examples, report = load(path, own, tokenizer, first=least, **options)
            return examples, replace(report, left_out=left_out(path))

        if isinstance(location, str):
            return read_one(location, config, tokenizer, None)
        named, found = sources(config, location), []
        for one in named:
            own = one.config(config)
            chats = tokenizer.chatting(own) if one.settings else tokenizer
            found.append(read_one(one.path, own, chats, one.max_records or None))
        return _mixed(named, config, found)

    return read


def _mixed(
    named: Sequence[Source], config: Any, found: Sequence[tuple[Sequence[Example], LoadReport]]
) -> tuple[Mixed[Example], LoadReport]:
    parts, reports = [part for part, _ in found], [report for _, report in found]
    widths = {source.path: _width(part[0]) for source, part in zip(named, parts, strict=True)}
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{path}: {width}" for path, width in widths.items())
        raise DataError(f"the sources have different numbers of responses, or of a teacher's tokens ({told}), expected the same in all")
    mixture = Mixture(tuple(named), tuple(map(len, parts)), config.mixture_temperature)
    return Mixed(mixture, parts, [one.num_records for one in reports]), combined(reports, mixture.summary())


def _width(example: Any) -> int:
    """What all examples of a batch must have as many of."""
    named = getattr(example, "teacher_tokens", None)
    return len(rows_of(example)) if named is None else int(named.shape[1])


def _renumbered(example: Any, first_id: int) -> Any:
    """With the id that its prompt, if it has one, has in the whole data set."""
    if not first_id:
        return example
    if isinstance(example, Prompt):
        return replace(example, id=first_id + example.id)
    if isinstance(prompt := getattr(example, "prompt", None), Prompt):
        return replace(example, prompt=replace(prompt, id=first_id + prompt.id))
    return example
