"""gRPC messages of which the last byte never comes."""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    call_headers,
    frame,
)

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["UnendingMessages"]

_NUM_CALLS = 200
_NUM_BYTES = 3 * 2**19
_WINDOW = 2**16 - 1
_MAX_FRAME = 2**14
_WINDOW_UPDATE = 8
_INITIAL_WINDOW_SIZE = 4


class UnendingMessages(Attack):
    """Messages that every server takes, less a byte, as calls of one connection."""

    name = "unending messages"
    # 64 MiB of a tenant's messages, and what the allocator keeps beside them.
    max_growth_mib = 112.0

    def run(self, target: Target, seconds: float) -> Findings:
        """Send as much of each message as the server lets the client."""
        end_s = time.monotonic() + seconds
        with socket.create_connection(("127.0.0.1", target.grpc_port), 10.0) as connection:
            calls = _Calls(target.key or "")
            connection.setblocking(False)
            data = bytearray(calls.start())
            while time.monotonic() < end_s and calls.is_open:
                data += calls.next_frames(2**18 - len(data))
                writing = [connection] if data else []
                readable, writable, _ = select.select([connection], writing, [], 0.05)
                with suppress(BlockingIOError):
                    if readable:
                        data += calls.receive(connection.recv(2**18))
                    if writable:
                        del data[: connection.send(data)]
        return Findings(
            figures={
                "calls_ended": calls.num_ended,
                "sent_mib": calls.num_sent // 2**20,
                "held_calls": len(calls.windows),
            }
        )


class _Calls:
    """The calls of an HTTP/2 connection, as far as its windows go."""

    def __init__(self, key: str) -> None:
        self.is_open = True
        self.num_ended = 0
        self.num_sent = 0
        self.windows: dict[int, int] = {}
        """What each call may send."""
        self._left: dict[int, int] = {}
        self._window = _WINDOW
        self._initial_window = _WINDOW
        self._received = bytearray()
        self._block = call_headers(
            "/pagedray.v1.GenerationService/Generate", {"authorization": f"Bearer {key}"}
        )

    def start(self) -> bytes:
        """Return the preface and the heads of all calls."""
        frames = [PREFACE, frame(SETTINGS, 0, 0)]
        for stream in range(1, 2 * _NUM_CALLS, 2):
            frames.append(frame(HEADERS, END_HEADERS, stream, self._block))
            self.windows[stream] = self._initial_window
            self._left[stream] = _NUM_BYTES + 4
        return b"".join(frames)

    def next_frames(self, most_bytes: int) -> bytes:
        """Return what the windows allow, in frames of about so many bytes."""
        frames = bytearray()
        for stream, window in self.windows.items():
            left = self._left[stream]
            size = min(window, left, self._window, _MAX_FRAME)
            if size <= 5 or len(frames) >= most_bytes:
                continue
            is_first = left == _NUM_BYTES + 4
            prefix = b"\0" + struct.pack(">I", _NUM_BYTES) if is_first else b""
            frames += frame(DATA, 0, stream, prefix + b" " * (size - len(prefix)))
            self.windows[stream] -= size
            self._left[stream] -= size
            self._window -= size
            self.num_sent += size
        return bytes(frames)

    def receive(self, data: bytes) -> bytes:
        """Take the server's frames; return the answer to them."""
        if not data:
            self.is_open = False
        self._received += data
        answer = b""
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + size:
                break
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9])
            payload = bytes(self._received[9 : 9 + size])
            del self._received[: 9 + size]
            if kind == SETTINGS and not flags & ACK:
                self._take_settings(payload)
                answer += frame(SETTINGS, ACK, 0)
            elif kind == _WINDOW_UPDATE:
                self._widen(stream, int.from_bytes(payload))
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.num_ended += self.windows.pop(stream, None) is not None
        return answer

    def _take_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            setting, value = struct.unpack(">HI", payload[at : at + 6])
            if setting == _INITIAL_WINDOW_SIZE:
                for stream in self.windows:
                    self.windows[stream] += value - self._initial_window
                self._initial_window = value

    def _widen(self, stream: int, num_bytes: int) -> None:
        if stream == 0:
            self._window += num_bytes
        elif stream in self.windows:
            self.windows[stream] += num_bytes
