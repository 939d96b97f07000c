"""The web page at `/`: a chat with the server's model, and live statistics.

Its static files contain no data; they fetch it from `/loads` and `/v1` with the user's API key. A
content security policy allows the browser to run these files only, and to make no HTML of text.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

__all__ = ["PAGE_PATHS", "page_routes"]

_FOLDER = resources.files("cluster.serving.admin") / "web"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "worker-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types pagedray-worker",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser revalidates each time, by the entity tag.
    "cache-control": "no-cache",
}


def _files_below(folder: Traversable, path: str) -> dict[str, Traversable]:
    """Return the files in a folder and its folders, by path."""
    found = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found.update(_files_below(entry, f"{path}{entry.name}/"))
        else:
            found[path + entry.name] = entry
    return found


_FILES = {
    "/": _FOLDER / "index.html",
    "/icon.svg": _FOLDER / "icon.svg",
    **_files_below(_FOLDER / "page", "/page/"),
}
PAGE_PATHS = frozenset(_FILES)
"""The paths that require no key."""


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [
        _route(path, file.read_bytes(), _MEDIA_TYPES[f".{file.name.rpartition('.')[2]}"])
        for path, file in _FILES.items()
    ]


def _route(path: str, content: bytes, media_type: str) -> Route:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, respond, methods=["GET"])
