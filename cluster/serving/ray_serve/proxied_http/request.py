"""A request in Ray Serve's HTTP proxy, which several replicas may receive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from cluster.serving.http.body import declared_length
from cluster.serving.intake.limits import MAX_REQUEST_BYTES

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

    from cluster.serving.ray_serve.routing.proxied_call import ProxiedCall

__all__ = ["ProxiedHttpRequest"]

_MOST_READ_BYTES = 256 * 2**10
"""Requests with longer bodies are routed by load alone, since reading them delays others."""
_READ_TIMEOUT_S = 10.0
"""Requests with slower bodies are routed by load alone, too."""
_PAUSE_S = 0.1
"""A client that sends nothing for so long waits for the response, or does not send the rest."""
_MOST_PAUSES = 100


class ProxiedHttpRequest:
    """The messages of a request, which several replicas may receive."""

    def __init__(self, receive: Receive, call: ProxiedCall) -> None:
        self._receive = receive
        self._call = call
        self._messages: list[Message] | None = []
        self._num_bytes = self._num_messages = 0
        self.is_disconnected = False
        self.is_whole = False
        """Whether the end of the body was received."""
        self._is_answered = False

    def receiver(self) -> Receive:
        """Return a `receive` that begins with the first message."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if self._messages is not None and place < len(self._messages):
                place += 1
                return self._messages[place - 1]
            message = await self._receive_next()
            place += 1
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
            else:
                self.is_whole = not message.get("more_body", False)
                self._hold(message)
            return message

        return receive

    async def short_body(self, scope: Scope) -> bytes | None:
        """Receive and return the body of a POST request if it is short and complete."""
        length = declared_length(Headers(scope=scope))
        if scope["method"] != "POST" or not length or length > _MOST_READ_BYTES:
            return None
        receive = self.receiver()
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                while not (self.is_whole or self.is_disconnected):
                    message = await receive()
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > _MOST_READ_BYTES:
                        # Some servers ignore Content-Length if there is Transfer-Encoding.
                        return None
        except TimeoutError:
            # The replica limits how long the rest may take.
            return None
        return b"".join(parts) if self.is_whole else None

    def discard_rest(self) -> None:
        """Discard the rest of the body, which Serve would keep for the replica without a limit."""
        self._is_answered = True

    async def wait_until_sent(self) -> None:
        """Wait until the client has sent its body, or pauses.

        Serve receives the body whether a replica reads it or not. If the connection were closed
        before, the client would miss the response.
        """
        for _ in range(_MOST_PAUSES):
            before = self._num_messages
            if self.is_whole or self.is_disconnected:
                return
            await asyncio.sleep(_PAUSE_S)
            if self._num_messages == before:
                return

    async def _receive_next(self) -> Message:
        while True:
            message = await self._receive()
            self._num_messages += 1
            if not (self._is_answered and message.get("more_body", False)):
                return message

    def _hold(self, message: Message) -> None:
        if self._messages is None:
            return
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        if self._num_bytes <= MAX_REQUEST_BYTES:
            self._messages.append(message)
            self._call.hold(num_bytes)
        else:
            # Our replicas reject it; other applications may not.
            self._messages = None
            self._call.forgo_continuation()
