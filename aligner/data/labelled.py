"""Conversations whose turns may carry a label, in NeMo-Aligner's chat format: SteerLM's attribute-conditioned fine-tuning (2310.05344).

    {system, conversations: [{from: User, value}, {from: Assistant, value, label: "quality:4,toxicity:0"}], mask: User, type: VALUE_TO_TEXT}

is written as the text on which that family of models was trained,

    <extra_id_0>System\n{system}\n<extra_id_1>User\n{value}\n<extra_id_1>Assistant\n<extra_id_2>{label}\n{value}\n<extra_id_1>

`mask` names the speaker whose turns are not trained on. A label is given, not trained on: the model learns the text with these
attributes, including the mark of the next turn.

`parse_labels` reads labels as numbers. `load_requests` and `load_unlabelled` read conversations that wait for a response, or for labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.data import records
from aligner.data.config import AnnotateDataConfig, RequestDataConfig
from aligner.data.encoding import Encoded, PromptStyle, encode_plain, masked, with_begin
from aligner.data.forms import Purpose, recast
from aligner.data.images import images_in
from aligner.data.messages import Message, is_blank, number_of, shown, text_of, turns_of
from aligner.data.prompts import load_prompts
from aligner.data.reading import Reader, read_all
from aligner.data.report import LoadReport
from aligner.data.sources import RawRecord, read_records
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt

MISSING = -100.0  # the label of an attribute, or a step, that was not judged; null in JSON too


def parse_labels(value: object, attributes: Sequence[str], what: str) -> tuple[float, ...]:
    """One number per attribute, or MISSING: from a list, an object by name, or SteerLM's "quality:4,toxicity:0".

    Raises DataError for a wrong number of labels, an unknown name, a number that is not finite, or only missing labels.
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
    """One label per step: true or false, a number from 0 to 1, or MISSING if it was not judged. Raises DataError as `parse_labels`."""
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
    return MISSING if value is None else number_of(value, what, f"a finite number ({MISSING:g} or null: missing)")


SYSTEM_START, TURN_START, LABEL_START = "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"
VALUE_TO_TEXT, TEXT_TO_VALUE = "VALUE_TO_TEXT", "TEXT_TO_VALUE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One speaker's turn; `label` is empty if no attributes are requested for the text."""

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
        """The text in pieces, each with a flag for training. `ends`: False if the last turn was cut off: it then has no end mark."""
        pieces: list[tuple[str, bool]] = [(f"{SYSTEM_START}System\n{self.system}\n{TURN_START}", False)]
        for turn in self.turns:
            label = f"{LABEL_START}{turn.label}\n" if turn.label else ""
            pieces += [(f"{turn.speaker}\n{label}", False), (f"{turn.text}\n{TURN_START}", turn.learnt)]
        return pieces if ends else [*pieces[:-1], (self.turns[-1].text, self.turns[-1].learnt)]

    def unlabelled(self) -> LabelledRecord:
        return replace(self, turns=tuple(replace(turn, label="") for turn in self.turns))


def encode_labelled(tokenizer: Tokenizer, record: LabelledRecord, style: PromptStyle, *, ends: bool = True) -> Encoded:
    """A conversation with labels as plain text, whose mask has every trained turn with the next one's mark. `ends`: the last is not cut."""
    written, tokens, spans = "", with_begin(tokenizer, [], style), []
    record = as_text(tokenizer, record)
    for text, learnt in record.segments(ends=ends):
        ids = tokenizer.continuation(written, text) if written else tokenizer.encode(text)
        if learnt:
            spans.append((len(tokens), len(tokens) + len(ids)))
        tokens, written = [*tokens, *ids], written + text
    if record.turns[-1].learnt and ends:
        spans.append((len(tokens), len(tokens) + 1))
        tokens.append(tokenizer.eos_id)
    return masked(tokens, spans)


def as_text(tokenizer: Tokenizer, record: LabelledRecord) -> LabelledRecord:
    """The same record, with special tokens in its texts read as `data.special_text` demands."""
    turns = tuple(replace(turn, text=tokenizer.protected(turn.text)) for turn in record.turns)
    return replace(record, system=tokenizer.protected(record.system), turns=turns)


def attribute_text(tokenizer: Tokenizer, record: LabelledRecord, turn: int) -> str:
    """The text that an attribute model scores for a turn: the conversation up to it, without labels, and the mark of a label."""
    written = as_text(tokenizer, replace(record, turns=record.turns[: turn + 1])).unlabelled()
    return "".join(text for text, _ in written.segments()).removesuffix(TURN_START) + LABEL_START


def is_labelled(raw: RawRecord) -> bool:
    """Whether a record has this format."""
    return isinstance(raw.value, dict) and "conversations" in raw.value


