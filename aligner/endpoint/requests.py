"""What clients ask for: the fields of a request, checked, as prompts and settings of the engine. Nothing is ignored unless it is listed."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from aligner.data.config import ImageConfig
from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.images import digests_of
from aligner.data.messages import ROLES, Image, Message, is_media, parse_messages, parse_tools, shown
from aligner.data.tokenizer import Tokenizer
from aligner.data.vision import check_header
from aligner.endpoint.text import THOUGHT
from aligner.errors import ConfigError, DataError
from aligner.rollout.engine import Likeliest
from aligner.rollout.live import LiveEngine
from aligner.servers.gateway import Refusal
from aligner.types import SamplingConfig
from aligner.types.extras import MOST_IMAGES, Images

MOST_CHOICES = 1024  # of one request: its prompts times `n`
MOST_STOPS = 64
MOST_TOP = 20  # tokens named in place of a drawn one
_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_SEEDS = range(-(1 << 63), 1 << 63)
_IGNORED = frozenset({"model", "user", "metadata", "safety_identifier", "service_tier"})
_IGNORED |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"}
_STARTED, _COUNT = secrets.token_hex(8), itertools.count()  # of this process: of responses' names
_RANGES = {"temperature": (0.001, 1000.0), "repetition_penalty": (0.001, 1000.0)}  # the engine divides by them

Score = Callable[[Sequence[Sequence[int]], int], tuple[list[list[float]], list[list[Likeliest]]]]


class BadRequest(Refusal):
    """Refused, naming the parameter."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(400, message)
        self.parameter = parameter


