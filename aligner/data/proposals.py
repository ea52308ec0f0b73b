"""Several responses to each prompt with their log-probs, for SteerLM 2 (2406.08673), in NeMo-Aligner's format:

    {system, prompt_turns: [{from, value}], label, responses: [{from, value, "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"}]}

where a is the label, x the prompt, y a response, and Q the model that sampled the responses. The text is that of labelled conversations
(`aligner.data.labelled`). A response with `finish_reason` "length" was cut off: its row has no end.

`load_sampled` reads responses that wait for one of these log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aligner.data.collate import SupervisedExample
from aligner.data.config import ProposalDataConfig, SampledDataConfig
from aligner.data.encoding import Encoded, encode_plain, encode_response
from aligner.data.labelled import MISSING, USER, LabelledRecord, Turn, attribute_text, encode_labelled, parse_labels, parse_turn
from aligner.data.messages import Message, number_of, shown
from aligner.data.reading import Reader, read_all, reads_sources
from aligner.data.records import field_text, raw_object
from aligner.data.report import LoadReport
from aligner.data.sources import RawRecord
from aligner.data.supervised import row_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import FinishReason

OF_ATTRIBUTES, OF_RESPONSE, OF_PROPOSAL = "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"


class Quantity(str, Enum):
    """A log-prob of a response."""

    attributes = "attributes"  # log P(a|x,y), by an attribute model
    response = "response"  # log P(y|x), by a model without requested attributes
    proposal = "proposal"  # log Q(y|a,x), by the model that sampled the responses

    @property
    def field(self) -> str:
        return {Quantity.attributes: OF_ATTRIBUTES, Quantity.response: OF_RESPONSE, Quantity.proposal: OF_PROPOSAL}[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedGroup:
    """The responses to one prompt. `targets` are log P(a|x,y) + log P(y|x); `proposals` log Q'(y|a,x), None if the record has none."""

    rows: tuple[SupervisedExample, ...]
    targets: tuple[float, ...]
    proposals: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """One record: several responses to a prompt, each a turn with the same label; `whole`: which of them were not cut off."""

    system: str
    prompt: tuple[Turn, ...]
    label: str
    turns: tuple[Turn, ...]
    whole: tuple[bool, ...]
    fields: tuple[dict[str, object], ...]  # of each response, as the record has them

    @property
    def conversations(self) -> list[LabelledRecord]:
        """The prompt with each of the responses."""
        return [LabelledRecord(system=self.system, turns=(*self.prompt, turn)) for turn in self.turns]


def _proposed(raw: RawRecord, reader: Reader) -> ProposedGroup:
    found = parse_responses(raw, reader.config.num_responses)
    targets, proposals = _log_probs(found.fields)
    encoded = (
        encode_labelled(reader.tokenizer, record, reader.plain, ends=whole)
        for record, whole in zip(found.conversations, found.whole, strict=True)
    )
    return ProposedGroup(rows=tuple(row_of(one, reader, raw) for one in encoded), targets=targets, proposals=proposals)


def _load_one(location: str, config: ProposalDataConfig, tokenizer: Tokenizer, **options: Any) -> tuple[list[ProposedGroup], LoadReport]:
    groups, report = read_all(_proposed, location, config, tokenizer, **options)
    check_sizes(location, [len(group.rows) for group in groups])
    return groups, report


load_proposals = reads_sources(ProposedGroup, _load_one)  # raises DataError if groups differ in size


def parse_responses(raw: RawRecord, num_responses: int) -> Responses:
    """The record with its first `num_responses` responses (0: all). Its log-probs are not read."""
    record = raw_object(raw)
    system = field_text(record, "system", empty=True) if "system" in record else ""
    label = field_text(record, "label")
    turns = _list(record, "prompt_turns")
    prompt = tuple(parse_turn(turn, f"field 'prompt_turns[{i}]'") for i, turn in enumerate(turns))
    responses = _list(record, "responses")
    if len(responses) < max(2, num_responses):
        raise DataError(f"field 'responses' has {len(responses)} responses, expected at least {max(2, num_responses)}")
    fields = tuple(responses[: num_responses or None])
    found = [parse_turn(one, f"field 'responses[{i}]'", own_label=label, learnt=True, empty=True) for i, one in enumerate(fields)]
    whole = tuple(one.get("finish_reason") != FinishReason.length.value for one in fields)
    return Responses(system=system, prompt=prompt, label=label, turns=tuple(found), whole=whole, fields=fields)


def check_sizes(location: str, sizes: Sequence[int]) -> None:
    """Raise DataError if groups differ in size."""
    if len(different := sorted(set(sizes))) > 1:
        raise DataError(
            f"{location}: records have {shown(different)} responses, expected the same number in all (data.num_responses cuts them)"
        )