def parse_labelled(raw: RawRecord, *, judged: bool = False) -> LabelledRecord:
    """`{system?, conversations: [{from, value, label?}], mask?, type?}`. `judged`: labels are trained on, and read without a `type`."""
    record = records.raw_object(raw)
    records.refuse_two(["conversations", *records.supervised_readings(record)])
    _refuse_images(getattr(record, "images", None) is not None and record.images.number > 0)  # type: ignore[attr-defined]
    kind = record.get("type")
    if judged and kind in (None, TEXT_TO_VALUE):
        kind = VALUE_TO_TEXT
    if kind not in (None, VALUE_TO_TEXT):
        raise DataError(
            f"field 'type' is {shown(kind)}, allowed: {VALUE_TO_TEXT!r} or none (to predict labels, train a reward model on them)"
        )
    mask = records.field_text(record, "mask") if "mask" in record else "User"
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"field 'conversations' is {shown(turns)}, expected a non-empty list of {{from, value, label}}")
    parsed = tuple(_turn(turn, f"field 'conversations[{i}]'", mask, with_label=kind is not None) for i, turn in enumerate(turns))
    if not any(turn.learnt for turn in parsed):
        raise DataError(f"field 'mask' is {shown(mask)}, which leaves no turn to learn, expected one of several speakers")
    if all(turn.learnt for turn in parsed):
        speakers = sorted({turn.speaker for turn in parsed})
        raise DataError(f"field 'mask' is {shown(mask)}, which is not among the speakers {shown(speakers)}: all turns would be learnt")
    return LabelledRecord(system=records.field_text(record, "system", empty=True) if "system" in record else "", turns=parsed)


def _refuse_images(holds_some: bool) -> None:
    if holds_some:
        raise DataError("holds an image, expected text: this format cannot hold images")


def _turn(turn: object, what: str, mask: str, *, with_label: bool) -> Turn:
    parsed = parse_turn(turn, what, with_label=with_label)
    if parsed.speaker != mask and is_blank(parsed.text):
        raise DataError(f"{what}: value is {shown(parsed.text)}, expected a response, not only white space")
    return replace(parsed, learnt=parsed.speaker != mask)


def parse_turn(
    turn: object, what: str, *, with_label: bool = True, own_label: object = None, learnt: bool = False, empty: bool = False
) -> Turn:
    """One `{from, value, label?}`, called `what` in errors. `own_label` replaces the turn's label. `empty`: the value may be ''."""
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
            raise DataError(f"{what}: {name} is {shown(value)}, which contains a mark of the format, expected plain text")
    return Turn(speaker=speaker, text=text, label=label or "", learnt=learnt)


USER, ASSISTANT = "User", "Assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to be answered; in a labelled conversation `record` has the turns before the answer, and `label` its attributes.

    `images`: the directory of the prompt's images.
    """

    prompt: Prompt
    images: str = ""
    record: LabelledRecord | None = None
    label: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        return images_in(self.prompt.extras)

    def answered(self, value: str, **more: Any) -> dict[str, Any]:
        """A record with the response `value`: a conversation that can be trained on, or `{prompt, response}`."""
        if self.record is None:
            asked: dict[str, Any] = {"prompt": self.prompt.text}
            if digests := self.digests:
                asked = {"prompt": list(self.prompt.messages), "images": [f"{self.images}/{one}" for one in digests]}
            return {**asked, "response": value, "source": self.prompt.source, **more}
        turn = Turn(speaker=ASSISTANT, text=value, label=self.label, learnt=True)
        return as_json(replace(self.record, turns=(*self.record.turns, turn))) | {"source": self.prompt.source, **more}

    def proposed(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A record with several responses for `aligner.data.proposals`. Raises DataError if no attributes are requested."""
        if self.record is None:
            raise DataError(f"{self.prompt.source}: requests no attributes, expected some (data.attributes) with algorithm.grouped=true")
        asked = as_json(self.record)
        responses = [{"from": ASSISTANT, **answer} for answer in answers]
        return {
            "system": asked["system"],
            "prompt_turns": asked["conversations"],
            "label": self.label,
            "responses": responses,
            "source": self.prompt.source,
        }


def load_requests(
    location: str, config: RequestDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[Request], LoadReport]:
    """Prompts (see `aligner.data.reading`), in SteerLM's format if `config.attributes` is set or the records are conversations.

    The last turn of a conversation is generated again; its attributes are its own label, unless the config names some.
    """
    if config.attributes or any(is_labelled(recast(raw, Purpose.prompts)) for raw in read_records(location, 1)):
        return read_all(_request, location, config, tokenizer, first=first, purpose=Purpose.prompts)
    prompts, report = load_prompts(location, config, tokenizer, first=first, columns=frozenset())
    images = "" if tokenizer.vision is None else str(tokenizer.vision.store.directory.absolute())
    return [Request(prompt=prompt, images=images) for prompt in prompts], report


