"""The web page at `/`: live statistics of the server, and a chat with its model.

Its static files contain no data; they fetch it from `/loads` and `/v1` with the user's API key. A
content security policy allows the browser to run these files only.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["PAGE_PATHS", "page_routes"]

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)
"""The paths that require no key."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser revalidates each time, by the entity tag.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    folder = resources.files("cluster.serving.admin") / "web"
    return [
        _route(path, (folder / name).read_bytes(), media_type)
        for path, (name, media_type) in _FILES.items()
    ]


def _route(path: str, content: bytes, media_type: str) -> Route:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, respond, methods=["GET"])
