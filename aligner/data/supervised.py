"""Supervised examples: tokens with a mask on what is learnt."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.data.config import OverLong, SFTDataConfig
from aligner.data.encoding import Encoded, PromptStyle, encode_conversation, encode_labelled, encode_response, truncated
from aligner.data.labelled import is_labelled, parse_labelled
from aligner.data.records import ConversationRecord, parse_supervised
from aligner.data.report import LoadReport, Tally, TooLong
from aligner.data.sources import RawRecord, read_records
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedExample:
    """One row: `loss_mask` is True on response tokens and their end token; `source` is `file:line`."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str


def load_supervised(
    location: str, config: SFTDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[SupervisedExample], LoadReport]:
    """All usable examples at `location` (`config.train` or `config.validation`), and what was left out or cut.

    `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError where no example is left.
    """
    tally = Tally(location, config.bad_lines)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> SupervisedExample:
        encoded = _encode(raw, config, tokenizer, style)
        fitted = fit_length(encoded, config.max_length, config.over_long)
        tally.truncated += fitted is not encoded
        return SupervisedExample(tokens=fitted.tokens, loss_mask=fitted.loss_mask, source=raw.source)

    examples = tally.convert(((raw.source, raw) for raw in read_records(location, first)), convert)
    return examples, tally.finish()


def _encode(raw: RawRecord, config: SFTDataConfig, tokenizer: Tokenizer, style: PromptStyle) -> Encoded:
    if is_labelled(raw):
        return encode_labelled(tokenizer, parse_labelled(raw), style)
    record = parse_supervised(raw, config.prompt_field, config.response_field)
    if isinstance(record, ConversationRecord):
        return encode_conversation(tokenizer, record.messages)
    return encode_response(tokenizer, record.prompt, record.response, style)


def fit_length(encoded: Encoded, max_length: int, over_long: OverLong) -> Encoded:
    """`encoded` itself where it fits; else what `over_long` says: a DataError, `TooLong`, or its beginning."""
    if len(encoded.tokens) <= max_length:
        return encoded
    if over_long == OverLong.truncate:
        return truncated(encoded, max_length)
    if over_long == OverLong.drop:
        raise TooLong
    raise DataError(f"has {len(encoded.tokens)} tokens, allowed: at most max_length={max_length} (data.over_long=drop or truncate)")
