"""Receives the messages of calls, within limits of size, memory and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.context import Context, metadata_of
from cluster.serving.rpc.entry import enter_call
from cluster.serving.rpc.message_limit import max_received_bytes
from cluster.serving.rpc.requests import parse
from pagedray.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from cluster.serving.intake.reception import IncomingMessage
    from cluster.serving.servicer import Servicer

__all__ = ["MessageReader"]

_WINDOW_BYTES = 2**16
"""Bytes of a message that HTTP/2's flow control lets a client send before it is read."""
_MAX_UNCOUNTED = 256
"""Messages that may wait although their received bytes exceed the limit."""

Incoming = TypeVar("Incoming", bound=Message)


class MessageReader(Generic[Incoming]):
    """Reads the one message of each call of a method."""

    def __init__(self, servicer: Servicer, method: str, kind: type[Incoming]) -> None:
        self._servicer = servicer
        self._method = method
        self._kind = kind
        self._intake = servicer.intake
        self._most_bytes = max_received_bytes(servicer.intake.size.num_bytes)

    async def read_message(self, context: Context) -> tuple[Incoming, RpcCall]:
        """Return the message of a call, and the call, which the caller leaves.

        Raises PagedRayError.
        """
        metadata = metadata_of(context.invocation_metadata())
        tenant, entered = enter_call(self._servicer, metadata, self._method)
        try:
            with (
                self._servicer.metrics.counting_rejections("grpc"),
                self._intake.reception.open_message(tenant.name) as incoming,
            ):
                body = await self._receive(incoming, context)
                message = await self._intake.parse(
                    len(body), lambda: parse(self._kind, body, self._intake.size)
                )
        except BaseException:
            if entered is not None:
                entered.leave()
            raise
        call = RpcCall(
            metadata=metadata,
            remaining_s=context.time_remaining(),
            add_done_callback=lambda callback: context.add_done_callback(lambda _: callback()),  # type: ignore[arg-type]  # the stubs are narrower than the library
            entered=entered,
            num_bytes=len(body),
        )
        return message, call

    async def _receive(self, incoming: IncomingMessage, context: Context) -> bytes:
        # The size is known once it has arrived; gRPC buffers at most the largest.
        if not incoming.reserve(self._most_bytes):
            await self._wait_room(incoming)
        body = await self._intake.deadlines.wait_for(context.read())
        if not isinstance(body, bytes):
            raise InvalidRequestError("The call has no message.", param="message")
        incoming.shrink_to(len(body))
        return body

    async def _wait_room(self, incoming: IncomingMessage) -> None:
        try:
            incoming.add(_WINDOW_BYTES)
        except OverloadedError:
            # Calls that came with this call may take all of the room until their messages are read.
            if self._intake.reception.num_waiting >= _MAX_UNCOUNTED:
                raise
        await incoming.wait_room(self._most_bytes - incoming.num_bytes)
