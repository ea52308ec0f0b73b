"""Preference pairs: the same prompt with a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from torch import Tensor

from aligner.data.config import PreferenceDataConfig
from aligner.data.encoding import PromptStyle, encode_response
from aligner.data.forms import Purpose, recognised
from aligner.data.reading import reads_sources
from aligner.data.records import is_text_line, parse_preference, parse_text_pair
from aligner.data.report import LoadReport, Tally
from aligner.data.sources import RawRecord
from aligner.data.supervised import SupervisedExample, fit_length, row_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two rows that begin with the same prompt; `margin` is the given reward difference, or 0."""

    chosen: SupervisedExample
    rejected: SupervisedExample
    margin: float

    @property
    def source(self) -> str:
        return self.chosen.source

    @property
    def rows(self) -> tuple[SupervisedExample, ...]:
        """The rows that a model reads."""
        return self.chosen, self.rejected

    def with_reference(self, logprobs: Sequence[Tensor]) -> PreferencePair:
        """The same pair with a frozen reference's log-probs of the trained tokens of each of its `rows`."""
        chosen, rejected = (replace(row, ref_logprobs=found) for row, found in zip(self.rows, logprobs, strict=True))
        return replace(self, chosen=chosen, rejected=rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """The raw record of a pair, and the second one where the file alternates `{text}` lines."""

    first: RawRecord
    second: RawRecord | None = None
    alternating: bool = False

    @property
    def records(self) -> tuple[RawRecord, ...]:
        """What it was made of."""
        return (self.first,) if self.second is None else (self.first, self.second)


@reads_sources
def load_preferences(
    location: str, config: PreferenceDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[PreferencePair], LoadReport]:
    """All usable pairs at `location` (`config.train` or `config.validation`), and a report of dropped and cut ones.

    `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError if no pair is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(lines: _Lines) -> PreferencePair:
        record = parse_text_pair(lines.first, lines.second) if lines.alternating else parse_preference(lines.first)
        rows, cut = [], 0
        for response in (record.chosen, record.rejected):
            encoded = encode_response(tokenizer.offering(record.tools), record.prompt, response, style)
            fitted = fit_length(encoded, config.max_length, config.overlong)
            cut += fitted is not encoded
            rows.append(row_of(fitted, lines.first))
        if rows[0].tokens == rows[1].tokens:
            raise DataError(f"chosen and rejected have the same {len(rows[0].tokens)} tokens, expected two different responses")
        tally.truncated += cut > 0
        return PreferencePair(chosen=rows[0], rejected=rows[1], margin=record.margin)

    pairs = tally.convert(
        _pair_lines(recognised(location, config, Purpose.preference, first)),
        convert,
        records=lambda lines: lines.records,
    )
    return pairs, tally.finish()


def require_margins(pairs: Sequence[PreferencePair], what: str) -> None:
    """Raise DataError if no pair says how much better its chosen response is: `what` would learn that all are equally good."""
    if not any(pair.margin for pair in pairs):
        raise DataError(
            f"{what} needs records with chosen_reward and rejected_reward: "
            f"none of the {len(pairs)} pairs of data.train has rewards that differ"
        )


def _pair_lines(records: Iterable[RawRecord]) -> Iterator[_Lines]:
    """One entry per record, or per two lines in files that alternate `{text}` lines (decided by a file's first readable record)."""
    for _, group in groupby(records, key=lambda raw: raw.file):
        head: list[RawRecord] = []
        while (raw := next(group, None)) is not None:
            head.append(raw)
            if not raw.error:
                break
        lines = chain(head, group)
        if not is_text_line(head[0] if head[-1].error else head[-1]):
            yield from (_Lines(first=raw) for raw in lines)
            continue
        for first in lines:
            yield _Lines(first=first, second=next(lines, None), alternating=True)
