"""The server of `aligner studio`: its address, its token, and the pages that it serves."""

from __future__ import annotations

import getpass
import secrets
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

from aligner.commands.parts import StudioOptions
from aligner.errors import ConfigError, ServerError

try:
    import uvicorn
    from fastapi import FastAPI
    from nicegui import ui

    from aligner.studio import chat_page, compare_page, new_page, run_page, runs_page
    from aligner.studio.guard import PARAMETER, Guard
    from aligner.studio.runs import Runs
    from aligner.studio.shared import STYLE, Studio
except ModuleNotFoundError as error:
    if error.name not in ("uvicorn", "fastapi", "nicegui"):
        raise
    raise ConfigError(f'aligner studio needs NiceGUI: pip install "aligner[studio]" ({error})') from error

LOCAL = ("127.0.0.1", "localhost", "::1")
PAGES: tuple[Callable[[Studio], None], ...] = (
    runs_page.register,
    run_page.register,
    compare_page.register,
    new_page.register,
    chat_page.register,
)


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
