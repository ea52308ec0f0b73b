"""Records as conversations in SteerLM's format that wait for a response, or for labels (see `aligner.data.labelled`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.data.config import AnnotateDataConfig, RequestDataConfig
from aligner.data.encoding import PromptStyle, as_text, encode_plain
from aligner.data.forms import Purpose, recast, recognised
from aligner.data.labelled import LABEL_START, TURN_START, VALUE_TO_TEXT, LabelledRecord, Turn, is_labelled, parse_labelled
from aligner.data.messages import Message, turns_of
from aligner.data.prompts import load_prompts
from aligner.data.records import ConversationRecord, TextRecord, parse_prompt, parse_supervised
from aligner.data.regression import attribute_text
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord, read_records
from aligner.data.supervised import fit_length
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt

USER, ASSISTANT = "User", "Assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to be answered; in a labelled conversation `record` has the turns before the answer and `label` its attributes."""

    prompt: Prompt
    record: LabelledRecord | None = None
    label: str = ""

    def answered(self, value: str, **more: Any) -> dict[str, Any]:
        """A record with the response `value`: a conversation that can be trained on, or `{prompt, response}`."""
        if self.record is None:
            return {"prompt": self.prompt.text, "response": value, "source": self.prompt.source, **more}
        turn = Turn(speaker=ASSISTANT, text=value, label=self.label, learnt=True)
        return as_json(replace(self.record, turns=(*self.record.turns, turn))) | {"source": self.prompt.source, **more}

    def proposed(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A record with several responses, as `aligner.data.proposals` reads it once they have their log-probs.

        An answer has `value` and further fields. Raises DataError if no attributes are asked for.
        """
        if self.record is None:
            raise DataError(f"{self.prompt.source}: asks for no attributes, expected some (data.attributes) with algorithm.grouped=true")
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
    """All usable prompts at `location`. With `config.attributes`, or conversations for records, they are written in SteerLM's format.

    The last turn of a conversation is generated again; its attributes are its own label, if the config names none.
    Raises: DataError listing all bad lines, or if no prompt is left.
    """
    if not config.attributes and not _has_conversations(location):
        prompts, report = load_prompts(location, config, tokenizer, first=first, columns=frozenset())
        return [Request(prompt=prompt) for prompt in prompts], report
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=False, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Request:
        record, label = _asked(raw, config)
        if not label:
            raise DataError("its last turn has no label, expected one, or data.attributes")
        tokens = encode_request(tokenizer, record, label, style)
        if 0 < config.max_prompt_length < len(tokens):
            too_long(len(tokens), config.max_prompt_length, config.overlong, "data.max_prompt_length")
        text = tokenizer.decode(tokens, skip_special=False)
        return Request(prompt=Prompt(id=raw.index, tokens=tuple(tokens), source=raw.source, text=text), record=record, label=label)

    requests = tally.convert(recognised(location, config, Purpose.prompts, first), convert)
    return requests, tally.finish()


def encode_request(tokenizer: Tokenizer, record: LabelledRecord, label: str, style: PromptStyle) -> list[int]:
    """The conversation and the head of a turn with this label, tokenized piece by piece, as the same turn is for training."""
    pieces = [text for text, _ in as_text(tokenizer, record).segments()] + [f"{ASSISTANT}\n{LABEL_START}{label}\n"]
    tokens, written = list(encode_plain(tokenizer, pieces[0], style).tokens), pieces[0]
    for text in pieces[1:]:
        tokens, written = [*tokens, *tokenizer.continuation(written, text)], written + text
    return tokens


def response_text(text: str) -> str:
    """A model's response, without the mark of the next turn."""
    return text.partition(TURN_START)[0].removesuffix("\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlabelled:
    """A conversation, and the tokens that are scored for each of its turns that is to have a label."""

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
    """All usable records: conversations, `{messages}`, `{prompt, response}` or `{input, output}`. Existing labels are replaced.

    Raises: DataError listing all bad lines, or if no record is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=False, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Unlabelled:
        record = _conversation(raw, config.prompt_field, config.response_field)
        numbers = tuple(number for number, turn in enumerate(record.turns) if turn.learnt)
        rows, cut = [], 0
        for number in numbers:
            encoded = encode_plain(tokenizer, attribute_text(tokenizer, record, number), style)
            fitted = fit_length(encoded, config.max_length, config.overlong)
            cut += fitted is not encoded
            rows.append(fitted.tokens)
        tally.truncated += cut > 0
        return Unlabelled(record=record, turns=numbers, rows=tuple(rows), source=raw.source)

    records = tally.convert(recognised(location, config, Purpose.supervised, first), convert)
    return records, tally.finish()


def as_json(record: LabelledRecord) -> dict[str, Any]:
    """The record as `aligner.data.labelled` reads it."""
    turns = [{"from": turn.speaker, "value": turn.text} | ({"label": turn.label} if turn.label else {}) for turn in record.turns]
    return {"system": record.system, "conversations": turns, "mask": USER, "type": VALUE_TO_TEXT}


def _has_conversations(location: str) -> bool:
    return any(is_labelled(recast(raw, Purpose.prompts)) for raw in read_records(location, 1))


def _asked(raw: RawRecord, config: RequestDataConfig) -> tuple[LabelledRecord, str]:
    """(what precedes the response, the attributes asked for)."""
    if is_labelled(raw):
        record = parse_labelled(raw)
        return replace(record, turns=record.turns[:-1]), config.attributes or record.turns[-1].label
    prompt = parse_prompt(raw, config.prompt_field, None).prompt
    return from_messages(turns_of(prompt, "user"), config.system), config.attributes


def _conversation(raw: RawRecord, prompt_field: str, response_field: str) -> LabelledRecord:
    if is_labelled(raw):
        return parse_labelled(raw)
    record = parse_supervised(raw, prompt_field, response_field)
    if isinstance(record, ConversationRecord):
        return from_messages(record.messages)
    if isinstance(record, TextRecord):
        raise DataError("is a text, of which no part is a response, expected a prompt with a response")
    return from_messages((*turns_of(record.prompt, "user"), *turns_of(record.response, "assistant")))


def from_messages(messages: Sequence[Message], system: str = "") -> LabelledRecord:
    """A chat as a conversation: a system message at its beginning is the record's, users are `User`, the rest is trained on."""
    if messages and messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    if bad := [message.role for message in messages if message.role not in ("user", "assistant")]:
        raise DataError(f"a message has role {bad[0]!r}, expected user and assistant behind at most one system message")
    if any(message.role == "assistant" and not message.is_plain for message in messages):
        raise DataError("an assistant's message has thinking or calls of tools, expected text: this format has no place for them")
    turns = tuple(
        Turn(speaker=USER if message.role == "user" else ASSISTANT, text=message.content, label="", learnt=message.role != "user")
        for message in messages
    )
    return LabelledRecord(system=system, turns=turns)
