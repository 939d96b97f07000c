"""Middleware of Ray Serve's HTTP proxy, which its environment names.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.serving.ray_serve.http_proxy:middlewares

It chooses the routing key of requests, and sends short bodies with their scope. A stream whose
replica died, hangs or ended it too early continues from another one, and any other request is sent
again; if that fails, the response ends with an OpenAI error. This module does not know the
servicer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers
from starlette.middleware import Middleware

from cluster.serving.anthropic.endpoints import anthropic_error
from cluster.serving.continuation import CONTINUATION_KEY, PROGRESS_KEY, Progress
from cluster.serving.http.endpoint import rejection_body
from cluster.serving.http.http_call import declared_length
from cluster.serving.intake import MAX_REQUEST_BYTES
from cluster.serving.openai.response_choice import DONE_EVENT, error_event
from cluster.serving.ray_serve.placement import Owners, RoutingKey, prefix_key, replica_key
from cluster.serving.ray_serve.proxied_call import BODY_KEY, HeldBytes, ProxiedCall
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError
from cluster.serving.responses.stored_responses import replica_of
from pagedray.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.serving.continuation import Cause
    from pagedray.errors import PagedRayError

__all__ = ["SESSION_HEADER", "ReplicaGuard"]

SESSION_HEADER = "x-session-id"
_SESSION_NAME = SESSION_HEADER.encode()
_PROBES = ("/health", "/ready")
"""The ends of paths that are answered soon, even if no replica is available."""
_READ_BY_SERVE = frozenset(
    {
        b"serve_multiplexed_model_id",
        b"traceparent",
        b"x_request_disconnect_disabled",
        b"x_request_id",
        b"x_request_timeout_seconds",
        b"x_session_id",
    }
)
"""Their names, in which Serve takes `-` and `_` for the same."""

_TIMEOUT = 408
"""The status of a replica that did not receive the whole body in time, and closes the connection.

A client that does not read gets the same status, but its connection stays open, and so does Serve
itself after its time limit.
"""
_encode = msgspec.json.encode
_MOST_READ_BYTES = 256 * 2**10
"""Requests with longer bodies are routed by load alone, since reading them delays others."""
_READ_TIMEOUT_S = 10.0
"""Requests with slower bodies are routed by load alone, too."""
_PAUSE_S = 0.1
"""A client that sends nothing for so long waits for the response, or does not send the rest."""
_MOST_PAUSES = 100


def middlewares() -> list[Middleware]:
    """Return the middleware of Serve's proxy."""
    return [Middleware(ReplicaGuard)]


class ReplicaGuard:
    """Sets the routing key of requests, and completes responses of replicas that failed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = HeldBytes()
        self._owners = Owners()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = ProxiedCall(self._held, is_probe=scope["path"].endswith(_PROBES))
        try:
            request = ProxiedHttpRequest(receive, call)
            body = await request.short_body(scope)
            scope = {**scope, "headers": self._headers_with_key(scope, body)}
            if body is not None:
                scope[BODY_KEY] = body
            response = ProxiedHttpResponse(scope["path"], send, call, request)
            await self._send_to_replicas(scope, request, response, call)
        finally:
            call.close()

    def _headers_with_key(self, scope: Scope, body: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers for Serve, with the routing key; its text may be the client's."""
        raw = decodable_headers(scope["headers"])
        headers = Headers(raw=raw)
        session = next((text for name, text in raw if name == _SESSION_NAME), b"").decode()
        text = session or (None if body is None else key_of_body(body))
        if not text:
            return raw
        credential = headers.get("authorization") or headers.get("x-api-key")
        key = RoutingKey(text, self._owners.owner_of(credential))
        others = [one for one in raw if one[0] != _SESSION_NAME]
        # In the encoding of Serve: a body may name a session in any script.
        return [*others, (_SESSION_NAME, key.as_session_id().encode())]

    async def _send_to_replicas(
        self,
        scope: Scope,
        request: ProxiedHttpRequest,
        response: ProxiedHttpResponse,
        call: ProxiedCall,
    ) -> None:
        while True:
            # Serve changes the scope that it gets.
            attempt = {**scope, CONTINUATION_KEY: call.continuation()}
            response.begin_attempt()
            try:
                async with call.sending():
                    await self._app(attempt, request.receiver(), response.send)
            except TimeoutError:
                # No replica accepted it.
                break
            cause = response.failure()
            if cause is None or call.is_complete or request.is_disconnected:
                break
            if not call.continues_after(cause):
                break
        await response.finish_response()


