"""An endpoint over an engine that says what a test wants, and a tokenizer with one token per byte and a chat template with tools."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Written, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.endpoint.app import Endpoint
from aligner.endpoint.requests import Model
from aligner.errors import EngineError
from aligner.rollout.engine import GenResult
from aligner.rollout.live import LiveRequest
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import FinishReason, LogprobKind

KEY = "5e" * 32
FRAMES = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = 256


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Written(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=FRAMES[0], additional_special_tokens=list(FRAMES[1:]))
    fast.chat_template = template
    fast.save_pretrained(str(directory))
    return directory


def tokenizer_of(directory: Path, template: str = TEMPLATE) -> Tokenizer:
    return load_tokenizer(write_tokenizer(directory, template))


class ScriptedEngine:
    """Answers every request with `script(request)`: a text, which an end token follows, or token ids, which it cuts where a stop string or
    the limit asks for that. `pieces`: tokens that arrive at once in a stream; `pause`: seconds between them."""

    def __init__(self, tokenizer: Tokenizer, script: Callable[[LiveRequest], Any], *, context: int = 4096) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.max_sequence_length, self.version = context, 7
        self.pieces, self.pause = 1, 0.0
        self.requests: list[LiveRequest] = []
        self.cancelled: list[LiveRequest] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.has_ended = False

    def submit(self, request: LiveRequest) -> Future[GenResult]:
        if self.has_ended:
            raise EngineError("the engine has ended: it answers no more requests")
        answer: Future[GenResult] = Future()
        self.requests.append(request)
        threading.Thread(target=self._answer, args=(request, answer), daemon=True).start()
        return answer

    def _answer(self, request: LiveRequest, answer: Future[GenResult]) -> None:
        said = self.script(request)
        if isinstance(said, BaseException):
            answer.set_exception(said)
            return
        ids = [*self.tokenizer.encode(said), END] if isinstance(said, str) else list(said)
        ids = ids[: request.sampling.longest]
        for end in range(1, len(ids)):
            if any(stop in self.tokenizer.decode(ids[:end], skip_special=False) for stop in request.sampling.stop_strings):
                ids = ids[:end]
                break
        stops = ids[-1] == END or any(stop in self.tokenizer.decode(ids) for stop in request.sampling.stop_strings)
        logprobs = tuple(-0.5 - 0.25 * (place % 4) for place in range(len(ids)))
        while not self.may_answer.wait(0.01):
            if answer.cancelled():
                self.cancelled.append(request)
                return
        for start in range(0, len(ids), self.pieces) if request.on_tokens is not None else ():
            time.sleep(self.pause)
            if answer.cancelled():
                self.cancelled.append(request)
                return
            part = slice(start, start + self.pieces)
            likeliest = [(one, p) for one, p in zip(range(97, 97 + request.top), (-0.25, -2.0, -3.0), strict=False)]
            request.on_tokens(ids[part], logprobs[part], [likeliest] * len(ids[part]) if request.top else ())
        result = GenResult(
            index=0,
            tokens=tuple(ids),
            logprobs=logprobs,
            kind=LogprobKind.sampled,
            finish_reason=FinishReason.stop if stops else FinishReason.length,
            weight_version=self.version,
        )
        if answer.set_running_or_notify_cancel():
            answer.set_result(result)
        else:
            self.cancelled.append(request)


@contextmanager
def scripted(
    tokenizer: Tokenizer,
    script: Callable[[LiveRequest], Any],
    *,
    sessions: Any = None,
    context: int = 4096,
    score: Any = None,
    **config: Any,
) -> Iterator[tuple[Endpoint, ScriptedEngine]]:
    engine = ScriptedEngine(tokenizer, script, context=context)
    model = Model(name="tiny", tokenizer=tokenizer, live=engine, score=score)  # type: ignore[arg-type]
    with Endpoint(model, Access(KEY), ServerConfig(**config), sessions=sessions) as endpoint:
        yield endpoint, engine


def events(body: bytes) -> list[dict[str, Any]]:
    """Of a stream, without its end."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ask(
    endpoint: Endpoint, path: str, body: Any = None, *, method: str = "POST", key: str = KEY, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=20)
    sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, body=sent, headers={**({"Authorization": f"Bearer {key}"} if key else {}), **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def post(url: str, key: str, body: Any, timeout: float = 30.0) -> tuple[int, Any]:
    """(status, JSON of the answer)."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error, suppress(ValueError):
            return error.code, json.load(error)


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()
