"""A TCP proxy that cuts a connection after so many bytes to the client."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    _Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

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

    async def relay_connections(self, listener: socket.socket) -> None:
        """Relay all connections to a listening socket, until cancelled."""
        loop = asyncio.get_running_loop()
        # The group keeps tasks that nothing else refers to once a connection is lost. The stack
        # closes what a task was to relay that is cancelled before it begins.
        with ExitStack() as connections:
            async with asyncio.TaskGroup() as relays:
                while True:
                    connection, _ = await loop.sock_accept(listener)
                    relays.create_task(self._relay(connections.enter_context(connection)))

    async def _relay(self, connection: socket.socket) -> None:
        left, self._cut_after = self._cut_after, None
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target)
            await self._relay_streams((reader, writer), upstream, left)
        finally:
            writer.close()

    async def _relay_streams(self, client: _Streams, server: _Streams, left: int | None) -> None:
        """Relay two connections; cut them after `left` bytes to the client."""
        (reader, writer), (server_reader, server_writer) = client, server
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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        proxy.port = listener.getsockname()[1]
        relaying = asyncio.create_task(proxy.relay_connections(listener))
        try:
            yield proxy
        finally:
            relaying.cancel()
            with suppress(asyncio.CancelledError):
                await relaying