def _request(raw: RawRecord, reader: Reader) -> Request:
    record, label = _asked(raw, reader.config)
    if not label:
        raise DataError("its last turn has no label, expected one, or data.attributes")
    tokens = encode_request(reader.tokenizer, record, label, reader.plain)
    reader.check_prompt(len(tokens))
    return Request(prompt=reader.prompt(raw, tokens), record=record, label=label)


def encode_request(tokenizer: Tokenizer, record: LabelledRecord, label: str, style: PromptStyle) -> list[int]:
    """The conversation and the head of a turn with this label, tokenized piece by piece, exactly as for training."""
    pieces = [text for text, _ in as_text(tokenizer, record).segments()] + [f"{ASSISTANT}\n{LABEL_START}{label}\n"]
    tokens, written = list(encode_plain(tokenizer, pieces[0], style).tokens), pieces[0]
    for text in pieces[1:]:
        tokens, written = [*tokens, *tokenizer.continuation(written, text)], written + text
    return tokens


def response_text(text: str) -> str:
    """A model's response without the mark of the next turn."""
    return text.partition(TURN_START)[0].removesuffix("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlabelled:
    """A conversation, and the tokens that are scored for each turn that gets a label."""

    record: LabelledRecord
    turns: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    source: str

    def labelled(self, labels: Sequence[str]) -> dict[str, Any]:
        """The record with a label for each of `turns`."""
        turns = list(self.record.turns)
        for number, label in zip(self.turns, labels, strict=True):
            turns[number] = replace(turns[number], label=label)
        return as_json(replace(self.record, turns=tuple(turns))) | {"source": self.source}


def load_unlabelled(
    location: str, config: AnnotateDataConfig, tokenizer: Tokenizer, *, first: int | None = None
) -> tuple[list[Unlabelled], LoadReport]:
    """Conversations, `{messages}`, `{prompt, response}` or `{input, output}` (see `aligner.data.reading`). Existing labels are replaced."""
    return read_all(_unlabelled, location, config, tokenizer, first=first, purpose=Purpose.supervised)


def _unlabelled(raw: RawRecord, reader: Reader) -> Unlabelled:
    record = _conversation(raw, reader.config.prompt_field, reader.config.response_field)
    numbers = tuple(number for number, turn in enumerate(record.turns) if turn.learnt)
    texts = (attribute_text(reader.tokenizer, record, number) for number in numbers)
    rows = tuple(reader.fit(encode_plain(reader.tokenizer, text, reader.plain)).tokens for text in texts)
    return Unlabelled(record=record, turns=numbers, rows=rows, source=raw.source)


def as_json(record: LabelledRecord) -> dict[str, Any]:
    turns = [{"from": turn.speaker, "value": turn.text} | ({"label": turn.label} if turn.label else {}) for turn in record.turns]
    return {"system": record.system, "conversations": turns, "mask": USER, "type": VALUE_TO_TEXT}


def _asked(raw: RawRecord, config: RequestDataConfig) -> tuple[LabelledRecord, str]:
    """(the conversation before the response, the requested attributes)."""
    if is_labelled(raw):
        record = parse_labelled(raw)
        return replace(record, turns=record.turns[:-1]), config.attributes or record.turns[-1].label
    prompt = records.parse_prompt(raw, config.prompt_field, None).prompt
    return from_messages(turns_of(prompt, "user"), config.system), config.attributes


def _conversation(raw: RawRecord, prompt_field: str, response_field: str) -> LabelledRecord:
    if is_labelled(raw):
        return parse_labelled(raw)
    record = records.parse_supervised(raw, prompt_field, response_field)
    if isinstance(record, records.ConversationRecord):
        return from_messages(record.messages)
    if isinstance(record, records.TextRecord):
        raise DataError("is a text, of which no part is a response, expected a prompt with a response")
    return from_messages((*turns_of(record.prompt, "user"), *turns_of(record.response, "assistant")))


def from_messages(messages: Sequence[Message], system: str = "") -> LabelledRecord:
    """A chat as a conversation: an initial system message becomes the record's, users are `User`, the rest is trained on."""
    if messages and messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    if bad := [message.role for message in messages if message.role not in ("user", "assistant")]:
        raise DataError(f"a message has role {bad[0]!r}, expected user and assistant after at most one system message")
    if any(message.role == "assistant" and not message.is_plain for message in messages):
        raise DataError("an assistant's message has thinking or calls of tools, expected text: this format cannot hold them")
    _refuse_images(any(message.images for message in messages))
    turns = tuple(
        Turn(speaker=USER if message.role == "user" else ASSISTANT, text=message.content, label="", learnt=message.role != "user")
        for message in messages
    )
    return LabelledRecord(system=system, turns=turns)
