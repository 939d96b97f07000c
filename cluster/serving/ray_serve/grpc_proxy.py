"""Wraps the handlers of Ray Serve's gRPC proxy; its configuration names `add_services`.

Serve's proxy hides deadlines from replicas, loses some cancels, and reports a replica's death as
INTERNAL. The wrappers fix that, choose the routing key of calls, and limit the size of messages.
A call whose replica died, hangs or ended the stream too early continues on another one. This module
does not know the servicer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from cluster.serving.intake import LARGEST, MAX_REQUEST_BYTES
from cluster.serving.ray_serve.placement import (
    MAX_KEY_MESSAGES,
    MAX_KEY_TOKENS,
    Owners,
    RoutingKey,
    prefix_key,
)
from cluster.serving.ray_serve.proxied_call import (
    TIMEOUT_KEY,
    HeldBytes,
    ProxiedCall,
    ProxiedMessage,
)
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError
from cluster.serving.rpc.call import AUTHORIZATION, DETAILS_KEY, Context, abort_call
from cluster.serving.rpc.requests import check_fields, check_message_size
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_N
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from cluster.serving.continuation import Cause

__all__ = ["add_services"]

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]

_SESSION_KEY = "session_id"
_GENERATING: dict[str, type[pb.GenerateRequest | pb.ChatRequest]] = {
    "Generate": pb.GenerateRequest,
    "Chat": pb.ChatRequest,
}
_UNFINISHED = pb.FINISH_REASON_UNSPECIFIED


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


class ProxiedGrpcRequest:
    """A client's request, which may be sent to several replicas."""

    def __init__(
        self, body: bytes, method: str, owners: Owners, *, remaining_s: float | None
    ) -> None:
        self.body = body
        self._owners = owners
        self._message = _parsed(body, method)
        self._key = _routing_key(self._message)
        self._response_kind: type[pb.GenerateResponse | pb.ChatResponse] = (
            pb.ChatResponse if method.endswith("/Chat") else pb.GenerateResponse
        )
        limits_s = [] if remaining_s is None else [remaining_s]
        if self._message is not None and self._message.HasField("timeout"):
            # Beyond the range of a timedelta too.
            timeout_s = self._message.timeout.seconds + self._message.timeout.nanos / 1e9
            # The replica rejects it otherwise.
            limits_s += [timeout_s] if timeout_s > 0 else []
        self._deadline_s = time.monotonic() + min(limits_s) if limits_s else None

    @classmethod
    async def received(cls, context: Context, method: str, owners: Owners) -> ProxiedGrpcRequest:
        """Return the request, or end the call if it has no message, or a too long message."""
        body: Any = await context.read()  # Any: bytes, or grpc's mark of the end.
        try:
            if not isinstance(body, bytes):
                raise InvalidRequestError("The call has no message.", param="message")
            check_message_size(body, MAX_REQUEST_BYTES)
        except InvalidRequestError as error:
            await abort_call(context, error)
        return cls(body, method, owners, remaining_s=context.time_remaining())

    @property
    def num_sequences(self) -> int:
        """The sequences that the call generates."""
        if self._message is None or not self._message.sampling.HasField("n"):
            return 1
        return min(self._message.sampling.n, MAX_N)

    def proxied(self, context: Context) -> ProxiedGrpcContext:
        """Return the context of the next attempt."""
        metadata = [
            (key, value) for key, value in context.invocation_metadata() or () if key != TIMEOUT_KEY
        ]
        if self._deadline_s is not None:
            remaining_ms = int((self._deadline_s - time.monotonic()) * 1000)
            metadata.append((TIMEOUT_KEY, str(max(remaining_ms, 0))))
        given = {str(key): str(value) for key, value in metadata if not isinstance(value, bytes)}
        text = given.get(_SESSION_KEY) or self._key
        if text:
            key = RoutingKey(text, self._owners.owner_of(given.get(AUTHORIZATION)))
            # The last one counts.
            metadata.append((_SESSION_KEY, key.as_session_id()))
        return ProxiedGrpcContext(context, metadata)

    def note_response(self, body: bytes, call: ProxiedCall) -> None:
        """Record the progress that a message adds to the call."""
        message = self._response_kind.FromString(body)
        if message.HasField("prompt_info"):
            call.note_cached_tokens(message.prompt_info.num_cached_tokens)
        call.add_tokens(
            [
                (one.index, one.token_ids, one.finish_reason != _UNFINISHED)
                for one in message.sequences
            ]
        )
        if message.HasField("usage"):
            call.is_complete = True


def _parsed(body: bytes, method: str) -> pb.GenerateRequest | pb.ChatRequest | None:
    """Return the message of a call that generates; None for others and for invalid messages."""
    kind = _GENERATING.get(method.rpartition("/")[2])
    if kind is None:
        return None
    try:
        # A proxy has no keys, so anyone could hold its event loop by parsing millions of fields.
        check_fields(kind, body, LARGEST)
        return kind.FromString(body)
    except (DecodeError, InvalidRequestError):
        # The replica rejects it with the same error as every frontend.
        return None


def _routing_key(message: pb.GenerateRequest | pb.ChatRequest | None) -> str | None:
    """Return the routing key of a call, which depends on the beginning of its prompt, or None."""
    if message is None:
        return None
    if isinstance(message, pb.ChatRequest):
        return prefix_key(message.messages[:MAX_KEY_MESSAGES])  # type: ignore[arg-type]  # the stubs are narrower than the library
    return prefix_key(message.token_ids.ids[:MAX_KEY_TOKENS] or message.text)


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
