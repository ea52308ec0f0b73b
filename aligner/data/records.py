"""Record formats: from one raw JSON value to typed text. Every refusal is a DataError that names the field, the value and what is allowed.

A record that can be read in two ways is refused, naming both; a null field counts as absent. The messages have no position:
`report.Tally` prepends `file:line`.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from aligner.data.images import placed
from aligner.data.messages import Conversation, Tools, is_blank, number_of, parse_messages, parse_tools, shown, text_of, turns_of
from aligner.data.sources import RawRecord, nested
from aligner.errors import DataError

ASSISTANT_MARK = "\n\nAssistant:"  # begins the assistant's turn in HH dialogues
_ASKED = ("prompt", "instruction", "input")  # possible prompts; Alpaca's instruction is about its input
ANSWERS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")  # names of answers: ours, verl's, TRL's rewards'
_NAME_ONE = " (data.prompt_field names the intended one)"
_NAME_BOTH = " (data.prompt_field and data.response_field name the intended ones)"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRecord:
    """A prompt, plain text or conversation, with the reference answer for reward functions."""

    prompt: str | Conversation
    answer: str | None
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRecord:
    """A prompt with the response to train on: a text, or the following turns, of which the assistant's are trained on."""

    prompt: str | Conversation
    response: str | Conversation
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRecord:
    """A conversation that ends with the assistant, whose assistant turns are all trained on."""

    messages: Conversation
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRecord:
    """A text that is trained on as a whole, with an end token."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """Two responses to one prompt; `margin` is chosen_reward - rejected_reward if given, else 0."""

    prompt: str | Conversation
    chosen: str | Conversation
    rejected: str | Conversation
    margin: float
    tools: Tools = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRecord:
    """A response to a prompt, and whether it was judged good."""

    prompt: str | Conversation
    response: str | Conversation
    desirable: bool
    tools: Tools = ()


def parse_prompt(raw: RawRecord, prompt_field: str = "", answer_field: str | None = "") -> PromptRecord:
    """`{prompt}`, `{messages}`, `{text}` or `{instruction, input?}`, or the field named, with its answer ("": of `ANSWERS`; None: none)."""
    record = raw_object(raw)
    formats = "{prompt}, {messages}, {text} or {instruction, input?}"
    name = prompt_field or the_one(record, ("prompt", "messages", "text", "instruction"), formats, hint=_NAME_ONE)
    if not prompt_field and name in _ASKED:
        _only_one_asks(record, name, _NAME_ONE)
    prompt = placed(_text_or_messages(record, name) if prompt_field else _question(record, name), record)
    if not isinstance(prompt, str) and prompt[-1].role == "assistant":
        raise DataError(f"field {name!r}: the last message has role 'assistant', expected 'user', 'system' or 'tool'")
    answer = None if answer_field is None else _answer(record, answer_field)
    return PromptRecord(prompt=prompt, answer=answer, tools=_tools(record, prompt))


def parse_supervised(raw: RawRecord, prompt_field: str = "", response_field: str = "") -> ResponseRecord | ConversationRecord | TextRecord:
    """`{messages}`, `{prompt, response}`, `{input, output}`, `{instruction, input?, output}` or `{text}`; or the two fields named."""
    record = raw_object(raw)
    if prompt_field:
        prompt = placed(_text_or_messages(record, prompt_field), record)
        return ResponseRecord(prompt=prompt, response=_response(record, response_field), tools=_tools(record, prompt))
    name = _reading(record)
    if name == "text":
        return TextRecord(text=_response(record, name))
    if name == "messages":
        messages = parse_messages(record[name], name)
        if messages[-1].role != "assistant":
            raise DataError(f"field 'messages': the last message has role {messages[-1].role!r}, expected 'assistant'")
        return ConversationRecord(messages=turns_of(placed(messages, record), "user"), tools=_tools(record, messages))
    prompt = placed(_question(record, name), record)
    response = _reply(record, "response" if name == "prompt" else "output")
    return ResponseRecord(prompt=prompt, response=response, tools=_tools(record, prompt))


def supervised_readings(record: dict[str, object]) -> list[str]:
    """The ways in which a supervised record can be read, each by the name of its first field."""
    asked = "instruction" if has(record, "instruction") else "input"
    pairs = [one for one, answer in (("prompt", "response"), (asked, "output")) if has(record, one) and has(record, answer)]
    return ["messages", *pairs] if has(record, "messages") else pairs


def _tools(record: dict[str, object], prompt: str | Conversation) -> Tools:
    return parse_tools(record["tools"]) if has(record, "tools") and not isinstance(prompt, str) else ()


def _reading(record: dict[str, object]) -> str:
    """The name of the field with the prompt, or the conversation. Raises DataError if that is ambiguous."""
    formats = "{messages}, {prompt, response} or {input, output}, {instruction, input?, output}, or {text}"
    found = supervised_readings(record) or [_first_present(record, ("messages", *_ASKED, "text"), formats)]
    refuse_two(found, _NAME_BOTH)
    if found[0] not in ("messages", "text"):
        _only_one_asks(record, found[0], _NAME_BOTH)
    return found[0]


def _only_one_asks(record: dict[str, object], name: str, hint: str = "") -> None:
    """Raise DataError if another text could be the prompt, or a part of it."""
    others = [one for one in _ASKED if one != name and (name, one) != ("instruction", "input") and has(record, one)]
    refuse_two([name, *others], hint)


def _question(record: dict[str, object], name: str) -> str | Conversation:
    """The field's prompt; for Alpaca, the instruction and, after an empty line, its input if there is one."""
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
    chosen, rejected = _reply(record, chosen_name), _reply(record, rejected_name)
    if "prompt" in record:
        prompt = _prompt(record)
    else:
        prompt, chosen, rejected = split_dialogue(_response(record, chosen_name), _response(record, rejected_name))
    prompt = placed(prompt, record)
    return _preference(prompt, chosen, rejected, _margin(record), _tools(record, prompt))


