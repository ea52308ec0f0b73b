"""The tokenizer of a model directory, reduced to this package's needs, without unrequested special tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.data.config import Thinking
from aligner.data.messages import Message, Tools
from aligner.data.templates import TEMPLATES, template_text
from aligner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A Hugging Face tokenizer. `bos_id` may be None; `eos_id` always exists; `pad_id` is the end token if none is defined."""

    def __init__(self, backend: PreTrainedTokenizerBase, path: str) -> None:
        if backend.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {path} defines no end-of-sequence token: looked for eos_token in its tokenizer_config.json "
                "and special_tokens_map.json"
            )
        self.path = path
        self.bos_id: int | None = backend.bos_token_id
        self.eos_id: int = backend.eos_token_id
        self.pad_id: int = backend.eos_token_id if backend.pad_token_id is None else backend.pad_token_id
        self.vocab_size: int = len(backend)
        self._backend = backend
        self._tools: Tools = ()
        self._own_template = ""  # in place of the backend's
        self._thinking = Thinking.template

    def chatting(self, template: str, thinking: Thinking) -> Tokenizer:
        """The same tokenizer with the chat template of that name or file (`aligner.data.templates`; empty: its own).

        Raises ConfigError if there is no such file.
        """
        chats = copy(self)
        chats._own_template = template_text(template) if template else ""
        chats._thinking = thinking
        return chats

    def offering(self, tools: Tools) -> Tokenizer:
        """The same tokenizer, whose chat template tells the model of these tools."""
        if not tools:
            return self
        offers = copy(self)
        offers._tools = tools
        return offers

    @property
    def max_token_id(self) -> int:
        """The largest id it can produce; more than `vocab_size - 1` if its ids have gaps."""
        return max(self._backend.get_vocab().values())

    @property
    def digest(self) -> str:
        """Equal for tokenizers whose ids stand for the same words."""
        return hashlib.sha256(json.dumps(sorted(self._backend.get_vocab().items())).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template())

    def encode(self, text: str, *, add_special: bool = False, plain: bool = False) -> list[int]:
        """Token ids of `text`; with `add_special`, with the tokenizer's own additions (usually a begin token).

        `plain`: a special token that is written out in the text stays text.
        """
        if not text:
            return []
        options = {"split_special_tokens": True} if plain else {}
        return list(self._backend.encode(text, add_special_tokens=add_special, verbose=False, **options))

    def continuation(self, prefix: str, text: str, *, plain: bool = False) -> list[int]:
        """Token ids of `text` as the continuation of `encode(prefix)`.

        A tokenizer may put a space before the first word of whatever it is given (SentencePiece), so the text is encoded after the prefix
        and the prefix's ids are cut off. If a token spans the border, it is encoded after a line break; by itself if that also merges.
        """
        for anchor in (prefix, "\n"):
            head, whole = self.encode(anchor, plain=plain), self.encode(anchor + text, plain=plain)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self.encode(text, plain=plain)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids, spaces left as they are."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def decode_after(self, prefix: Sequence[int], ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids` behind `prefix`, such that `continuation` gives them again.

        By themselves they would lose the space before their first word if the tokenizer puts one there (SentencePiece). Where `prefix`
        ends in the middle of a character they are read by themselves.
        """
        head, whole = (self.decode(part, skip_special=skip_special) for part in (prefix, [*prefix, *ids]))
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids, skip_special=skip_special)

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation in the model's own format.

        Raises: ConfigError if the tokenizer has no template; DataError if the template refuses the messages.
        """
        return list(self._apply(messages, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False))

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation in the model's own format. Raises as `apply_chat_template` does."""
        return self._apply(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def written_spans(self, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        """[start, stop) of what each assistant turn wrote among the tokens of a conversation, its end mark included.

        None if the template does not say, by `{% generation %}`. Raises as `apply_chat_template` does.
        """
        if not (self._backend.is_fast and _GENERATION.search(self._template())):
            return None
        found = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = [False, *map(bool, found["assistant_masks"]), False]
        edges = [position for position in range(len(mask) - 1) if mask[position] != mask[position + 1]]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _template(self) -> str:
        return self._own_template or str(self._backend.chat_template or "")

    def _apply(self, messages: Sequence[Message], **options: bool) -> Any:
        if not self.has_chat_template:
            raise ConfigError(
                f"tokenizer {self.path} has no chat template: looked for chat_template in its tokenizer_config.json "
                f"and for chat_template.jinja; allowed: data.chat_template={'|'.join(TEMPLATES)}, "
                "plain text records with apply_chat_template=false, or a tokenizer with a template"
            )
        from jinja2 import TemplateError

        messages = self._thinking_as_set(messages)
        if lost := next((word for word in self._wanted(messages) if word not in self._template()), ""):
            raise DataError(f"the chat template of {self.path} has no place for {lost}, expected one that has (data.chat_template)")
        more: dict[str, Any] = {"tools": list(self._tools)} if self._tools else {}
        if self._own_template:
            more["chat_template"] = self._own_template
        turns = [message.as_json() for message in messages]
        try:
            if self._thinking is Thinking.keep:
                self._check_thoughts(messages, self._backend.apply_chat_template(turns, tokenize=False, **more))
            return self._backend.apply_chat_template(turns, **more, **options)
        except TemplateError as error:
            raise DataError(f"the chat template of {self.path} refuses the messages: {error}") from error

    def _wanted(self, messages: Sequence[Message]) -> list[str]:
        """What a template has to know of, or it would leave it out."""
        return [*(["tools"] if self._tools else []), *(["tool_calls"] if any(message.tool_calls for message in messages) else [])]

    def _thinking_as_set(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._thinking is Thinking.drop:
            return [message.without_thinking() for message in messages]
        if self._thinking is Thinking.keep and "reasoning_content" not in self._template():
            return [message.with_thinking_in_text() for message in messages]
        return messages

    def _check_thoughts(self, messages: Sequence[Message], text: str) -> None:
        for position, message in enumerate(messages):
            if any(thought not in text for thought in message.thoughts()):
                raise DataError(
                    f"message {position}: the chat template of {self.path} leaves out its thinking (data.thinking=keep), "
                    "allowed: data.thinking=template or drop, or another data.chat_template"
                )

    def save(self, directory: str | Path) -> None:
        """Write it in the form that `load_tokenizer` and `transformers` load."""
        self._backend.save_pretrained(str(directory))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load from a local directory; never from the network, never running code from it.

    Raises: ConfigError naming the missing files.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"tokenizer path is {str(path)!r}: no such directory (looked for {directory.absolute()})")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"tokenizer directory {directory.absolute()} has none of {', '.join(TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        if "trust_remote_code" in str(error):
            files = [directory / name for name in ("tokenizer_config.json", "config.json")]
            code = [json.loads(file.read_text()).get("auto_map") for file in files if file.is_file()]
            raise ConfigError(
                f"tokenizer in {directory.absolute()} is code of its own (auto_map: {code}), which is never run; allowed: "
                "model.tokenizer=DIR with a tokenizer.json whose tokenizer_class transformers has, such as PreTrainedTokenizerFast"
            ) from error
        raise ConfigError(f"tokenizer in {directory.absolute()} does not load: {type(error).__name__}: {error}") from error
    return Tokenizer(backend, str(path))


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer can produce an id for which the model has no embedding."""
    if tokenizer.max_token_id >= model_vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.path} produces ids up to {tokenizer.max_token_id} ({tokenizer.vocab_size} tokens), "
            f"model.vocab_size is {model_vocab_size}, allowed: at least {tokenizer.max_token_id + 1}"
        )
