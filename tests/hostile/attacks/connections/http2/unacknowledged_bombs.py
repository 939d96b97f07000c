"""HPACK bombs of clients that never acknowledge the settings, with which gRPC sends its limits."""

from __future__ import annotations

from tests.hostile.attacks.connections.http2.header_bombs import HeaderBombs
from tests.hostile.http2 import literal_field

__all__ = ["UnacknowledgedBombs"]


class UnacknowledgedBombs(HeaderBombs):
    """As the other bombs, with a short header: gRPC accepts 16 MiB before the acknowledgement."""

    name = "HPACK bombs, no SETTINGS ACK"
    acknowledges = False
    entry = literal_field(b"x", b"", is_indexed=True)
