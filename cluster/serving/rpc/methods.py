"""The service's methods as handlers of gRPC's server: bytes and a context in, messages out.

They are registered without the generated code, which answers a malformed message with INTERNAL and
sends no error details.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message_factory import GetMessageClass

from cluster.serving.auth.tenant import ANONYMOUS
from cluster.serving.rpc.call import AUTHORIZATION
from cluster.serving.rpc.context import Context, abort_call, drop_frames, metadata_of
from cluster.serving.rpc.entry import log_rejection
from cluster.serving.rpc.message_reader import MessageReader
from cluster.serving.rpc.service import SERVICE, GrpcService
from cluster.serving.rpc.stalled_writes import StalledWrites
from pagedray.errors import AuthenticationError, StalledReaderError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from google.protobuf.message import Message

    from cluster.serving.rpc.call import RpcCall
    from cluster.serving.servicer import Servicer

    _Answer = Callable[[Context], Coroutine[None, None, None]]

__all__ = ["method_handlers", "python_name"]

logger = logging.getLogger(__name__)

_MOST_WRITTEN_BYTES = 2**16
"""Bytes of messages of a call that gRPC takes before it makes the next write wait."""
_WORD_START = re.compile("(?<!^)(?=[A-Z])")


def method_handlers(servicer: Servicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handlers of all methods.

    To gRPC's server each is streaming in both directions: otherwise a call would enter only after
    its message, and nothing could tell when the client does not read the answer. On the wire, a
    stream of one message is the same.
    """
    service = GrpcService(servicer)
    writes = StalledWrites(servicer.reader_limits.write_timeout_s)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        reader = MessageReader(servicer, method.name, GetMessageClass(method.input_type))
        run = getattr(service, python_name(method.name))
        if not method.server_streaming:
            run = _one_message(run)
        answer = _answering(run, reader, servicer, writes, name=method.name)
        handlers[method.name] = grpc.stream_stream_rpc_method_handler(
            _handler(answer),
            response_serializer=_serialize,
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def python_name(method: str) -> str:
    """Return the name of a method in GrpcService."""
    return _WORD_START.sub("_", method).lower()


def _one_message(
    method: Callable[[Message, RpcCall], Awaitable[Message]],
) -> Callable[[Message, RpcCall], AsyncGenerator[Message]]:
    async def messages(incoming: Message, call: RpcCall) -> AsyncGenerator[Message]:
        yield await method(incoming, call)

    return messages


def _answering(
    method: Callable[[Message, RpcCall], AsyncGenerator[Message | bytes]],
    reader: MessageReader[Message],
    servicer: Servicer,
    writes: StalledWrites,
    *,
    name: str,
) -> _Answer:
    async def answer(context: Context) -> None:
        message: Message | bytes | None = None
        try:
            incoming, call = await reader.read_message(context)
            try:
                with writes.watched() as writer:
                    async with aclosing(method(incoming, call)) as messages:
                        is_first = True
                        async for message in messages:
                            writer.num_marks += 1
                            if is_first and _is_large(message):
                                # Headers that go with the message would be pending with it, and
                                # gRPC sends no status meanwhile.
                                await context.send_initial_metadata(())
                            is_first = False
                            await context.write(message)
                            writer.num_marks += 1
            finally:
                if call.entered is not None:
                    call.entered.leave()
        except StalledReaderError as error:
            num_bytes = 0 if message is None else len(_serialize(message))
            message = None
            await _abort_stalled(context, error, num_bytes, servicer)
        except Exception as error:
            if message is None:
                log_rejection(servicer, name, error)
            await abort_call(context, error)

    return answer


def _handler(answer: _Answer) -> Callable[[object, Context], Awaitable[None]]:
    async def handle(_requests: object, context: Context) -> None:
        try:
            await answer(context)
        except grpc.aio.AbortError as abort:
            drop_frames(abort)
            raise
        except grpc.aio.BaseError as left:
            # The client left during a write, which gRPC would log as an error of the method.
            logger.debug("A write of a gRPC call failed.", exc_info=left)
            raise asyncio.CancelledError from left

    return handle


async def _abort_stalled(
    context: Context, error: StalledReaderError, num_bytes: int, servicer: Servicer
) -> NoReturn:
    """Send the status of a call after its client left the last message, of `num_bytes`, unread.

    gRPC keeps the last messages until the client reads them, cancels the call or disconnects.
    """
    servicer.metrics.count_stalled_reader("grpc")
    try:
        tenant = servicer.authenticate(
            metadata_of(context.invocation_metadata()).get(AUTHORIZATION)
        )
    except AuthenticationError:
        # Its key was removed meanwhile.
        tenant = ANONYMOUS
    buffer = servicer.buffers.open_buffer(tenant.name)
    buffer.hold(max(num_bytes, _MOST_WRITTEN_BYTES))
    try:
        await abort_call(context, error)
    finally:
        buffer.clear()


def _is_large(message: Message | bytes) -> bool:
    return len(_serialize(message)) > _MOST_WRITTEN_BYTES


def _serialize(message: Message | bytes) -> bytes:
    # A resumable stream keeps encoded messages.
    return message if isinstance(message, bytes) else message.SerializeToString()
