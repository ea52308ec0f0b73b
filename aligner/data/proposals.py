"""Several responses to each prompt with their log-probs, for SteerLM 2 (2406.08673), as NeMo-Aligner has them:

    {system, prompt_turns: [{from, value}], label, responses: [{from, value, "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"}]}

with a the label, x the prompt, y a response; Q is the model that the responses were sampled from. They are written as
`aligner.data.labelled` writes conversations with labels. A response with `finish_reason` "length" was cut off: its row has no end.

`load_sampled` reads responses that wait for one of these log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aligner.data.config import ProposalDataConfig, SampledDataConfig
from aligner.data.encoding import Encoded, PromptStyle, encode_labelled, encode_plain, encode_response
from aligner.data.labelled import MISSING, LabelledRecord, Turn, parse_labels, parse_turn
from aligner.data.messages import Message, shown
from aligner.data.reading import reads_sources
from aligner.data.records import field_text, raw_object
from aligner.data.regression import attribute_text
from aligner.data.report import LoadReport, Tally
from aligner.data.requests import USER
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import SupervisedExample, fit_length
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import FinishReason

OF_ATTRIBUTES, OF_RESPONSE, OF_PROPOSAL = "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"


class Quantity(str, Enum):
    """A log-prob that a response has."""

    attributes = "attributes"  # log P(a|x,y), by an attribute model
    response = "response"  # log P(y|x), by a model that is asked for no attributes
    proposal = "proposal"  # log Q(y|a,x), by the model that sampled the responses

    @property
    def field(self) -> str:
        """Its name in a record."""
        return {Quantity.attributes: OF_ATTRIBUTES, Quantity.response: OF_RESPONSE, Quantity.proposal: OF_PROPOSAL}[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProposedGroup:
    """The responses to one prompt. `targets` are log P(a|x,y) + log P(y|x); `proposals` log Q'(y|a,x), None if the record has none."""

    rows: tuple[SupervisedExample, ...]
    targets: tuple[float, ...]
    proposals: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """One record: several responses to a prompt, each a turn under the same label; `whole` says which were not cut off."""

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


@reads_sources
def load_proposals(
    location: str, config: ProposalDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[ProposedGroup], LoadReport]:
    """All usable groups at `location`, and a report of dropped ones. `first`: use only this many records.

    Raises: DataError listing all bad lines; DataError if no group is left, or if groups differ in size.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=False, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> ProposedGroup:
        found, rows = parse_responses(raw, config.num_responses), []
        targets, proposals = _log_probs(found.fields)
        for record, whole in zip(found.conversations, found.whole, strict=True):
            fitted = fit_length(encode_labelled(tokenizer, record, style, ends=whole), config.max_length, config.overlong)
            rows.append(SupervisedExample(tokens=fitted.tokens, loss_mask=fitted.loss_mask, source=raw.source))
        return ProposedGroup(rows=tuple(rows), targets=targets, proposals=proposals)

    groups = tally.convert(read_records(location, first), convert)
    check_sizes(location, [len(group.rows) for group in groups])
    return groups, tally.finish()


def parse_responses(raw: RawRecord, num_responses: int) -> Responses:
    """The record, with the first `num_responses` of its responses, or all of them (0). Its log-probs are not read."""
    record = raw_object(raw)
    system = field_text(record, "system", empty=True) if "system" in record else ""
    label = field_text(record, "label")
    turns = _list(record, "prompt_turns")
    prompt = tuple(parse_turn(turn, f"field 'prompt_turns[{i}]'") for i, turn in enumerate(turns))
    responses = _list(record, "responses")
    if len(responses) < max(2, num_responses):
        raise DataError(f"field 'responses' has {len(responses)} responses, expected at least {max(2, num_responses)}")
    found, fields = [], []
    for i, response in enumerate(responses[: num_responses or None]):
        found.append(parse_turn(response, f"field 'responses[{i}]'", own_label=label, learnt=True, empty=True))
        fields.append(response)
    whole = tuple(one.get("finish_reason") != FinishReason.length.value for one in fields)
    return Responses(system=system, prompt=prompt, label=label, turns=tuple(found), whole=whole, fields=tuple(fields))


def check_sizes(location: str, sizes: Sequence[int]) -> None:
    """Raise DataError if groups differ in size."""
    if len(different := sorted(set(sizes))) > 1:
        raise DataError(
            f"{location}: records have {shown(different)} responses, expected the same number in all (data.num_responses cuts them)"
        )


def _log_probs(responses: Sequence[dict[str, object]]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """(targets, proposals) of `ProposedGroup`."""
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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{what}: {name!r} is {shown(value)}, expected a finite number (the recipe proposals writes it)")
    return float(value)


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
    location: str, config: SampledDataConfig, tokenizer: Tokenizer, sought: LabelQuery, *, first: int | None = None
) -> tuple[list[SampledGroup], LoadReport]:
    """All usable groups at `location`, and a report of dropped ones. `first`: use only this many records.

    What is scored is, token for token, what `load_proposals` gives for training. P(y|x) sees the same conversation without labels, or as
    the model's own chat template writes it. Of P(a|x,y) it is what an attribute model was trained on: all of it is in the mask.
    Raises: DataError listing all bad lines; DataError if no group is left, or if groups differ in size.
    """
    tally = Tally(location, config, whole=True)

    def convert(raw: RawRecord) -> SampledGroup:
        found, rows = parse_responses(raw, config.num_responses), []
        for number in range(len(found.turns)):
            fitted = fit_length(_encode(tokenizer, found, number, sought.quantity, config), config.max_length, config.overlong)
            rows.append(SupervisedExample(tokens=fitted.tokens, loss_mask=fitted.loss_mask, source=raw.source))
        levels = _levels(found.label, sought) if sought.quantity is Quantity.attributes else ()
        return SampledGroup(record={**raw.value, "responses": list(found.fields)}, rows=tuple(rows), levels=levels)

    groups = tally.convert(read_records(location, first), convert)
    check_sizes(location, [len(group.rows) for group in groups])
    return groups, tally.finish()


def _encode(tokenizer: Tokenizer, found: Responses, number: int, quantity: Quantity, config: SampledDataConfig) -> Encoded:
    style = PromptStyle(apply_chat_template=False, add_bos=config.add_bos)
    record, whole = found.conversations[number], found.whole[number]
    if quantity is Quantity.attributes:
        return encode_plain(tokenizer, attribute_text(tokenizer, record, len(record.turns) - 1), style)
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


def _levels(label: str, sought: LabelQuery) -> tuple[float, ...]:
    levels = parse_labels(label, sought.attributes, "field 'label'")
    for name, level in zip(sought.attributes, levels, strict=True):
        if level != MISSING and (level != int(level) or not sought.lowest <= level <= sought.highest):
            allowed = f"a whole number from {sought.lowest} to {sought.highest} (algorithm.lowest, highest)"
            raise DataError(f"field 'label' is {shown(label)}: {name} is {level:g}, expected {allowed}")
    return levels
