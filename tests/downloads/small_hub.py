"""A small Hugging Face Hub on the loopback, with faults: the part of its API for downloads."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from tests.downloads.faulty_server import FaultyServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.downloads.faulty_server import Exchange, Requested

__all__ = ["SmallHub", "folder_files"]

_LARGE = 2**17
"""Files of this size and above are stored with Git LFS."""


def folder_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the files in a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class SmallHub(FaultyServer):
    """Serves models from memory, as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[str, dict[str, dict[str, bytes]]] = {}
        """Files by name, by commit, by id."""
        self._branches: dict[tuple[str, str], str] = {}

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

    def files_at(self, model_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision and its files. Raises KeyError for an unknown model."""
        commits = self._models[model_id]
        commit = self._branches.get((model_id, revision), revision)
        return (commit, commits[commit]) if commit in commits else None

    def answer(self, exchange: Exchange, path: str, query: str) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            revision = "/".join(parts[5:]) if parts[4:5] == ["revision"] else "main"
            self._describe(exchange, "/".join(parts[2:4]), revision)
        elif parts[2:3] == ["resolve"]:
            self._resolve(exchange, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            exchange.send(404, {})

    def _describe(self, exchange: Exchange, model_id: str, revision: str) -> None:
        found = self._found(exchange, model_id, revision)
        if found is not None:
            commit, files = found
            siblings = [_sibling(name, content) for name, content in files.items()]
            described = {"id": model_id, "sha": commit, "siblings": siblings}
            exchange.send(200, {"Content-Type": "application/json"}, json.dumps(described).encode())

    def _resolve(self, exchange: Exchange, model_id: str, revision: str, name: str) -> None:
        found = self._found(exchange, model_id, revision)
        if found is None:
            return
        commit, files = found
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name not in files:
            exchange.send(404, headers | {"X-Error-Code": "EntryNotFound"})
            return
        content = files[name]
        headers["ETag"] = f'"{_etag(content)}"'
        if len(content) >= _LARGE:
            headers["X-Linked-Etag"] = headers["ETag"]
            headers["X-Linked-Size"] = str(len(content))
        status = 200
        if exchange.headers["Range"]:
            start, _, last = exchange.headers["Range"].removeprefix("bytes=").partition("-")
            first, end = int(start), min(int(last or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            content, status = content[first:end], 206
        exchange.send(status, headers, content)

    def _found(
        self, exchange: Exchange, model_id: str, revision: str
    ) -> tuple[str, dict[str, bytes]] | None:
        """Return what `files_at` does, or None after an error was sent."""
        try:
            found = self.files_at(model_id, revision)
        except KeyError:
            exchange.send(404, {"X-Error-Code": "RepoNotFound"})
            return None
        if found is None:
            exchange.send(404, {"X-Error-Code": "RevisionNotFound"})
        return found


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
