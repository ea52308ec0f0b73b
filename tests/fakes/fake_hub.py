"""A Hub on this machine that speaks its protocol: what is asked of repositories, files with ranges, and commits.

with FakeHub() as hub:
    hub.add("org/name", {"config.json": b"{}"})     # a commit of its own; returns its hash
    ...                                              # HF_ENDPOINT=hub.url
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet")  # what the Hub keeps in its large file storage, and serves after a redirect
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/(.+)")
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_WRITE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(preupload|commit)/(.+)")
_LFS = re.compile(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch")


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    messages: list[str] = field(default_factory=list)


class FakeHub:
    """`requests`: (method, path) of all that came. `token`: that opens gated and private repositories, and lets write."""

    def __init__(self, token: str = "hf_good") -> None:
        self.token = token
        self.repositories: dict[str, Repository] = {}  # by models/ORG/NAME or datasets/ORG/NAME
        self.requests: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.cuts: dict[str, int] = {}  # by file: how many bytes are sent before the connection is cut, once
        self.delays: dict[str, float] = {}  # by file: seconds before it is sent
        self.stored: dict[str, bytes] = {}  # what was uploaded to the large file storage, by SHA-256
        self.status = 0  # answer everything with this one
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.files_url = f"http://localhost:{self._server.server_address[1]}"  # another host, which no token is sent to

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: dict[str, bytes], *, kind: str = "models", ref: str = "main", **options: bool) -> str:
        """A commit with these files, which `ref` now names."""
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository())
        for option, value in options.items():
            setattr(repository, option, value)
        text = repr((name, sorted(files.items()), len(repository.commits)))
        commit = hashlib.sha1(text.encode()).hexdigest()
        repository.commits[commit], repository.refs[ref] = dict(files), commit
        return commit

    def files(self, name: str, kind: str = "models") -> dict[str, bytes]:
        """What the main branch holds."""
        repository = self.repositories[f"{kind}/{name}"]
        return repository.commits[repository.refs["main"]]

    def downloads(self, file: str) -> int:
        """How often the contents of a file were asked for."""
        return sum(method == "GET" and path.endswith((f"/{file}", f"@{file}")) for method, path in self.requests)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.status:
            return self._send(self.hub.status, b"in maintenance")
        if path.startswith("/cdn/"):
            return self._file(self.hub.repositories[path.split("@")[1]].commits[path.split("@")[2]], path.split("@")[3])
        if path.startswith("/upload/"):
            self.hub.stored[path.removeprefix("/upload/")] = body
            return self._send(200, b"")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if found := _API.fullmatch(path):
            return self._info(f"{found[1]}/{found[2]}", found[4], as_tree=found[3] == "tree")
        if found := _RESOLVE.fullmatch(path):
            return self._resolve(f"{'datasets' if found[1] else 'models'}/{found[2]}", found[3], found[4])
        if found := _LFS.fullmatch(path):
            return self._batch(json.loads(body))
        if found := _WRITE.fullmatch(path):
            return self._written(f"{found[1]}/{found[2]}", found[3], body)
        return self._send(404, b"", {"X-Error-Message": "no such page"})

    def _repository(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files); None after an answer that refuses."""
        repository = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository is None or (repository.private and not allowed):
            self._send(404 if allowed else 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repository.gated and not allowed:
            self._send(403 if self.headers.get("Authorization") else 401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        else:
            return commit, repository.commits[commit]
        return None

    def _info(self, name: str, revision: str, *, as_tree: bool) -> None:
        if not (found := self._repository(name, revision)):
            return
        if as_tree:
            self._json([{"type": "file", "path": file, "size": len(data), "oid": _git(data)} for file, data in found[1].items()])
        else:
            siblings = [{"rfilename": file, "size": len(data), "blobId": _git(data)} for file, data in found[1].items()]
            self._json({"id": name.partition("/")[2], "sha": found[0], "siblings": siblings, "tags": [], "private": False, "downloads": 0})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if not (found := self._repository(name, revision)):
            return
        commit, files = found
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = files[file]
        if not file.endswith(LARGE):
            return self._file(files, file, {"X-Repo-Commit": commit, "ETag": f'"{_git(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        large = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"', "ETag": f'"{digest}"'}
        return self._send(302, b"", large | {"Location": f"{self.hub.files_url}/cdn/@{name}@{commit}@{file}"})

    def _file(self, files: dict[str, bytes], file: str, headers: dict[str, str] | None = None) -> None:
        """The file, or the range of it that is asked for."""
        data, begin = files[file], 0
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{_git(data)}"', **(headers or {})}
        if asked := self.headers.get("Range"):
            self.hub.ranges.append(asked)
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            time.sleep(self.hub.delays.get(file, 0.0))
        cut = self.hub.cuts.pop(file, 0) if self.command == "GET" else 0
        self._send(206 if asked else 200, data[begin:], headers, cut=cut)

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('type', 'model')}s/{request['organization']}/{request['name']}"
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, b'{"error": "Invalid username or password."}')
        if name in self.hub.repositories:
            return self._send(409, json.dumps({"url": f"{self.hub.url}/{name}", "error": "exists"}).encode())
        self.hub.add(
            name.partition("/")[2],
            {},
            kind=name.partition("/")[0],
            private="private" in (request.get("visibility"), request.get("private") and "private"),
        )
        return self._json({"url": f"{self.hub.url}/{name.removeprefix('models/')}"})

    def _batch(self, request: dict[str, Any]) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}", "header": {}}}} for one in request["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json")

    def _written(self, name: str, action: str, body: bytes) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        repository = self.hub.repositories[name]
        if action == "preupload":
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self._json({"files": modes})
        files = dict(repository.commits[repository.refs["main"]])
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        commit = self.hub.add(name.partition("/")[2], files, kind=name.partition("/")[0])
        url = f"{self.hub.url}/{name.removeprefix('models/')}/commit/{commit}"
        return self._json({"commitUrl": url, "commitOid": commit, "success": True})

    def _json(self, value: object, content_type: str = "application/json") -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": content_type})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, cut: int = 0) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[:cut] if cut else data)
        if cut:
            self.close_connection = True


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
