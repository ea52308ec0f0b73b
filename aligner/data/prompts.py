"""Prompt sets for online RL, and their questions as text: a judge reads these, without the marks of a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aligner.data.config import Overlong, PromptDataConfig
from aligner.data.encoding import encode_prompt
from aligner.data.forms import Purpose, columns_of, recognised
from aligner.data.images import digests_of
from aligner.data.messages import Conversation
from aligner.data.mixture import Location, sources
from aligner.data.reading import Reader, read_all, reads_sources
from aligner.data.records import parse_prompt
from aligner.data.report import LoadReport
from aligner.data.sources import RawRecord, located
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt
from aligner.types.extras import Images


def _load_one(
    location: str, config: PromptDataConfig, tokenizer: Tokenizer, *, first: int | None = None, columns: frozenset[str] | None = None
) -> tuple[list[Prompt], LoadReport]:
    """Tokenized prompts of `config.train` or `config.validation` (see `aligner.data.reading`).

    `columns`: the fields to keep (None: all); a record that lacks one keeps all, for the message. `Prompt.id` is the record's index at
    `location`, whatever else was dropped, so it is stable across epochs and resumes.
    """

    def convert(raw: RawRecord, reader: Reader) -> Prompt:
        record = parse_prompt(raw, config.prompt_field, config.answer_field)
        whole = encode_prompt(tokenizer.offering(record.tools), record.prompt, reader.style)
        if not whole:
            raise DataError(f"prompt {record.prompt!r} has no token, expected at least one")
        tokens, images = _fitted(whole, reader), digests_of(record.prompt)
        text = record.prompt if isinstance(record.prompt, str) and tokens is whole else None
        fields = columns_of(raw)
        if columns is not None and columns <= fields.keys():
            fields = {name: one for name, one in fields.items() if name in columns}
        turns = () if isinstance(record.prompt, str) else tuple(turn.as_json() for turn in record.prompt)
        return reader.prompt(raw, tokens, text, images, answer=record.answer, columns=fields, messages=turns)

    unused = "that only reward functions may use"
    return read_all(convert, location, config, tokenizer, first=first, purpose=Purpose.prompts, unused=unused)


load_prompts = reads_sources(Prompt, _load_one)


def _fitted(tokens: list[int], reader: Reader) -> list[int]:
    """`tokens` itself if they fit, or their end behind a begin token. Raises as `Reader.check_prompt` unless they may be cut."""
    limit = reader.config.max_prompt_length
    if not limit or len(tokens) <= limit:
        return tokens
    if reader.config.overlong is not Overlong.truncate:
        reader.check_prompt(len(tokens))
    reader.cut()
    head = tokens[:1] if tokens[0] == reader.tokenizer.bos_id and limit > 1 else []
    kept, vision = [*head, *tokens[len(tokens) - limit + len(head) :]], reader.tokenizer.vision
    if (
        vision is not None and not vision.failure and vision.count_slots(kept) < vision.count_slots(tokens)
    ):  # what is asked of an image stays without it
        reader.check_prompt(len(tokens))
    return kept


_SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The question of each prompt, by its `source`. `are_chats`: the model's prompts use its chat template."""

    texts: dict[str, str] = field(default_factory=dict)
    are_chats: bool = False

    def __or__(self, other: Questions) -> Questions:
        return Questions(texts=self.texts | other.texts, are_chats=self.are_chats or other.are_chats)


def read_questions(location: Location, config: PromptDataConfig, prompts: Iterable[Prompt]) -> Questions:
    """The questions of these prompts from `load_prompts` at `location`; a record is found by its file and line."""
    prompts = list(prompts)
    if seeing := [prompt.source for prompt in prompts if Images.name in prompt.extras]:
        raise DataError(f"{seeing[0]}: holds an image, and a judge that reads questions as texts would not see it; allowed: texts")
    wanted = {prompt.source: prompt.id for prompt in prompts}
    named: list[tuple[str, PromptDataConfig, int | None]] = [(str(location), config, max(wanted.values(), default=0) + 1)]
    if not isinstance(location, str):
        named = [(source.path, source.config(config), source.max_records or None) for source in sources(config, location)]
    texts, are_chats = {}, config.apply_chat_template
    for path, own, first in named:
        for raw in recognised(located(path, location, config), own, Purpose.prompts, first):
            if raw.source in wanted:
                asked = parse_prompt(raw, own.prompt_field, None).prompt
                texts[raw.source] = question_text(asked)
                are_chats |= own.apply_chat_template or not isinstance(asked, str)
    return Questions(texts=texts, are_chats=are_chats)


def question_text(asked: str | Conversation) -> str:
    """A text unchanged; of a conversation its only message, or every turn after its speaker's name."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return asked[0].content
    return "\n\n".join(f"{_SPEAKERS[message.role]}: {message.content}" for message in asked)
