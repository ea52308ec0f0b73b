"""From typed text to token ids and loss masks: only this module decides where begin and end tokens go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aligner.data.images import digests_of
from aligner.data.messages import Conversation, Message, turns_of
from aligner.data.tokenizer import Tokenizer
from aligner.errors import DataError

_THINKING_MARKS = re.compile(r"</?think>|\[/?THINK\]|<\|(START|END)_THINKING\|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Token ids; the loss mask is True on trained tokens (response and end), never on position 0. `images`: digests of those in slots."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStyle:
    """How prompts are written: as one user message of a chat, and with a begin token (plain text only: a template has its own)."""

    apply_chat_template: bool
    add_bos: bool | None = None  # None: the tokenizer's default


def as_conversation(prompt: str | Conversation, style: PromptStyle) -> Conversation | None:
    """The prompt's messages; None for a plain text."""
    if not isinstance(prompt, str):
        return prompt
    return (Message(role="user", content=prompt),) if style.apply_chat_template else None


def encode_prompt(tokenizer: Tokenizer, prompt: str | Conversation, style: PromptStyle) -> list[int]:
    """Ids of a prompt, ready for a response to follow, with at most one begin token."""
    messages = as_conversation(prompt, style)
    if messages is not None:
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        _check_begin(tokenizer, tokens)
        return tokens
    return with_begin(tokenizer, tokenizer.encode(plain_text(tokenizer, str(prompt))), style)


def plain_text(tokenizer: Tokenizer, text: str, *, behind: str = "") -> str:
    """A record's text (`behind` its prompt) ready to be encoded: `data.special_text` decides how special tokens in it are read.

    A text, or a prompt, that begins with one is a rendered conversation, whose special tokens are intended.
    """
    return text if tokenizer.is_framed(behind or text) else tokenizer.protected(text)


def encode_response(tokenizer: Tokenizer, prompt: str | Conversation, response: str | Conversation, style: PromptStyle) -> Encoded:
    """Prompt and response, only the response (with its end token) in the mask; of several turns, the assistant's.

    Turns that answer a text turn it into a conversation. A response's text may end with the end token.
    """
    messages = as_conversation(prompt, style) if isinstance(response, str) else turns_of(prompt, "user")
    if messages is not None:
        turns = turns_of(response, "assistant")
        learnt = [len(messages) + position for position, turn in enumerate(turns) if turn.role == "assistant"]
        return _encode_turns(tokenizer, (*messages, *turns), learnt)
    head, said = encode_prompt(tokenizer, prompt, style), str(response).removesuffix(tokenizer.end_text)
    tail = tokenizer.continuation(plain_text(tokenizer, str(prompt)), plain_text(tokenizer, said, behind=str(prompt)))
    if head == with_begin(tokenizer, [], style) == tail[: len(head)]:  # an empty prompt before a text that has its own begin token
        tail = tail[len(head) :]
    tail.append(tokenizer.eos_id)
    return masked([*head, *tail], [(len(head), len(head) + len(tail))])


def encode_conversation(tokenizer: Tokenizer, messages: Conversation, *, last_only: bool = False) -> Encoded:
    """A whole conversation, every assistant turn (with its end token) in the mask, or the last one; later turns are cut."""
    learnt = [i for i, message in enumerate(messages) if message.role == "assistant"]
    return _encode_turns(tokenizer, messages, learnt[-1:] if last_only else learnt)


def encode_plain(tokenizer: Tokenizer, text: str, style: PromptStyle, *, ends: bool = False) -> Encoded:
    """A text, without an end token unless it `ends`; all of it in the mask."""
    tokens = with_begin(tokenizer, tokenizer.encode(plain_text(tokenizer, text)), style)
    if ends and tokens[-1:] != [tokenizer.eos_id]:
        tokens.append(tokenizer.eos_id)
    return masked(tokens, [(0, len(tokens))])


def everything(encoded: Encoded) -> Encoded:
    """The same tokens, all of them in the mask."""
    return replace(encoded, loss_mask=masked(list(encoded.tokens), [(0, len(encoded.tokens))]).loss_mask)


def last_span(encoded: Encoded) -> Encoded:
    """The same tokens with only the last run of trained ones in the mask."""
    stop = max(i for i, learnt in enumerate(encoded.loss_mask) if learnt) + 1
    start = response_start(encoded.loss_mask[:stop])
    return replace(encoded, loss_mask=masked(list(encoded.tokens), [(start, stop)]).loss_mask)


def response_start(loss_mask: Sequence[bool]) -> int:
    """Where the last run of trained tokens begins. Raises DataError if the row does not end with one."""
    if not loss_mask[-1]:
        raise DataError("ends with a turn that is not learnt, expected a response at the end")
    return len(loss_mask) - list(reversed(loss_mask)).index(False)


def with_begin(tokenizer: Tokenizer, tokens: list[int], style: PromptStyle) -> list[int]:
    begin = list(tokenizer.begin_ids)
    if style.add_bos is not None:
        begin = (begin or [tokenizer.bos_id] if tokenizer.bos_id is not None else begin) if style.add_bos else []
    return tokens if tokens[: len(begin)] == begin else [*begin, *tokens]


