"""Constitutional AI: the principles by which a model criticises, revises and compares responses, and its questions (2212.08073).

A constitution is a YAML or JSON file:

    principles:
      - name: harm                  # optional, each once
        critique_request: ...       # both, or neither: a principle may only compare
        revision_request: ...
        question: ...               # optional: which of two responses is better
    examples:                       # optional: model critiques and revisions, shown before every prompt for either
      - {prompt, response, critique_request, critique, revision_request, revision}
    comparisons:                    # optional: questions with their answers, shown before every question
      - {prompt, first, second, question, answer}     # answer: A (the first) or B

The questions are for a critique, for a revision, and for the better of two responses (sections 3 and 4). Texts have the form of the paper's
dialogues,

    Human: ... Assistant: {response} CritiqueRequest: {request} Critique: {critique} RevisionRequest: {request} Revision:

each part after an empty line; messages go through the chat template, with the requests as turns of the user. A round sees the prompt and
its own response, not earlier rounds: a revision has the form of a response. A `Case` is where a round starts: a prompt to be answered, or a
pair of responses that are only compared.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml

from aligner.data.config import ConstitutionDataConfig
from aligner.data.encoding import PromptStyle, as_conversation, encode_prompt
from aligner.data.forms import Purpose, recast
from aligner.data.messages import Conversation, Message, is_blank, shown, text_of
from aligner.data.reading import Reader, read_all
from aligner.data.records import ASSISTANT_MARK, field_text, has, parse_preference, parse_prompt, raw_object, text_response, the_one
from aligner.data.report import MAX_LISTED, LoadReport
from aligner.data.sources import RawRecord
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError, DataError
from aligner.types import Prompt

DEFAULT = Path(__file__).with_suffix(".yaml")
SUFFIXES = (".yaml", ".yml", ".json")
ANSWERS = ("A", "B")

T = TypeVar("T")
_Key = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Principle:
    """A principle to judge responses by. `critique_request` and `revision_request` are empty if it only compares, `question` if not."""

    name: str
    critique_request: str = ""
    revision_request: str = ""
    question: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A critique and a revision to learn from."""

    prompt: str
    response: str
    critique_request: str
    critique: str
    revision_request: str
    revision: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A question with its answer, A or B, to learn from."""

    prompt: str
    first: str
    second: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Constitution:
    """Principles, and examples to show before the questions."""

    principles: tuple[Principle, ...]
    examples: tuple[Example, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @property
    def revising(self) -> list[Principle]:
        """The principles that request a critique and a revision."""
        return [one for one in self.principles if one.critique_request]

    @property
    def comparing(self) -> list[Principle]:
        """The principles that compare two responses."""
        return [one for one in self.principles if one.question]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def draw(principles: Sequence[Principle], count: int, key: str) -> list[Principle]:
    """`count` random principles, a pure function of `key`; none repeats before all have been drawn."""
    generator, found = random.Random(key), []
    while len(found) < count:
        found += generator.sample(principles, len(principles))
    return found[:count]


def load_constitution(path: str) -> Constitution:
    """The file at `path`, or the built-in principles (constitution.yaml). Raises ConfigError, or DataError listing all faults."""
    file = Path(path or DEFAULT)
    if not file.is_file():
        raise ConfigError(f"data.constitution={path}: no such file (looked for {file.absolute()})")
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"data.constitution={path}: ends in {file.suffix!r}, allowed: {', '.join(SUFFIXES)}")
    return _Checker(path or str(DEFAULT), *_tree(file)).constitution()


def _tree(file: Path) -> tuple[Any, Mapping[_Key, int]]:
    """The file's value, and in YAML the line of every entry. Raises DataError if it is neither JSON nor YAML."""
    lines: dict[_Key, int] = {}
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".json":
            return json.loads(text), lines
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _value(node, (), lines, str(file)), lines
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, DataError):
            raise
        kind = "JSON" if file.suffix == ".json" else "YAML"
        raise DataError(f"{file}: is not {kind} in UTF-8: {' '.join(str(error).split())}") from error


