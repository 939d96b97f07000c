"""The body of a request, carried separately from its scope from Serve's HTTP proxy to a replica.

A replica of Serve asks the proxy for the messages of a body. They are lost if Serve sends the
request again to a replica that was paused: the first sending takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

__all__ = ["BODY_KEY", "receive_carried"]

BODY_KEY = "pagedray.body"
"""The key of the whole body in the ASGI scope, which clients cannot set."""


def receive_carried(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that begins with the body that `scope` carries, if any.

    The messages of the body may be received again, which applications ignore.
    """
    body: bytes | None = scope.pop(BODY_KEY, None)
    if body is None:
        return receive
    is_taken = False

    async def receive_body_first() -> Message:
        nonlocal is_taken
        if is_taken:
            return await receive()
        is_taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first
