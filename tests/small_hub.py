"""A small Hugging Face Hub on the loopback, with faults: the part of its API for downloads."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["Fault", "Requested", "SmallHub", "folder_files"]

_LARGE = 2**17
"""Files of this size and above are stored with Git LFS."""


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next requests whose path contains a text."""

    path: str
    times: int = 1
    method: str = "GET"
    status: int | None = None
    """Answer with this status instead."""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    flips_byte: bool = False
    """Change a byte of the body."""
    stalls: threading.Event | None = None
    """Wait for this event before the answer."""
    stalls_after: int | None = None
    """Wait for it after so many bytes of the body instead, and close the connection."""


@dataclass(frozen=True, slots=True)
class Requested:
    """A request that the Hub has received."""

    method: str
    path: str
    range: str | None
    token: str | None


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the files in a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class SmallHub:
    """Serves models from memory, as a context manager."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, dict[str, bytes]]] = {}
        """Files by name, by commit, by id."""
        self._branches: dict[tuple[str, str], str] = {}
        self.requested: list[Requested] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def push(self, model_id: str, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """Commit files to a branch; return the commit."""
        digest = hashlib.sha1()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)} ".encode() + content)
        commit = digest.hexdigest()
        self._models.setdefault(model_id, {})[commit] = dict(files)
        self._branches[model_id, branch] = commit
        return commit

    def gets_of(self, name: str) -> list[Requested]:
        """Return the downloads of a file that have begun."""
        return [
            each
            for each in self.requested
            if each.method == "GET" and "/resolve/" in each.path and each.path.endswith(f"/{name}")
        ]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def note(self, requested: Requested) -> Fault | None:
        """Record a request; return its fault."""
        with self._lock:
            self.requested.append(requested)
            for fault in self.faults:
                if (
                    fault.times
                    and fault.method == requested.method
                    and fault.path in requested.path
                ):
                    fault.times -= 1
                    return fault
        return None

    def files_at(self, model_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision and its files. Raises KeyError for an unknown model."""
        commits = self._models[model_id]
        commit = self._branches.get((model_id, revision), revision)
        return (commit, commits[commit]) if commit in commits else None


def _handler_of(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            requested = Requested(
                self.command, path, self.headers["Range"], self.headers["Authorization"]
            )
            fault = hub.note(requested)
            if fault is not None and fault.stalls is not None and fault.stalls_after is None:
                fault.stalls.wait()
            if fault is not None and fault.status is not None:
                self._send(fault.status, dict(fault.headers))
                return
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                revision = "/".join(parts[5:]) if parts[4:5] == ["revision"] else "main"
                self._describe("/".join(parts[2:4]), revision)
            elif parts[2:3] == ["resolve"]:
                self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), fault)
            else:
                self._send(404, {})

        def _describe(self, model_id: str, revision: str) -> None:
            found = self._found(model_id, revision)
            if found is not None:
                commit, files = found
                siblings = [_sibling(name, content) for name, content in files.items()]
                described = {"id": model_id, "sha": commit, "siblings": siblings}
                self._send(
                    200, {"Content-Type": "application/json"}, json.dumps(described).encode()
                )

        def _resolve(self, model_id: str, revision: str, name: str, fault: Fault | None) -> None:
            found = self._found(model_id, revision)
            if found is None:
                return
            commit, files = found
            headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if name not in files:
                self._send(404, headers | {"X-Error-Code": "EntryNotFound"})
                return
            content = files[name]
            headers["ETag"] = f'"{_etag(content)}"'
            if len(content) >= _LARGE:
                headers["X-Linked-Etag"] = headers["ETag"]
                headers["X-Linked-Size"] = str(len(content))
            status = 200
            if self.headers["Range"]:
                first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                content, status = content[first:], 206
            self._send(status, headers, content, fault)

        def _found(self, model_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
            """Return what `files_at` does, or None after an error was sent."""
            try:
                found = hub.files_at(model_id, revision)
            except KeyError:
                self._send(404, {"X-Error-Code": "RepoNotFound"})
                return None
            if found is None:
                self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return found

        def _send(
            self,
            status: int,
            headers: Mapping[str, str],
            content: bytes = b"",
            fault: Fault | None = None,
        ) -> None:
            self.send_response(status, HTTPStatus(status).phrase)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if fault is not None and fault.flips_byte:
                content = bytes([content[0] ^ 1]) + content[1:]
            if fault is not None and fault.cut_after is not None:
                content, self.close_connection = content[: fault.cut_after], True
            if fault is not None and fault.stalls is not None:
                self.wfile.write(content[: fault.stalls_after])
                fault.stalls.wait()
                self.close_connection = True
                return
            self.wfile.write(content)

    return Handler


def _sibling(name: str, content: bytes) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
    if len(content) >= _LARGE:
        sha256 = hashlib.sha256(content).hexdigest()
        sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return sibling


def _etag(content: bytes) -> str:
    """Return Git's id of a file, or the digest of one that is stored with Git LFS."""
    if len(content) >= _LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
