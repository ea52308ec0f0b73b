"""Models that the studio serves for its chat: each by `aligner serve` in a process that ends with the studio, or when nobody uses it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import aiohttp

from aligner.cluster.processes import exec_command
from aligner.errors import ServerError
from aligner.studio.runs import tail

READY_SECONDS, IDLE_SECONDS, LOOK_SECONDS = 600.0, 300.0, 0.2
PREFERENCES = "preferences.jsonl"  # in the studio's folder
Turn = Mapping[str, str]  # role, content


@dataclass(kw_only=True)
class Served:
    process: asyncio.subprocess.Process
    output: IO[bytes]  # what it printed, its key too: a file without a name, which is gone with the studio, however that ends
    used: float  # when, the last time
    url: str = ""
    key: str = ""
    is_chatting: bool = True  # it has a chat template

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def lines(self) -> list[str]:
        """The last that it printed."""
        return tail(Path(f"/proc/self/fd/{self.output.fileno()}"), 1 << 14)

    def said(self, name: str) -> str:
        """What it printed behind `name: `; empty if it has not yet."""
        return next((line.removeprefix(f"{name}: ") for line in self.lines() if line.startswith(f"{name}: ")), "")

    def failure(self) -> str:
        return self.said("error") or "\n".join([line for line in self.lines() if not line.startswith("key: ")][-8:])


class Models:
    """The served models, by what they were asked for as."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._turn = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def get(self, model: str) -> Served:
        """The model, served. Raises ServerError with what its process said if it does not come up."""
        if not model or model.startswith("-"):
            raise ServerError(f"model={model!r}: expected a directory, or ORG/NAME of the Hub")
        async with self._turn:  # one is loaded after the other
            served = self._served.get(model)
            if served is None or served.process.returncode is not None:
                served = self._served[model] = await self._start(model)
            while not served.key:
                if served.process.returncode is not None:
                    raise ServerError(served.failure())
                if time.monotonic() - served.used > READY_SECONDS:
                    served.process.kill()
                served.url, served.key = served.said("url"), served.said("key")
                await asyncio.sleep(LOOK_SECONDS)
            served.used = time.monotonic()
        about = served.url.removesuffix("/v1") + "/tokenizer_info"
        async with aiohttp.ClientSession(headers=served.headers) as session, session.get(about) as answer:
            served.is_chatting = bool((await answer.json())["chat_template"])
        return served

    async def _start(self, model: str) -> Served:
        command = exec_command([sys.executable, "-u", "-m", "aligner.cli", "serve", model, "--port", "0"])
        output, none = TemporaryFile(), asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, stdin=none, stdout=output, stderr=output)
        self._watch = self._watch or asyncio.create_task(self._stop_unused())
        return Served(process=process, output=output, used=time.monotonic())

    async def _stop_unused(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            unused = [name for name, one in self._served.items() if one.key and time.monotonic() - one.used > IDLE_SECONDS]
            for served in map(self._served.pop, unused):
                if served.process.returncode is None:
                    served.process.terminate()

    async def answer(self, served: Served, turns: Sequence[Turn], how: Mapping[str, Any]) -> AsyncIterator[str]:
        """The pieces of an answer as they come: of a chat, or, without a chat template, of the text's continuation. Raises ServerError."""
        path, asked = ("chat/completions", {"messages": turns}) if served.is_chatting else ("completions", {"prompt": as_text(turns)})
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READY_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=served.headers, timeout=timeout) as session,
                session.post(f"{served.url}/{path}", json={"model": "policy", "stream": True, **asked, **how}) as answer,
            ):
                async for line in answer.content:
                    served.used = time.monotonic()
                    data = line.decode().removeprefix("data: ").strip()
                    event = json.loads(data) if data not in ("", "[DONE]") else {"choices": []}
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    for choice in event["choices"]:
                        said = choice.get("delta", {})
                        yield choice.get("text") or (said.get("reasoning_content") or "") + (said.get("content") or "")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise ServerError(f"no answer: {error!r}\n{served.failure()}") from error


def as_text(turns: Sequence[Turn]) -> str:
    """What a model without a chat template continues."""
    return "".join(turn["content"] for turn in turns)


def preference(turns: Sequence[Turn], chosen: str, rejected: str, *, is_chat: bool) -> dict[str, Any]:
    """A pair, as `aligner train dpo` and `reward_model` read it. Raises ServerError for answers that are no pair."""
    if chosen == rejected or not chosen.strip() or not rejected.strip():
        raise ServerError("a pair needs two answers that differ, and neither may be empty")
    if not is_chat:
        return {"prompt": as_text(turns), "chosen": chosen, "rejected": rejected}
    answers = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))}
    return {"prompt": list(turns), **answers}


def record(folder: Path, pair: Mapping[str, Any], *, read_only: bool) -> Path:
    """Append the pair to the folder's file of preferences. Raises ServerError in a read-only studio, OSError."""
    if read_only:
        raise ServerError("--read-only: this studio writes nothing")
    with (folder / PREFERENCES).open("a", encoding="utf-8") as file:  # one write: two tabs may append
        file.write(json.dumps(pair, ensure_ascii=False) + "\n")
    return folder / PREFERENCES
