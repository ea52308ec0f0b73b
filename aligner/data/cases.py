"""The input of Constitutional AI: prompts to be answered, or pairs of responses that are only compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aligner.data.config import ConstitutionDataConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.records import (
    ASSISTANT_MARK,
    Conversation,
    Message,
    field_text,
    parse_preference,
    parse_prompt,
    raw_object,
    shown,
    the_one,
)
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
    tally = Tally(location, config.bad_lines)
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Case:
        said, pair = _pair(raw) if given else (parse_prompt(raw, config.prompt_field, "").prompt, None)
        case = case_of(raw, said, tokenizer, style, pair=pair)
        if 0 < config.max_prompt_length < len(case.prompt.tokens):
            too_long(len(case.prompt.tokens), config.max_prompt_length, config.overlong, "data.max_prompt_length")
        return case

    cases = tally.convert(read_records(location, first), convert)
    return cases, tally.finish()


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
        return found.prompt, (found.chosen.strip(), found.rejected.strip())
    responses = record["responses"]
    if not isinstance(responses, list) or len(responses) != 2:
        raise DataError(f"field 'responses' is {shown(responses)}, expected a list of two texts")
    texts = [field_text({f"responses[{number}]": text}, f"responses[{number}]").strip() for number, text in enumerate(responses)]
    if empty := [number for number, text in enumerate(texts) if not text]:
        raise DataError(f"field 'responses[{empty[0]}]' is {shown(responses[empty[0]])}, expected a response: there is only white space")
    return parse_prompt(raw, answer_field="").prompt, (texts[0], texts[1])
