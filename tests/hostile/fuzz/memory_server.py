"""The HTTP server with connections that are in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.server import ServerState

from cluster.serving.http.server import ConnectionOptions, connection_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp


__all__ = ["MemoryServer"]

_NUM_TURNS = 6
_TIMEOUT_S = 5.0


class MemoryServer:
    """Responds to one connection after the other."""

    def __init__(
        self,
        app: ASGIApp,
        loop: asyncio.AbstractEventLoop,
        default_headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """`default_headers` are what each response begins with."""
        self._loop = loop
        self._errors: list[dict[str, Any]] = []  # Any: what asyncio knows of an error
        loop.set_exception_handler(lambda _loop, context: self._errors.append(context))
        self._state = ServerState()
        self._state.default_headers = list(default_headers)
        self._config = uvicorn.Config(
            app,
            http=connection_kind(
                ConnectionOptions(
                    read_timeout_s=_TIMEOUT_S,
                    most_open=8,
                    note_rejection=_ignore,
                    note_stall=_ignore,
                )
            ),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self._config.load()

    async def respond(self, segments: Iterable[bytes], *, is_at_once: bool = False) -> bytes:
        """Return what is sent to a connection that ends after its segments.

        The loop runs between these unless they arrive at once.
        """
        transport = _Transport()
        connection = self._config.http_protocol_class(  # type: ignore[call-arg]  # of both parsers'
            config=self._config, server_state=self._state, app_state={}, _loop=self._loop
        )
        connection.connection_made(transport)
        for segment in segments:
            if not transport.is_closed:
                connection.data_received(segment)
                if not is_at_once:
                    await _run_loop()
        await _run_loop()
        connection.connection_lost(None)
        await _run_loop()
        assert not self._state.tasks, "a request of a lost connection goes on"
        assert not self._state.connections
        assert not self._errors, self._errors
        return transport.written


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed, "written after the connection was closed"
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _run_loop() -> None:
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)


def _ignore(*_given: object) -> None:
    pass
