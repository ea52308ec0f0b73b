"""The questions of prompts as text, for a judge, without the marks of a chat template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aligner.data.config import PromptDataConfig
from aligner.data.records import Conversation, parse_prompt
from aligner.data.sources import read_records
from aligner.types import Prompt

_SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """The question of each prompt, by its `source`. `are_chats`: the model's prompts use its chat template."""

    texts: dict[str, str] = field(default_factory=dict)
    are_chats: bool = False

    def __or__(self, other: Questions) -> Questions:
        return Questions(texts=self.texts | other.texts, are_chats=self.are_chats or other.are_chats)


def read_questions(location: str, config: PromptDataConfig, prompts: Iterable[Prompt]) -> Questions:
    """The questions of these prompts, which `load_prompts` made from the records at `location`."""
    wanted = {prompt.id for prompt in prompts}
    texts, are_chats = {}, config.apply_chat_template
    for raw in read_records(location, max(wanted, default=0) + 1):
        if raw.index in wanted:
            asked = parse_prompt(raw, config.prompt_field, config.answer_field).prompt
            texts[raw.source] = question_text(asked)
            are_chats |= not isinstance(asked, str)
    return Questions(texts=texts, are_chats=are_chats)


def question_text(asked: str | Conversation) -> str:
    """A text as it is; for a conversation its only message, or every turn after its speaker's name."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return asked[0].content
    return "\n\n".join(f"{_SPEAKERS[message.role]}: {message.content}" for message in asked)