class Fields:
    """The fields of a JSON object; a null counts as absent. `where`: in front of their names in messages."""

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise BadRequest(f"{where or 'the body'} is {shown(value)}, expected a JSON object", where or None)
        self._left = {name: one for name, one in value.items() if one is not None}
        self._known: list[str] = []
        self.where, self._where = where, f"{where}." if where else ""

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a field. Raises BadRequest if it is of another kind."""
        self._known.append(name)
        if (value := self._left.pop(name, None)) is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and not {bool, object} & {*kinds}):
            raise self.bad(name, value, " or ".join(map(_KINDS.__getitem__, kinds)))
        return value

    def peek(self, name: str) -> Any:
        """The value of a field that is still to be taken."""
        return self._left.get(name)

    def rename(self, name: str, other: str) -> None:
        """One interface's name of what another one calls `other`."""
        self.only(other, (), f"here it is {name}")
        if name in self._left:
            self._left[other] = self._left.pop(name)

    def require(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """As `take`. Raises BadRequest if it is missing."""
        if (value := self.take(name, kind)) is None:
            given = ", ".join(one[:60] for one in sorted(self._left))
            raise BadRequest(f"{self._where}{name} is missing{given and f'; further fields are {given}'}", name)
        return value

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Raise BadRequest unless a field is absent, or one of those values that change nothing."""
        if (value := self.take(name, object)) is not None and value not in allowed:
            raise BadRequest(f"{self._where}{name}={shown(value)}: {why}; allowed: {', '.join(map(json.dumps, allowed)) or 'none'}", name)

    def ignore(self, names: Sequence[str] | frozenset[str]) -> None:
        """Accept these, which change nothing."""
        for name in names:
            self.take(name, object)

    def bad(self, name: str, value: object, expected: str) -> BadRequest:
        return BadRequest(f"{self._where}{name} is {shown(value)}, expected {expected}", name)

    def end(self) -> None:
        """Raise BadRequest if there are others."""
        if self._left:
            named = ", ".join(f"{self._where}{name[:60]}" for name in sorted(self._left))
            raise BadRequest(f"unknown parameter {named}; known here: {', '.join(sorted(self._known))}", next(iter(sorted(self._left))))


def objects(items: Sequence[object], where: str) -> Iterator[Fields]:
    """The objects of a list, whose fields all have to be taken."""
    for place, item in enumerate(items):
        fields = Fields(item, f"{where}[{place}]")
        yield fields
        fields.end()


@dataclass(kw_only=True, slots=True)
class Ask:
    """What one request asks for: `n` responses to each of its prompts."""

    prompts: list[tuple[int, ...]]
    sampling: SamplingConfig
    seed: int | None = None
    n: int = 1
    stream: bool = False
    usage: bool = False  # in the last chunk of a stream
    logprobs: bool = False
    top: int = 0  # of the likeliest tokens in each place, whose log-probs are named too
    ids: bool = False  # token ids in the answer
    echo: bool = False
    samples: bool = True  # False: only the prompts are wanted back
    skip_special: bool = True
    thinks: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # fields that the answer repeats
    id: str = field(default_factory=lambda: f"{_STARTED}{next(_COUNT):08x}")
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(kw_only=True)
class Model:
    """The policy as requests see it: `name`, and `sampling` for what they leave open; from `seed` come the seeds of those without one.

    `score`: of texts, for every token but the first, its log-prob, and so many likeliest tokens; None where they cannot be had.
    """

    name: str
    tokenizer: Tokenizer
    live: LiveEngine
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    score: Score | None = None
    seed: int | None = None
    max_pixels: int = field(default_factory=lambda: ImageConfig().max_pixels)

    @property
    def context(self) -> int:
        """Tokens of prompt and response together."""
        return self.live.max_sequence_length

    @cached_property
    def token_ids(self) -> frozenset[int]:
        return self.tokenizer.token_ids

    def settings(self, fields: Fields, *, limits: Sequence[str], usual: int = 0) -> dict[str, Any]:
        """The parts of an `Ask` that all interfaces have; the limit on tokens is the first of `limits` that is given, else `usual`."""
        fields.ignore(_IGNORED)
        own: dict[str, Any] = {}
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := fields.take(name, float)) is not None:
                low, high = _RANGES.get(name, (0.0, 0.0))
                if high and not (low <= value <= high or name == "temperature" and value == 0):
                    raise fields.bad(name, value, f"a number from {low} to {high:g}{', or 0' if name == 'temperature' else ''}")
                own[name] = value
        if (top_k := fields.take("top_k", int)) is not None:
            own["top_k"] = 0 if top_k == -1 else min(top_k, len(self.token_ids))  # vLLM's -1 is off
        given = [limit for name in limits if (limit := fields.take(name, int)) is not None]
        if any(limit < 1 for limit in given):
            raise BadRequest(f"{limits[0]} is {min(given)}, expected at least 1", limits[0])
        own["max_response_length"] = min([*given[:1], *([] if given else [usual] if usual else []), self.context])
        if least := fields.take("min_tokens", int, 0):
            own["min_response_length"] = least
        stops = fields.take("stop", (str, list), [])
        own["stop_strings"] = [stops] if isinstance(stops, str) else stops
        if len(own["stop_strings"]) > MOST_STOPS or not all(isinstance(one, str) and one for one in own["stop_strings"]):
            raise fields.bad("stop", stops, f"at most {MOST_STOPS} texts that are not empty")
        if least and own["stop_strings"]:
            raise BadRequest("min_tokens: not together with stop; allowed: one of them", "min_tokens")
        own["stop_token_ids"] = list(self.tokens_of(fields.take("stop_token_ids", list, []), "stop_token_ids"))
        seed = fields.take("seed", int)
        if seed is not None and seed not in _SEEDS:
            raise fields.bad("seed", seed, "a number of 64 bits")
        try:
            sampling = replace(self.sampling, **own)
        except ConfigError as error:
            raise BadRequest(str(error).removeprefix("sampling.").replace("min_response_length", "min_tokens", 1)) from error
        fields.only("ignore_eos", (False,), "end tokens always end a response")
        return {
            "sampling": sampling,
            "seed": seed,
            "stream": fields.take("stream", bool, False),
            "ids": fields.take("return_token_ids", bool, False),
            "skip_special": fields.take("skip_special_tokens", bool, True),
        }

    def choices(self, fields: Fields) -> int:
        n: int = fields.take("n", int, 1)
        if not 1 <= n <= MOST_CHOICES:
            raise fields.bad("n", n, f"a number from 1 to {MOST_CHOICES}")
        fields.only("best_of", (1,), "every sampled response is returned")
        return n

    def alternatives(self, fields: Fields, name: str) -> int | None:
        """How many of the likeliest tokens are asked for in each place."""
        count: int | None = fields.take(name, int)
        if not 0 <= (count or 0) <= MOST_TOP:
            raise BadRequest(f"{name}={count}: the likeliest tokens in each place; allowed: 0 to {MOST_TOP}", name)
        return count

    def tokens_of(self, value: object, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise BadRequest(f"{what} is {shown(value)}, expected a list of token ids", what)
        if wrong := next((one for one in value if one not in self.token_ids), None):
            raise BadRequest(f"{what}: {wrong} is no id of a token; there are {len(self.token_ids)}", what)
        return tuple(value)

    def check(self, prompt: Sequence[int], what: str, *, images: bool = False, room: int = 1) -> None:
        """Raise BadRequest for a prompt that leaves no room for a response, is empty, or has places of images without images."""
        if not prompt:
            raise BadRequest(f"{what} has no token, expected at least one", what)
        if len(prompt) > self.context - room:
            raise BadRequest(f"{what} has {len(prompt)} tokens; this model's context of {self.context} tokens leaves no room", what)
        vision = self.tokenizer.vision
        if not images and vision is not None and not vision.failure and vision.count_slots(prompt):
            raise BadRequest(f"{what} holds tokens that stand for images, expected images as parts of messages", what)

    def conversation(self, turns: list[Any], tools: object = None, *, asks: bool = True) -> dict[str, Any]:
        """The parts of an `Ask` that messages in OpenAI's form make up. Raises DataError for messages that the chat template refuses."""
        offered = parse_tools(tools) if tools else ()
        said = tuple(self._turn(turn, f"messages[{place}]") for place, turn in enumerate(turns))
        if not said:
            raise BadRequest("messages is empty, expected at least one", "messages")
        if asks and not self.tokenizer.has_chat_template:
            wanted = "allowed: /v1/completions, or a tokenizer with one (jobs: data.chat_template)"
            raise BadRequest(f"model {self.name} has no chat template; {wanted}", "messages")
        tokenizer, images = self.tokenizer.offering(offered), digests_of(said)
        if asks:
            prompt = tuple(encode_prompt(tokenizer, said, PromptStyle(apply_chat_template=True)))
        else:
            prompt = tuple(tokenizer.apply_chat_template(said, add_generation_prompt=False))
        self.check(prompt, "messages", images=bool(images))
        if len(images) > MOST_IMAGES:
            raise BadRequest(f"messages hold {len(images)} images; at most {MOST_IMAGES} are allowed", "messages")
        extras = {Images.name: Images.of(images)} if images else {}
        return {"prompts": [prompt], "extras": extras, "tools": offered, "thinks": THOUGHT in tokenizer.chat_template, "messages": turns}

    def _turn(self, turn: Any, what: str) -> Message:
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, list):
            turn = turn | {"content": [self._part(part, f"{what}.content[{place}]") for place, part in enumerate(content)]}
        elif isinstance(content, str) and not content.strip() and turn.get("role") in [*ROLES] and not turn.get("tool_calls"):
            return Message(role=turn["role"], content=content)  # an agent may say nothing, which no training example may
        try:
            return parse_messages([turn], "messages")[0]
        except DataError as error:
            raise BadRequest(str(error).replace("'messages[0]'", f"'{what}'", 1), "messages") from error

    def _part(self, part: Any, what: str) -> Any:
        """A part of a content; one that is an image is kept, and becomes its digest."""
        if not is_media(part):
            return part
        if part["type"] not in ("image_url", "input_image"):
            raise BadRequest(f"{what} has the type {shown(part['type'])}, expected text or image_url", "messages")
        vision, url = self.tokenizer.vision, part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if vision is None or vision.failure:
            why = vision.failure if vision is not None else self.name
            raise BadRequest(f"{what} is an image, and this model, as it is loaded, does not see: {why}", "messages")
        if not isinstance(url, str) or not url.startswith("data:image/") or ";base64," not in url[:100]:
            raise BadRequest(f"{what} is {shown(url)}, expected data:image/...;base64,...: nothing else is loaded here", "messages")
        try:
            content = base64.b64decode(url.partition(";base64,")[2], validate=True)
            check_header(content, self.max_pixels)
            return Image(vision.add(content))
        except (binascii.Error, DataError) as error:
            raise BadRequest(f"{what}: the image {error}", "messages") from error


def tools_of(fields: Fields) -> object:
    """The tools that a request offers to the model, in OpenAI's form."""
    tools, choice = fields.take("tools", list), fields.take("tool_choice", (str, dict), "auto")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise BadRequest(f"tool_choice={shown(choice)}: the model cannot be made to call a tool; allowed: auto, none", "tool_choice")
    fields.only("parallel_tool_calls", (True,), "the model decides how many tools it calls")
    return None if kind == "none" else tools


def reward_of(fields: Fields) -> dict[str, Any]:
    """{"reward": number, "turn": its number from 1 (else of the whole session), "done": true: no call follows}."""
    posted = {"reward": fields.take("reward", float), "turn": fields.take("turn", int), "done": fields.take("done", bool)}
    fields.end()
    if all(value is None for value in posted.values()):
        raise BadRequest('the body is empty, expected {"reward": number, "turn": number, "done": bool}')
    if not math.isfinite(posted["reward"] or 0.0):
        raise fields.bad("reward", posted["reward"], "a finite number")
    return posted | {"done": bool(posted["done"])}
