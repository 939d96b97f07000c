"""An HTTP connection for arbitrary bytes, which a client library would not send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Answer", "KeepAlive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    """From the first byte of the request to the last of the response."""


class KeepAlive:
    """A connection that is opened when needed, and again after the server closed it.

    It uses a plain socket: asyncio's streams drop the response if the rest of a rejected request
    cannot be sent.
    """

    def __init__(self, port: int, *, headers: Mapping[str, str] | None = None) -> None:
        self._port = port
        self._common = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._socket: socket.socket | None = None
        self._received = bytearray()

    async def connect(self) -> None:
        """Connect unless connected."""
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
            self._received.clear()
            await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))

    async def post(
        self, path: str, body: bytes, *, content_type: str = "application/json", more: str = ""
    ) -> Answer:
        """Send a body and return the response; `more` has further header lines.

        The request is sent again if the server has closed an idle connection.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n{self._common}{more}\r\n"
        )
        request = head.encode() + body
        is_new = self._socket is None
        await self.connect()
        try:
            return await self._exchange(request)
        except (EOFError, ConnectionError):
            self.close()
            if is_new or self._received:
                raise
        await self.connect()
        return await self._exchange(request)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _exchange(self, request: bytes) -> Answer:
        started_s = time.perf_counter()
        sending = asyncio.create_task(self._send(request))
        try:
            status, headers = _read_head(await self._until(b"\r\n\r\n"))
            body = await self._read_body(headers)
        finally:
            # A server that rejects a request early may not read all of it.
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        seconds = time.perf_counter() - started_s
        if headers.get("connection") == "close":
            self.close()
        return Answer(status=status, headers=headers, body=body, seconds=seconds)

    async def _send(self, request: bytes) -> None:
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._socket, request)

    async def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return await self._exactly(int(headers["content-length"]))
        chunks = []
        while True:
            size = int(await self._until(b"\r\n"), 16)
            chunks.append((await self._exactly(size + 2))[:-2])
            if size == 0:
                return b"".join(chunks)

    async def _until(self, end: bytes) -> bytes:
        while (place := self._received.find(end)) < 0:
            await self._receive()
        return await self._exactly(place + len(end))

    async def _exactly(self, num_bytes: int) -> bytes:
        while len(self._received) < num_bytes:
            await self._receive()
        found = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return found

    async def _receive(self) -> None:
        assert self._socket is not None
        received = await asyncio.get_running_loop().sock_recv(self._socket, 2**16)
        if not received:
            raise EOFError
        self._received += received


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("ascii").split("\r\n")
    pairs = (line.partition(": ") for line in lines if line)
    return int(first.split(" ")[1]), {name.lower(): value for name, _, value in pairs}
