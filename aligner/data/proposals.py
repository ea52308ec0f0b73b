"""Several responses to each prompt with their log-probs, for SteerLM 2 (2406.08673), as NeMo-Aligner has them:

    {system, prompt_turns: [{from, value}], label, responses: [{from, value, "log(P(a|x,y))", "log(P(y|x))", "log(Q(y|a,x))"}]}

with a the label, x the prompt, y a response; Q is the model that the responses were sampled from. They are written as
`aligner.data.labelled` writes conversations with labels. A response with `finish_reason` "length" was cut off: its row has no end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from aligner.data.config import ProposalDataConfig
from aligner.data.encoding import PromptStyle, encode_labelled
from aligner.data.labelled import LabelledRecord, Turn, parse_turn
from aligner.data.records import field_text, raw_object, shown
from aligner.data.report import LoadReport, Tally
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


def load_proposals(
    location: str, config: ProposalDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[ProposedGroup], LoadReport]:
    """All usable groups at `location`, and a report of dropped ones. `first`: use only this many records.

    Raises: DataError listing all bad lines; DataError if no group is left, or if groups differ in size.
    """
    tally = Tally(location, config.bad_lines)
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