def _check_begin(tokenizer: Tokenizer, tokens: list[int]) -> None:
    if tokenizer.bos_id is not None and tokens[:2] == [tokenizer.bos_id] * 2:
        raise DataError(
            f"the chat template of {tokenizer.path} begins with two begin tokens (id {tokenizer.bos_id}), expected one: either it "
            "writes two, or it writes one and the first message begins with another"
        )


def _encode_turns(tokenizer: Tokenizer, messages: Conversation, learnt: Sequence[int]) -> Encoded:
    """Mask the turns whose positions are `learnt`, the last of which ends the tokens."""
    tokenizer = tokenizer.choosing(messages)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    _check_begin(tokenizer, tokens)
    spans = _written(tokenizer, messages, learnt) or [_turn_span(tokenizer, messages, position, tokens) for position in learnt]
    start, end = spans[-1]
    tokens = tokens[:end]
    if not any(token in tokenizer.end_ids for token in tokens[start:]):
        tokens.append(tokenizer.eos_id)
        spans[-1] = (start, end + 1)
    return replace(masked(tokens, spans), images=digests_of(messages))


def _written(tokenizer: Tokenizer, messages: Conversation, learnt: Sequence[int]) -> list[tuple[int, int]]:
    """The spans of these turns, if the template marks what an assistant wrote; empty if not."""
    found = tokenizer.written_spans(messages)
    if found is None:
        return []
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    if len(found) != len(turns):
        raise DataError(
            f"the chat template of {tokenizer.path} marks {len(found)} parts as written by an assistant, "
            f"expected {len(turns)}: one for each turn"
        )
    return [found[turns.index(position)] for position in learnt]


def _turn_span(tokenizer: Tokenizer, messages: Conversation, position: int, tokens: list[int]) -> tuple[int, int]:
    """[start, stop) of one assistant turn: from the end of its generation prompt to the mark that ends it, or to the template's own end.

    This is verified on the record itself: the tokens before the turn equal those of the preceding messages with a generation prompt, and
    the turn ends where the tokens of the messages up to it end. If a template writes the turn differently once others follow (Phi-3 ends
    the last one with one more token, Qwen3 omits earlier thinking), the first mark that ends turns ends it. It holds the turn's text.
    """
    start, refused = _turn_start(tokenizer, messages, position, tokens), f"message {position}: the chat template of {tokenizer.path}"
    if start is None:
        raise DataError(
            f"{refused} does not write an assistant turn after its own generation prompt, "
            "so the turn's tokens cannot be identified; expected a template that does"
        )
    is_last = position == len(messages) - 1
    whole = tokens if is_last else tokenizer.apply_chat_template(messages[: position + 1], add_generation_prompt=False)
    if tokens[: len(whole)] == whole:
        frames = [place + 1 for place in range(start, len(whole)) if tokenizer.is_frame(tokens[place])]
        is_ended = any(token in tokenizer.end_ids for token in tokens[len(whole) : len(whole) + 1])  # by the next speaker's mark (GLM)
        ends = [*frames[-1:], len(whole) + is_ended]
    else:
        ends = [place + 1 for place in range(start, len(tokens)) if tokenizer.ends_turn(tokens[place])][:1]
    said = messages[position].content.rpartition("</think>")[2].strip()
    for normalises in (False, True):  # a tokenizer may normalise a text
        text = tokenizer.decode(tokenizer.encode(tokenizer.protected(said)), skip_special=False).strip() if normalises else said
        for stop in ends:
            if text in tokenizer.decode(tokens[start:stop], skip_special=False):
                return start, stop
    raise DataError(f"{refused} does not show where the assistant turn ends")


def _turn_start(tokenizer: Tokenizer, messages: Conversation, position: int, tokens: list[int]) -> int | None:
    """Where a turn begins: after its generation prompt, of which only marks of thinking may be missing; None if unknown."""
    head = tokenizer.apply_chat_template(messages[:position], add_generation_prompt=True)
    if tokens[: len(head)] == head:
        return len(head)
    before = tokenizer.apply_chat_template(messages[:position], add_generation_prompt=False)
    start = next((place for place, (one, other) in enumerate(zip(head, tokens, strict=False)) if one != other), len(tokens))
    missing = _THINKING_MARKS.sub("", tokenizer.decode(head[start:], skip_special=False)).strip()
    return start if tokens[: len(before)] == before and start >= len(before) and not missing else None


def masked(tokens: list[int], spans: Sequence[tuple[int, int]]) -> Encoded:
    """Tokens with these spans in the mask, except position 0, which has no context. Raises DataError if nothing is left to learn."""
    mask = [False] * len(tokens)
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    mask[0] = False
    if not any(mask):
        raise DataError("has no token to learn, expected a response")
    return Encoded(tokens=tuple(tokens), loss_mask=tuple(mask))


def truncated(encoded: Encoded, max_length: int) -> Encoded:
    """Its first `max_length` tokens. Raises DataError if that leaves nothing to learn."""
    mask = encoded.loss_mask[:max_length]
    if not any(mask):
        raise DataError(f"has no response token within max_length={max_length} ({len(encoded.tokens)} tokens), expected a shorter prompt")
    return replace(encoded, tokens=encoded.tokens[:max_length], loss_mask=mask)
