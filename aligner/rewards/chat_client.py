"""Questions over HTTP that are asked again if the answer may come later, and a client of APIs like OpenAI's (chat completions) that limits
them, and never asks twice for an answer that it has.

One thread per client asks. A pause that an endpoint asks for (Retry-After) holds back all requests to it, not only the refused one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from aligner.errors import AlignerError, ConfigError, describe_os_error
from aligner.rewards.config import NamedRewardConfig

T = TypeVar("T")
RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))  # 529: overloaded, as some hosts say
FIRST_PAUSE_SECONDS = 0.5
MOST_BYTES = 8 << 20  # of an answer
EXCERPT_CHARACTERS = 300


class EndpointRefused(AlignerError):
    """The endpoint gave no answer to a question, or none of the API's form."""


class Later(Exception):
    """The endpoint may answer if it is asked again, after so many seconds if it says so."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


async def post(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    seconds: float,
    *,
    token: str = "",
    retried: Collection[int] = RETRIED,
) -> bytes:
    """The body of an answer with status 200. Raises Later for one that may come if it is asked again, EndpointRefused for others."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    limits: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=seconds), "allow_redirects": False}
    content = bytearray()
    try:
        async with session.post(url, json=body, headers=headers, **limits) as response:
            async for chunk in response.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > MOST_BYTES:
                    raise EndpointRefused(f"{url} answered more than {MOST_BYTES >> 20} MiB")
    except asyncio.TimeoutError as error:  # aiohttp's are among them
        raise Later(f"nothing within timeout_seconds={seconds:g}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Later(_without(token, str(error) or repr(error))) from error
    if response.status == 200:
        return bytes(content)
    reason = f"status {response.status}: {excerpt(content, token)}"
    if response.status in retried:
        raise Later(reason, _seconds(response.headers.get("Retry-After", "")))
    raise EndpointRefused(f"{url} answered {reason}")


def excerpt(content: bytes, token: str = "") -> str:
    """The beginning of an answer, without the token."""
    text = _without(token, content[: 4 * EXCERPT_CHARACTERS].decode(errors="replace"))
    return repr(text[:EXCERPT_CHARACTERS] + ("..." if len(text) > EXCERPT_CHARACTERS else ""))


def _without(token: str, text: str) -> str:
    return text.replace(token, "***") if token else text


async def insist(
    ask: Callable[[], Awaitable[T]], url: str, gives_up: Callable[[int, Later, float], str], *, longest_pause: float = math.inf
) -> T:
    """What `ask` returns in the end: after each Later it is asked again, unless `gives_up(attempts, Later, seconds to wait)` says why not.
    Raises EndpointRefused then."""
    pause = FIRST_PAUSE_SECONDS
    for attempt in count(1):
        try:
            return await ask()
        except Later as later:
            wait = later.seconds + min(pause, longest_pause) * random.uniform(0.5, 1.0)
            if why := gives_up(attempt, later, wait):
                raise EndpointRefused(f"{url} gave no answer in {attempt} attempts ({why}); the last: {later}") from later
        await asyncio.sleep(wait)
        pause *= 2
    raise AssertionError("unreachable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer and its tokens: 0, if it was known already."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cut: bool = False  # at the most tokens that it may have


class KnownAnswers:
    """Answers by the digest of their question, appended to a file as they come. One writer; those of `others` are read once."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._answers = path, dict[str, Answer]()
        for file in sorted(path.parent.parent.glob(f"*/{path.name}")) if path is not None else ():
            for line in file.read_bytes().splitlines():
                try:
                    record = json.loads(line)
                    self._answers[record["question"]] = Answer(text=record["text"], is_cut=record["is_cut"])
                except (ValueError, KeyError, TypeError):  # cut when a process was killed: it is asked again
                    continue

    def get(self, question: str) -> Answer | None:
        return self._answers.get(question)

    def put(self, question: str, answer: Answer) -> None:
        """A full disk costs the file, not the answer."""
        self._answers[question] = replace(answer, prompt_tokens=0, completion_tokens=0)
        if self._path is None:
            return
        tokens = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        record = {"question": question, "text": answer.text, "is_cut": answer.is_cut, "time": time.time(), **tokens}
        try:
            for folder in (self._path.parent.parent, self._path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    file.write(b"\n")  # after a line that was cut
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            print(f"warning: answers of a judge are no longer kept: {describe_os_error(error, self._path)}", flush=True)
            self._path = None


def bearer_token(config: NamedRewardConfig, setting: str) -> str:
    """The token for the endpoint; empty: none. Raises ConfigError if its variable or file is missing."""
    if config.token_variable:
        if not (token := os.environ.get(config.token_variable, "").strip()):
            raise ConfigError(f"{setting}.token_variable={config.token_variable}: this environment variable is not set")
        return token
    if not config.judge.token_file:
        return ""
    try:
        token = Path(config.judge.token_file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}.judge.token_file={config.judge.token_file}: cannot be read ({error})") from error
    if not token or not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{setting}.judge.token_file={config.judge.token_file}: must hold one line, the token")
    return token


class ChatClient:
    """Asks the model of a judge's settings. `close` ends its thread; what is under way is dropped."""

    def __init__(self, config: NamedRewardConfig, setting: str, answers: KnownAnswers | None = None) -> None:
        self._config, self._limits = config, config.judge
        self._url = f"{config.url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self._token = bearer_token(config, setting)
        self._answers = KnownAnswers() if answers is None else answers
        self._asked: dict[str, asyncio.Task[Answer]] = {}
        self._next = 0.0  # when the next request may leave
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._seats = asyncio.Semaphore(config.judge.concurrency)
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine that asks, in the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Does not wait."""

        async def end() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            if self._session is not None:
                await self._session.close()
            self._loop.call_soon(self._loop.stop)

        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(end(), self._loop)

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a request with these fields. Raises EndpointRefused if there is none after all retries."""
        question = hashlib.sha256(json.dumps([self._url, body], sort_keys=True).encode()).hexdigest()
        if (known := self._answers.get(question)) is not None:
            return known
        if question in self._asked:
            return replace(await asyncio.shield(self._asked[question]), prompt_tokens=0, completion_tokens=0)
        self._asked[question] = task = asyncio.ensure_future(self._persist(body))
        try:
            answer = await asyncio.shield(task)
            self._answers.put(question, answer)
            return answer
        finally:
            del self._asked[question]

    async def _persist(self, body: Mapping[str, Any]) -> Answer:
        longest = self._limits.longest_wait_seconds

        def gives_up(attempts: int, later: Later, wait: float) -> str:
            if later.seconds > longest:
                return f"it asks for a pause of {later.seconds:.0f} s, more than judge.longest_wait_seconds={longest:g}"
            self._next = max(self._next, time.monotonic() + later.seconds) if later.seconds else self._next
            return "judge.retries" if attempts > self._limits.retries else ""

        return await insist(lambda: self._post(body), self._url, gives_up, longest_pause=longest)

    async def _turn(self) -> None:
        """Wait until the endpoint's own pause is over and the rate allows one more request."""
        interval = 60 / self._limits.requests_per_minute if self._limits.requests_per_minute else 0.0
        while (now := time.monotonic()) < self._next:
            await asyncio.sleep(self._next - now)
        self._next = max(now, self._next) + interval

    async def _post(self, body: Mapping[str, Any]) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._limits.concurrency), trust_env=True)
        async with self._seats:
            await self._turn()
            content = await post(self._session, self._url, body, self._config.timeout_seconds, token=self._token)
        try:
            return _answer(json.loads(content))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Later(f"no chat completion: {excerpt(content, self._token)}") from error


def _answer(record: Any) -> Answer:
    choice, usage = record["choices"][0], record.get("usage") or {}
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise TypeError("content is no text")
    count: Callable[[str], int] = lambda name: int(usage.get(name) or 0)  # noqa: E731
    return Answer(
        text=text,
        prompt_tokens=count("prompt_tokens"),
        completion_tokens=count("completion_tokens"),
        is_cut=choice.get("finish_reason") == "length",
    )


def _seconds(retry_after: str) -> float:
    """The pause that the header asks for, in seconds or until a date; 0 if it is missing or unreadable."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
