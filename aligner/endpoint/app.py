"""The HTTP server of the policy: in a thread with an event loop of its own, beside the engine's thread.

A client shows the endpoint's key, or that of one session, as `Authorization: Bearer` or `x-api-key`. Connections, bodies and requests are
limited as those of the critic and reward servers (`aligner.servers.gateway`); a client that leaves, or does not read, is dropped with its
responses.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from aligner.data.messages import Message
from aligner.endpoint import anthropic, openai, responses
from aligner.endpoint.generation import RETRY, Generation, Inbox
from aligner.endpoint.requests import Ask, BadRequest, Fields, Model, reward_of
from aligner.endpoint.sessions import KeptSessions
from aligner.errors import AlignerError, ConfigError, DataError
from aligner.servers import gateway
from aligner.servers.access import Access, advertised_host
from aligner.servers.config import ServerConfig
from aligner.servers.gateway import HttpThread, Refusal

LARGE_BYTES = 1 << 16  # a request of more is read beside the event loop
WRITE_SECONDS = 60.0  # for a client to read what is ready for it
SESSION = web.RequestKey("SESSION", str)  # of a request's key or header; "" for the endpoint's own key without the header
SESSION_HEADER, VERSION_HEADER = "X-Session-ID", "X-Weight-Version"
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """How one path reads a request, and writes its responses as a whole and as a stream; `named`: the stream's events have names."""

    parse: Callable[[Model, Fields], Ask]
    whole: Callable[[Generation], dict[str, Any]]
    stream: Callable[[Generation], AsyncIterator[dict[str, Any]]]
    named: bool = False


_GENERATE = Interface(parse=openai.parse_generate, whole=openai.whole_generate, stream=openai.stream_generate)
INTERFACES = {
    "/inference/v1/generate": _GENERATE,
    "/v1/inference/v1/generate": _GENERATE,
    "/v1/completions": Interface(parse=openai.parse_completions, whole=openai.whole_completions, stream=openai.stream_completions),
    "/v1/chat/completions": Interface(parse=openai.parse_chat, whole=openai.whole_chat, stream=openai.stream_chat),
    "/v1/responses": Interface(parse=responses.parse, whole=responses.whole, stream=responses.stream, named=True),
    "/v1/messages": Interface(parse=anthropic.parse, whole=anthropic.whole, stream=anthropic.stream, named=True),
}
_COUNTS = {"/v1/messages/count_tokens": anthropic.count_tokens, "/tokenize": openai.tokenize, "/detokenize": openai.detokenize}


