"""Responses with labels, for regression reward models (HelpSteer, 2311.09528; SteerLM's attribute prediction, 2310.05344)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from aligner.data.collate import supervised_batch
from aligner.data.config import RegressionDataConfig
from aligner.data.encoding import Encoded, PromptStyle, as_text, encode_conversation, encode_plain, encode_response
from aligner.data.forms import Purpose, recognised
from aligner.data.labelled import LABEL_START, TURN_START, LabelledRecord, is_labelled, parse_labelled, parse_labels
from aligner.data.reading import reads_sources
from aligner.data.records import (
    ConversationRecord,
    ResponseRecord,
    field_text,
    parse_supervised,
    raw_object,
    refuse_two,
    supervised_readings,
)
from aligner.data.report import LoadReport, Tally
from aligner.data.sources import RawRecord
from aligner.data.supervised import SupervisedExample, fit_length, row_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import LabeledBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """A row to be scored, and one number per attribute; `aligner.data.labelled.MISSING` where nobody gave one."""

    row: SupervisedExample
    labels: tuple[float, ...]


@reads_sources
def load_regression(
    location: str, config: RegressionDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[LabelledExample], LoadReport]:
    """All usable examples at `location` (`config.train` or `config.validation`), and a report of dropped and cut ones.

    A conversation is one example for each of its turns that has a label. `first`: only of so many records.
    Raises: DataError listing all bad lines; DataError if no example is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> list[LabelledExample]:
        examples, cut = [], 0
        for encoded, labels in _judged(raw, config.attributes, tokenizer, style):
            fitted = fit_length(encoded, config.max_length, config.overlong)
            cut += fitted is not encoded
            row = row_of(fitted, raw)
            examples.append(LabelledExample(row=row, labels=labels))
        tally.truncated += cut > 0
        return examples

    records = recognised(location, config, Purpose.regression, first)
    return tally.convert(records, convert), tally.finish()


def labelled_batch(examples: Sequence[LabelledExample], pad_id: int) -> LabeledBatch:
    """Rows with labels float32 [B, K]."""
    labels = torch.tensor([example.labels for example in examples], dtype=torch.float32)
    return replace(supervised_batch([example.row for example in examples], pad_id), labels=labels)


def attribute_text(tokenizer: Tokenizer, record: LabelledRecord, turn: int) -> str:
    """The text that an attribute model scores for a turn: the conversation up to it, without labels, and the mark of one."""
    written = as_text(tokenizer, replace(record, turns=record.turns[: turn + 1])).unlabelled()
    return "".join(text for text, _ in written.segments()).removesuffix(TURN_START) + LABEL_START


def _judged(
    raw: RawRecord, attributes: Sequence[str], tokenizer: Tokenizer, style: PromptStyle
) -> Iterator[tuple[Encoded, tuple[float, ...]]]:
    record = raw_object(raw)
    if is_labelled(raw):
        yield from _judged_turns(raw, attributes, tokenizer, style)
        return
    labels = parse_labels(_label(record), attributes, "field 'label'")
    if "text" in record:
        refuse_two(["text", *supervised_readings(record)])
        yield encode_plain(tokenizer, field_text(record, "text"), style), labels
        return
    parsed = parse_supervised(raw)
    if isinstance(parsed, ConversationRecord):
        yield encode_conversation(tokenizer.offering(parsed.tools), parsed.messages), labels
    elif isinstance(parsed, ResponseRecord):
        yield encode_response(tokenizer.offering(parsed.tools), parsed.prompt, parsed.response, style), labels


def _judged_turns(
    raw: RawRecord, attributes: Sequence[str], tokenizer: Tokenizer, style: PromptStyle
) -> Iterator[tuple[Encoded, tuple[float, ...]]]:
    parsed = parse_labelled(raw, judged=True)
    judged = [number for number, turn in enumerate(parsed.turns) if turn.label]
    if not judged:
        raise DataError("field 'conversations' has no turn with a label, expected at least one")
    for number in judged:
        labels = parse_labels(parsed.turns[number].label, attributes, f"field 'conversations[{number}]': label")
        yield encode_plain(tokenizer, attribute_text(tokenizer, parsed, number), style), labels


def _label(record: dict[str, object]) -> object:
    if "label" not in record:
        raise DataError(f"has the fields {sorted(map(str, record))}, expected a field 'label' with a number for each attribute")
    return record["label"]