class _Prompt(msgspec.Struct):
    """The parts of a request body that identify its prompt."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    session_id: str | None = None

    def key(self) -> str | None:
        """Return the routing key."""
        if self.session_id:
            return self.session_id
        replica = replica_of(self.previous_response_id or "")
        if replica is not None:
            return replica_key(replica)
        if self.input is None:
            return prefix_key(self.messages or self.prompt or "")
        given = [{"content": self.input}] if isinstance(self.input, str) else self.input
        return prefix_key([{"content": self.instructions}, *given])


def key_of_body(body: bytes) -> str | None:
    """Return the routing key of a request, or None if its body is not valid."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The replica rejects it with the same error as every frontend.
        return None
    return prompt.key()


def decodable_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers with values that Serve can decode, which it does as UTF-8 only."""
    return [
        (name, _as_utf8(text) if name.replace(b"-", b"_") in _READ_BY_SERVE else text)
        for name, text in headers
    ]


def _as_utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1").encode()
    return text


class ProxiedHttpResponse:
    """The response of one replica after another, as one response to the client."""

    def __init__(
        self, path: str, send: Send, call: ProxiedCall, request: ProxiedHttpRequest
    ) -> None:
        self._path = path
        self._send = send
        self._call = call
        self._request = request
        self._kept: list[Message] = []
        """Messages that are sent unless another replica serves the request."""
        self._has_started = False
        """Whether the client has the status."""
        self._is_stream = False
        self._has_failed = False
        """Whether the current replica reported that it cannot serve the request."""
        self._is_late = False
        """Whether Serve's time limit passed before the client got the status."""
        self._is_event_stream = False
        """Whether the current replica sends events."""
        self._has_ended = False
        self._closes = False
        """Whether the connection is closed after the response."""
        self._has_names = False
        """Whether the events of the stream have names, so that none of them is `[DONE]`."""
        self._is_done = False
        """Whether the stream has its last event."""

    def begin_attempt(self) -> None:
        """Expect the response of another replica, from its beginning."""
        self._kept = []
        self._has_failed = self._has_ended = False

    async def send(self, message: Message) -> None:
        """Send a part of the response, or keep it."""
        encoded = message.pop(PROGRESS_KEY, None)
        progress = None if encoded is None else Progress(*encoded)
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            if self._is_late:
                # A text of Serve's; the error takes its place.
                return
            self._has_failed = self._has_failed or (progress is not None and progress.has_failed)
            self._has_ended = not message.get("more_body", False)
            if self._has_failed:
                self._kept.append(message)
            elif not (self._has_ended and self._is_cut):
                await self._send_part(message, progress)
        else:
            await self._send(message)

    def failure(self) -> Cause | None:
        """Return how the current replica failed, or None."""
        if self._has_failed:
            return "failed"
        if not self._has_ended:
            return "died"
        return "truncated" if self._is_cut else None

    async def finish_response(self) -> None:
        """End a response that its replica left incomplete."""
        if self.failure() is None:
            return
        if not self._has_started:
            is_whole = bool(self._kept) and self._has_ended
            status = _TIMEOUT if self._is_late else self._error.http_status
            error = error_response(self._path, self._error, status)
            for message in self._kept if is_whole else error:
                await self._send(message)
        elif self._is_stream and self._call.is_complete:
            rest = b"" if self._is_done else DONE_EVENT
            await self._send({"type": "http.response.body", "body": rest, "more_body": False})
        elif self._is_stream and self._has_failed and self._has_ended and self._is_event_stream:
            for message in self._kept:
                await self._send(message)
        elif self._is_stream:
            last = last_events(self._path, self._error, num_events=self._call.num_events)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        # An incomplete JSON response ends with its connection.

    @property
    def _error(self) -> PagedRayError:
        """The error of a response that no replica completes."""
        if self._call.is_cancelled:
            return DeadlineError("Ray Serve's time limit passed before the request was finished.")
        return ReplicaDiedError()

    @property
    def _is_cut(self) -> bool:
        """Whether the messages of the replicas are incomplete."""
        has_status = self._has_started or bool(self._kept)
        return not has_status or (self._is_stream and self._call.is_ours and not self._is_done)

    async def _start(self, message: Message) -> None:
        headers = Headers(raw=message["headers"])
        self._is_event_stream = headers.get("content-type", "").startswith("text/event-stream")
        if self._has_started:
            # A stream continues; its client has the status.
            self._has_failed = not self._is_event_stream
            return
        self._is_stream = self._is_event_stream
        status = message["status"]
        self._is_late = status == _TIMEOUT and self._call.is_cancelled
        if self._is_late:
            return
        self._closes = headers.get("connection") == "close"
        misses_body = status == _TIMEOUT and self._closes
        has_lost_body = misses_body and self._request.is_whole
        self._has_failed = has_lost_body or status == ReplicaDiedError.http_status
        if self._is_stream:
            self._has_started = True
            await self._send(message)
        else:
            # Another replica can still take the place of a replica that dies before the body.
            self._kept.append(message)

    async def _send_part(self, message: Message, progress: Progress | None) -> None:
        kept, self._kept = self._kept, []
        if kept and self._closes:
            if self._has_ended:
                self._request.discard_rest()
            await self._request.wait_until_sent()
        for earlier in kept:
            self._has_started = True
            await self._send(earlier)
        if progress is not None:
            self._call.add_progress(progress)
        body = message.get("body", b"")
        if body:
            self._has_names = self._has_names or body.startswith(b"event: ")
            self._call.num_events += body.count(b"\n\n")
            self._is_done = self._call.is_complete if self._has_names else body.endswith(DONE_EVENT)
            if progress is None:
                # How far the client has come is unknown.
                self._call.forgo_continuation()
        await self._send(message)


