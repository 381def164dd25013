"""A Hub look-alike on loopback: enough of the Hub's HTTP interface for the real client, with faults on demand.

Repositories are dictionaries of files. Small files are served by `/resolve` itself (ETag: git blob id), large ones
redirect to another address with `X-Linked-Etag` (SHA-256), as the Hub does with LFS files. Faults are queued for a
path and used up one a request, so every test says exactly what goes wrong and how often.
"""

import hashlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LFS_FROM = 4096
"""Files of this many bytes or more are LFS files."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with a file's bytes (or with the listing, for path `api`)."""

    kind: str
    """`truncate` (the connection closes early), `short` (fewer bytes, and the length header agrees), `corrupt` (as
    many bytes, others), `stall` (stops in the middle), `status` (an error status), `drop` (no answer at all), `etag`
    (another etag and other bytes)."""
    status: int = 500
    after: int = 0
    """Bytes that come through before `truncate`, `short`, `stall`."""
    seconds: float = 3.0
    """Of a stall."""
    retry_after: int = 0
    """Seconds that a 429 asks to wait."""


@dataclass
class FakeRepo:
    """A repository: files at one commit, and what is needed to read it."""

    files: dict[str, bytes]
    repo_type: str = "model"
    branches: dict[str, str] = field(default_factory=dict)
    """Branch -> commit; `main` is added."""
    gated: bool = False
    private: bool = False
    advertised: dict[str, str] = field(default_factory=dict)
    """Path -> digest that the listing claims, where it lies."""

    @property
    def commit(self) -> str:
        content = b"".join(name.encode() + b"\0" + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def git_blob_id(data: bytes) -> str:
    """The id that git gives to a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class HubLookalike:
    """The server; use it as a context manager. `endpoint` is what HF_ENDPOINT would be."""

    def __init__(self, token: str | None = None) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.token = token
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """(method, path, headers) of every request."""
        self.bytes_sent: dict[str, int] = defaultdict(int)
        self.most_at_once = 0
        """The most files whose bytes were on their way at the same time."""
        self._on_their_way = 0
        self._count = threading.Lock()
        lookalike = self

        class Handler(_Handler):
            hub = lookalike

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, repo: FakeRepo) -> FakeRepo:
        """Serves a repository under `owner/name`."""
        self.repos[name] = repo
        return repo

    def fail(self, path: str, *faults: Fault) -> None:
        """Queues faults for the file `path` (or `api` for the listing)."""
        self.faults[path].extend(faults)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Counts a file whose bytes are on their way."""
        with self._count:
            self._on_their_way += 1
            self.most_at_once = max(self.most_at_once, self._on_their_way)
        try:
            yield
        finally:
            with self._count:
                self._on_their_way -= 1

    def gets(self, path: str) -> list[dict[str, str]]:
        """Headers of every GET for the bytes of a file."""
        return [headers for method, seen, headers in self.requests if method == "GET" and seen.endswith("/" + path)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubLookalike

    def log_message(self, format: str, *arguments: Any) -> None:
        """Tests read `requests`, not a log."""

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, send_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        parts = path.strip("/").split("/")
        try:
            if parts[0] == "api":
                self._api(parts)
            elif parts[0] == "cdn":
                self._bytes("/".join(parts[3:]), self._repo_named("/".join(parts[1:3])), send_body, linked=True)
            else:
                self._resolve(parts, send_body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client went away, as it may
        self.close_connection = True  # so that a server that is shut down does not live on in open connections

    def _repo_named(self, name: str) -> FakeRepo | None:
        return self.hub.repos.get(name)

    def _allowed(self, repo: FakeRepo | None) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.hub.token}" or not (repo and repo.private)

    def _api(self, parts: list[str]) -> None:
        """`/api/models/owner/name[/revision/R]` and `/api/models/owner/name/tree/R`."""
        repo_type = {"models": "model", "datasets": "dataset"}.get(parts[1], "")
        name, action = "/".join(parts[2:4]), parts[4:]
        repo = self._repo_named(name)
        if self._fault("api"):
            return
        if repo is None or repo.repo_type != repo_type or not self._allowed(repo):
            self._error(401, "RepoNotFound", "Repository not found")
            return
        revision = action[1] if len(action) > 1 else "main"
        if {**repo.branches, "main": repo.commit}.get(revision, revision) != repo.commit:
            self._error(404, "RevisionNotFound", "Invalid rev id")
        elif action[:1] == ["tree"]:
            self._json([self._tree_entry(repo, path, data) for path, data in sorted(repo.files.items())])
        else:
            self._json({"_id": "0" * 24, "id": name, "modelId": name, "sha": repo.commit, "private": repo.private,
                        "gated": "manual" if repo.gated else False, "tags": [], "downloads": 0, "likes": 0,
                        "siblings": [{"rfilename": path} for path in sorted(repo.files)]})  # fmt: skip

    @staticmethod
    def _tree_entry(repo: FakeRepo, path: str, data: bytes) -> dict[str, Any]:
        sha256 = repo.advertised.get(path, hashlib.sha256(data).hexdigest())
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
        if len(data) >= LFS_FROM:
            entry |= {"oid": "0" * 40, "lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}}
        else:
            entry["oid"] = repo.advertised.get(path, git_blob_id(data))
        return entry

    def _resolve(self, parts: list[str], send_body: bool) -> None:
        """`/owner/name/resolve/R/path` and `/datasets/owner/name/resolve/R/path`."""
        parts = parts[1:] if parts[0] == "datasets" else parts
        name, path = "/".join(parts[:2]), "/".join(parts[4:])
        repo = self._repo_named(name)
        if repo is None or not self._allowed(repo):
            self._error(401, "RepoNotFound", "Repository not found")
        elif repo.gated and self.headers.get("authorization") != f"Bearer {self.hub.token}":
            self._error(403, "GatedRepo", "Access to this repository is restricted")
        elif path not in repo.files:
            self._error(404, "EntryNotFound", "Entry not found")
        elif len(repo.files[path]) >= LFS_FROM:
            self._redirect(repo, name, path)
        else:
            self._bytes(path, repo, send_body, linked=False)

    def _redirect(self, repo: FakeRepo, name: str, path: str) -> None:
        data = repo.files[path]
        etag = hashlib.sha256(data).hexdigest()
        if self.hub.faults[path] and self.hub.faults[path][0].kind == "etag" and self.command == "HEAD":
            self.hub.faults[path].popleft()
            etag = hashlib.sha256(data + b"newer").hexdigest()
        self.send_response(302)
        cdn = self.hub.endpoint.replace("127.0.0.1", "localhost") + "/cdn"
        self._headers({"Location": f"{cdn}/{name}/{path}", "X-Repo-Commit": repo.commit,
                       "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data)),
                       "Content-Length": "0"})  # fmt: skip

    def _bytes(self, path: str, repo: FakeRepo | None, send_body: bool, linked: bool) -> None:
        if repo is None or path not in repo.files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        data = repo.files[path]
        fault = self.hub.faults[path].popleft() if send_body and self.hub.faults[path] else None
        if fault is not None and fault.kind in ("status", "drop"):
            self._break(fault)
            return
        etag = hashlib.sha256(data).hexdigest() if linked else git_blob_id(data)
        start = _range_start(self.headers.get("range"))
        if start >= len(data) > 0 and start:
            self._error(416, "RangeNotSatisfiable", "Range")
            return
        body = _altered(data, fault)[start:]
        length = len(body) if fault is None or fault.kind != "short" else min(fault.after, len(body))
        headers = {"Content-Length": str(length), "ETag": f'"{etag}"', "X-Repo-Commit": repo.commit,
                   "Accept-Ranges": "bytes"}  # fmt: skip
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if start else 200)
        self._headers(headers)
        if send_body:
            with self.hub.sending():
                self._send(path, body[:length], fault)

    def _send(self, path: str, body: bytes, fault: Fault | None) -> None:
        cut = fault.after if fault is not None and fault.kind in ("truncate", "stall") else len(body)
        self.wfile.write(body[:cut])
        self.wfile.flush()
        self.hub.bytes_sent[path] += min(cut, len(body))
        if fault is not None and fault.kind == "stall":
            time.sleep(fault.seconds)
        if cut < len(body):
            self.close_connection = True

    def _fault(self, name: str) -> bool:
        if not self.hub.faults[name]:
            return False
        self._break(self.hub.faults[name].popleft())
        return True

    def _break(self, fault: Fault) -> None:
        if fault.kind == "status":
            self._error(fault.status, "", "broken on purpose", retry_after=fault.retry_after)
        else:
            self.close_connection = True
            self.connection.close()

    def _headers(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self._headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _error(self, status: int, code: str, message: str, retry_after: int = 0) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self._headers({"X-Error-Code": code, "X-Error-Message": message, "Content-Length": str(len(body)),
                       **({"Retry-After": str(retry_after)} if status == 429 else {})})  # fmt: skip
        if self.command != "HEAD":
            self.wfile.write(body)


def _range_start(header: str | None) -> int:
    return int(header.removeprefix("bytes=").split("-")[0]) if header else 0


def _altered(data: bytes, fault: Fault | None) -> bytes:
    """The bytes that a fault makes of `data`."""
    if fault is None or fault.kind not in ("corrupt", "etag"):
        return data
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
