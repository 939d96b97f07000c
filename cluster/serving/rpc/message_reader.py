"""Receives the messages of calls, within limits of size, memory and time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from google.protobuf.message import Message

from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.context import Context, metadata_of
from cluster.serving.rpc.entry import enter_call
from cluster.serving.rpc.message_limit import max_received_bytes
from cluster.serving.rpc.requests import parse
from pagedray.errors import DeadlineError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.serving.intake.reception import IncomingMessage
    from cluster.serving.servicer import Servicer

__all__ = ["MessageReader", "call_of"]

_WINDOW_BYTES = 2**16
"""Bytes of a message that HTTP/2's flow control lets a client send before it is read."""

Incoming = TypeVar("Incoming", bound=Message)


class MessageReader(Generic[Incoming]):
    """Reads the one message of each call of a method."""

    def __init__(self, servicer: Servicer, method: str, kind: type[Incoming]) -> None:
        self._servicer = servicer
        self._method = method
        self._kind = kind
        self._intake = servicer.intake
        self._most_bytes = max_received_bytes(servicer.intake.size.num_bytes)

    @asynccontextmanager
    async def received(self, context: Context) -> AsyncIterator[tuple[Incoming, RpcCall]]:
        """Yield the message of a call, which counts in its tenant's limits inside the block.

        Raises PagedRayError.
        """
        call = call_of(context)
        tenant, entered = enter_call(self._servicer, call, self._method)
        try:
            with (
                self._servicer.metrics.counting_refusals(call.frontend),
                self._intake.reception.open_message(tenant.name) as incoming,
            ):
                body = await self._receive(incoming, context)
                steps = parse(self._kind, body, self._intake.size)
                message = await self._intake.parsing.run(tenant.name, len(body), steps)
            yield (
                message,
                replace(
                    call,
                    entered=entered,
                    num_bytes=len(body),
                    remaining_s=context.time_remaining(),
                ),
            )
        finally:
            if entered is not None:
                entered.leave()

    async def _receive(self, incoming: IncomingMessage, context: Context) -> bytes:
        # The size is known once it has arrived; gRPC buffers at most the largest.
        incoming.add(_WINDOW_BYTES)
        await incoming.wait_room(self._most_bytes - _WINDOW_BYTES)
        body = await self._read(context)
        incoming.shrink_to(len(body))
        return body

    async def _read(self, context: Context) -> bytes:
        timeout_s = self._intake.read_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body = await context.read()
        except TimeoutError:
            raise DeadlineError(
                f"The message did not arrive within {timeout_s:g} s (--read-timeout-s)."
            ) from None
        if not isinstance(body, bytes):
            raise InvalidRequestError("The call has no message.", param="message")
        return body


def call_of(context: Context) -> RpcCall:
    """Return what is known of a call before its message is received."""
    return RpcCall(
        metadata=metadata_of(context.invocation_metadata()),
        add_done_callback=lambda callback: context.add_done_callback(lambda _: callback()),  # type: ignore[arg-type]  # the stubs are narrower than the library
    )
