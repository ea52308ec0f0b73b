"""Who may see the studio's pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("nicegui", reason="nicegui is not installed")
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from aligner.studio.app import Guard

TOKEN, HOST = "secret-token", "http://127.0.0.1:8080"


async def _page(request: Request) -> Response:
    return PlainTextResponse(f"page {request.url.query}")


async def _socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def _client(base: str = HOST, **guard: object) -> TestClient:
    app = Starlette(routes=[Route("/run/{name:path}", _page), Route("/", _page), WebSocketRoute("/ws", _socket)])
    settings = {"token": TOKEN, "hosts": {"127.0.0.1", "localhost"}, "cookie": "studio_8080"} | guard
    return TestClient(Guard(app, **settings), base_url=base, follow_redirects=False)  # type: ignore[arg-type]


@pytest.fixture
def inside() -> Iterator[TestClient]:
    client = _client()
    answer = client.get(f"/run/a/b?token={TOKEN}&part=logs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/run/a/b?part=logs")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    yield client


def test_without_the_token_nothing_is_shown() -> None:
    client = _client()
    for path in ("/", "/run/a", "/?token=", "/?token=wrong", "/nothing"):
        answer = client.get(path)
        assert answer.status_code == 401 and "aligner studio" in answer.text and "page" not in answer.text, path
    client.cookies.set("studio_8080", "wrong")
    assert client.get("/").status_code == 401
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws"):
        pass


def test_the_cookie_admits_pages_and_sockets(inside: TestClient) -> None:
    answer = inside.get("/run/a?part=logs")
    assert (answer.status_code, answer.text) == (200, "page part=logs")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http:" not in policy and answer.headers["referrer-policy"] == "no-referrer"
    with inside.websocket_connect("ws://127.0.0.1:8080/ws", headers={"origin": HOST}) as socket:
        assert socket.receive_text() == "hello"


@pytest.mark.parametrize("origin", ["http://127.0.0.1:9000", "http://localhost:9000", "https://evil.example", "null"])
def test_pages_of_another_origin_are_refused(inside: TestClient, origin: str) -> None:
    assert inside.get("/", headers={"origin": origin}).status_code == 403
    with pytest.raises(WebSocketDisconnect), inside.websocket_connect("ws://127.0.0.1:8080/ws", headers={"origin": origin}):
        pass


def test_a_name_that_was_made_to_point_here_is_refused(inside: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:8080", "", "[", "localhost.evil.example"):
        assert inside.get("/", headers={"host": host}).status_code == 421, host
    assert inside.get("/", headers={"host": "localhost:8080"}).status_code == 200


def test_behind_a_proxy_with_a_name_and_a_path_of_its_own() -> None:
    client = _client("https://portal.example", hosts={"127.0.0.1", "portal.example"}, root_path="/node/n1/8080")
    answer = client.get(f"/run/a?token={TOKEN}")
    assert answer.headers["location"] == "/node/n1/8080/run/a" and "Path=/node/n1/8080" in answer.headers["set-cookie"]
    headers = {"cookie": f"studio_8080={TOKEN}", "host": "127.0.0.1:8080"}  # the proxy does not pass the browser's Host on
    assert client.get("/", headers=headers | {"origin": "https://portal.example"}).status_code == 200
    assert client.get("/", headers=headers | {"origin": "https://other.example"}).status_code == 403