def error_response(path: str, error: PagedRayError, status: int) -> list[Message]:
    """Return the messages of a whole response with a status."""
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": _body_of(path, error)},
    ]


def last_events(path: str, error: PagedRayError, *, num_events: int) -> bytes:
    """Return the end of a stream that has this number of events."""
    if path.endswith("/messages"):
        return b"event: error\ndata: %b\n\n" % _body_of(path, error)
    if path.endswith("/responses"):
        fields = {
            "type": "error",
            "sequence_number": num_events,
            "code": error.openai_code or error.openai_type,
            "message": str(error),
            "param": None,
        }
        return b"event: error\ndata: %b\n\n" % _encode(fields)
    return error_event(error) + DONE_EVENT


def _body_of(path: str, error: PagedRayError) -> bytes:
    body = rejection_body(error)
    if path.endswith(("/messages", "/messages/count_tokens")):
        body = anthropic_error(body, error.http_status)
    return _encode(body)


class ProxiedHttpRequest:
    """The messages of a request, which several replicas may receive."""

    def __init__(self, receive: Receive, call: ProxiedCall) -> None:
        self._receive = receive
        self._call = call
        self._messages: list[Message] | None = []
        self._num_bytes = self._num_messages = 0
        self.is_disconnected = False
        self.is_whole = False
        """Whether the end of the body was received."""
        self._is_answered = False

    def receiver(self) -> Receive:
        """Return a `receive` that begins with the first message."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if self._messages is not None and place < len(self._messages):
                place += 1
                return self._messages[place - 1]
            message = await self._receive_next()
            place += 1
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
            else:
                self.is_whole = not message.get("more_body", False)
                self._hold(message)
            return message

        return receive

    async def short_body(self, scope: Scope) -> bytes | None:
        """Receive and return the body of a POST request if it is short and complete."""
        length = declared_length(Headers(scope=scope))
        if scope["method"] != "POST" or not length or length > _MOST_READ_BYTES:
            return None
        receive = self.receiver()
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                while not (self.is_whole or self.is_disconnected):
                    message = await receive()
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > _MOST_READ_BYTES:
                        # Some servers ignore Content-Length if there is Transfer-Encoding.
                        return None
        except TimeoutError:
            # The replica limits how long the rest may take.
            return None
        return b"".join(parts) if self.is_whole else None

    def discard_rest(self) -> None:
        """Discard the rest of the body, which Serve would keep for the replica without a limit."""
        self._is_answered = True

    async def wait_until_sent(self) -> None:
        """Wait until the client has sent its body, or pauses.

        Serve receives the body whether a replica reads it or not. If the connection were closed
        before, the client would miss the response.
        """
        for _ in range(_MOST_PAUSES):
            before = self._num_messages
            if self.is_whole or self.is_disconnected:
                return
            await asyncio.sleep(_PAUSE_S)
            if self._num_messages == before:
                return

    async def _receive_next(self) -> Message:
        while True:
            message = await self._receive()
            self._num_messages += 1
            if not (self._is_answered and message.get("more_body", False)):
                return message

    def _hold(self, message: Message) -> None:
        if self._messages is None:
            return
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        if self._num_bytes <= MAX_REQUEST_BYTES:
            self._messages.append(message)
            self._call.hold(num_bytes)
        else:
            # Our replicas reject it; other applications may not.
            self._messages = None
            self._call.forgo_continuation()
