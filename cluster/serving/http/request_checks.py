"""Checks of a request before its path is known: its head, its host and its origin.

A web page of any site may send requests to a server on the visitor's machine. If the page's site
also changes its own name's address to that machine (DNS rebinding), the browser lets it read the
responses. What the page cannot change is the name in the `Host` header, and its own site in
`Origin`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.datastructures import Headers
    from starlette.types import Scope

__all__ = [
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "TOO_MANY_HEADERS",
    "AllowedHosts",
    "AllowedOrigins",
    "check_head",
    "head_without_upgrade",
]

MAX_HEADERS = 128
TOO_MANY_HEADERS = f"A request may have at most {MAX_HEADERS} headers."
MAX_HEAD_BYTES = 2**16
"""The limit of a head, and of the chunk extensions and trailers around the chunks of a body."""
_Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""
_VERSIONS = ("1.0", "1.1")
_ANY = "*"
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:@/]+)(?::[0-9]*)?")
_MAX_SHOWN = 80

_ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^][:@/\s*]+)(:[0-9]{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, -]{0,2048}")
_MAX_AGE_S = 600
_EXPOSED = "x-request-id, retry-after"


class AllowedHosts:
    """Checks which host a request is for, and from which site's page it comes."""

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        own_name: str = "localhost",
        origins: AllowedOrigins | None = None,
    ) -> None:
        """Besides IP addresses, `localhost` and its own name, a server answers for `names`.

        Pages of these hosts, and of `origins`, may use it, too.
        """
        self._origins = AllowedOrigins() if origins is None else origins
        self._names = frozenset(map(_normalized, names))
        self._own_names = frozenset(("localhost", _normalized(own_name)))

    def check(self, headers: Headers) -> None:
        """Raise HTTPException for a request that a foreign page may have caused."""
        if _ANY in self._names:
            return
        # Only HTTP/1.0 has requests without this header, and no browser sends these.
        authority = headers.get("host", "")
        if authority and not self._is_allowed(authority):
            raise HTTPException(
                421,
                f"This server rejects requests for the host {_shown(authority)}. Without API keys, "
                "it accepts IP addresses, localhost and the names in --allowed-hosts.",
            )
        origin = headers.get("origin")
        if origin is None or self._origins.allows(origin):
            return
        if not self._is_own(origin, authority):
            raise HTTPException(
                403,
                f"Web pages of {_shown(origin)} may not use this server. Without API keys, only "
                "its own page and those of --allowed-hosts and --allowed-origins may.",
            )

    def _is_allowed(self, authority: str) -> bool:
        host = _host_of(authority)
        return host in self._names or host in self._own_names or _is_address(host)

    def _is_own(self, origin: str, authority: str) -> bool:
        # A proxy may use another scheme than its client.
        scheme, separator, site = origin.partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        if site.lower() == authority.lower():
            return True
        # Other servers of this machine on other ports are foreign.
        return _host_of(site) in self._names


def _host_of(authority: str) -> str:
    """Return the host of `host:port`, or an empty text for something else."""
    found = _AUTHORITY.fullmatch(authority)
    return "" if found is None else _normalized(found[1])


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        else:
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    """Return a client's text for a message."""
    return ascii(text[:_MAX_SHOWN])


class AllowedOrigins:
    """Decides which origins may use the server, and writes the headers that tell a browser."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        """Each is `SCHEME://HOST[:PORT]`; `*` is all. Raises StartupError for another text."""
        self._origins = frozenset(origin.lower().removesuffix("/") for origin in origins)
        for origin in self._origins - {_ANY_ORIGIN}:
            if _ORIGIN.fullmatch(origin) is None:
                raise StartupError(
                    f"--allowed-origins must be * or origins such as https://example.com:8080, "
                    f"not {origin!r:.80}."
                )

    def allows(self, origin: str | None) -> bool:
        """Return whether pages of an origin may use the server; False for None."""
        if origin is None or not self._origins:
            return False
        return _ANY_ORIGIN in self._origins or origin.lower() in self._origins

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
            "access-control-allow-origin": _ANY_ORIGIN if _ANY_ORIGIN in self._origins else origin,
            "access-control-expose-headers": _EXPOSED,
            "vary": "origin",
        }


def check_head(scope: Scope) -> None:
    """Raise HTTPException for a head that is too large, or that a proxy might read differently."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(431, TOO_MANY_HEADERS)
    url = scope.get("raw_path", b"") + scope.get("query_string", b"")
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise HTTPException(431, f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")
    # Requests that did not come over a connection, such as requests of a batch, have no version.
    if "http_version" in scope and _is_ambiguous(scope["http_version"], headers):
        raise HTTPException(400, "The request is not valid HTTP.", {"connection": "close"})


def _is_ambiguous(version: str, headers: _Headers) -> bool:
    """Return whether a proxy might take another host for the request's, or another body."""
    names = [name for name, _ in headers]
    num_hosts = names.count(b"host")
    if version not in _VERSIONS or num_hosts > 1 or (version == "1.1" and not num_hosts):
        return True
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return False
    # HTTP/1.0 has no chunks, so a proxy may take all bytes after the head for the body.
    return version == "1.0" or len(codings) > 1 or codings[0].lower() != b"chunked"


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: _Headers) -> bytes:
    """Return a head that requests no other protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join((*lines, b"", b""))
