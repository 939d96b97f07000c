"""An HPACK bomb whose header has a long name, which servers like to repeat in their errors."""

from __future__ import annotations

from tests.hostile.attacks.connections.http2.header_bomb import HeaderBomb
from tests.hostile.http2 import literal_field

__all__ = ["HeaderNameBomb"]


class HeaderNameBomb(HeaderBomb):
    """As the other bomb, with the length in the name."""

    name = "HPACK bomb, long name"
    entry = literal_field(b"a" * 3900, b"x", is_indexed=True)
