"""Wraps the handlers of Ray Serve's gRPC proxy; its configuration names `add_services`.

Serve's proxy hides deadlines from replicas, loses some cancels, and reports a replica's death as
INTERNAL. The wrappers fix that, choose the routing key of calls, and limit the size of messages.
This module does not know the servicer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from cluster.serving.ray_serve.affinity import prefix_key
from cluster.serving.ray_serve.errors import ReplicaDiedError
from cluster.serving.rpc.context import Context, abort_call
from cluster.serving.rpc.message_limit import check_message_size
from cluster.serving.rpc.status import DETAILS_KEY
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

__all__ = ["TIMEOUT_KEY", "add_services"]

TIMEOUT_KEY = "pagedray-timeout-ms"
"""The metadata key of a call's remaining time, which Serve does not pass to replicas."""
_SESSION_KEY = "session_id"
_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def add_services(servicer: object, server: grpc.aio.Server) -> None:
    """Register the service and the health check with Serve's gRPC server.

    `servicer` is Serve's dummy and not used.
    """
    for service, methods in (
        (_SERVICE.full_name, {one.name: one.server_streaming for one in _SERVICE.methods}),
        (_HEALTH.full_name, {"Check": False}),
    ):
        server.add_generic_rpc_handlers((_Handlers(service, methods),))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """The methods of one service, whose handlers Serve replaces by its own; these are wrapped."""

    def __init__(self, service: str, methods: dict[str, bool]) -> None:
        # Serve replaces the values of this attribute, which the library's own handlers have too.
        self._method_handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            f"/{service}/{name}": (
                grpc.unary_stream_rpc_method_handler(_unserved)
                if is_streaming
                else grpc.unary_unary_rpc_method_handler(_unserved)
            )
            for name, is_streaming in methods.items()
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call, or None if it is not of this service."""
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None:
            return None
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(handler.unary_stream, handler_call_details.method)  # type: ignore[arg-type]  # the stubs are narrower than the library
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary(handler.unary_unary, handler_call_details.method)  # type: ignore[arg-type]  # the stubs are narrower than the library
        )


class _ProxiedContext:
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

    async def finish_call(self) -> None:
        """Send the status of the replica, or UNAVAILABLE if it died."""
        code = self._code or grpc.StatusCode.OK
        if code is grpc.StatusCode.CANCELLED:
            # The client has cancelled the call.
            return
        if code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(self._trailing)
            return
        if code is grpc.StatusCode.INTERNAL and DETAILS_KEY not in dict(self._trailing):
            # All errors of our replicas have details. Serve itself sends this status when an actor
            # has died, with a trace that clients must not see.
            await abort_call(self._context, ReplicaDiedError())
        await self._context.abort(code, self._details, self._trailing)


def _streaming(
    # Any: messages are bytes, but Serve does not type them.
    inner: Callable[[bytes, Any], AsyncGenerator[Any]],
    method: str,
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def handle(body: bytes, context: Context) -> None:
        proxied = await _proxied(body, context, method)
        messages = inner(body, proxied)
        try:
            async for message in messages:
                # A call that fails ends with an empty message.
                if message:
                    await context.write(message)
        except BaseException:
            # When a client disconnects, this task is cancelled, its write fails, or both. The
            # replica's call must still be cancelled to the end, and before this handler returns,
            # because it uses the context, which grpc then frees.
            ending = asyncio.create_task(_cancel(messages))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((ending,))
            raise
        await proxied.finish_call()

    return handle


def _unary(
    inner: Callable[[bytes, Any], Awaitable[Any]],  # Any: see above.
    method: str,
) -> Callable[[bytes, Context], Awaitable[Any]]:
    async def handle(body: bytes, context: Context) -> Any:  # Any: see above.
        proxied = await _proxied(body, context, method)
        answer = await inner(body, proxied)
        await proxied.finish_call()
        return answer

    return handle


async def _cancel(messages: AsyncGenerator[Any]) -> None:  # Any: see above.
    """Make Serve cancel the replica's call, which it does only while it waits for a message."""
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
        await waiting
    await messages.aclose()


async def _proxied(body: bytes, context: Context, method: str) -> _ProxiedContext:
    try:
        check_message_size(body)
    except InvalidRequestError as error:
        await abort_call(context, error)
    metadata = [
        (key, value) for key, value in context.invocation_metadata() or () if key != TIMEOUT_KEY
    ]
    remaining_s = context.time_remaining()
    if remaining_s is not None:
        metadata.append((TIMEOUT_KEY, str(max(int(remaining_s * 1000), 0))))
    if not any(key == _SESSION_KEY for key, _ in metadata):
        key = _routing_key(body, method)
        if key is not None:
            metadata.append((_SESSION_KEY, key))
    return _ProxiedContext(context, metadata)


def _routing_key(body: bytes, method: str) -> str | None:
    """Return the routing key of a call, the same for prompts that begin alike; None without one."""
    try:
        if method.endswith("/Generate"):
            message = pb.GenerateRequest.FromString(body)
            ids = message.token_ids.ids
            return prefix_key(tuple(ids[:1024]) or message.text)
        if method.endswith("/Chat"):
            return prefix_key(tuple(pb.ChatRequest.FromString(body).messages))  # type: ignore[arg-type]  # the stubs are narrower than the library
    except DecodeError:
        # The replica rejects it with the same error as every frontend.
        return None
    return None


def _unserved(body: bytes, context: Context) -> None:
    raise NotImplementedError
