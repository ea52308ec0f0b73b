"""Sampled responses that wait for one of the log-probs of SteerLM 2's records (see `aligner.data.proposals`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.data.config import SampledDataConfig
from aligner.data.encoding import Encoded, PromptStyle, encode_labelled, encode_plain, encode_response
from aligner.data.labelled import LabelledRecord
from aligner.data.labels import MISSING, parse_labels
from aligner.data.proposals import Quantity, Responses, check_sizes, parse_responses
from aligner.data.records import Message, shown
from aligner.data.regression import attribute_text
from aligner.data.report import LoadReport, Tally
from aligner.data.requests import USER
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import SupervisedExample, fit_length
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelQuery:
    """The quantity to compute; for `Quantity.attributes` the attribute model's outputs, in their order, and their levels."""

    quantity: Quantity
    attributes: Sequence[str]
    lowest: int
    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroup:
    """One record: the scored rows of each response, and the levels that its label asks for (MISSING if it does not; else empty)."""

    record: Mapping[str, Any]
    rows: tuple[SupervisedExample, ...]
    levels: tuple[float, ...] = ()

    def with_log_probs(self, quantity: Quantity, log_probs: Sequence[float]) -> dict[str, Any]:
        """The record, all else as it was; a log-prob that was there is replaced."""
        responses = [one | {quantity.field: log_prob} for one, log_prob in zip(self.record["responses"], log_probs, strict=True)]
        return {**self.record, "responses": responses}


def load_sampled(
    location: str, config: SampledDataConfig, tokenizer: Tokenizer, query: LabelQuery, *, first: int | None = None
) -> tuple[list[SampledGroup], LoadReport]:
    """All usable groups at `location`, and a report of dropped ones. `first`: use only this many records.

    What is scored is, token for token, what `load_proposals` gives for training. P(y|x) sees the same conversation without labels, or as
    the model's own chat template writes it. Of P(a|x,y) it is what an attribute model was trained on: all of it is in the mask.
    Raises: DataError listing all bad lines; DataError if no group is left, or if groups differ in size.
    """
    tally = Tally(location, config.bad_lines, whole=True)

    def convert(raw: RawRecord) -> SampledGroup:
        found, rows = parse_responses(raw, config.num_responses), []
        for number in range(len(found.turns)):
            fitted = fit_length(_encode(tokenizer, found, number, query.quantity, config), config.max_length, config.overlong)
            rows.append(SupervisedExample(tokens=fitted.tokens, loss_mask=fitted.loss_mask, source=raw.source))
        levels = _levels(found.label, query) if query.quantity is Quantity.attributes else ()
        return SampledGroup(record={**raw.value, "responses": list(found.fields)}, rows=tuple(rows), levels=levels)

    groups = tally.convert(read_records(location, first), convert)
    check_sizes(location, [len(group.rows) for group in groups])
    return groups, tally.finish()


def _encode(tokenizer: Tokenizer, found: Responses, number: int, quantity: Quantity, config: SampledDataConfig) -> Encoded:
    style = PromptStyle(apply_chat_template=False, add_bos=config.add_bos)
    record, whole = found.conversations[number], found.whole[number]
    if quantity is Quantity.attributes:
        return encode_plain(tokenizer, attribute_text(record, len(record.turns) - 1), style)
    if quantity is Quantity.proposal:
        return encode_labelled(tokenizer, record, style, ends=whole)
    if not config.apply_chat_template:
        return encode_labelled(tokenizer, record.unlabelled(), style, ends=whole)
    if not whole:
        raise DataError(
            f"field 'responses[{number}]' was cut off (finish_reason 'length'), and a chat template writes an end; expected whole "
            "responses: sample them with a larger rollout.sampling.max_response_length"
        )
    return encode_response(tokenizer, _messages(record), record.turns[-1].text, style)


def _messages(record: LabelledRecord) -> tuple[Message, ...]:
    """What precedes the last turn, as a chat."""
    system = (Message(role="system", content=record.system),) if record.system else ()
    turns = (Message(role="user" if turn.speaker == USER else "assistant", content=turn.text) for turn in record.turns[:-1])
    return (*system, *turns)


def _levels(label: str, query: LabelQuery) -> tuple[float, ...]:
    levels = parse_labels(label, query.attributes, "field 'label'")
    for name, level in zip(query.attributes, levels, strict=True):
        if level != MISSING and (level != int(level) or not query.lowest <= level <= query.highest):
            allowed = f"a whole number from {query.lowest} to {query.highest} (algorithm.lowest, highest)"
            raise DataError(f"field 'label' is {shown(label)}: {name} is {level:g}, expected {allowed}")
    return levels
