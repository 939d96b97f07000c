"""The context of a call in Ray Serve's gRPC proxy, as Serve gets it for one replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from cluster.serving.ray_serve.routing.errors import ReplicaDiedError
from cluster.serving.rpc.context import Context, abort_call
from cluster.serving.rpc.status import DETAILS_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.continuation import Cause

__all__ = ["ProxiedGrpcContext"]


class ProxiedGrpcContext:
    """The context that Serve gets: with our metadata, and a status that `finish_call` sends."""

    def __init__(self, context: Context, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._context = context
        self._metadata = metadata
        self._code: Any = None  # Any: a StatusCode or its number.
        self._details = ""
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()

    # Any: attributes of the library's context.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def code(self) -> Any:  # Any: see above.
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._trailing

    def set_code(self, code: Any) -> None:  # Any: see above.
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str | bytes]]) -> None:
        self._trailing = tuple(trailing)

    def failure(self, *, is_complete: bool) -> Cause | None:
        """Return how the replica failed; None if it did not, or if the client has disconnected.

        `is_complete` is true if the response has all messages that it must have.
        """
        code = self._code or grpc.StatusCode.OK
        task = asyncio.current_task()
        assert task is not None
        if code is grpc.StatusCode.CANCELLED:
            # Serve swallows the cancellation of this task. Without a cancellation, the replica
            # cancelled the call, as when its lease expired.
            return None if task.cancelling() else "truncated"
        if code is grpc.StatusCode.OK:
            return None if is_complete else "truncated"
        if code is grpc.StatusCode.INTERNAL and DETAILS_KEY not in dict(self._trailing):
            # All errors of our replicas have details. Serve itself sends this status when an actor
            # has died, with a traceback that clients must not see.
            return "died"
        return "failed" if code is grpc.StatusCode.UNAVAILABLE else None

    def finish_complete(self) -> None:
        """Let the call end with OK."""
        self._context.set_trailing_metadata(self._trailing)

    async def finish_call(self, cause: Cause | None) -> None:
        """Send the status of the replica, or UNAVAILABLE if it died or ended the call early."""
        code = self._code or grpc.StatusCode.OK
        if cause in ("died", "truncated"):
            await abort_call(self._context, ReplicaDiedError())
        if code is grpc.StatusCode.CANCELLED:
            return
        if code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(self._trailing)
            return
        await self._context.abort(code, self._details, self._trailing)
