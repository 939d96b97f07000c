"""How large responses are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.http.kept_response import KeptResponse
from cluster.serving.memory.output_buffer import OutputBuffers
from cluster.serving.memory.tenant_bytes import BufferLimits

if TYPE_CHECKING:
    from starlette.types import Message

PARTS = b"x" * 200_000, b"y" * 100_000


@pytest.mark.parametrize(("method", "body"), [("GET", b"".join(PARTS)), ("HEAD", b"")])
async def test_only_get_sends_the_body(method: str, body: bytes) -> None:
    buffers = OutputBuffers(BufferLimits())
    buffer = buffers.open_buffer("tenant")
    buffer.collect(300_000)
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    response = KeptResponse(PARTS, buffer, headers={})
    await response({"type": "http", "method": method}, receive, send)
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == b"300000"
    assert b"".join(one["body"] for one in bodies) == body
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]
    # A client may send its next request once it has the headers of a response to HEAD.
    assert (len(bodies) == 1) == (method == "HEAD")
    assert buffers.num_bytes == 0
