"""What connects to the controller's port for ranks, before its secret is known to be right."""

from __future__ import annotations

import atexit
import socket

import msgspec

from pagedray.step_listener import StepListener
from tests.hostile.fuzz.target import Target

_SECRET = b"not in any input"
_LISTENER = StepListener("unix:")
atexit.register(_LISTENER.close)
_TIMEOUT_S = 60.0


class _ConnectionClosedError(Exception):
    pass


def run(data: bytes) -> None:
    """Close the connection and go on waiting for the rank."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect("\0" + _LISTENER.endpoint.removeprefix("unix:"))
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.setblocking(False)

        def check() -> None:
            try:
                peer.recv(1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Closed with bytes that were not read.
                pass
            raise _ConnectionClosedError

        try:
            channels = _LISTENER.accept(1, _SECRET, _TIMEOUT_S, check=check)
        except _ConnectionClosedError:
            return
    channels[0].close()
    assert _SECRET in data


_HELLO = msgspec.msgpack.encode((0, b"a secret of 16 b"))

TARGET = Target(
    run=run,
    seeds=(len(_HELLO).to_bytes(4, "big") + _HELLO, b"\x00\x00\x00\x01\xc0", b"GET / HTTP/1.1\r\n"),
    words=(b"\xc4\x10", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xdd\x00\x00\x00\x02"),
    max_bytes=512,
)
