"""The tokenizer of a model directory, with its chat template: texts and conversations as token ids."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import date
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.data.config import SpecialText, Thinking
from aligner.data.messages import THOUGHTS, Message, Tools, shown
from aligner.data.rendering import Framing, Rendered, writes_dates
from aligner.data.templates import DEFAULT, OWN_TEMPLATE, TEMPLATE_FILE, TEMPLATES, TOOL_USE, template_text
from aligner.data.vision import Vision
from aligner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SAMPLES = ("hello world, how are you", "def fib(n):\n    if n < 2:\n        return n", "12 + 345 = 357; caf\u00e9, \u4f60\u597d")


def _decoder(backend: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """What makes a text of ids, with all spaces. On few ids the way through the class takes three times as long."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(backend)
    if backend.is_fast and (own.decode, own._decode) == (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode):
        return partial(backend.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(backend.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Tokenizer:
    """A Hugging Face tokenizer. `bos_id` may be None; `eos_id` always exists; `pad_id` is the end token if none is defined."""

    def __init__(self, backend: PreTrainedTokenizerBase, path: str, ends: Sequence[int] = ()) -> None:
        if backend.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {path} defines no end-of-sequence token: looked for eos_token in its tokenizer_config.json "
                "and special_tokens_map.json"
            )
        self.path = path
        self.bos_id: int | None = backend.bos_token_id
        self.eos_id: int = backend.eos_token_id
        self.pad_id: int = backend.eos_token_id if backend.pad_token_id is None else backend.pad_token_id
        self.end_ids = tuple(dict.fromkeys([self.eos_id, *ends]))  # they end a response; the first one also ends training data
        self.vocab_size: int = len(backend)
        self._backend, self._text_of = backend, _decoder(backend)
        self._tools: Tools = ()
        self.vision: Vision | None = None
        found = backend.chat_template or {}
        self._templates: dict[str, str] = dict(found) if isinstance(found, Mapping) else {DEFAULT: found}
        self._thinking = Thinking.template
        self._special_text = SpecialText.plain
        self._day = date.today()
        self._framing = Framing(backend, self._templates, self._day, self.end_ids)

    def chatting(self, data: Any, *, day: date | None = None) -> Tokenizer:
        """The same tokenizer with the `chat_template` (a name or a file; empty: its own), `thinking` and `special_text` of a data config.

        `day`: today's date for templates. Raises ConfigError for an unknown template.
        """
        chats = copy(self)
        if data.chat_template.startswith(OWN_TEMPLATE):
            name = data.chat_template.removeprefix(OWN_TEMPLATE)
            if name not in self._templates:
                there = ", ".join(self._templates) or "none"
                raise ConfigError(f"data.chat_template={data.chat_template}: the chat templates of tokenizer {self.path} are: {there}")
            chats._templates = {DEFAULT: self._templates[name]}
        elif data.chat_template:
            chats._templates = {DEFAULT: template_text(data.chat_template)}
        chats._thinking, chats._special_text, chats._day = data.thinking, data.special_text, day or self._day
        chats._framing = Framing(self._backend, chats._templates, chats._day, self.end_ids, self.vision)
        return chats

    def offering(self, tools: Tools) -> Tokenizer:
        """The same tokenizer, whose chat template offers these tools to the model."""
        if not tools:
            return self
        offers = copy(self)
        offers._tools = tools
        return offers

    def seeing(self, vision: Vision | None) -> Tokenizer:
        """The same tokenizer of a model that sees: it writes the slots of images. None: of a model that does not."""
        sees = copy(self)
        sees.vision = vision
        sees._framing = Framing(self._backend, self._templates, self._day, self.end_ids, vision)
        return sees

    @property
    def max_token_id(self) -> int:
        """The largest id it can produce; more than `vocab_size - 1` if its ids have gaps."""
        return max(self.token_ids)

    @property
    def token_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_vocab().values())

    @property
    def digest(self) -> str:
        """Equal for tokenizers with the same vocabulary."""
        return hashlib.sha256(json.dumps(sorted(self._backend.get_vocab().items())).encode()).hexdigest()

    @property
    def chat_digest(self) -> str:
        """Equal for tokenizers that write conversations in the same way (on the same day, if that matters)."""
        return hashlib.sha256(json.dumps([self._templates, str(self._day) if self.writes_dates else ""]).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str:
        """The default one; empty if there is none."""
        return self._templates.get(DEFAULT, "")

    @property
    def writes_dates(self) -> bool:
        return any(map(writes_dates, self._templates.values()))

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer itself puts before a text: a begin token, none (GPT-2, Qwen), or more (GLM)."""
        whole, bare = self.encode("a", add_special=True), self.encode("a")
        starts = [place for place in range(len(whole)) if whole[place : place + len(bare)] == bare]
        return tuple(whole[: starts[0]]) if starts else ()

    def protected(self, text: str) -> str:
        """A text from outside, whose special tokens frame nothing (`data.special_text`). Raises DataError if it is refused."""
        found = self._framing.found(text)
        if self._special_text is SpecialText.keep:
            found = [frame for frame in found if frame in self._framing.slots]
        if not found:
            return text
        if self._special_text is SpecialText.refuse:
            raise DataError(f"a text holds {found[0]!r}, which frames texts for this tokenizer, expected none (data.special_text=refuse)")
        return self._framing.escaped(text, found)

    def is_framed(self, text: str) -> bool:
        """Whether a text begins like a rendered conversation, whose special tokens are intended."""
        return self._framing.begins(text)

    def ends_turn(self, token: int) -> bool:
        return token in self.end_ids or token in self._framing.turn_ends

    def is_frame(self, token: int) -> bool:
        return token in self._framing.ids

    @property
    def end_text(self) -> str:
        """The end token, written out."""
        return str(self._backend.eos_token)

    def encode(self, text: str, *, add_special: bool = False, plain: bool = False) -> list[int]:
        """Token ids of `text`; `add_special`: with a begin token and the like; `plain`: special tokens spelled out stay text."""
        if not text:
            return []
        if not (add_special or plain):
            return self._framing.encode(Rendered(text, ()))[0]
        options = {"split_special_tokens": True} if plain else {}
        return list(self._backend.encode(text, add_special_tokens=add_special, verbose=False, **options))

    def continuation(self, prefix: str, text: str, *, plain: bool = False) -> list[int]:
        """Token ids of `text` as the continuation of `encode(prefix)`.

        A tokenizer may put a space before the first word of its input (SentencePiece), so the text is encoded after the prefix and the
        prefix's ids are cut off. If a token spans the border, it is encoded after a line break; if that also merges, by itself.
        """
        for anchor in (prefix, "\n"):
            head, whole = self.encode(anchor, plain=plain), self.encode(anchor + text, plain=plain)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self.encode(text, plain=plain)

    def missing_ids(self, num_rows: int) -> list[int]:
        """The ids below `num_rows` without a token: gaps, and the padding of a model's vocabulary."""
        return sorted(set(range(num_rows)) - self.token_ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids, with all spaces: what a model wrote. Special tokens are spelled out (`<think>`, marks of tool calls), except
        end tokens, padding and an initial begin token if `skip_special`."""
        ids, left_out = list(ids), {self.pad_id, *self.end_ids}
        if skip_special:
            ids = [token for token in ids[ids[:1] == [self.bos_id] :] if token not in left_out]
        return self._text_of(ids)

    def has_special(self, ids: Sequence[int]) -> bool:
        return self._backend.decode(list(ids), skip_special_tokens=True) != self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_after(self, prefix: Sequence[int], ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids` after `prefix`, such that `continuation` returns the same ids.

        Alone they would lose the space before their first word with some tokenizers (SentencePiece). If `prefix` ends in the middle of a
        character, they are decoded alone.
        """
        head, whole = (self.decode(part, skip_special=skip_special) for part in (prefix, [*prefix, *ids]))
        return whole[len(head) :] if whole.startswith(head) else self.decode(ids, skip_special=skip_special)

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation in the model's own format. Raises ConfigError without a template, DataError if it refuses."""
        return self._framing.encode(self._rendered(messages, add_generation_prompt=add_generation_prompt))[0]

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation in the model's own format. Raises as `apply_chat_template` does."""
        return self._rendered(messages, add_generation_prompt=add_generation_prompt).text

    def written_spans(self, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
        """[start, stop) of each assistant turn's text among the tokens of a conversation, including its end mark.

        None if the template has no `{% generation %}`. Raises as `apply_chat_template` does.
        """
        if not (self._backend.is_fast and _GENERATION.search(self._template(messages))):
            return None
        mask = self._framing.encode(self._rendered(messages, add_generation_prompt=False))[1]
        edges = [position for position, (before, now) in enumerate(pairwise([False, *mask, False])) if before != now]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _template(self, messages: Sequence[Message]) -> str:
        """The template for these messages: `tool_use`, if it exists, for messages with tools."""
        if not self._templates:
            raise ConfigError(
                f"tokenizer {self.path} has no chat template: looked for chat_template in its tokenizer_config.json "
                f"and for {TEMPLATE_FILE}; allowed: data.chat_template={'|'.join(TEMPLATES)}, "
                "plain text records with apply_chat_template=false, or a tokenizer with a template"
            )
        name = TOOL_USE if self._wanted(messages) and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            named = ", ".join(f"data.chat_template={OWN_TEMPLATE}{one}" for one in self._templates)
            raise DataError(f"tokenizer {self.path} has no default chat template, allowed: {named}")
        return self._templates[name]

    def choosing(self, messages: Sequence[Message]) -> Tokenizer:
        """The same tokenizer with one template for a conversation and all of its beginnings."""
        if list(self._templates) in ([], [DEFAULT]):
            return self
        chosen = copy(self)
        chosen._templates = {DEFAULT: self._template(messages)}
        return chosen

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Rendered:
        messages = self._thinking_as_set(messages)
        template = self._template(messages)
        if lost := next((word for word in self._wanted(messages) if word not in template), ""):
            raise DataError(f"the chat template of {self.path} cannot write {lost}, expected one that can (data.chat_template)")
        thought, parts = _thought_field(template) or THOUGHTS[0], self._framing.wants_parts
        turns, tools = (self._protected_json(it) for it in ([message.as_json(thought, parts) for message in messages], list(self._tools)))
        found = self._framing.render(template, turns, tools=tools, asks=add_generation_prompt)
        self._check_contents(messages, found.text)
        images = [image.digest for message in messages for image in message.images]
        if self._thinking is Thinking.keep:
            whole = self._framing.render(template, turns, tools=tools) if add_generation_prompt else found
            self._check_thoughts(messages, whole.text)
        return self._with_images(found, images)

    def _with_images(self, rendered: Rendered, images: Sequence[str]) -> Rendered:
        """The text with the slots of these images where the template wrote images."""
        if self.vision is None or (self.vision.failure and not images):
            if images:
                raise DataError(f"holds an image, and the model of tokenizer {self.path} does not see")
            return rendered
        token = self.vision.image_token
        starts = [found.start() for found in re.finditer(re.escape(token), rendered.text)]
        if len(starts) != len(images):
            raise DataError(
                f"the chat template of {self.path} writes {len(starts)} times {token!r} for {len(images)} images, "
                "expected one for each (data.chat_template)"
            )
        return rendered.replaced([(start, start + len(token)) for start in starts], [self.vision.expansion(one) for one in images])

    def _protected_json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.protected(value)
        if isinstance(value, Mapping):
            return {self.protected(name): self._protected_json(one) for name, one in value.items()}
        return [self._protected_json(one) for one in value] if isinstance(value, list) else value

    def _wanted(self, messages: Sequence[Message]) -> list[str]:
        """The variables that a template must use, so that nothing is lost."""
        return [*(["tools"] if self._tools else []), *(["tool_calls"] if any(message.tool_calls for message in messages) else [])]

    def _thinking_as_set(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self._thinking is Thinking.drop:
            return [message.without_thinking() for message in messages]
        if self._thinking is Thinking.keep and not _thought_field(self._template(messages)):
            return [message.with_thinking_in_text() for message in messages]
        return messages

    def _check_contents(self, messages: Sequence[Message], text: str) -> None:
        """Raise DataError if the template omits a message's content; an assistant's thinking may be omitted."""
        for position, message in enumerate(messages):
            said = message.texts if message.role != "assistant" else (message.content.rpartition("</think>")[2],)
            for what in (*(text.strip() for text in said), *(call["function"]["name"] for call in message.tool_calls)):
                words = self.protected(what)
                if words not in text and json.dumps(words, ensure_ascii=False)[1:-1] not in text:
                    lost = f"{shown(what)} of role {message.role!r}, expected one that writes it (data.chat_template)"
                    raise DataError(f"message {position}: the chat template of {self.path} omits or changes {lost}")

    def _check_thoughts(self, messages: Sequence[Message], text: str) -> None:
        for position, message in enumerate(messages):
            if any(self.protected(thought) not in text for thought in message.thoughts()):
                raise DataError(
                    f"message {position}: the chat template of {self.path} omits its thinking (data.thinking=keep), "
                    "allowed: data.thinking=template or drop, or another data.chat_template"
                )

    def save_template(self, directory: Path) -> None:
        """Write the chat template as the only one beside a copy of the tokenizer's files."""
        (directory / TEMPLATE_FILE).write_text(self._templates[DEFAULT], encoding="utf-8")
        shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)

    def save(self, directory: str | Path) -> None:
        self._backend.save_pretrained(str(directory))


def _thought_field(template: str) -> str:
    """The field in which the template looks for an assistant's thinking; '' if none."""
    return next((name for name in THOUGHTS if re.search(rf"""(\.|\[?["']){name}\b""", template)), "")


def load_tokenizer(path: str | Path, model: Path | None = None) -> Tokenizer:
    """Load from a local directory; never from the network, and without running its code.

    The ends of a response are in the model's settings: in the directory `model`, else in the same.

    Raises: ConfigError naming the missing files, a setting that names no end token, or a text that `transformers` encodes differently from
    tokenizer.json.
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
                f"tokenizer in {directory.absolute()} needs its own code (auto_map: {code}), which is never run; allowed: "
                "model.tokenizer=DIR with a tokenizer.json and a tokenizer_class of transformers, such as PreTrainedTokenizerFast"
            ) from error
        raise ConfigError(f"tokenizer in {directory.absolute()} does not load: {type(error).__name__}: {error}") from error
    if backend.is_fast and (directory / "tokenizer.json").is_file():
        _compare(backend, directory / "tokenizer.json")
    return Tokenizer(backend, str(path), model_end_ids(model or directory))


def listed(ids: Any) -> list[Any]:
    """A setting's value, or values, as a list."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def model_settings(path: Path) -> dict[str, Any]:
    """The settings in a model's JSON file, including its text part's; empty if there is no such file. Raises ConfigError."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    settings = settings if isinstance(settings, dict) else {}
    text = settings.get("text_config")
    return (text if isinstance(text, dict) else {}) | {name: value for name, value in settings.items() if value is not None}


def model_end_ids(directory: Path) -> list[int]:
    """Every `eos_token_id` in generation_config.json and config.json. Raises ConfigError if one is not an id of the model."""
    found: list[int] = []
    rows = model_settings(directory / "config.json").get("vocab_size")
    for path in (directory / "generation_config.json", directory / "config.json"):
        ids = listed(value := model_settings(path).get("eos_token_id"))
        if any(type(one) is not int or one < 0 or (type(rows) is int and one >= rows) for one in ids):
            limit = f" below {rows} (vocab_size of config.json)" if type(rows) is int else ""
            raise ConfigError(f"{path}: eos_token_id is {value!r}, allowed: an id{limit}, a list of ids, or null")
        found += ids
    return found


def _compare(backend: PreTrainedTokenizerBase, file: Path) -> None:
    """Raise ConfigError if `transformers` encodes differently from the file, except for a space before the first word."""
    import transformers
    from tokenizers import Tokenizer as Written

    written = Written.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    for text in _SAMPLES:
        ids = backend.encode(text, add_special_tokens=False)
        if ids not in (expected := [written.encode(begin + text, add_special_tokens=False).ids for begin in ("", " ")]):
            raise ConfigError(
                f"tokenizer in {file.parent.absolute()}: as {type(backend).__name__} transformers {transformers.__version__} "
                f"encodes {text!r} as {shown(ids)} ({backend.decode(ids)!r}); by tokenizer.json it is {shown(expected[0])}; allowed: "
                "another version of transformers, or the right tokenizer_class in tokenizer_config.json"
            )


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer can produce an id without an embedding in the model."""
    if tokenizer.max_token_id >= model_vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.path} produces ids up to {tokenizer.max_token_id} ({tokenizer.vocab_size} tokens), "
            f"model.vocab_size is {model_vocab_size}, allowed: at least {tokenizer.max_token_id + 1}"
        )
