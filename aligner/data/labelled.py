"""Conversations whose turns may carry a label, in NeMo-Aligner's chat format: SteerLM's attribute-conditioned fine-tuning (2310.05344).

    {system, conversations: [{from: User, value}, {from: Assistant, value, label: "quality:4,toxicity:0"}], mask: User, type: VALUE_TO_TEXT}

is written as the text on which that family of models was trained,

    <extra_id_0>System\n{system}\n<extra_id_1>User\n{value}\n<extra_id_1>Assistant\n<extra_id_2>{label}\n{value}\n<extra_id_1>

`mask` names the speaker whose turns are not trained on. A label is given, not trained on: the model learns the text with these
attributes, up to and with the mark of the next turn.

`parse_labels` reads labels as numbers: one for each attribute, some of which nobody judged, or for each step of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aligner.data.messages import is_blank, shown, text_of
from aligner.data.records import field_text, raw_object, refuse_two, supervised_readings
from aligner.data.sources import RawRecord
from aligner.errors import DataError

MISSING = -100.0  # of an attribute, or a step, that nobody judged; null in JSON too


def parse_labels(value: object, attributes: Sequence[str], what: str) -> tuple[float, ...]:
    """One number per attribute: from a list of as many, an object by name, or SteerLM's "quality:4,toxicity:0"; MISSING if it has none.

    Raises DataError for another number of labels, an unknown name, a number that is not finite, or only missing labels.
    """
    if isinstance(value, str):
        value = _named(value, what)
    if isinstance(value, dict):
        if unknown := [name for name in value if name not in attributes]:
            raise DataError(f"{what} has {shown(unknown[0])}, allowed: {', '.join(attributes)} (data.attributes)")
        value = [value.get(name) for name in attributes]
    if not isinstance(value, list) or len(value) != len(attributes):
        raise DataError(f"{what} is {shown(value)}, expected {len(attributes)} numbers: {', '.join(attributes)} (data.attributes)")
    labels = tuple(_number(label, f"{what}: {name}") for name, label in zip(attributes, value, strict=True))
    if all(label == MISSING for label in labels):
        raise DataError(f"{what} is {shown(value)}, expected at least one number that is not missing ({MISSING:g} or null)")
    return labels


def parse_step_labels(value: object, num_steps: int, what: str) -> tuple[float, ...]:
    """One label per step: true or false, or a number from 0 to 1; MISSING if nobody judged it. Raises DataError as `parse_labels`."""
    if not isinstance(value, list) or len(value) != num_steps:
        raise DataError(f"{what} is {shown(value)}, expected a list of {num_steps} labels, one per step")
    labels = tuple(float(label) if isinstance(label, bool) else _number(label, f"{what}[{i}]") for i, label in enumerate(value))
    if bad := [label for label in labels if label != MISSING and not 0 <= label <= 1]:
        raise DataError(f"{what} has {bad[0]:g}, expected true, false or a number from 0 to 1 ({MISSING:g} or null: not judged)")
    if all(label == MISSING for label in labels):
        raise DataError(f"{what} is {shown(value)}, expected at least one step that was judged")
    return labels


def _named(text: str, what: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in text.split(","):
        name, colon, number = part.partition(":")
        try:
            found[name.strip()] = float(number)
        except ValueError as error:
            raise DataError(f"{what} is {shown(text)}, expected numbers such as 'quality:4,toxicity:0'") from error
        if not colon:
            raise DataError(f"{what} is {shown(text)}, expected numbers such as 'quality:4,toxicity:0'")
    return found


def _number(value: object, what: str) -> float:
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{what} is {shown(value)}, expected a finite number ({MISSING:g} or null: missing)")
    return float(value)


SYSTEM_START, TURN_START, LABEL_START = "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"
VALUE_TO_TEXT, TEXT_TO_VALUE = "VALUE_TO_TEXT", "TEXT_TO_VALUE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One speaker's turn; `label` is empty if the text has no requested attributes."""

    speaker: str
    text: str
    label: str
    learnt: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRecord:
    """A conversation with at least one turn to train on."""

    system: str
    turns: tuple[Turn, ...]

    def segments(self, *, ends: bool = True) -> list[tuple[str, bool]]:
        """The text in pieces, each with a flag: is it trained on? `ends`: False if the last turn was cut off, and has no mark behind it."""
        pieces: list[tuple[str, bool]] = [(f"{SYSTEM_START}System\n{self.system}\n{TURN_START}", False)]
        for turn in self.turns:
            label = f"{LABEL_START}{turn.label}\n" if turn.label else ""
            pieces += [(f"{turn.speaker}\n{label}", False), (f"{turn.text}\n{TURN_START}", turn.learnt)]
        return pieces if ends else [*pieces[:-1], (self.turns[-1].text, self.turns[-1].learnt)]

    def unlabelled(self) -> LabelledRecord:
        """The same conversation without labels."""
        return replace(self, turns=tuple(replace(turn, label="") for turn in self.turns))


