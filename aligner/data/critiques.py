"""The questions of Constitutional AI: for a critique, for a revision, and which of two responses is better (2212.08073, sections 3 and 4).

Texts are framed as the paper's dialogues,

    Human: ... Assistant: {response} CritiqueRequest: {request} Critique: {critique} RevisionRequest: {request} Revision:

each part behind an empty line; messages go through the chat template, with the requests as turns of the user. A round sees the prompt and
the response that it is about, not the rounds before: a revision has the form of a response.

A `Case` is what it starts from: a prompt to be answered, or a pair of responses that are only compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aligner.data.config import ConstitutionDataConfig
from aligner.data.constitution import Comparison, Constitution, Example
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.forms import Purpose, recast
from aligner.data.messages import Conversation, Message, is_blank, shown
from aligner.data.records import ASSISTANT_MARK, field_text, has, parse_preference, parse_prompt, raw_object, text_response, the_one
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord, read_records
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt

HUMAN_MARK = "\n\nHuman:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A prompt as it is answered: messages for the chat template, or a text that ends where the assistant's turn begins.

    `pair`: the two responses that were given with it, if nothing is to be sampled.
    """

    prompt: Prompt
    messages: Conversation | None
    said: str | Conversation  # as a record has it that is read with the same data.apply_chat_template
    pair: tuple[str, str] | None = None

    @property
    def as_json(self) -> str | list[dict[str, str]]:
        """The record's prompt."""
        if isinstance(self.said, str):
            return self.said
        return [{"role": message.role, "content": message.content} for message in self.said]

    def response(self, text: str) -> str:
        """A response as in a record: a space follows a text's "Assistant:"."""
        return text if self.messages is not None else f" {text}"

    @property
    def dialogue(self) -> str:
        """The dialogue so far, as a text."""
        if self.messages is None:
            return str(self.said).removesuffix(ASSISTANT_MARK).strip()
        names = {"user": "Human", "assistant": "Assistant", "system": "System", "tool": "Tool"}
        return "\n\n".join(f"{names[message.role]}: {message.content.strip()}" for message in self.messages)


def framed(text: str) -> str:
    """A plain prompt as the first turn of the paper's dialogues; a text that is such a dialogue already as it is."""
    return text if text.endswith(ASSISTANT_MARK) else f"{HUMAN_MARK} {text.strip()}{ASSISTANT_MARK}"


def load_cases(
    location: str, config: ConstitutionDataConfig, tokenizer: Tokenizer, *, given: bool, first: int | None = None
) -> tuple[list[Case], LoadReport]:
    """All usable records at `location`: prompts, or with `given` pairs: `{prompt, responses: [a, b]}` or those of preferences.

    Raises: DataError listing all bad lines, or if none is left.
    """
    tally = Tally(location, config)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Case:
        said, pair = _pair(raw) if given else (parse_prompt(raw, config.prompt_field, None).prompt, None)
        case = case_of(raw, said, tokenizer, style, pair=pair)
        if 0 < config.max_prompt_length < len(case.prompt.tokens):
            too_long(len(case.prompt.tokens), config.max_prompt_length, config.overlong, "data.max_prompt_length")
        return case

    cases = tally.convert((_recognised(raw, config, given=given) for raw in read_records(location, first)), convert)
    return cases, tally.finish()


def _recognised(raw: RawRecord, config: ConstitutionDataConfig, *, given: bool) -> RawRecord:
    if config.prompt_field or (given and isinstance(raw.value, dict) and has(raw.value, "responses")):
        return raw
    return recast(raw, Purpose.preference if given else Purpose.prompts, config.form)


def case_of(
    raw: RawRecord, said: str | Conversation, tokenizer: Tokenizer, style: PromptStyle, *, pair: tuple[str, str] | None = None
) -> Case:
    """The case of one record, tokenized."""
    messages: Conversation | None = None
    if not isinstance(said, str):
        messages = said
    elif style.apply_chat_template:
        messages = (Message(role="user", content=said),)
    else:
        said = framed(said)
    tokens = tuple(encode_prompt(tokenizer, said, style))
    text = tokenizer.decode(tokens, skip_special=False)
    return Case(prompt=Prompt(id=raw.index, tokens=tokens, source=raw.source, text=text), messages=messages, said=said, pair=pair)


def _pair(raw: RawRecord) -> tuple[str | Conversation, tuple[str, str]]:
    record: dict[str, Any] = raw_object(raw)
    if the_one(record, ("responses", "chosen", "chosen_response"), "{prompt, responses}, or the records of preferences") != "responses":
        found = parse_preference(raw)
        return found.prompt, (
            text_response(found.chosen).strip(),
            text_response(found.rejected).strip(),
        )
    responses = record["responses"]
    if not isinstance(responses, list) or len(responses) != 2:
        raise DataError(f"field 'responses' is {shown(responses)}, expected a list of two texts")
    texts = [field_text({f"responses[{number}]": text}, f"responses[{number}]").strip() for number, text in enumerate(responses)]
    if empty := [number for number, text in enumerate(texts) if is_blank(text)]:
        raise DataError(f"field 'responses[{empty[0]}]' is {shown(responses[empty[0]])}, expected a response: there is only white space")
    return parse_prompt(raw, answer_field=None).prompt, (texts[0], texts[1])


