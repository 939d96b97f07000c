"""The origins of web pages that may use the server from a browser (CORS).

A browser asks with OPTIONS before it sends most requests for a page of another origin, and shows
the page a response only if the response names its origin.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.responses import Response

from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.datastructures import Headers

__all__ = ["AllowedOrigins"]

_ANY = "*"
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^][:@/\s*]+)(:[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{0,2048}")
_MAX_AGE_S = 600
_EXPOSED = "x-request-id, retry-after"


class AllowedOrigins:
    """Decides which origins may use the server, and writes the headers that tell a browser."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        """Each is `SCHEME://HOST[:PORT]`; `*` is all. Raises StartupError for another text."""
        self._origins = frozenset(origin.lower().removesuffix("/") for origin in origins)
        for origin in self._origins - {_ANY}:
            if _ORIGIN.fullmatch(origin) is None:
                raise StartupError(
                    f"--allowed-origins must be * or origins such as https://example.com:8080, "
                    f"not {origin!r:.80}."
                )

    def allows(self, origin: str | None) -> bool:
        """Return whether pages of an origin may use the server; False for None."""
        if origin is None or not self._origins:
            return False
        return _ANY in self._origins or origin.lower() in self._origins

    def preflight(self, headers: Headers, methods: Iterable[str]) -> Response | None:
        """Return the response to a browser that asks for one of these methods.

        None if it does not ask, or not for a page that may use the server.
        """
        if "access-control-request-method" not in headers:
            return None
        if not self.allows(headers.get("origin")):
            return None
        names = headers.get("access-control-request-headers", "")
        answer = {
            "access-control-allow-methods": ", ".join(sorted(methods)),
            "access-control-allow-headers": names if _HEADER_NAMES.fullmatch(names) else "",
            "access-control-max-age": str(_MAX_AGE_S),
        }
        if headers.get("access-control-request-private-network") == "true":
            answer["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=answer)

    def headers_for(self, origin: str) -> Mapping[str, str]:
        """Return the headers of a response to a page of an allowed origin."""
        return {
            "access-control-allow-origin": _ANY if _ANY in self._origins else origin,
            "access-control-expose-headers": _EXPOSED,
            "vary": "origin",
        }
