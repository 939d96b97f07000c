"""Our part in Ray Serve's gRPC proxy: the name of `add_services` goes into its configuration.

Serve's proxy hands calls to replicas, but hides deadlines from them, loses some cancels, and tells
of a replica's death as a defect. What stands here around Serve's handlers mends that, chooses the
key by which calls are routed, and bounds the size of messages. It knows no servicer.
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
from cluster.serving.rpc.message_limit import check_message_size
from cluster.serving.rpc.status import DETAILS_KEY, code_of, status_of
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from google.rpc.status_pb2 import Status

__all__ = ["TIMEOUT_KEY", "add_services"]

TIMEOUT_KEY = "pagedray-timeout-ms"
"""The metadata that tells a replica how long its call may take."""
_SESSION_KEY = "session_id"
_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]

# grpc's own stubs leave the context's message types open.
Context = grpc.aio.ServicerContext[Any, Any]


def add_services(servicer: object, server: grpc.aio.Server) -> None:
    """Register the service, and the health check, with Serve's gRPC server.

    `servicer` is Serve's stand-in, which answers nothing.
    """
    for service, methods in (
        (_SERVICE.full_name, {one.name: one.server_streaming for one in _SERVICE.methods}),
        (_HEALTH.full_name, {"Check": False}),
    ):
        server.add_generic_rpc_handlers((_Handlers(service, methods),))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """The methods of one service. Serve puts handlers of its own in their place; ours go around."""

    def __init__(self, service: str, methods: dict[str, bool]) -> None:
        # Serve reads and replaces what has this name, as it is in the library's own handlers.
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
        """Return what answers a call, or None if it is not of this service."""
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
    """A call as Serve sees it: with metadata of ours, and an end that is not sent at once."""

    def __init__(self, context: Context, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._context = context
        self._metadata = metadata
        self._code: Any = None  # Any: a StatusCode or its number, as the setter likes.
        self._details = ""
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()

    # Any: the rest is as the library has it.
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

    async def finish(self) -> None:
        """End the call as the replica said, or for the replica's death."""
        code = self._code or grpc.StatusCode.OK
        if code is grpc.StatusCode.CANCELLED:
            # The client has gone, and with it the call.
            return
        if code is grpc.StatusCode.OK:
            self._context.set_trailing_metadata(self._trailing)
            return
        if code is grpc.StatusCode.INTERNAL and DETAILS_KEY not in dict(self._trailing):
            # Every error that a replica tells of has details: Serve itself says this, when an
            # actor has died, with a trace that is none of the client's business.
            await _abort(self._context, status_of(ReplicaDiedError()))
        await self._context.abort(code, self._details, self._trailing)


def _streaming(
    # Any: messages are bytes, but Serve does not say so.
    inner: Callable[[bytes, Any], AsyncGenerator[Any]],
    method: str,
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def handle(body: bytes, context: Context) -> None:
        proxied = await _proxied(body, context, method)
        messages = inner(body, proxied)
        try:
            async for message in messages:
                # An empty message carries the end of a call that failed.
                if message:
                    await context.write(message)
        except BaseException:
            # A call whose client has gone is cancelled, or its next message cannot be written, or
            # first the one and then the other: what ends the replica's part must not be cancelled.
            # It is waited for, since it uses the call, which grpc frees behind this.
            ending = asyncio.create_task(_cancel(messages))
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((ending,))
            raise
        await proxied.finish()

    return handle


def _unary(
    inner: Callable[[bytes, Any], Awaitable[Any]],  # Any: see above.
    method: str,
) -> Callable[[bytes, Context], Awaitable[Any]]:
    async def handle(body: bytes, context: Context) -> Any:  # Any: see above.
        proxied = await _proxied(body, context, method)
        answer = await inner(body, proxied)
        await proxied.finish()
        return answer

    return handle


async def _cancel(messages: AsyncGenerator[Any]) -> None:  # Any: see above.
    """Have Serve cancel the replica's part, which it only does while it waits for a message."""
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
        await _abort(context, status_of(error))
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
    """Return what calls that begin alike have in common, if anything is known."""
    try:
        if method.endswith("/Generate"):
            message = pb.GenerateRequest.FromString(body)
            ids = message.token_ids.ids
            return prefix_key(tuple(ids[:1024]) or message.text)
        if method.endswith("/Chat"):
            return prefix_key(tuple(pb.ChatRequest.FromString(body).messages))  # type: ignore[arg-type]  # the stubs are narrower than the library
    except DecodeError:
        # The replica refuses it, in the words that every frontend has.
        return None
    return None


async def _abort(context: Context, status: Status) -> None:
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(code_of(status), status.message, trailing)


def _unserved(body: bytes, context: Context) -> None:
    raise NotImplementedError
