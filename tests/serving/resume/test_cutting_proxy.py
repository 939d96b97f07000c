"""The proxy of these tests loses no connection of its own."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from tests.serving.resume.cutting_proxy import cutting_proxy

if TYPE_CHECKING:
    import pytest


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


async def test_no_relay_is_collected_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, cutting_proxy(server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        writer.close()
        for _ in range(20):
            gc.collect()
            await asyncio.sleep(0)
    assert caplog.messages == []
