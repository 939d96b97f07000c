"""The service's methods as handlers of gRPC's server: bytes and a context in, messages out.

They are registered without the generated code, which answers a malformed message with INTERNAL and
sends no error details.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.context import Context, abort_call, metadata_of
from cluster.serving.rpc.requests import parse
from cluster.serving.rpc.service import SERVICE, GrpcService

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from google.protobuf.message import Message

    from cluster.serving.servicer import Servicer
    from cluster.serving.telemetry.metrics import Metrics

__all__ = ["method_handlers", "python_name"]

_WORD_START = re.compile("(?<!^)(?=[A-Z])")


def method_handlers(servicer: Servicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handlers of all methods."""
    service = GrpcService(servicer)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        kind = GetMessageClass(method.input_type)
        run = getattr(service, python_name(method.name))
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _streaming(run, kind, servicer.metrics), response_serializer=_serialize
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
    method: Callable[[Message, RpcCall], AsyncGenerator[Message]],
    kind: type[Message],
    metrics: Metrics,
) -> Callable[[bytes, Context], AsyncGenerator[Message]]:
    async def handle(body: bytes, context: Context) -> None:
        try:
            with metrics.counting_refusals("grpc"):
                incoming = parse(kind, body)
            async with aclosing(method(incoming, _call_of(context))) as messages:
                async for message in messages:
                    await context.write(message)
        except Exception as error:
            await abort_call(context, error)

    return handle  # type: ignore[return-value]  # a coroutine writes instead of yielding


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
