"""Record formats: from one raw JSON value to typed text. Every refusal is a DataError naming field, value and what is allowed.

A record that can be read in two ways is refused, naming both; a field that holds null counts as absent. The messages carry no position;
`report.Tally` puts `file:line` in front.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Sequence
from dataclasses import dataclass

from aligner.data.sources import RawRecord
from aligner.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
ASSISTANT_MARK = "\n\nAssistant:"  # opens the assistant's turn in the HH dialogues
MAX_SHOWN = 80  # characters of an offending value that are repeated in the message
_ASKED = ("prompt", "instruction", "input")  # texts that ask; Alpaca's instruction is about its input
_NAME_ONE = " (data.prompt_field names the one that is meant)"
_NAME_BOTH = " (data.prompt_field and data.response_field name what is meant)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


Conversation = tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """A prompt, plain text or conversation, with the answer that a reward function may compare with."""

    prompt: str | Conversation
    answer: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRecord:
    """A prompt with the response to learn."""

    prompt: str | Conversation
    response: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRecord:
    """A conversation that ends with the assistant, whose assistant turns are all trained on."""

    messages: Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """Two responses to one prompt; `margin` is chosen_reward - rejected_reward if given, else 0."""

    prompt: str | Conversation
    chosen: str
    rejected: str
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRecord:
    """A response to a prompt, and whether it was judged good."""

    prompt: str | Conversation
    response: str
    desirable: bool


def parse_prompt(raw: RawRecord, prompt_field: str = "", answer_field: str = "answer") -> PromptRecord:
    """`{prompt}`, `{messages}`, `{text}` or `{instruction, input?}`, or the field named, and its answer (no `answer_field`: not read)."""
    record = raw_object(raw)
    formats = "{prompt}, {messages}, {text} or {instruction, input?}"
    name = prompt_field or the_one(record, ("prompt", "messages", "text", "instruction"), formats, hint=_NAME_ONE)
    if not prompt_field and name in _ASKED:
        _only_one_asks(record, name, _NAME_ONE)
    prompt = _text_or_messages(record, name) if prompt_field else _question(record, name)
    if not isinstance(prompt, str) and prompt[-1].role == "assistant":
        raise DataError(f"field {name!r}: the last message has role 'assistant', expected 'user', 'system' or 'tool'")
    return PromptRecord(prompt=prompt, answer=_answer(record, answer_field) if answer_field else None)


def parse_supervised(raw: RawRecord, prompt_field: str = "", response_field: str = "") -> ResponseRecord | ConversationRecord:
    """`{messages}`, `{prompt, response}`, `{input, output}` or Alpaca's `{instruction, input?, output}`; or the two fields named."""
    record = raw_object(raw)
    if prompt_field:
        return ResponseRecord(prompt=_text_or_messages(record, prompt_field), response=_response(record, response_field))
    name = _reading(record)
    if name == "messages":
        messages = _messages(record, name)
        if messages[-1].role != "assistant":
            raise DataError(f"field 'messages': the last message has role {messages[-1].role!r}, expected 'assistant'")
        return ConversationRecord(messages=messages)
    return ResponseRecord(prompt=_question(record, name), response=_response(record, "response" if name == "prompt" else "output"))


def supervised_readings(record: dict[str, object]) -> list[str]:
    """The fields by which a supervised record can be read: of each whole reading the first one's name."""
    asked = "instruction" if has(record, "instruction") else "input"
    pairs = [one for one, answer in (("prompt", "response"), (asked, "output")) if has(record, one) and has(record, answer)]
    return ["messages", *pairs] if has(record, "messages") else pairs


def _reading(record: dict[str, object]) -> str:
    """The name of the field that is the prompt, or the conversation. Raises DataError if another one could be meant."""
    formats = "{messages}, {prompt, response} or {input, output}, or {instruction, input?, output}"
    found = supervised_readings(record) or [_first_present(record, ("messages", *_ASKED), formats)]
    refuse_two(found, _NAME_BOTH)
    if found[0] != "messages":
        _only_one_asks(record, found[0], _NAME_BOTH)
    return found[0]


def _only_one_asks(record: dict[str, object], name: str, hint: str = "") -> None:
    """Raise DataError if another text could be the prompt, or a part of it."""
    others = [one for one in _ASKED if one != name and (name, one) != ("instruction", "input") and has(record, one)]
    refuse_two([name, *others], hint)