class Endpoint(HttpThread):
    """`model` behind HTTP. A context: it answers within, and `url` is where. `config`: as a server's, without its transport."""

    name = "endpoint"
    drain_seconds = 30.0

    def __init__(self, model: Model, access: Access, config: ServerConfig, *, sessions: KeptSessions | None = None) -> None:
        super().__init__(config, access)
        self.model, self._sessions = model, sessions
        self.url = f"{access.scheme}://{advertised_host(config, os.environ)}:{self.port}"
        self._running: dict[int, int] = {}  # requests, by `id`: the bytes of their bodies until these are read
        self._is_ending = False

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Refuse new requests, let running ones end, then close everything."""
        self.stop()

    async def _open(self, **settings: Any) -> web.Server:
        self._inbox = Inbox()
        if self.model.tokenizer.has_chat_template:  # a template is tried out before its first use, which takes a second
            with suppress(DataError, ConfigError):
                self.model.tokenizer.apply_chat_template([Message(role="user", content="Hello")], add_generation_prompt=True)
        app = web.Application(middlewares=[self._guarded], client_max_size=self._config.max_request_bytes, logger=settings["logger"])
        app.add_routes(self._routes())
        self._runner = web.AppRunner(app, shutdown_timeout=gateway.ANSWER_SECONDS, handler_cancellation=True, **settings)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        ended = server.connection_lost

        def left(handler: web.RequestHandler, error: BaseException | None = None) -> None:
            ended(handler, error)
            self._seats.leave(handler)

        server.connection_lost = left  # type: ignore[method-assign]
        return server

    async def _close(self, server: web.Server) -> None:
        self._is_ending = True
        until = time.monotonic() + self.drain_seconds
        while self._running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self._runner.cleanup()
        self._inbox.close()

    def _routes(self) -> list[web.RouteDef]:
        async def health(_: web.Request) -> web.Response:
            return _json({"status": "ok", "weight_version": self.model.live.version})

        async def models(_: web.Request) -> web.Response:
            card = {"id": self.model.name, "object": "model", "created": self._began, "owned_by": "aligner"}
            about = {"max_model_len": self.model.context, "weight_version": self.model.live.version}
            return _json({"object": "list", "data": [card | about], "weight_version": self.model.live.version})

        async def tokenizer(_: web.Request) -> web.Response:
            own = self.model.tokenizer
            names = {"bos_token": own.bos_id, "eos_token": own.eos_id, "pad_token": own.pad_id}
            info = {name: own.decode([token], skip_special=False) for name, token in names.items() if token is not None}
            return _json(info | {"tokenizer_class": "aligner", "vocab_size": own.vocab_size, "chat_template": own.chat_template or None})

        self._began = int(time.time())
        routes = [web.get("/health", health), web.get("/v1/models", models), web.get("/tokenizer_info", tokenizer)]
        routes += [web.post(path, partial(self._generate, one)) for path, one in INTERFACES.items()]
        routes += [web.post(path, partial(self._count, one)) for path, one in _COUNTS.items()]
        return routes + ([web.post("/sessions/{session}/reward", self._reward)] if self._sessions is not None else [])

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        try:
            if request.path == "/health" and request.method == "GET":
                return await handler(request)
            request[SESSION] = self._session_of(request)
            if not self._seats.trust(request.protocol):
                said = f"{self._config.max_connections} connections are open (server.max_connections); try again"
                raise Refusal(429, said, RETRY | {"Connection": "close"})
            if request.method == "POST":
                self._running[id(request)] = self._admitted(request)
            return await handler(request)
        except web.HTTPException as error:  # of aiohttp's own: no such path, method or place
            kept = {"Allow": allow} if (allow := error.headers.get("Allow")) else {}
            said = f"{error.text or error.reason} ({request.method} {request.path[:100]})"
            return self._refused(request, error.status, said, kept)
        except Refusal as error:
            return self._refused(request, error.status, str(error), error.headers, getattr(error, "parameter", None))
        except AlignerError as error:  # of what the client sent: messages that a chat template refuses
            is_theirs = isinstance(error, (DataError, ConfigError))
            return self._refused(request, 400 if is_theirs else 503, str(error), {} if is_theirs else RETRY)
        except (ConnectionError, asyncio.TimeoutError) as error:
            if request.transport is not None:
                request.transport.abort()  # to close it would wait for a client that does not read
            raise ConnectionResetError(str(error)) from error
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return self._refused(request, 500, "internal error; see the endpoint's log", {})
        finally:
            self._running.pop(id(request), None)

    def _session_of(self, request: web.Request) -> str:
        """The session of a request. Raises Refusal for one without a right to it."""
        named = request.headers.get(SESSION_HEADER, "")
        given = request.headers.get("Authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        if self._access.admits(given):
            return named
        own = self._sessions.of_key(given.removeprefix("Bearer ")) if self._sessions is not None else None
        if own is None:
            said = "the key is missing or wrong: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise Refusal(401, said, {"WWW-Authenticate": "Bearer", "Connection": "close"})
        return own  # whatever the header says: clients put names of their own there

    @property
    def _pending_bytes(self) -> int:
        return sum(self._running.values())

    def _admitted(self, request: web.Request) -> int:
        """The bytes that a body may have. Raises Refusal for one that may not be read, and while too many requests are running."""
        encoding, config = request.headers.get("Content-Encoding", "identity"), self._config
        size = config.max_request_bytes if request.content_length is None else request.content_length
        if self._is_ending:
            raise Refusal(503, "the endpoint is ending", RETRY | {"Connection": "close"})
        if encoding.lower() != "identity":
            raise Refusal(415, f"Content-Encoding {encoding[:40]!r}: send the body uncompressed")
        if size > config.max_request_bytes:
            raise Refusal(413, f"the body has {size} bytes; at most {config.max_request_bytes} are allowed (server.max_request_bytes)")
        if len(self._running) >= config.max_requests or self._pending_bytes + size > config.max_pending_bytes:
            said = f"{len(self._running)} requests with {self._pending_bytes} bytes are running"
            limits = f"server.max_requests={config.max_requests}, server.max_pending_bytes={config.max_pending_bytes}"
            raise Refusal(429, f"{said} ({limits}); try again", RETRY)
        return size

    def _refused(
        self, request: web.Request, status: int, message: str, headers: Mapping[str, str], parameter: str | None = None
    ) -> web.StreamResponse:
        """In the form of the client's interface."""
        body = _error(request.path, status, message, parameter)
        answer = _json(body | {"weight_version": self.model.live.version}, status, headers)
        if "Connection" in headers:
            answer.force_close()  # the header alone would leave that to the client
        return answer

    async def _parsed(self, request: web.Request, parse: Callable[[Model, Fields], Any]) -> Any:
        limit = self._config.body_timeout_seconds
        try:
            body = await asyncio.wait_for(request.read(), limit)
        except asyncio.TimeoutError as error:
            raise Refusal(408, f"the body did not come in {limit:g} s (server.body_timeout_seconds)", {"Connection": "close"}) from error
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}") from error
        is_large = len(body) > LARGE_BYTES or b'"image' in body or b'"input_image' in body
        parsed = await self._inbox.compute(_read, self.model, body, parse) if is_large else _read(self.model, body, parse)
        self._running[id(request)] = 0
        return parsed

    async def _count(self, count: Callable[[Model, Fields], dict[str, Any]], request: web.Request) -> web.StreamResponse:
        return _json(await self._parsed(request, count) | {"weight_version": self.model.live.version})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = request.match_info["session"]
        if self._sessions is None or request[SESSION] not in ("", session):
            raise Refusal(403, f"this key is not that of session {session[:64]!r}")
        posted = await self._parsed(request, lambda _, fields: reward_of(fields))
        return _json({"session": session, "calls": self._sessions.reward(session, **posted)})

    async def _generate(self, interface: Interface, request: web.Request) -> web.StreamResponse:
        ask: Ask = await self._parsed(request, interface.parse)
        own = {"inbox": self._inbox, "sessions": self._sessions, "session": request[SESSION]}
        async with Generation(model=self.model, ask=ask, **own) as generation:
            if not ask.stream:
                await generation.end()
                return _json(interface.whole(generation))
            answer = web.StreamResponse(headers=_headers(generation.version) | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            answer.content_type, answer.charset = "text/event-stream", "utf-8"
            await answer.prepare(request)
            ready = b""
            try:
                async for event in interface.stream(generation):
                    ready += _event(event, named=interface.named)
                    if generation.is_growing:  # else nothing is waited for any more: one write has the rest
                        await _write(request, answer.write, ready)
                        ready = b""
            except Refusal as error:  # too late for a status
                ready += _event({"type": "error", **_error(request.path, error.status, str(error))}, named=interface.named)
            else:
                ready += b"" if interface.named else b"data: [DONE]\n\n"
            await _write(request, answer.write_eof, ready)
            return answer


def _event(event: dict[str, Any], *, named: bool) -> bytes:
    name = f"event: {event['type']}\n" if named else ""
    return f"{name}data: {_encoded(event)}\n\n".encode()


async def _write(request: web.Request, write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
    """Raises TimeoutError for a client that does not read; a watch over every event would cost more than the event."""
    takes_all = request.transport is not None and not request.transport.get_write_buffer_size() and len(data) < LARGE_BYTES // 4
    await (write(data) if takes_all else asyncio.wait_for(write(data), WRITE_SECONDS))


def _error(path: str, status: int, message: str, parameter: str | None = None) -> dict[str, Any]:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}


def _read(model: Model, body: bytes, parse: Callable[[Model, Fields], Any]) -> Any:
    try:
        document = json.loads(body)
        if b"\\ud" in body.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the body holds half of a surrogate pair, which is no text: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return parse(model, Fields(document))


def _headers(version: int) -> dict[str, str]:
    return {"Server": gateway.SERVER, VERSION_HEADER: str(version)}


def _json(document: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    named = _headers(document["weight_version"]) if "weight_version" in document else {"Server": gateway.SERVER}
    return web.Response(
        body=_encoded(document).encode(), status=status, headers={**named, **(headers or {})}, content_type="application/json"
    )