def _value(node: yaml.Node, key: _Key, lines: dict[_Key, int], file: str) -> Any:
    """The value of a node; the lines of all entries are added to `lines`."""
    lines[key] = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, (*key, number), lines, file) for number, one in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return yaml.constructor.SafeConstructor().construct_object(node)
    found: dict[str, Any] = {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.value in found:
            what = "appears twice, expected each field once" if isinstance(name, yaml.ScalarNode) else "is not a field name"
            raise DataError(f"{file}:{name.start_mark.line + 1}: {shown(name.value)} {what}")
        found[name.value] = _value(value, (*key, name.value), lines, file)
    return found


@dataclass(frozen=True, slots=True)
class _Checker:
    """Checks a tree and collects its faults."""

    _path: str
    _tree: Any
    _lines: Mapping[_Key, int]
    _faults: list[str] = field(default_factory=list)

    def constitution(self) -> Constitution:
        """Raises DataError listing all faults."""
        if not isinstance(self._tree, dict):
            raise DataError(f"{self._path}: is {shown(self._tree)}, expected the field 'principles', a list of them")
        self._check_names((), self._tree, required={"principles"}, allowed={"principles", "examples", "comparisons"})
        found = Constitution(
            principles=tuple(self._each("principles", self._principle)),
            examples=tuple(self._each("examples", lambda key, entry: Example(**self._texts(key, entry, Example.__slots__)))),
            comparisons=tuple(self._each("comparisons", self._comparison)),
        )
        if not self._faults and not found.principles:
            self._fault(("principles",), "is empty, expected at least one")
        names = [one.name for one in found.principles]
        for number, name in enumerate(names):
            if not self._faults and name in names[:number]:
                self._fault(("principles", number, "name"), f"is {shown(name)}, like principles[{names.index(name)}], expected each once")
        if self._faults:
            more = len(self._faults) - MAX_LISTED
            listed = [*self._faults[:MAX_LISTED], *([f"... and {more} more"] if more > 0 else [])]
            raise DataError("the constitution cannot be used:\n" + "\n".join(f"  {fault}" for fault in listed))
        return found

    def _each(self, name: str, read: Callable[[_Key, dict[str, Any]], T]) -> list[T]:
        entries = self._tree.get(name, [])
        if not isinstance(entries, list):
            self._fault((name,), f"is {shown(entries)}, expected a list")
            return []
        found = []
        for number, entry in enumerate(entries):
            key, before = (name, number), len(self._faults)
            if not isinstance(entry, dict):
                self._fault(key, f"is {shown(entry)}, expected fields with texts")
                continue
            one = read(key, entry)
            found += [one] if len(self._faults) == before else []
        return found

    def _principle(self, key: _Key, entry: dict[str, Any]) -> Principle:
        self._check_names(key, entry, required=set(), allowed=set(Principle.__slots__))
        has = entry.keys() & {"critique_request", "revision_request"}
        if len(has) == 1:
            self._fault(key, f"has {has.pop()!r} alone, expected both or neither of critique_request and revision_request")
        elif not has and "question" not in entry:
            self._fault(key, "requests nothing, expected critique_request and revision_request, or question, or all three")
        texts = {name: self._text(key, entry, name) for name in Principle.__slots__ if name in entry}
        return Principle(**({"name": f"principle {key[1] + 1}"} | texts))

    def _comparison(self, key: _Key, entry: dict[str, Any]) -> Comparison:
        found = Comparison(**self._texts(key, entry, Comparison.__slots__))
        if "answer" in entry and found.answer not in ANSWERS:
            self._fault((*key, "answer"), f"is {shown(entry['answer'])}, allowed: {', '.join(ANSWERS)}")
        return found

    def _texts(self, key: _Key, entry: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
        self._check_names(key, entry, required=set(names), allowed=set(names))
        return {name: self._text(key, entry, name) if name in entry else "" for name in names}

    def _text(self, key: _Key, entry: dict[str, Any], name: str) -> str:
        try:
            text = text_of(entry[name], "", empty=True).strip()
        except DataError as error:
            self._fault((*key, name), str(error).strip())
            return ""
        if not text:
            self._fault((*key, name), f"is {shown(entry[name])}, expected text")
        return text

    def _check_names(self, key: _Key, entry: dict[str, Any], *, required: set[str], allowed: set[str]) -> None:
        for name in sorted(required - entry.keys()):
            self._fault(key, f"has no field {name!r}")
        for name in sorted(map(str, entry.keys() - allowed)):
            self._fault((*key, name), f"is an unknown field, allowed: {', '.join(sorted(allowed))}")

    def _fault(self, key: _Key, what: str) -> None:
        line = next((self._lines[key[:size]] for size in range(len(key), -1, -1) if key[:size] in self._lines), None)
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")
        self._faults.append(f"{self._path}{'' if line is None else f':{line}'}: {where}{' ' if where else ''}{what}")


HUMAN_MARK = "\n\nHuman:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A prompt to be answered: messages, or a text that ends where the assistant's turn begins; or a `pair` of given responses."""

    prompt: Prompt
    messages: Conversation | None
    said: str | Conversation  # for a record that is read with the same data.apply_chat_template
    pair: tuple[str, str] | None = None

    @property
    def as_json(self) -> str | list[dict[str, str]]:
        if isinstance(self.said, str):
            return self.said
        return [{"role": message.role, "content": message.content} for message in self.said]

    def response(self, text: str) -> str:
        """A response for a record: in a text, a space follows "Assistant:"."""
        return text if self.messages is not None else f" {text}"

    @property
    def dialogue(self) -> str:
        if self.messages is None:
            return str(self.said).removesuffix(ASSISTANT_MARK).strip()
        names = {"user": "Human", "assistant": "Assistant", "system": "System", "tool": "Tool"}
        return "\n\n".join(f"{names[message.role]}: {message.content.strip()}" for message in self.messages)


def framed(text: str) -> str:
    """A plain prompt as the first turn of the paper's dialogues; a text that already is such a dialogue stays unchanged."""
    return text if text.endswith(ASSISTANT_MARK) else f"{HUMAN_MARK} {text.strip()}{ASSISTANT_MARK}"


def load_cases(
    location: str, config: ConstitutionDataConfig, tokenizer: Tokenizer, *, given: bool, first: int | None = None
) -> tuple[list[Case], LoadReport]:
    """Prompts (see `aligner.data.reading`), or with `given` pairs: `{prompt, responses: [a, b]}` or preferences."""

    def recognised(raw: RawRecord) -> RawRecord:
        if config.prompt_field or (given and isinstance(raw.value, dict) and has(raw.value, "responses")):
            return raw
        return recast(raw, Purpose.preference if given else Purpose.prompts, config.form)

    def convert(raw: RawRecord, reader: Reader) -> Case:
        said, pair = _pair(raw) if given else (parse_prompt(raw, config.prompt_field, None).prompt, None)
        messages = as_conversation(said, reader.style)
        said = framed(str(said)) if messages is None else said
        tokens = encode_prompt(tokenizer, said, reader.style)
        reader.check_prompt(len(tokens))
        return Case(prompt=reader.prompt(raw, tokens), messages=messages, said=said, pair=pair)

    return read_all(convert, location, config, tokenizer, first=first, items=lambda raws: map(recognised, raws))


def _pair(raw: RawRecord) -> tuple[str | Conversation, tuple[str, str]]:
    record: dict[str, Any] = raw_object(raw)
    if the_one(record, ("responses", "chosen", "chosen_response"), "{prompt, responses}, or the records of preferences") != "responses":
        found = parse_preference(raw)
        return found.prompt, (text_response(found.chosen).strip(), text_response(found.rejected).strip())
    responses = record["responses"]
    if not isinstance(responses, list) or len(responses) != 2:
        raise DataError(f"field 'responses' is {shown(responses)}, expected a list of two texts")
    texts = [field_text({f"responses[{number}]": text}, f"responses[{number}]").strip() for number, text in enumerate(responses)]
    if empty := [number for number, text in enumerate(texts) if is_blank(text)]:
        raise DataError(f"field 'responses[{empty[0]}]' is {shown(responses[empty[0]])}, expected a response, not only white space")
    return parse_prompt(raw, answer_field=None).prompt, (texts[0], texts[1])


CRITIQUE_REQUEST, CRITIQUE = "\n\nCritiqueRequest:", "\n\nCritique:"
REVISION_REQUEST, REVISION = "\n\nRevisionRequest:", "\n\nRevision:"
MARKS = (HUMAN_MARK, ASSISTANT_MARK, CRITIQUE_REQUEST, CRITIQUE, REVISION_REQUEST, REVISION)  # an answer ends at the first of these
ANSWER, OPTIONS = "The answer is:", (" (A)", " (B)")
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not text


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """One round about a response: its requests, and the answers so far."""

    response: str
    critique_request: str
    critique: str = ""
    revision_request: str = ""  # empty: the critique is requested


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Which of two responses to a dialogue is better."""

    dialogue: str
    question: str
    first: str
    second: str

    @property
    def text(self) -> str:
        return (
            f"Consider the following conversation between a human and an assistant:\n\n{self.dialogue}\n\n{self.question}\n"
            f"Options:\n(A) {self.first}\n\n(B) {self.second}"
        )

    @property
    def turned(self) -> Question:
        return replace(self, first=self.second, second=self.first)


class Framing:
    """Token ids of the questions. `add_bos`: `data.add_bos`, for texts."""

    def __init__(self, tokenizer: Tokenizer, constitution: Constitution, *, add_bos: bool | None) -> None:
        self._tokenizer = tokenizer
        self._style = PromptStyle(apply_chat_template=False, add_bos=add_bos)
        examples, comparisons = constitution.examples, constitution.comparisons
        self._shown = "".join(f"{_written(framed(one.prompt), one)} {one.revision}" for one in examples)
        self._shown_turns = tuple(chain.from_iterable((*_said((_user(one.prompt),), one), _assistant(one.revision)) for one in examples))
        self._compared = "".join(f"{_question_of(one).text}\n\n{ANSWER} ({one.answer})\n\n" for one in comparisons)
        asked = ((_user(_question_of(one).text), _assistant(f"{ANSWER} ({one.answer})")) for one in comparisons)
        self._compared_turns = tuple(chain.from_iterable(asked))
        self._options = [tokenizer.continuation(ANSWER, option) for option in OPTIONS]

    def turns(self, case: Case, turns: Turns) -> list[int]:
        """Ids of everything before the critique, or the revision, of a response to the case."""
        if case.messages is None:
            return self._encode(self._shown + _written(str(case.said), turns))
        cut = int(case.messages[0].role == "system")  # which stays first
        return self._encode((*case.messages[:cut], *self._shown_turns, *_said(case.messages[cut:], turns)))

    def options(self, question: Question, *, chat: bool) -> list[tuple[list[int], int]]:
        """For (A) and for (B): ids of the question with this answer, and how many of them come before the answer."""
        if chat:
            head = self._encode((*self._compared_turns, _user(question.text)))
            head += self._tokenizer.continuation("\n", ANSWER)
        else:
            head = self._encode(f"{self._compared}{question.text}\n\n{ANSWER}")
        return [([*head, *option], len(head)) for option in self._options]

    def read(self, response: Sequence[int], *, ended: bool, chat: bool) -> tuple[str, str]:
        """(the text of a response, its fault): '', truncated, empty or unreadable.

        `ended`: it stopped by itself. Unreadable: it has bytes that are not text, or a special token inside (another turn).
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


def _question_of(one: Comparison) -> Question:
    dialogue = framed(one.prompt).removesuffix(ASSISTANT_MARK).strip()
    return Question(dialogue=dialogue, question=one.question, first=one.first, second=one.second)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def _written(said: str, turns: Turns | Example) -> str:
    text = f"{said} {turns.response}{CRITIQUE_REQUEST} {turns.critique_request}{CRITIQUE}"
    return f"{text} {turns.critique}{REVISION_REQUEST} {turns.revision_request}{REVISION}" if turns.revision_request else text


def _said(messages: Conversation, turns: Turns | Example) -> Conversation:
    found = (*messages, _assistant(turns.response), _user(turns.critique_request))
    return (*found, _assistant(turns.critique), _user(turns.revision_request)) if turns.revision_request else found