CRITIQUE_REQUEST, CRITIQUE = "\n\nCritiqueRequest:", "\n\nCritique:"
REVISION_REQUEST, REVISION = "\n\nRevisionRequest:", "\n\nRevision:"
MARKS = (HUMAN_MARK, ASSISTANT_MARK, CRITIQUE_REQUEST, CRITIQUE, REVISION_REQUEST, REVISION)  # what follows one is no longer the answer
ANSWER, OPTIONS = "The answer is:", (" (A)", " (B)")
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # bytes that are no text


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """One round of a response: its requests, and the answers so far."""

    response: str
    critique_request: str
    critique: str = ""
    revision_request: str = ""  # empty: the critique is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Which of two responses to a dialogue is better."""

    dialogue: str
    question: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """The multiple-choice question."""
        return (
            f"Consider the following conversation between a human and an assistant:\n\n{self.dialogue}\n\n{self.question}\n"
            f"Options:\n(A) {self.first}\n\n(B) {self.second}"
        )

    @property
    def turned(self) -> Question:
        """With the responses in the other order."""
        return replace(self, first=self.second, second=self.first)


class Framing:
    """Token ids of the questions. Texts are encoded with a begin token as `data.add_bos` says."""

    def __init__(self, tokenizer: Tokenizer, constitution: Constitution, *, add_bos: bool | None) -> None:
        self._tokenizer = tokenizer
        self._style = PromptStyle(apply_chat_template=False, add_bos=add_bos)
        examples, comparisons = constitution.examples, constitution.comparisons
        self._shown = "".join(f"{_written(framed(one.prompt), _turns_of(one))} {one.revision}" for one in examples)
        self._shown_turns = _joined([(*_said((_user(one.prompt),), _turns_of(one)), _assistant(one.revision)) for one in examples])
        self._compared = "".join(f"{_question_of(one).text}\n\n{ANSWER} ({one.answer})\n\n" for one in comparisons)
        self._compared_turns = _joined([(_user(_question_of(one).text), _assistant(f"{ANSWER} ({one.answer})")) for one in comparisons])
        self._options = [tokenizer.continuation(ANSWER, option) for option in OPTIONS]

    def turns(self, case: Case, turns: Turns) -> list[int]:
        """Ids of what precedes the critique, or the revision, of a response to the case."""
        if case.messages is None:
            return self._encode(self._shown + _written(str(case.said), turns))
        return self._encode(_behind_system(case.messages, self._shown_turns, turns))

    def options(self, question: Question, *, chat: bool) -> list[tuple[list[int], int]]:
        """For (A) and for (B): ids of the question with this answer, and how many of them precede the answer."""
        if chat:
            head = self._encode((*self._compared_turns, _user(question.text)))
            head += self._tokenizer.continuation("\n", ANSWER)
        else:
            head = self._encode(f"{self._compared}{question.text}\n\n{ANSWER}")
        return [([*head, *option], len(head)) for option in self._options]

    def read(self, response: Sequence[int], *, ended: bool, chat: bool) -> tuple[str, str]:
        """(the text of a response, its fault): '' if there is none; else truncated, empty or unreadable.

        `ended`: it stopped by itself. Unreadable is one with bytes that are no text, or with a special token in its midst (another turn).
        """
        text = self._tokenizer.decode(response)
        body = response[:-1] if ended else response
        has_special = self._tokenizer.has_special(body)
        if not chat:
            cut = min((at for at in map(text.find, MARKS) if at >= 0), default=len(text))
            ended, text = ended or cut < len(text), text[:cut]
        text = text.strip()
        if not ended:
            return text, "truncated"
        if not text:
            return text, "empty"
        return text, "unreadable" if has_special or UNREADABLE in text else ""

    def _encode(self, said: str | Conversation) -> list[int]:
        return encode_prompt(self._tokenizer, said, self._style)


def _turns_of(example: Example) -> Turns:
    return Turns(
        response=example.response,
        critique_request=example.critique_request,
        critique=example.critique,
        revision_request=example.revision_request,
    )


def _question_of(one: Comparison) -> Question:
    dialogue = framed(one.prompt).removesuffix(ASSISTANT_MARK).strip()
    return Question(dialogue=dialogue, question=one.question, first=one.first, second=one.second)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def _joined(parts: Sequence[Conversation]) -> Conversation:
    return tuple(message for part in parts for message in part)


def _written(said: str, turns: Turns) -> str:
    """A round as text, up to where the model goes on."""
    text = f"{said} {turns.response}{CRITIQUE_REQUEST} {turns.critique_request}{CRITIQUE}"
    return f"{text} {turns.critique}{REVISION_REQUEST} {turns.revision_request}{REVISION}" if turns.revision_request else text


def _said(messages: Conversation, turns: Turns) -> Conversation:
    """A round as messages, up to where the model goes on."""
    found = (*messages, _assistant(turns.response), _user(turns.critique_request))
    return (*found, _assistant(turns.critique), _user(turns.revision_request)) if turns.revision_request else found


def _behind_system(messages: Conversation, shown: Conversation, turns: Turns) -> Conversation:
    """The round with examples before it; a system message stays the first."""
    cut = int(messages[0].role == "system")
    return (*messages[:cut], *shown, *_said(messages[cut:], turns))
