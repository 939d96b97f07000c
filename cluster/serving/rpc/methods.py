"""The service's methods as handlers of gRPC's server: bytes and a context in, messages out.

They are registered without the generated code, which answers a malformed message with INTERNAL and
sends no error details.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from cluster.serving.auth import ANONYMOUS
from cluster.serving.inputs import Arrival
from cluster.serving.rpc.call import (
    AUTHORIZATION,
    Context,
    RpcCall,
    abort_call,
    drop_frames,
    field_of,
    metadata_of,
)
from cluster.serving.rpc.requests import max_received_bytes, parse
from cluster.serving.rpc.service import COUNTED, OPERATIONS, SERVICE, GrpcService
from pagedray.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    StalledReaderError,
)

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Mapping,
    )

    from cluster.serving.auth import Tenant
    from cluster.serving.inputs import Frontend
    from cluster.serving.intake import IncomingMessage
    from cluster.serving.open_calls import OpenCall
    from cluster.serving.servicer import Servicer

    _Answer = Callable[[Context], Coroutine[None, None, None]]

__all__ = [
    "HEALTH",
    "UNKNOWN_SERVICE",
    "EntryInterceptor",
    "Health",
    "enter_call",
    "log_rejection",
    "method_handlers",
    "python_name",
    "service_of",
]

logger = logging.getLogger(__name__)

_MOST_WRITTEN_BYTES = 2**16
"""Bytes of messages of a call that gRPC takes before it makes the next write wait."""
_LOOKS_PER_TIMEOUT = 10
_WORD_START = re.compile("(?<!^)(?=[A-Z])")
_WINDOW_BYTES = 2**16
"""Bytes of a message that HTTP/2's flow control lets a client send before it is read."""
_MAX_UNCOUNTED = 256
"""Messages that may wait although their received bytes exceed the limit."""
Incoming = TypeVar("Incoming", bound=Message)

HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
UNKNOWN_SERVICE = "Unknown service."
_Status = health_pb2.HealthCheckResponse.ServingStatus
_MAX_REQUEST_BYTES = 256
_READ_TIMEOUT_S = 5.0
_MAX_WATCHES = 512
"""Open Watch calls. Check calls are answered at once, so they are not limited."""


def method_handlers(servicer: Servicer) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the handlers of all methods.

    To gRPC's server each is streaming in both directions: otherwise a call would enter only after
    its message, and nothing could tell when the client does not read the answer. On the wire, a
    stream of one message is the same.
    """
    service = GrpcService(servicer)
    writes = _StalledWrites(servicer.reader_limits.write_timeout_s)
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVICE.methods:
        reader = MessageReader(servicer, method.name, GetMessageClass(method.input_type))
        run = getattr(service, python_name(method.name))
        if not method.server_streaming:
            run = _one_message(run)
        answer = _answering(run, reader, servicer, writes, name=method.name)
        handlers[method.name] = grpc.stream_stream_rpc_method_handler(
            _handler(answer), response_serializer=_serialize
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
    writes: _StalledWrites,
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
            await servicer.delay_rejection(error)
            await abort_call(context, error)

    return answer


class _StreamWriter:
    """The progress of one call's writes."""

    __slots__ = ("is_stalled", "num_looks", "num_marks", "num_seen", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.num_marks = 0
        """Increased before and after each write, so that it is odd during a write."""
        self.num_seen = -1
        """The marks when they were last looked at."""
        self.num_looks = 0
        """How often these marks were looked at again."""
        self.is_stalled = False


class _StalledWrites:
    """Ends calls of clients that accept no messages; used from the event loop only.

    A writer only counts its marks, because a timer for each message would be slow. One timer looks
    at all writers a few times within the timeout. Looks are counted instead of seconds, so a pause
    of the process, in which no client could have been served, is not a stall.
    """

    def __init__(self, timeout_s: float) -> None:
        """A write may take `timeout_s`, and up to a tenth more."""
        self._timeout_s = timeout_s
        self._writers: set[_StreamWriter] = set()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[_StreamWriter]:
        """Watch the writes of the current task inside the block.

        A write that takes too long is cancelled, and the block raises StalledReaderError.
        """
        task = asyncio.current_task()
        assert task is not None
        writer = _StreamWriter(task)
        self._writers.add(writer)
        self._start_timer()
        try:
            yield writer
        except asyncio.CancelledError:
            if not writer.is_stalled:
                raise
            task.uncancel()
            raise StalledReaderError(
                "The stream was aborted: its client did not accept a message within "
                f"{self._timeout_s:g} s."
            ) from None
        finally:
            self._writers.discard(writer)

    def _start_timer(self) -> None:
        if self._timer is None and self._writers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s / _LOOKS_PER_TIMEOUT, self._look)

    def _look(self) -> None:
        self._timer = None
        for writer in self._writers:
            if writer.num_marks != writer.num_seen:
                writer.num_seen, writer.num_looks = writer.num_marks, 0
                continue
            writer.num_looks += 1
            is_writing = bool(writer.num_marks % 2)
            if is_writing and not writer.is_stalled and writer.num_looks >= _LOOKS_PER_TIMEOUT:
                writer.is_stalled = True
                writer.task.cancel()
        self._start_timer()


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
                if entered is not None:
                    await entered.take_turn()
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
        timeout_s = self._intake.read_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                body = await context.read()
        except TimeoutError as error:
            raise DeadlineError(
                f"The message did not arrive within {timeout_s:g} s (--read-timeout-s)."
            ) from error
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


