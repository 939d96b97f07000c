"""The body of a request, carried separately from its scope from Serve's HTTP proxy to a replica.

A replica of Serve asks the proxy for the messages of a body. They are lost if Serve sends the
request again to a replica that was paused: the first sending takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

    from cluster.serving.continuation import Continuation

__all__ = ["BODY_KEY", "TIMEOUT_KEY", "ProxiedMessage", "receive_carried"]

BODY_KEY = "pagedray.body"
"""The key of the whole body in the ASGI scope, which clients cannot set."""

TIMEOUT_KEY = "pagedray-timeout-ms"
"""The metadata key of a call's remaining time, which Serve does not pass to replicas."""


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


class ProxiedMessage(NamedTuple):
    """The message of a call, with the data that keeps the call the same in any replica.

    Clients cannot send such a message: Serve decodes their messages as bytes.
    """

    body: bytes
    continuation: Continuation