def parse_judged(raw: RawRecord) -> JudgedRecord:
    """`{prompt, response, preference}` (chosen or rejected, true or false, 1 or 0) or `{prompt, completion, label}`."""
    record = raw_object(raw)
    formats = "{prompt, response, preference} or {prompt, completion, label}"
    desirable = _judgement(record, the_one(record, ("preference", "label"), formats))
    field = the_one(record, ("response", "completion"), formats)
    # An empty response may be judged bad, but cannot be learnt.
    response = _reply(record, field) if desirable or isinstance(record[field], list) else field_text(record, field, empty=True)
    prompt = placed(_prompt(record), record)
    return JudgedRecord(prompt=prompt, response=response, desirable=desirable, tools=_tools(record, prompt))


def parse_text_pair(good: RawRecord, bad: RawRecord | None) -> PreferenceRecord:
    """Two consecutive `{text}` lines, the better one first. Dialogues are split like HH's; other texts have an empty prompt."""
    if bad is None:
        raise DataError("is the last of an odd number of lines, expected alternating lines {text: good}, {text: bad}")
    chosen, rejected = field_text(raw_object(good), "text"), field_text(raw_object(bad, f"next line {bad.line} "), "text")
    if ASSISTANT_MARK in os.path.commonprefix([chosen, rejected]):
        return _preference(*split_dialogue(chosen, rejected), 0.0)
    return _preference("", chosen, rejected, 0.0)


def is_text_line(raw: RawRecord) -> bool:
    """Whether a file that begins with this record alternates good and bad `{text}` lines."""
    return isinstance(raw.value, dict) and "text" in raw.value and "chosen" not in raw.value


