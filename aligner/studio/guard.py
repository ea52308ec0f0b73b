"""Who may see the pages: whoever has the token of the printed URL, from a page of the studio's own origin.

The token arrives once in the URL and is kept in a cookie (HttpOnly, SameSite=Strict). A request for another host than those that are
allowed is refused: a page of somebody else's whose name was made to point here (DNS rebinding) would send its own name.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import quote, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PARAMETER = "token"  # of the URL
# Only what this server serves: nothing is fetched from a network, and no other site may frame a page. Vue compiles templates (eval).
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; frame-ancestors 'self'"
)
_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_NO_TOKEN = "open the URL that `aligner studio` printed, with its ?token=...; the token changes with every start\n"


class Guard:
    """Wraps the application `app`. `hosts`: names that a browser may call this server by, without ports."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str], cookie: str, root_path: str = "") -> None:
        self.app, self._token, self._cookie, self._root_path = app, token, cookie, root_path
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the application's start and end
            return await self.app(scope, receive, send)
        scope = self._below_root(scope)
        connection = HTTPConnection(scope)
        refusal = self._refusal(connection)
        if refusal is None:
            return await self.app(scope, receive, _with_headers(send))
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await refusal(scope, receive, _with_headers(send))

    def _below_root(self, scope: Scope) -> Scope:
        """The scope as ASGI has it below a path: some proxies pass their own path on, others strip it."""
        root, path = self._root_path, scope["path"]
        if not root:
            return scope
        whole = path if path == root or path.startswith(f"{root}/") else root + path
        return {**scope, "root_path": root, "path": whole, "raw_path": quote(whole).encode()}

    def _refusal(self, connection: HTTPConnection) -> Response | None:
        host = connection.headers.get("host", "")
        if (name := _name(host)) not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            return PlainTextResponse(f"host {name!r} is not allowed (--allow-host); allowed: {allowed}\n", 421)
        origin = connection.headers.get("origin")
        if origin is not None and not self._is_own(origin, host):
            return PlainTextResponse(f"a page of {origin} may not use this server\n", 403)
        if self._admits(connection.cookies.get(self._cookie, "")):
            return None
        if not self._admits(connection.query_params.get(PARAMETER, "")):
            return PlainTextResponse(_NO_TOKEN, 401)
        kept = [(key, value) for key, value in connection.query_params.multi_items() if key != PARAMETER]
        target = quote(connection.scope["path"]) + (f"?{urlencode(kept)}" if kept else "")
        answer = RedirectResponse(target, 303)  # an address bar, and a history, without the token
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path=self._root_path or "/")
        return answer

    def _admits(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _is_own(self, origin: str, host: str) -> bool:
        """The origin is this server's: the same host and port, or, behind a proxy that passes another Host on, an allowed name."""
        netloc = urlsplit(origin).netloc.lower()
        local = {"127.0.0.1", "localhost", "::1"}
        return netloc == host.lower() or _name(netloc) in self._hosts - local


def _name(host: str) -> str:
    """The host without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
