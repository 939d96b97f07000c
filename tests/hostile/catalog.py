"""All attacks by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.hostile.connection_attacks import CONNECTION_ATTACKS
from tests.hostile.http2_attacks import HTTP2_ATTACKS
from tests.hostile.request_attacks import REQUEST_ATTACKS

if TYPE_CHECKING:
    from tests.hostile.attack import Attack

__all__ = ["ATTACKS"]

ATTACKS: dict[str, Attack] = {
    **CONNECTION_ATTACKS,
    **HTTP2_ATTACKS,
    **REQUEST_ATTACKS,
}
