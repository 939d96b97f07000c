"""Wraps the handlers of Ray Serve's gRPC proxy; its configuration names `add_services`.

Serve's proxy hides deadlines from replicas, loses some cancels, and reports a replica's death as
INTERNAL. The wrappers fix that, choose the routing key of calls, and limit the size of messages.
A call whose replica died, hangs or ended the stream too early continues on another one. This module
does not know the servicer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

from cluster.serving.ray_serve.proxied_grpc.message import ProxiedMessage
from cluster.serving.ray_serve.proxied_grpc.request import ProxiedGrpcRequest
from cluster.serving.ray_serve.routing.affinity import Owners
from cluster.serving.ray_serve.routing.errors import ReplicaDiedError
from cluster.serving.ray_serve.routing.held_call import HeldBytes
from cluster.serving.ray_serve.routing.proxied_call import ProxiedCall
from cluster.serving.rpc.context import Context, abort_call
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

__all__ = ["add_services"]

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def add_services(servicer: object, server: grpc.aio.Server) -> None:
    """Register the service and the health check with Serve's gRPC server.

    `servicer` is Serve's dummy and not used.
    """
    held, owners = HeldBytes(), Owners()
    for service, methods in (
        (_SERVICE.full_name, {one.name: one.server_streaming for one in _SERVICE.methods}),
        (_HEALTH.full_name, {"Check": False}),
    ):
        server.add_generic_rpc_handlers((_Handlers(service, methods, held, owners),))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """The methods of a service; Serve replaces its handlers, and these are wrapped."""

    def __init__(
        self, service: str, methods: dict[str, bool], held: HeldBytes, owners: Owners
    ) -> None:
        self._held = held
        self._owners = owners
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
        # gRPC leaves a call open if its client ends it without a message, unless its handler reads.
        make, inner = (
            (_streaming, handler.unary_stream)
            if handler.response_streaming
            else (_unary, handler.unary_unary)
        )
        return grpc.stream_stream_rpc_method_handler(
            make(inner, handler_call_details.method, self._held, self._owners)  # type: ignore[arg-type]  # the stubs are narrower than the library
        )


def _streaming(
    # Any: messages are bytes, but Serve does not type them.
    inner: Callable[[ProxiedMessage, Any], AsyncGenerator[Any]],
    method: str,
    held: HeldBytes,
    owners: Owners,
) -> Callable[[object, Context], Awaitable[None]]:
    async def handle(_requests: object, context: Context) -> None:
        request = await ProxiedGrpcRequest.received(context, method, owners)
        call = ProxiedCall(held)
        call.hold(len(request.body))
        call.num_sequences = request.num_sequences
        try:
            await send_to_replicas(request, call, context)
        finally:
            call.close()

    async def send_to_replicas(
        request: ProxiedGrpcRequest, call: ProxiedCall, context: Context
    ) -> None:
        while True:
            proxied = request.proxied(context)
            messages = inner(ProxiedMessage(request.body, call.continuation()), proxied)
            try:
                async with call.sending():
                    async for message in messages:
                        # A call that fails ends with an empty message.
                        if message:
                            request.note_response(message, call)
                            await context.write(message)
            except TimeoutError:
                await abort_call(context, ReplicaDiedError())
            except BaseException:
                # Before this handler returns: the replica's call uses the context, which grpc then
                # frees.
                await _cancel_to_the_end(messages)
                raise
            if call.is_complete:
                # However the replica ended, the client has all of the response.
                proxied.finish_complete()
                return
            cause = proxied.failure(is_complete=False)
            if cause is None or not call.continues_after(cause):
                await proxied.finish_call(cause)
                return

    return handle


def _unary(
    inner: Callable[[bytes, Any], Awaitable[Any]],  # Any: see above.
    method: str,
    held: HeldBytes,
    owners: Owners,
) -> Callable[[object, Context], Awaitable[None]]:
    async def handle(_requests: object, context: Context) -> None:
        request = await ProxiedGrpcRequest.received(context, method, owners)
        call = ProxiedCall(held, is_probe=method.startswith(f"/{_HEALTH.full_name}/"))
        call.hold(len(request.body))
        try:
            while True:
                proxied = request.proxied(context)
                async with call.sending():
                    answer = await inner(request.body, proxied)
                cause = proxied.failure(is_complete=True)
                if cause is None or not call.continues_after(cause):
                    await proxied.finish_call(cause)
                    if proxied.code() is not grpc.StatusCode.CANCELLED:
                        await context.write(answer)
                    return
        except TimeoutError:
            await abort_call(context, ReplicaDiedError())
        finally:
            call.close()

    return handle


async def _cancel_to_the_end(messages: AsyncGenerator[Any]) -> None:  # Any: see above.
    """Cancel the replica's call, also if this task is cancelled meanwhile.

    When a client disconnects, its task is cancelled, its write fails, or both.
    """
    ending = asyncio.create_task(_cancel(messages))
    while not ending.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((ending,))


async def _cancel(messages: AsyncGenerator[Any]) -> None:  # Any: see above.
    """Make Serve cancel the replica's call, which it does only while it waits for a message."""
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
        await waiting
    await messages.aclose()


def _unserved(body: bytes, context: Context) -> None:
    raise NotImplementedError