def _question(record: dict[str, object], name: str) -> str | Conversation:
    """What the field asks; Alpaca's instruction with the input that it is about, if any, behind an empty line."""
    if name != "instruction" or not has(record, "input"):
        return _text_or_messages(record, name)
    about = field_text(record, "input", empty=True)
    return field_text(record, name) + (f"\n\n{about}" if about.strip() else "")


def _prompt(record: dict[str, object]) -> str | Conversation:
    _only_one_asks(record, "prompt")
    return _text_or_messages(record, "prompt")


def parse_preference(raw: RawRecord) -> PreferenceRecord:
    """`{prompt, chosen, rejected}`, `{prompt, chosen_response, rejected_response}` or HH's `{chosen, rejected}`; rewards optional."""
    record = raw_object(raw)
    chosen_name = the_one(
        record, ("chosen", "chosen_response"), "{prompt, chosen, rejected}, {chosen, rejected} or alternating {text} lines"
    )
    rejected_name = chosen_name.replace("chosen", "rejected")
    chosen, rejected = _response(record, chosen_name), _response(record, rejected_name)
    if "prompt" in record:
        prompt = _prompt(record)
    else:
        prompt, chosen, rejected = split_dialogue(chosen, rejected)
    return _preference(prompt, chosen, rejected, _margin(record))


def parse_judged(raw: RawRecord) -> JudgedRecord:
    """`{prompt, response, preference}` (chosen or rejected, true or false, 1 or 0) or `{prompt, completion, label}`."""
    record = raw_object(raw)
    formats = "{prompt, response, preference} or {prompt, completion, label}"
    desirable = _judgement(record, the_one(record, ("preference", "label"), formats))
    field = the_one(record, ("response", "completion"), formats)
    response = field_text(record, field, empty=not desirable)  # to say nothing may be bad, but is nothing to learn
    return JudgedRecord(prompt=_prompt(record), response=response, desirable=desirable)


def parse_text_pair(good: RawRecord, bad: RawRecord | None) -> PreferenceRecord:
    """Two consecutive `{text}` lines, the better one first. Dialogues are split as HH's; other texts have an empty prompt."""
    if bad is None:
        raise DataError("is the last of an odd number of lines, expected alternating lines {text: good}, {text: bad}")
    chosen, rejected = field_text(raw_object(good), "text"), field_text(raw_object(bad, f"next line {bad.line} "), "text")
    if ASSISTANT_MARK in os.path.commonprefix([chosen, rejected]):
        return _preference(*split_dialogue(chosen, rejected), 0.0)
    return _preference("", chosen, rejected, 0.0)


def is_text_line(raw: RawRecord) -> bool:
    """Whether a file that begins so alternates good and bad `{text}` lines."""
    return isinstance(raw.value, dict) and "text" in raw.value and "chosen" not in raw.value


def split_dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two dialogues: the prompt is their common prefix up to and with its last "\\n\\nAssistant:"."""
    common = os.path.commonprefix([chosen, rejected])
    cut = common.rfind(ASSISTANT_MARK)
    if cut < 0:
        raise DataError(
            f"fields 'chosen' and 'rejected' share {shown(common)}, "
            f"expected a common beginning with {ASSISTANT_MARK!r} in it, or a field 'prompt'"
        )
    cut += len(ASSISTANT_MARK)
    return common[:cut], chosen[cut:], rejected[cut:]


def _preference(prompt: str | Conversation, chosen: str, rejected: str, margin: float) -> PreferenceRecord:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():  # of a dialogue: what its last turn says
            raise DataError(f"the {name} response is {shown(text)}, expected text")
    if chosen == rejected:
        raise DataError(f"chosen and rejected are both {shown(chosen)}, expected two different responses")
    return PreferenceRecord(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


def shown(value: object) -> str:
    """A value as it is repeated in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def raw_object(raw: RawRecord, which: str = "") -> dict[str, object]:
    """The record as a JSON object. Raises DataError for anything else."""
    if raw.error:
        raise DataError(which + raw.error)
    if not isinstance(raw.value, dict):
        raise DataError(f"{which}is {shown(raw.value)}, expected a JSON object")
    return raw.value


