"""The smallest endpoint over a LiveEngine, and an engine for it: tokens in and out, in aiohttp, and rewards."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from aligner.endpoint.app import SESSION
from aligner.endpoint.sessions import Call, KeptSessions, SessionClosed
from aligner.protocols import Replica
from aligner.rollout.engine import Capabilities, GenResult, Work
from aligner.rollout.live import LiveEngine, LiveRequest
from aligner.types import LogprobKind, SamplingConfig


class FakeEndpoint:
    """POST /inference/v1/generate {token_ids, max_tokens, temperature}; with `encode` and `decode` /v1/completions {prompt, ...} too."""

    def __init__(
        self,
        live: LiveEngine,
        sessions: KeptSessions,
        encode: Callable[[str], Sequence[int]] = lambda text: (),
        decode: Callable[[Sequence[int]], str] = str,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self._live, self._sessions, self._encode, self._decode = live, sessions, encode, decode
        self._sampling = sampling or SamplingConfig()
        self._started = threading.Event()
        self.url = ""
        self.num_calls = 0

    def __enter__(self) -> FakeEndpoint:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._known])
        own = [web.post("/inference/v1/generate", self._generate), web.post("/v1/completions", self._complete)]
        app.add_routes([*own, web.post("/sessions/{session}/reward", self._reward)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stopping.wait()
        await runner.cleanup()

    @web.middleware
    async def _known(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        own = "" if given == "everything" else self._sessions.of_key(given)
        if own is None:
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        request[SESSION] = own
        return await handler(request)

    async def _sample(self, session: str, prompt: tuple[int, ...], body: dict[str, Any]) -> GenResult:
        asked = {"max_response_length": body.get("max_tokens", 0), "temperature": body.get("temperature", 1.0)}
        sampling = self._sessions.settings(session, replace(self._sampling, **asked, stop_strings=body.get("stop", [])))
        seed = self._sessions.begin(session, prompt)
        self.num_calls += 1
        answer = self._live.submit(LiveRequest(tokens=prompt, seed=body.get("seed", 0) if seed is None else seed, sampling=sampling))
        result = await asyncio.wrap_future(answer)
        self._sessions.record(Call(session=session, prompt=prompt, result=result, seed=seed or 0, sampling=sampling))
        return result

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            result = await self._sample(request[SESSION], tuple(body["token_ids"]), body)
        except SessionClosed as error:
            return web.json_response({"error": {"message": str(error)}}, status=error.status)
        return web.json_response({"token_ids": result.tokens, "finish_reason": result.finish_reason.value})

    async def _reward(self, request: web.Request) -> web.Response:
        posted = {"reward": None, "turn": None, "done": False} | await request.json()
        return web.json_response({"calls": self._sessions.reward(request.match_info["session"], **posted)})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        result = await self._sample(request[SESSION], tuple(self._encode(body["prompt"])), body)
        text = self._decode(result.tokens)
        for stop in body.get("stop", []):
            text = text.partition(stop)[0]
        choice = {"index": 0, "text": text, "finish_reason": result.finish_reason.value}
        return web.json_response({"choices": [choice]})


def post(url: str, key: str, body: Any, timeout: float = 30.0) -> tuple[int, Any]:
    """(status, JSON of the answer)."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error, suppress(ValueError):
            return error.code, json.load(error)


class RunEngine:
    """`aligner.rollout.engine.Engine` around `run(work, sampling, version)`, which answers a `Work`."""

    replica = Replica()
    capabilities = Capabilities(name="fake", logprobs=LogprobKind.sampled, serves=True)

    def __init__(self, run: Callable[..., Iterator[list[GenResult]]], context: int) -> None:
        self._run = run
        self.max_sequence_length = context
        self.version = 0

    def refit(self, version: int) -> int:
        self.version = version
        return 0

    def generate(self, work: Work, sampling: SamplingConfig) -> Iterator[list[GenResult]]:
        return self._run(work, sampling, self.version)

    def shutdown(self) -> None: ...
