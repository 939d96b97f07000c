"""Finds the network interface of an IP address."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

__all__ = ["interface_of"]

_SIOCGIFCONF = 0x8912
_NAME_BYTES = 16
_ENTRY_BYTES = 40
"""Size of `struct ifreq` on 64-bit Linux."""
_ADDRESS = slice(_NAME_BYTES + 4, _NAME_BYTES + 8)
"""Offset of the IPv4 address: after the name, and the family and port of `sockaddr_in`."""
_MAX_ENTRIES = 256


def interface_of(host: str) -> str | None:
    """Return the name of this node's interface that has the address `host`, or None."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    names = _ipv4_names() if address.version == 4 else _ipv6_names()
    return names.get(address.packed)


def _ipv4_names() -> dict[bytes, str]:
    entries = array.array("B", bytes(_MAX_ENTRIES * _ENTRY_BYTES))
    begin, size = entries.buffer_info()
    request = struct.pack("iP", size, begin)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        filled, _ = struct.unpack("iP", fcntl.ioctl(query, _SIOCGIFCONF, request))
    found = entries.tobytes()[:filled]
    names = {}
    for start in range(0, filled, _ENTRY_BYTES):
        entry = found[start : start + _ENTRY_BYTES]
        # An additional address of an interface has a label such as eth0:1.
        name = entry[:_NAME_BYTES].partition(b"\0")[0].partition(b":")[0].decode()
        names[entry[_ADDRESS]] = name
    return names


def _ipv6_names() -> dict[bytes, str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return {}
    lines = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    return {bytes.fromhex(fields[0]): fields[-1] for fields in lines}
