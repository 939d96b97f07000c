"""The service's methods as handlers of gRPC's server: bytes and a context in, messages out.

They are registered without the generated code, which answers a malformed message with INTERNAL and
sends no error details.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message_factory import GetMessageClass

from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.context import Context, abort_call, metadata_of
from cluster.serving.rpc.requests import parse
from cluster.serving.rpc.service import SERVICE, GrpcService
from cluster.serving.rpc.stalled_writes import StalledWrites
from pagedray.errors import StalledReaderError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from google.protobuf.message import Message

    from cluster.serving.servicer import Servicer
    from cluster.serving.telemetry.metrics import Metrics

__all__ = ["method_handlers", "python_name"]

_MOST_WRITTEN_BYTES = 2**16
"""Bytes of messages of a call that gRPC takes before it makes the next write wait."""
_WORD_START = re.compile("(?<!^)(?=[A-Z])")


def method_handlers(servicer: Servicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handlers of all methods."""
    service = GrpcService(servicer)
    writes = StalledWrites(servicer.reader_limits.write_timeout_s)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        kind = GetMessageClass(method.input_type)
        run = getattr(service, python_name(method.name))
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _streaming(run, kind, servicer, writes), response_serializer=_serialize
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _unary(run, kind, servicer.metrics), response_serializer=_serialize
            )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def python_name(method: str) -> str:
    """Return the name of a method in GrpcService."""
    return _WORD_START.sub("_", method).lower()


def _call_of(context: Context) -> RpcCall:
    return RpcCall(
        metadata=metadata_of(context.invocation_metadata()),
        remaining_s=context.time_remaining(),
        add_done_callback=lambda callback: context.add_done_callback(lambda _: callback()),  # type: ignore[arg-type]  # the stubs are narrower than the library
    )


def _unary(
    method: Callable[[Message, RpcCall], Awaitable[Message]], kind: type[Message], metrics: Metrics
) -> Callable[[bytes, Context], Awaitable[Message]]:
    async def handle(body: bytes, context: Context) -> Message:
        try:
            with metrics.counting_refusals("grpc"):
                incoming = parse(kind, body)
            return await method(incoming, _call_of(context))
        except Exception as error:
            await abort_call(context, error)

    return handle


def _streaming(
    method: Callable[[Message, RpcCall], AsyncGenerator[Message | bytes]],
    kind: type[Message],
    servicer: Servicer,
    writes: StalledWrites,
) -> Callable[[bytes, Context], AsyncGenerator[Message]]:
    async def handle(body: bytes, context: Context) -> None:
        try:
            with servicer.metrics.counting_refusals("grpc"):
                incoming = parse(kind, body)
            with writes.watched() as writer:
                async with aclosing(method(incoming, _call_of(context))) as messages:
                    async for message in messages:
                        writer.num_marks += 1
                        await context.write(message)
                        writer.num_marks += 1
        except StalledReaderError as error:
            await _abort_stalled(context, error, servicer)
        except Exception as error:
            await abort_call(context, error)

    return handle  # type: ignore[return-value]  # a coroutine writes instead of yielding


async def _abort_stalled(
    context: Context, error: StalledReaderError, servicer: Servicer
) -> NoReturn:
    """Send the status of a call whose client does not read.

    gRPC keeps the last messages until the client reads them, cancels the call or disconnects.
    """
    servicer.metrics.count_stalled_reader("grpc")
    tenant = servicer.authenticate(_call_of(context).authorization)
    buffer = servicer.buffers.open_buffer(tenant.name)
    buffer.hold(_MOST_WRITTEN_BYTES)
    try:
        await abort_call(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as left:
        # The client has left; gRPC would log the failed write.
        raise asyncio.CancelledError from left
    finally:
        buffer.clear()


def _serialize(message: Message | bytes) -> bytes:
    # A resumable stream keeps encoded messages.
    return message if isinstance(message, bytes) else message.SerializeToString()