def is_labelled(raw: RawRecord) -> bool:
    """Whether a record is of this format."""
    return isinstance(raw.value, dict) and "conversations" in raw.value


def parse_labelled(raw: RawRecord, *, judged: bool = False) -> LabelledRecord:
    """`{system?, conversations: [{from, value, label?}], mask?, type?}`; without a `type` labels are left out.

    `judged`: train on the labels, not the text: they are read without a `type`, and with `TEXT_TO_VALUE`.
    """
    record = raw_object(raw)
    refuse_two(["conversations", *supervised_readings(record)])
    kind = record.get("type")
    if judged and kind in (None, TEXT_TO_VALUE):
        kind = VALUE_TO_TEXT
    if kind not in (None, VALUE_TO_TEXT):
        raise DataError(
            f"field 'type' is {shown(kind)}, allowed: {VALUE_TO_TEXT!r} or none (to predict labels, train a reward model on them)"
        )
    mask = field_text(record, "mask") if "mask" in record else "User"
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"field 'conversations' is {shown(turns)}, expected a non-empty list of {{from, value, label}}")
    parsed = tuple(_turn(turn, f"field 'conversations[{i}]'", mask, with_label=kind is not None) for i, turn in enumerate(turns))
    if not any(turn.learnt for turn in parsed):
        raise DataError(f"field 'mask' is {shown(mask)}, which leaves no turn to learn, expected one of several speakers")
    if all(turn.learnt for turn in parsed):
        speakers = sorted({turn.speaker for turn in parsed})
        raise DataError(f"field 'mask' is {shown(mask)}, which is none of the speakers {shown(speakers)}: the turns of all would be learnt")
    return LabelledRecord(system=field_text(record, "system", empty=True) if "system" in record else "", turns=parsed)


def _turn(turn: object, what: str, mask: str, *, with_label: bool) -> Turn:
    parsed = parse_turn(turn, what, with_label=with_label)
    if parsed.speaker != mask and is_blank(parsed.text):
        raise DataError(f"{what}: value is {shown(parsed.text)}, expected a response: there is only white space")
    return replace(parsed, learnt=parsed.speaker != mask)


def parse_turn(
    turn: object, what: str, *, with_label: bool = True, own_label: object = None, learnt: bool = False, empty: bool = False
) -> Turn:
    """One `{from, value, label?}`; `what` stands for it in errors. `own_label`: in place of the turn's. `empty`: the value may be ''."""
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise DataError(f"{what} is {shown(turn)}, expected {{from, value, label}}")
    speaker = text_of(turn["from"], f"{what}: from")
    label = own_label if own_label is not None or not with_label else turn.get("label")
    if label is not None:
        label = text_of(label, f"{what}: label")
        if "\n" in label:
            raise DataError(f"{what}: label is {shown(label)}, expected one line such as 'quality:4,toxicity:0'")
    text = text_of(turn["value"], f"{what}: value", empty=empty)
    for name, value in (("from", speaker), ("value", text), ("label", label or "")):
        if TURN_START in value or SYSTEM_START in value or LABEL_START in value:
            raise DataError(f"{what}: {name} is {shown(value)}, which holds a mark of the format, expected plain text")
    return Turn(speaker=speaker, text=text, label=label or "", learnt=learnt)