class Health:
    """The serving status of some services, for Check and Watch."""

    def __init__(self, services: Iterable[str], *, read_timeout_s: float = _READ_TIMEOUT_S) -> None:
        """Services start as NOT_SERVING. The empty name is the whole server.

        `read_timeout_s` limits how long a call's message may take to arrive.
        """
        self._read_timeout_s = read_timeout_s
        self._is_serving = dict.fromkeys(("", *services), False)
        self._changed = asyncio.Condition()
        self._num_watches = 0

    async def set_serving(self, is_serving: bool) -> None:
        """Set the status of all services and notify Watch calls."""
        async with self._changed:
            self._is_serving = dict.fromkeys(self._is_serving, is_serving)
            self._changed.notify_all()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handlers of Check and Watch."""
        # Streaming handlers are called before a message has arrived.
        make = grpc.stream_stream_rpc_method_handler
        methods = {
            "Check": make(self._reading(self._check)),
            "Watch": make(self._reading(self._watch)),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    def _reading(
        self, answer: Callable[[str, Context], Awaitable[None]]
    ) -> Callable[[object, Context], Awaitable[None]]:
        async def handle(_requests: object, context: Context) -> None:
            await answer(await self._read_service(context), context)

        return handle

    async def _read_service(self, context: Context) -> str:
        """Return the name of the requested service. Aborts the call if none arrives in time."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                body = await context.read()
        except TimeoutError:
            text = f"The request message did not arrive within {self._read_timeout_s:g} s."
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        try:
            return service_of(body)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _check(self, service: str, context: Context) -> None:
        if service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, UNKNOWN_SERVICE)
        await context.write(self._answer(service))

    async def _watch(self, service: str, context: Context) -> None:
        if self._num_watches >= _MAX_WATCHES:
            text = f"The server may have at most {_MAX_WATCHES} open Watch calls."
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._num_watches += 1
        try:
            await self._send_changes(service, context)
        finally:
            self._num_watches -= 1

    async def _send_changes(self, service: str, context: Context) -> None:
        sent = b""
        while True:
            if (answer := self._answer(service)) != sent:
                await context.write(answer)
                sent = answer
                continue
            async with self._changed:
                if self._answer(service) == sent:
                    await self._changed.wait()

    def _answer(self, service: str) -> bytes:
        status = _Status.SERVICE_UNKNOWN
        if service in self._is_serving:
            status = _Status.SERVING if self._is_serving[service] else _Status.NOT_SERVING
        answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return answer


def service_of(body: object) -> str:
    """Return the name of the service in a message. Raises InvalidRequestError."""
    if not isinstance(body, bytes) or len(body) > _MAX_REQUEST_BYTES:
        raise InvalidRequestError(
            f"Expected a HealthCheckRequest of at most {_MAX_REQUEST_BYTES} bytes."
        )
    try:
        service: str = health_pb2.HealthCheckRequest.FromString(body).service
    except DecodeError as error:
        raise InvalidRequestError("The message is not a valid HealthCheckRequest.") from error
    return service


_OPEN_PREFIX = f"/{HEALTH}/"


# Their handlers admit calls themselves.
_OPEN_METHODS = frozenset(f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods)


# The class is generic only in grpc's stubs.
class EntryInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # see above
    """Rejects calls without a valid key to methods that do not check it themselves.

    These are reflection, and methods that do not exist.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, or a handler that rejects the call."""
        method = handler_call_details.method
        if not (method in _OPEN_METHODS or method.startswith(_OPEN_PREFIX)):
            metadata = metadata_of(handler_call_details.invocation_metadata)
            try:
                with self._servicer.metrics.counting_rejections("grpc"):
                    self._servicer.authenticate(metadata.get(AUTHORIZATION))
            except PagedRayError as error:
                log_rejection(self._servicer, method, error)
                return _rejection(error)
        return await continuation(handler_call_details)


def enter_call(
    servicer: Servicer,
    metadata: Mapping[str, str],
    method: str,
    *,
    frontend: Frontend = "grpc",
    is_continued: bool = False,
) -> tuple[Tenant, OpenCall | None]:
    """Return the tenant of a call, and the call in the tenant's limits if it counts.

    Raises AuthenticationError, or OverloadedError if the tenant or the server has no room for it.
    """
    with servicer.metrics.counting_rejections(frontend):
        tenant = servicer.authenticate(metadata.get(AUTHORIZATION))
    if method not in COUNTED:
        return tenant, None
    operation = OPERATIONS.get(method)
    try:
        entered = servicer.enter_call(
            tenant, uses_engine=operation is not None, is_continued=is_continued
        )
    except OverloadedError as error:
        arrival = None
        if operation is not None:
            origin = RpcCall(frontend=frontend, metadata=metadata).origin
            arrival = Arrival(operation=operation, tenant=tenant.name, origin=origin)
        servicer.note_rejected(error, arrival, frontend)
        raise
    return tenant, entered


def log_rejection(
    servicer: Servicer, method: str, error: Exception, *, frontend: Frontend = "grpc"
) -> None:
    """Log a call that is rejected; `method` is the path, or the name of one of our methods."""
    # gRPC's own errors, and defects, are logged elsewhere.
    if not isinstance(error, PagedRayError):
        return
    path = method if method.startswith("/") else f"/{SERVICE.full_name}/{method}"
    servicer.rejected_calls.note(
        frontend,
        status=error.grpc_status,
        method=path.rpartition("/")[2],
        path=path,
        param=field_of(error),
        error=str(error),
    )


def _rejection(error: PagedRayError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(_requests: object, context: Context) -> None:
        await abort_call(context, error)

    # A streaming handler is called before any message is read.
    return grpc.stream_stream_rpc_method_handler(handle)
