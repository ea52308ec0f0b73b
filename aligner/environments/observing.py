"""From the text of an observation to tokens: by itself, between what the tokenizer's chat template puts before and behind such a message.

What the policy wrote is never tokenized again, and text of an environment never becomes a special token: a tool's output cannot end a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aligner.data.records import Message
from aligner.data.tokenizer import Tokenizer
from aligner.environments.config import EnvironmentConfig, ObservationForm
from aligner.errors import ConfigError, DataError
from aligner.types import Prompt

_ASKED, _TURN, _OBSERVED = "QUESTION", "ASSISTANTTURN", "OBSERVATION"  # stand for texts in a conversation that is rendered once


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The tokens around an observation. Where a turn has ended with the first of `before` (its end token), that is not repeated."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    def around(self, inner: Sequence[int], last: int) -> tuple[int, ...]:
        """The observation as it follows a turn that ended with the token `last`."""
        before = self.before[1:] if self.before[:1] == (last,) else self.before
        return (*before, *inner, *self.behind)


def observation_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of an observation's text; special tokens that are written out in it stay text."""
    return tokenizer.continuation("\n", text, plain=True)


def surroundings(config: EnvironmentConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Surroundings:
    """What `config.form` puts around observations; `prompts` are the run's.

    Raises ConfigError where a chat was asked for and the tokenizer's template cannot show where an observation goes.
    """
    if config.form is ObservationForm.plain or config.form is ObservationForm.auto and not tokenizer.has_chat_template:
        return Surroundings(
            before=tuple(tokenizer.continuation("\n", config.prefix)), behind=tuple(tokenizer.continuation("\n", config.suffix))
        )
    chat = _of_template(tokenizer, config.role)
    if config.form is ObservationForm.chat:
        return chat
    opening = _behind_question(tokenizer)
    is_chat = [prompt.tokens[-len(opening) :] == opening for prompt in prompts]
    if any(is_chat) and not all(is_chat):
        odd = prompts[is_chat.index(False)]
        raise ConfigError(
            f"environment.form=auto: some prompts end as the chat template ends a user's message, {odd.source} does not; "
            "allowed: chat or plain, or data.apply_chat_template=true"
        )
    return chat if all(is_chat) else Surroundings()


def _of_template(tokenizer: Tokenizer, role: str) -> Surroundings:
    question, turn = Message(role="user", content=_ASKED), Message(role="assistant", content=_TURN)
    text = _rendered(tokenizer, [question, turn, Message(role=role, content=_OBSERVED)], role)
    head, found, rest = text.partition(_TURN)
    before, also, behind = rest.partition(_OBSERVED)
    if not (found and also):
        raise ConfigError(
            f"environment.form=chat: the chat template of {tokenizer.path} writes no message of role {role!r} behind the assistant's; "
            "allowed: another environment.role, or form=plain with a prefix and a suffix"
        )
    return Surroundings(before=tuple(tokenizer.encode(before)), behind=tuple(tokenizer.encode(behind)))


def _behind_question(tokenizer: Tokenizer) -> tuple[int, ...]:
    text = _rendered(tokenizer, [Message(role="user", content=_ASKED)], "user")
    return tuple(tokenizer.encode(text.partition(_ASKED)[2]))


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], role: str) -> str:
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=True)
    except DataError as error:
        raise ConfigError(f"environment.role={role!r}: {error}; allowed: another role, or environment.form=plain") from error
