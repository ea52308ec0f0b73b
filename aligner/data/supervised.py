"""Supervised examples and preference pairs: tokens with a mask on what is trained.

A `Demonstration` is a prompt with the given response, with which SPIN compares its own responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from aligner.data.collate import PreferencePair, SupervisedExample
from aligner.data.config import Learn
from aligner.data.encoding import Encoded, encode_conversation, encode_plain, encode_response, everything, last_span, response_start
from aligner.data.forms import Purpose
from aligner.data.images import images_in
from aligner.data.labelled import encode_labelled, is_labelled, parse_labelled
from aligner.data.reading import Reader, loader
from aligner.data.records import ConversationRecord, TextRecord, is_text_line, parse_preference, parse_supervised, parse_text_pair
from aligner.data.sources import RawRecord
from aligner.errors import DataError
from aligner.types import Prompt


def row_of(encoded: Encoded, reader: Reader, raw: RawRecord) -> SupervisedExample:
    """The row of an encoded record, cut if it is too long and the settings allow that."""
    fitted = reader.fit(encoded)
    extras = reader.extras(raw, fitted.tokens, encoded.images, len(encoded.tokens))
    return SupervisedExample(tokens=fitted.tokens, loss_mask=fitted.loss_mask, source=raw.source, extras=extras)


def _example(raw: RawRecord, reader: Reader) -> SupervisedExample:
    encoded = _encode(raw, reader)
    return row_of(everything(encoded) if reader.config.learn is Learn.everything else encoded, reader, raw)


def _encode(raw: RawRecord, reader: Reader) -> Encoded:
    config, tokenizer, style = reader.config, reader.tokenizer, reader.style
    last_only = config.learn is Learn.last_response
    if is_labelled(raw):
        encoded = encode_labelled(tokenizer, parse_labelled(raw), style)
        return last_span(encoded) if last_only else encoded
    record = parse_supervised(raw, config.prompt_field, config.response_field)
    if isinstance(record, TextRecord):
        if last_only:
            raise DataError("is a text, of which no part is a response, expected a prompt with a response (data.learn=last_response)")
        return encode_plain(tokenizer, record.text, style, ends=True)
    tokenizer = tokenizer.offering(record.tools)
    if isinstance(record, ConversationRecord):
        return encode_conversation(tokenizer, record.messages, last_only=last_only)
    return encode_response(tokenizer, record.prompt, record.response, style)


load_supervised = loader(SupervisedExample, _example, purpose=Purpose.supervised)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt and the tokens of the given response, its end included."""

    prompt: Prompt
    response: tuple[int, ...]


def answered(prompt: Prompt, response: Sequence[int]) -> SupervisedExample:
    """The prompt with a response; that alone is in the mask."""
    head = prompt.tokens
    mask = (False,) * len(head) + (True,) * len(response)
    return SupervisedExample(tokens=(*head, *response), loss_mask=mask, source=prompt.source, extras=prompt.extras)


def _demonstration(raw: RawRecord, reader: Reader) -> Demonstration:
    """In a conversation the last response is the given one, and the rest is the prompt; `Prompt.id` is the record's index."""
    row = _example(raw, reader)
    start = response_start(row.loss_mask)
    reader.check_prompt(start)
    return Demonstration(prompt=reader.prompt(raw, row.tokens[:start], images=images_in(row.extras)), response=row.tokens[start:])


load_demonstrations = loader(Demonstration, _demonstration, purpose=Purpose.supervised)


# The raw record of a pair; in a file that alternates `{text}` lines two of them, of which the last one may have no second.
_Lines = tuple[RawRecord] | tuple[RawRecord, RawRecord | None]


def _pair(lines: _Lines, reader: Reader) -> PreferencePair:
    record = parse_text_pair(*lines) if len(lines) == 2 else parse_preference(lines[0])
    rows = []
    for response in (record.chosen, record.rejected):
        encoded = encode_response(reader.tokenizer.offering(record.tools), record.prompt, response, reader.style)
        rows.append(row_of(encoded, reader, lines[0]))
    if rows[0].tokens == rows[1].tokens:
        raise DataError(f"chosen and rejected have the same {len(rows[0].tokens)} tokens, expected two different responses")
    return PreferencePair(chosen=rows[0], rejected=rows[1], margin=record.margin)


def require_margins(pairs: Sequence[PreferencePair], what: str) -> None:
    """Raise DataError if no pair has a margin: `what` would learn that all chosen responses are equally good."""
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
            yield from zip(lines)
            continue
        for first in lines:
            yield first, next(lines, None)


def _records(lines: _Lines) -> tuple[RawRecord, ...]:
    return tuple(filter(None, lines))


load_preferences = loader(PreferencePair, _pair, purpose=Purpose.preference, items=_pair_lines, records=_records)
