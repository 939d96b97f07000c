"""An HTTP client of event streams that reads whatever arrives before its connection is cut."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "ask"]


@dataclass(frozen=True)
class Answer:
    """The part of a response that arrived."""

    status: int
    """0 if not even the head arrived."""
    events: list[tuple[int, str]]
    """The ids and the data of complete events."""
    is_complete: bool
    """Whether the response ended."""
    body: bytes = b""


# Any: JSON
async def ask(
    port: int | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    **headers: str,
) -> Answer:
    """Send a request on a connection of its own and read to the end of the connection."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    received = b""
    try:
        while data := await reader.read(2**16):
            received += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return _answer(received)


def _answer(received: bytes) -> Answer:
    head, mark, rest = received.partition(b"\r\n\r\n")
    if not mark:
        return Answer(0, [], False)
    status = int(head.split()[1])
    if status == 204:
        return Answer(status, [], True)
    if b"content-length" in head:
        return Answer(status, [], True, rest)
    body, is_complete = _joined(rest)
    events = []
    for event in body.split(b"\n\n")[:-1]:
        number = 0
        for line in event.split(b"\n"):
            name, _, value = line.partition(b": ")
            if name == b"id":
                number = int(value)
            else:
                assert name == b"data"
                events.append((number, value.decode()))
    return Answer(status, events, is_complete, body)


def _joined(rest: bytes) -> tuple[bytes, bool]:
    """Return the content of chunks, and whether the last one is there."""
    body = b""
    while True:
        size, mark, rest = rest.partition(b"\r\n")
        if not mark:
            return body, False
        if size == b"0":
            return body, rest == b"\r\n"
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
