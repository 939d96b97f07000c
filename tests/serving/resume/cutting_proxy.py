"""A TCP proxy that cuts a connection after so many bytes to the client."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["CuttingProxy", "cutting_proxy"]


class CuttingProxy:
    """Relays connections to a port of this host."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.has_cut = False
        """Whether the connection of `cut_next` was cut."""
        self._cut_after: int | None = None
        self._target = target

    def cut_next(self, num_bytes: int) -> None:
        """Cut the next connection after so many bytes to the client."""
        self._cut_after = num_bytes
        self.has_cut = False

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left, self._cut_after = self._cut_after, None
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._copy(reader, server_writer))
        try:
            while data := await server_reader.read(2**16):
                if left is not None and len(data) > left:
                    self.has_cut = True
                    writer.write(data[:left])
                    break
                if left is not None:
                    left -= len(data)
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            up.cancel()
            server_writer.transport.abort()
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
            writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(target: int | None) -> AsyncIterator[CuttingProxy]:
    """Run a proxy to a port."""
    assert target is not None
    proxy = CuttingProxy(target)
    server = await asyncio.start_server(proxy.relay, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await server.wait_closed()
