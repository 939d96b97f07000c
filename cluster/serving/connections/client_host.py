"""Which host a client's address belongs to, for limits that concern one host."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network, ip_address

__all__ = ["client_host"]

_SITE_BITS = 64
"""The prefix of an IPv6 client: a client can choose any address behind it."""


def client_host(address: str) -> str:
    """Return an IPv4 address as it is, and the /64 network of an IPv6 address.

    Anything else, such as the path of a UNIX socket, is returned as it is.
    """
    if ":" not in address:
        # The system writes an IPv4 address in one way only.
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(IPv6Network((int(found), _SITE_BITS), strict=False))
