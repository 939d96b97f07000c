"""How much unread output calls, tenants and the server may have."""

from __future__ import annotations

import pytest

from cluster.serving.buffers import BufferLimits, OutputBuffers
from pagedray.errors import OverloadedError, UnreadError


def test_limits_hold_for_calls_tenants_and_the_server() -> None:
    buffers = OutputBuffers(BufferLimits(3200))
    first, second = buffers.open_buffer("ann"), buffers.open_buffer("ann")
    with pytest.raises(UnreadError, match="a call may leave at most 100"):
        first.add(101)
    tenant = [buffers.open_buffer("ann") for _ in range(8)]
    for one in tenant:
        one.add(100)
    with pytest.raises(UnreadError, match="a tenant may leave at most 800"):
        second.add(1)
    with pytest.raises(OverloadedError, match="keeps 800 bytes"):
        buffers.check_room("ann")
    buffers.check_room("ben")
    for name in ("ben", "cid", "dan"):
        for _ in range(8):
            buffers.open_buffer(name).add(100)
    with pytest.raises(OverloadedError, match="memory for unread output"):
        buffers.check_room("eve")
    with pytest.raises(UnreadError, match="a server may leave at most 3200"):
        buffers.open_buffer("eve").add(1)
    for one in tenant:
        one.clear()
    buffers.check_room("ann")
    assert buffers.num_bytes == 2400
