"""The hosts that a server without keys answers for.

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

from cluster.serving.http.allowed_origins import AllowedOrigins

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.datastructures import Headers

__all__ = ["AllowedHosts"]

_ANY = "*"
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:@/]+)(?::[0-9]*)?")
_MAX_SHOWN = 80


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
