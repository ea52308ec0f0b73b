"""A server of OpenAI's chat completions in a thread of this process, whose answers a test decides."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

BREAKS = 0  # in place of a status: the connection ends without an answer


@dataclass
class Refusal:
    """An answer that is none."""

    status: int
    body: str = "later"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # before it is given


Reply = Callable[[dict[str, Any]], str | Refusal]


@dataclass
class JudgeServer:
    """`reply(body)` gives the text of an answer, of 100 tokens to ask and 10 to answer, or a refusal."""

    reply: Reply
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.times.append(time.monotonic())
        self.keys.append(request.headers.get("Authorization", ""))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            said = self.reply(body)
            await asyncio.sleep(said.seconds if isinstance(said, Refusal) else 0.01)
        finally:
            self._now -= 1
        if isinstance(said, Refusal):
            if said.status == BREAKS:
                request.transport.close()
            return web.Response(status=said.status or 200, text=said.body, headers=said.headers)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})


def asked(body: dict[str, Any]) -> str:
    """The question of a request."""
    return str(body["messages"][-1]["content"])


@contextmanager
def judge_server(reply: Reply) -> Iterator[JudgeServer]:
    server, loop, started = JudgeServer(reply), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1", server.answer)  # of rewards
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