def _log_probs(responses: Sequence[dict[str, object]]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    targets, proposals = [], []
    for i, response in enumerate(responses):
        what = f"field 'responses[{i}]'"
        targets.append(_log(response, OF_ATTRIBUTES, what) + _log(response, OF_RESPONSE, what))
        proposals += [_log(response, OF_PROPOSAL, what)] if OF_PROPOSAL in response else []
    if proposals and len(proposals) < len(targets):
        raise DataError(f"{len(proposals)} of {len(targets)} responses have {OF_PROPOSAL!r}, expected all of them or none")
    return tuple(targets), tuple(proposals) or None


def _list(record: dict[str, object], name: str) -> Sequence[object]:
    value = record[name] if name in record else None
    if not isinstance(value, list) or not value:
        raise DataError(f"field {name!r} is {shown(value)}, expected a non-empty list of {{from, value}}")
    return value


def _log(response: dict[str, object], name: str, what: str) -> float:
    value = response[name] if name in response else None
    return number_of(value, f"{what}: {name!r}", "a finite number (the recipe proposals writes it)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelQuery:
    """The quantity to compute; for `Quantity.attributes`, the attribute model's outputs in order, and their levels."""

    quantity: Quantity
    attributes: Sequence[str]
    lowest: int
    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroup:
    """One record: the scored rows of its responses, and the levels that its label requests (MISSING where it does not; else empty)."""

    record: Mapping[str, Any]
    rows: tuple[SupervisedExample, ...]
    levels: tuple[float, ...] = ()

    def with_log_probs(self, quantity: Quantity, log_probs: Sequence[float]) -> dict[str, Any]:
        """The record with these log-probs; existing ones are replaced."""
        responses = [one | {quantity.field: log_prob} for one, log_prob in zip(self.record["responses"], log_probs, strict=True)]
        return {**self.record, "responses": responses}


def load_sampled(
    location: str, config: SampledDataConfig, tokenizer: Tokenizer, sought: LabelQuery, *, first: int | None = None
) -> tuple[list[SampledGroup], LoadReport]:
    """Groups at `location` (see `aligner.data.reading`). Raises DataError if they differ in size.

    The scored rows are, token for token, what `load_proposals` returns for training. For P(y|x) it is the same conversation without labels,
    or written by the model's own chat template; for P(a|x,y) it is what an attribute model was trained on, all of it in the mask.
    """

    def convert(raw: RawRecord, reader: Reader) -> SampledGroup:
        found = parse_responses(raw, config.num_responses)
        rows = tuple(row_of(_encode(found, number, sought.quantity, reader), reader, raw) for number in range(len(found.turns)))
        levels = _levels(found.label, sought) if sought.quantity is Quantity.attributes else ()
        return SampledGroup(record={**raw.value, "responses": list(found.fields)}, rows=rows, levels=levels)

    groups, report = read_all(convert, location, config, tokenizer, first=first, whole=True)
    check_sizes(location, [len(group.rows) for group in groups])
    return groups, report


def _encode(found: Responses, number: int, quantity: Quantity, reader: Reader) -> Encoded:
    record, whole, tokenizer = found.conversations[number], found.whole[number], reader.tokenizer
    if quantity is Quantity.attributes:
        return encode_plain(tokenizer, attribute_text(tokenizer, record, len(record.turns) - 1), reader.plain)
    if quantity is Quantity.proposal:
        return encode_labelled(tokenizer, record, reader.plain, ends=whole)
    if not reader.config.apply_chat_template:
        return encode_labelled(tokenizer, record.unlabelled(), reader.plain, ends=whole)
    if not whole:
        raise DataError(
            f"field 'responses[{number}]' was cut off (finish_reason 'length'), and a chat template writes an end; expected complete "
            "responses: sample them with a larger rollout.sampling.max_response_length"
        )
    return encode_response(tokenizer, _messages(record), record.turns[-1].text, reader.style)


def _messages(record: LabelledRecord) -> tuple[Message, ...]:
    system = (Message(role="system", content=record.system),) if record.system else ()
    turns = (Message(role="user" if turn.speaker == USER else "assistant", content=turn.text) for turn in record.turns[:-1])
    return (*system, *turns)


def _levels(label: str, sought: LabelQuery) -> tuple[float, ...]:
    levels = parse_labels(label, sought.attributes, "field 'label'")
    for name, level in zip(sought.attributes, levels, strict=True):
        if level != MISSING and (level != int(level) or not sought.lowest <= level <= sought.highest):
            allowed = f"a whole number from {sought.lowest} to {sought.highest} (algorithm.lowest, highest)"
            raise DataError(f"field 'label' is {shown(label)}: {name} is {level:g}, expected {allowed}")
    return levels
