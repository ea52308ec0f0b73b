"""Prompt sets for online RL, and what prompts ask as text: a judge reads that, without the marks of a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aligner.data.config import Overlong, PromptDataConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.folders import located
from aligner.data.forms import Purpose, columns_of, extras_of, recognised
from aligner.data.messages import Conversation
from aligner.data.mixture import Location, sources
from aligner.data.reading import reads_sources
from aligner.data.records import parse_prompt
from aligner.data.report import LoadReport, Tally, too_long
from aligner.data.sources import RawRecord
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError
from aligner.types import Prompt


@reads_sources
def load_prompts(
    location: str, config: PromptDataConfig, tokenizer: Tokenizer, *, first: int | None = None, columns: frozenset[str] | None = None
) -> tuple[list[Prompt], LoadReport]:
    """All usable prompts at `location` (`config.train` or `config.validation`), tokenized, and a report of dropped ones.

    `first`: only of so many records. `columns`: the fields to keep (None: all); a record that lacks one keeps all, for the message.
    `Prompt.id` is the record's index at `location`, whatever else was dropped, so it is stable across epochs and resumes.
    Raises: DataError listing all bad lines; DataError if no prompt is left.
    """
    tally = Tally(location, config, unused="that only reward functions may use")
    style = PromptStyle(apply_chat_template=config.apply_chat_template, add_bos=config.add_bos)

    def convert(raw: RawRecord) -> Prompt:
        record = parse_prompt(raw, config.prompt_field, config.answer_field)
        tokens = encode_prompt(tokenizer.offering(record.tools), record.prompt, style)
        if not tokens:
            raise DataError(f"prompt {record.prompt!r} has no token, expected at least one")
        whole, tokens = tokens, fit_prompt(tokens, config, tokenizer.bos_id)
        tally.truncated += tokens is not whole
        is_text = isinstance(record.prompt, str) and tokens is whole
        text = str(record.prompt) if is_text else tokenizer.decode(tokens, skip_special=False)
        fields = columns_of(raw)
        if columns is not None and columns <= fields.keys():
            fields = {name: one for name, one in fields.items() if name in columns}
        turns = () if isinstance(record.prompt, str) else tuple(turn.as_json() for turn in record.prompt)
        known = {"answer": record.answer, "columns": fields, "messages": turns, "extras": extras_of(raw, len(tokens))}
        return Prompt(id=raw.index, tokens=tuple(tokens), source=raw.source, text=text, **known)

    prompts = tally.convert(recognised(location, config, Purpose.prompts, first), convert)
    return prompts, tally.finish()


def fit_prompt(tokens: list[int], config: PromptDataConfig, bos_id: int | None) -> list[int]:
    """`tokens` itself if they fit (0: any do); else what `config.overlong` says: a DataError, `TooLong`, or their end.

    A begin token stays the first one.
    """
    limit = config.max_prompt_length
    if not limit or len(tokens) <= limit:
        return tokens
    if config.overlong is not Overlong.truncate:
        too_long(len(tokens), limit, config.overlong, "data.max_prompt_length")
    head = tokens[:1] if tokens[0] == bos_id and limit > 1 else []
    return [*head, *tokens[len(tokens) - limit + len(head) :]]


_SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The question of each prompt, by its `source`. `are_chats`: the model's prompts use its chat template."""

    texts: dict[str, str] = field(default_factory=dict)
    are_chats: bool = False

    def __or__(self, other: Questions) -> Questions:
        return Questions(texts=self.texts | other.texts, are_chats=self.are_chats or other.are_chats)


def read_questions(location: Location, config: PromptDataConfig, prompts: Iterable[Prompt]) -> Questions:
    """The questions of these prompts, which `load_prompts` made from the records at `location`; a record is found by its file and line."""
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
    """A text as it is; for a conversation its only message, or every turn after its speaker's name."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return asked[0].content
    return "\n\n".join(f"{_SPEAKERS[message.role]}: {message.content}" for message in asked)
