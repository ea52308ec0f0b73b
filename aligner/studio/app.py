"""The server of `aligner studio`: its address, the pages that it serves, and who may see them: whoever has the token of the printed URL,
from a page of the studio's own origin.

The token arrives once in the URL and is kept in a cookie (HttpOnly, SameSite=Strict). A request for another host than those that are
allowed is refused: a page of somebody else's whose name was made to point here (DNS rebinding) would send its own name.
"""

from __future__ import annotations

import getpass
import hmac
import secrets
import socket
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from aligner.commands.parts import StudioOptions
from aligner.errors import ConfigError, ServerError

try:
    import uvicorn
    from fastapi import FastAPI
    from nicegui import ui
    from starlette.datastructures import MutableHeaders
    from starlette.requests import HTTPConnection
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from aligner.studio import chat_page, new_page, run_page, runs_page
    from aligner.studio.runs import Runs
    from aligner.studio.shared import STYLE, Studio
except ModuleNotFoundError as error:
    if error.name not in ("uvicorn", "fastapi", "nicegui"):
        raise
    raise ConfigError(f'aligner studio needs NiceGUI: pip install "aligner[studio]" ({error})') from error

LOCAL = ("127.0.0.1", "localhost", "::1")
PAGES: tuple[Callable[[Studio], None], ...] = (runs_page.register, run_page.register, new_page.register, chat_page.register)
PARAMETER = "token"  # of the URL
# Only what this server serves: nothing is fetched from a network, and no other site may frame a page. Vue compiles templates (eval).
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; frame-ancestors 'self'"
)
_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_NO_TOKEN = "open the URL that `aligner studio` printed, with its ?token=...; the token changes with every start\n"


def studio(folder: Path, options: StudioOptions) -> int:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for a folder that does not exist, ServerError for a port that is taken."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a directory; expected a folder with runs")
    listening = _listen(options.host, options.port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    about = Studio(runs=Runs(folder.resolve()), read_only=options.read_only)
    about.runs.warm_up()
    root_path = "/" + options.root_path.strip("/") if options.root_path.strip("/") else ""
    hosts = {options.host, *options.allow_host, *(LOCAL if options.host in LOCAL else (socket.gethostname(), socket.getfqdn()))}
    guarded = Guard(application(about), token=token, hosts=hosts, cookie=f"aligner_studio_{port}", root_path=root_path)
    server = uvicorn.Server(uvicorn.Config(guarded, log_level="warning", timeout_graceful_shutdown=2, server_header=False))
    name = f"[{options.host}]" if ":" in options.host else options.host
    print(f"runs: {about.runs.folder}{' (read-only)' if options.read_only else ''}", flush=True)
    print(f"open: http://{name}:{port}{root_path}/?{PARAMETER}={token}", flush=True)
    if options.host in LOCAL:
        print(f"from your own machine first: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}", flush=True)
    # It looks at every object of the process, torch's deprecated ones too.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui.ui_run_with")
    server.run(sockets=[listening])
    return 0


def application(about: Studio) -> FastAPI:
    """All pages over `about`, without the guard."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for register in PAGES:
        register(about)
    ui.add_head_html(f'<script>document.documentElement.lang = "en"</script>{STYLE}', shared=True)
    ui.run_with(app, title="aligner studio", dark=None, show_welcome_message=False, reconnect_timeout=30.0)
    return app


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 chooses a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServerError(f"--host {host} --port {port}: {error.strerror or error}; --port 0 chooses a free one") from error


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
        return netloc == host.lower() or _name(netloc) in self._hosts.difference(LOCAL)


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
