"""A TCP relay between clients and a server, which can cut all its connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Relay"]

_PART_BYTES = 2**16


class Relay:
    """Relays a loopback port, as an asynchronous context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """Where clients connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Reset all connections, in both directions."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            # The server restarts.
            writer.close()
            self._writers.discard(writer)
            return
        self._writers.add(upstream[1])
        await asyncio.gather(self._copy(reader, upstream[1]), self._copy(upstream[0], writer))
        # Until both have ended, nothing else refers to what they read once a connection is lost.
        self._writers -= {writer, upstream[1]}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(_PART_BYTES):
                writer.write(part)
                await writer.drain()
        writer.close()
