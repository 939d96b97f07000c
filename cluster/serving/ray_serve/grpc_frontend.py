"""The gRPC service behind Ray Serve's proxy, with the methods of our own server.

Serve passes a message, or its bytes, and its own context. Errors are set on that context and an
empty message is returned, because Serve would log a raised error with a traceback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from cluster.serving.ray_serve.proxied_call import TIMEOUT_KEY, ProxiedMessage
from cluster.serving.rpc.call import DETAILS_KEY, RpcCall, code_of, metadata_of, status_of
from cluster.serving.rpc.methods import (
    UNKNOWN_SERVICE,
    enter_call,
    log_rejection,
    python_name,
    service_of,
)
from cluster.serving.rpc.requests import parse
from cluster.serving.rpc.service import SERVICE, GrpcService
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from ray.serve.grpc_util import RayServegRPCContext

    from cluster.serving.ray_serve.options import MessagePace
    from cluster.serving.servicer import Servicer

__all__ = ["Incoming", "ServeGrpc"]

Incoming = Message | bytes | ProxiedMessage
"""The message of a call: decoded by Serve, as bytes, or from our own proxy's extension."""

Broadcast = Callable[[str, Sequence[str]], Awaitable[None]]
"""Aborts requests in all replicas, given the tenant's name and their ids."""


class ServeGrpc:
    """Runs methods of the service by their names."""

    def __init__(self, servicer: Servicer, pace: MessagePace) -> None:
        self._servicer = servicer
        self._service = GrpcService(servicer)
        self._pace = pace
        self._kinds = {one.name: GetMessageClass(one.input_type) for one in SERVICE.methods}

    async def stream(
        self, method: str, request: Incoming, context: RayServegRPCContext
    ) -> AsyncGenerator[Message]:
        """Yield the messages of a streaming method, many tokens in each."""
        try:
            run = getattr(self._service, python_name(method))
            async with self._received(method, request, context) as (message, call):
                with self._pace.stream() as stream:
                    async with aclosing(run(message, call)) as answers:
                        async for answer in answers:
                            yield answer
                            await stream.pause()
        except Exception as error:
            yield self._rejection(method, context, error)

    async def unary(self, method: str, request: Incoming, context: RayServegRPCContext) -> Message:
        """Return the response of a unary method."""
        try:
            async with self._received(method, request, context) as (message, call):
                answer = await getattr(self._service, python_name(method))(message, call)
        except Exception as error:
            return self._rejection(method, context, error)
        assert isinstance(answer, Message)
        return answer

    async def abort(
        self, request: Incoming, context: RayServegRPCContext, broadcast: Broadcast
    ) -> Message:
        """Abort requests in all replicas."""
        try:
            async with self._received("Abort", request, context) as (message, call):
                assert isinstance(message, pb.AbortRequest)
                answer = await self._service.abort(message, call)
            tenant = self._servicer.authenticate(call.authorization)
            await broadcast(tenant.name, list(message.request_ids))
        except Exception as error:
            return self._rejection("Abort", context, error)
        return answer

    def health(self, request: Incoming, context: RayServegRPCContext) -> Message:
        """Return the health of this replica as a message of grpc.health.v1."""
        status = health_pb2.HealthCheckResponse
        try:
            service = service_of(_body_of(request))
        except InvalidRequestError as error:
            return _rejection(context, error)
        if service not in ("", SERVICE.full_name):
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(UNKNOWN_SERVICE)
            return Empty()
        return status(status=status.SERVING if self._servicer.is_ready else status.NOT_SERVING)  # type: ignore[no-any-return]  # the library has no types

    def _rejection(self, method: str, context: RayServegRPCContext, error: Exception) -> Message:
        log_rejection(self._servicer, method, error, frontend="ray")
        return _rejection(context, error)

    @asynccontextmanager
    async def _received(
        self, method: str, request: Incoming, context: RayServegRPCContext
    ) -> AsyncIterator[tuple[Message, RpcCall]]:
        """Yield the message and its call, which counts inside the block.

        Raises and counts the error of a rejected call.
        """
        call = _call_of(context, request)
        _, entered = enter_call(
            self._servicer,
            call.metadata,
            method,
            frontend=call.frontend,
            is_continued=call.continuation is not None and bool(call.continuation.sequences),
        )
        intake = self._servicer.intake
        # Serve decodes messages itself if its configuration names the generated code.
        body = _body_of(request)
        try:
            with self._servicer.metrics.counting_rejections(call.frontend):
                kind = self._kinds[method]
                message = await intake.parse(len(body), lambda: parse(kind, body, intake.size))
            yield message, replace(call, entered=entered, num_bytes=len(body))
        finally:
            if entered is not None:
                entered.leave()


def _body_of(request: Incoming) -> bytes:
    if isinstance(request, ProxiedMessage):
        return request.body
    return request if isinstance(request, bytes) else request.SerializeToString()


def _call_of(context: RayServegRPCContext, request: Incoming) -> RpcCall:
    metadata = metadata_of(context.invocation_metadata())
    timeout_ms = metadata.pop(TIMEOUT_KEY, "")
    is_given = timeout_ms.isdecimal() and len(timeout_ms) < 12
    return RpcCall(
        metadata=metadata,
        remaining_s=int(timeout_ms) / 1000 if is_given else None,
        frontend="ray",
        continuation=request.continuation if isinstance(request, ProxiedMessage) else None,
    )


def _rejection(context: RayServegRPCContext, error: Exception) -> Message:
    status = status_of(error)
    context.set_code(code_of(status))
    context.set_details(status.message)
    context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])  # type: ignore[list-item]  # Serve takes bytes too
    return Empty()