def split_dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two dialogues: the prompt is their common prefix up to its last "\\n\\nAssistant:", inclusive.

    For other texts it is the whole common prefix without a final space, as in TRL.
    """
    common = os.path.commonprefix([chosen, rejected])
    if common.strip() and ASSISTANT_MARK not in chosen + rejected:
        common = common.removesuffix(" ")
        return common, chosen[len(common) :], rejected[len(common) :]
    cut = common.rfind(ASSISTANT_MARK)
    if cut < 0:
        raise DataError(
            f"fields 'chosen' and 'rejected' share {shown(common)}, "
            f"expected a common beginning that contains {ASSISTANT_MARK!r}, or a field 'prompt'"
        )
    cut += len(ASSISTANT_MARK)
    return common[:cut], chosen[cut:], rejected[cut:]


def _preference(
    prompt: str | Conversation, chosen: str | Conversation, rejected: str | Conversation, margin: float, tools: Tools = ()
) -> PreferenceRecord:
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(text, str) and is_blank(text):  # of a dialogue: its last turn
            raise DataError(f"the {name} response is {shown(text)}, expected text")
    if chosen == rejected:
        raise DataError(f"chosen and rejected are both {shown(chosen)}, expected two different responses")
    return PreferenceRecord(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin, tools=tools)


class WrongFields(DataError):
    """A record lacks the fields that its reader looks for."""


def raw_object(raw: RawRecord, which: str = "") -> dict[str, object]:
    """The record as a JSON object. Raises DataError for anything else."""
    if raw.error:
        raise (DataError if raw.value is None else WrongFields)(which + raw.error)
    if not isinstance(raw.value, dict):
        raise DataError(f"{which}is {shown(raw.value)}, expected a JSON object")
    return raw.value


def has(record: dict[str, object], name: str) -> bool:
    """Whether the field has a value; the field does not count as read."""
    return dict.get(record, name) is not None


def the_one(record: dict[str, object], names: tuple[str, ...], formats: str, *, hint: str = "") -> str:
    """The one of these fields that the record has. Raises DataError if it has none of them, or several."""
    found = [name for name in names if has(record, name)]
    refuse_two(found, hint)
    return found[0] if found else _first_present(record, names, formats)


def refuse_two(found: Sequence[str], hint: str = "") -> None:
    """Raise DataError if a record can be read in two ways."""
    if len(found) > 1:
        raise DataError(f"has {found[0]!r} and {found[1]!r}, which is ambiguous, expected one of them{hint}")


def _first_present(record: dict[str, object], names: tuple[str, ...], formats: str) -> str:
    for name in names:
        if name in record:
            return name
    raise WrongFields(f"has the fields {shown(sorted(map(str, record)))}, expected {formats}")


def _value(record: dict[str, object], name: str) -> object:
    if name not in record and nested(record, name) is None:
        raise WrongFields(f"field {name!r} is missing (the record has {shown(sorted(map(str, record)))})")
    return nested(record, name)


def field_text(record: dict[str, object], name: str, *, empty: bool = False) -> str:
    """The text in a field. Raises DataError if it is missing or not a text."""
    return text_of(_value(record, name), f"field {name!r}", empty=empty)


def _text_or_messages(record: dict[str, object], name: str) -> str | Conversation:
    value = _value(record, name)
    return parse_messages(value, name) if isinstance(value, list) else field_text(record, name)


def _reply(record: dict[str, object], name: str) -> str | Conversation:
    """A response: a text, or turns that end with an assistant's; a single turn of plain text becomes that text."""
    if not isinstance(_value(record, name), list):
        return _response(record, name)
    turns = parse_messages(record[name], name)
    if turns[-1].role != "assistant":
        raise DataError(f"field {name!r}: the last message has role {turns[-1].role!r}, expected 'assistant'")
    if any(turn.images for turn in turns):
        raise DataError(f"field {name!r} holds an image, expected images only in prompts")
    return turns[0].content if len(turns) == 1 and turns[0].is_plain else turns


def text_response(response: str | Conversation) -> str:
    """The response as a text. Raises DataError for turns."""
    if not isinstance(response, str):
        raise DataError(f"the response has {len(response)} turns, or thinking, or tool calls, expected a text")
    return response


def _response(record: dict[str, object], name: str) -> str:
    text = field_text(record, name)
    if is_blank(text):
        raise DataError(f"field {name!r} is {shown(text)}, expected a response, not only white space")
    return text


def _answer(record: dict[str, object], name: str) -> str | None:
    found = name or next((one for one in ANSWERS if nested(record, one) is not None), "")
    value = nested(record, found) if found else None
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        return str(value)
    if found in ANSWERS[1:] and not name:
        return None  # reward functions receive it unchanged
    hint = f" (data.answer_field={found}.{next(iter(value))} is one of its fields)" if isinstance(value, dict) and value else ""
    raise DataError(f"field {found!r} is {shown(value)}, expected a string or a number{hint}")


_JUDGEMENTS = {"chosen": True, "rejected": False, True: True, False: False}  # 1 and 0 are equal to true and false


def _judgement(record: dict[str, object], name: str) -> bool:
    value = record[name]
    if isinstance(value, (str, bool, int, float)) and value in _JUDGEMENTS:
        return _JUDGEMENTS[value]
    raise DataError(f"field {name!r} is {shown(value)}, allowed: 'chosen' or 'rejected', true or false, 1 or 0")


def _margin(record: dict[str, object]) -> float:
    names = [name for name in ("chosen_reward", "rejected_reward") if name in record]
    if len(names) == 1:
        raise DataError(f"field {names[0]!r} is alone, expected both or neither of chosen_reward and rejected_reward")
    rewards = [number_of(record[name], f"field {name!r}") for name in names]
    return rewards[0] - rewards[1] if rewards else 0.0