def has(record: dict[str, object], name: str) -> bool:
    """Whether the field holds anything; asking does not count as reading it."""
    return dict.get(record, name) is not None


def the_one(record: dict[str, object], names: tuple[str, ...], formats: str, *, hint: str = "") -> str:
    """Which of the fields the record has. Raises DataError if it has none of them, or several."""
    found = [name for name in names if has(record, name)]
    refuse_two(found, hint)
    return found[0] if found else _first_present(record, names, formats)


def refuse_two(found: Sequence[str], hint: str = "") -> None:
    """Raise DataError if a record can be read by two fields."""
    if len(found) > 1:
        raise DataError(f"has {found[0]!r} and {found[1]!r}, either of which could be meant, expected one of them{hint}")


def _first_present(record: dict[str, object], names: tuple[str, ...], formats: str) -> str:
    for name in names:
        if name in record:
            return name
    raise DataError(f"has the fields {shown(sorted(map(str, record)))}, expected {formats}")


def _value(record: dict[str, object], name: str) -> object:
    if name not in record:
        raise DataError(f"field {name!r} is missing (there are {shown(sorted(map(str, record)))})")
    return record[name]


def text_of(value: object, what: str, *, empty: bool = False) -> str:
    """A string that can be tokenized; JSON can smuggle in half a surrogate pair, which is not text."""
    if not isinstance(value, str) or not (value or empty):
        raise DataError(f"{what} is {shown(value)}, expected a {'' if empty else 'non-empty '}string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is {shown(value)}, expected text without lone surrogates") from error
    return value


def field_text(record: dict[str, object], name: str, *, empty: bool = False) -> str:
    """The text in a field. Raises DataError if it is missing or no text."""
    return text_of(_value(record, name), f"field {name!r}", empty=empty)


def _text_or_messages(record: dict[str, object], name: str) -> str | Conversation:
    if isinstance(_value(record, name), list):
        return _messages(record, name)
    return field_text(record, name)


def _response(record: dict[str, object], name: str) -> str:
    text = field_text(record, name)
    if not text.strip():
        raise DataError(f"field {name!r} is {shown(text)}, expected a response: there is only white space")
    return text


def _messages(record: dict[str, object], name: str) -> Conversation:
    turns = record[name]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"field {name!r} is {shown(turns)}, expected a non-empty list of {{role, content}}")
    found = tuple(_message(turn, f"field '{name}[{position}]'") for position, turn in enumerate(turns))
    for position, (before, message) in enumerate(zip(found[:-1], found[1:], strict=True), start=1):
        if before.role == message.role == "assistant":
            raise DataError(f"field '{name}[{position}]': role is 'assistant' as that of the one before, expected another speaker between")
    return found


def _message(turn: object, what: str) -> Message:
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise DataError(f"{what} is {shown(turn)}, expected {{role, content}}")
    if turn["role"] not in ROLES:
        raise DataError(f"{what}: role is {shown(turn['role'])}, allowed: {', '.join(ROLES)}")
    content = text_of(turn["content"], f"{what}: content", empty=turn["role"] == "system")
    if turn["role"] == "assistant" and not content.strip():
        raise DataError(f"{what}: content is {shown(content)}, expected a response: there is only white space")
    return Message(role=turn["role"], content=content)


def _answer(record: dict[str, object], name: str) -> str | None:
    value = record[name] if name in record else None
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"field {name!r} is {shown(value)}, expected a string or a number")


_JUDGEMENTS = {"chosen": True, "rejected": False, True: True, False: False}  # 1 and 0 are equal to true and false


def _judgement(record: dict[str, object], name: str) -> bool:
    value = record[name]
    if isinstance(value, (str, bool, int, float)) and value in _JUDGEMENTS:
        return _JUDGEMENTS[value]
    raise DataError(f"field {name!r} is {shown(value)}, allowed: 'chosen' or 'rejected', true or false, 1 or 0")


def _margin(record: dict[str, object]) -> float:
    names = [name for name in ("chosen_reward", "rejected_reward") if name in record]
    if len(names) == 1:
        raise DataError(f"field {names[0]!r} stands alone, expected both or neither of chosen_reward and rejected_reward")
    rewards = []
    for name in names:
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(f"field {name!r} is {shown(value)}, expected a finite number")
        rewards.append(float(value))
    return rewards[0] - rewards[1] if rewards else 0.0
