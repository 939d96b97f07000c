"""An HTTP stream on a plain socket, which its client may stop reading or reset."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.faults.fault import Scene

__all__ = ["RawStream"]

_LINGER_NONE = struct.pack("ii", 1, 0)


class RawStream:
    """A stream of many tokens that no client library reads."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._socket = socket.socket()
        # The server's output soon fills a small buffer.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)

    async def open(self, *, num_sequences: int) -> None:
        """Send the request and wait for the first bytes of the response."""
        body = json.dumps(
            {
                "model": self._scene.target.model,
                "prompt": "import os\n",
                "n": num_sequences,
                "max_tokens": 400,
                "ignore_eos": True,
                "logprobs": 5,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._scene.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        host, _, port = self._scene.target.url.removeprefix("http://").partition(":")
        await loop.sock_connect(self._socket, (host, int(port)))
        await loop.sock_sendall(self._socket, head.encode() + body)
        await loop.sock_recv(self._socket, 1024)

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
        self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
