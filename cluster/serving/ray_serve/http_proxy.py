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
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware

from cluster.serving.continuation import CONTINUATION_KEY, PROGRESS_KEY, Progress
from cluster.serving.intake.limits import MAX_REQUEST_BYTES
from cluster.serving.openai.last_events import DONE_EVENT
from cluster.serving.ray_serve.carried_body import BODY_KEY
from cluster.serving.ray_serve.proxied_errors import error_response, last_events
from cluster.serving.ray_serve.routing.affinity import (
    Owners,
    RoutingKey,
    prefix_key,
    replica_key,
)
from cluster.serving.ray_serve.routing.errors import ReplicaDiedError
from cluster.serving.ray_serve.routing.proxied_call import HeldBytes, ProxiedCall
from cluster.serving.responses.response_ids import replica_of
from pagedray.errors import DeadlineError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.serving.continuation import Cause
    from pagedray.errors import PagedRayError

__all__ = ["ReplicaGuard", "middlewares"]

SESSION_HEADER = "x-session-id"
_MOST_READ_BYTES = 256 * 2**10
"""Requests with longer bodies are routed by load alone, since reading them delays others."""
_READ_TIMEOUT_S = 10.0
"""Requests whose bodies take longer are routed by load alone, too."""
_TIMEOUT = 408
"""The status of a replica that did not receive the whole body in time, and closes the connection.

It is also that of a client that does not read, whose connection stays open, and of Serve itself
when its time limit passed.
"""
_PAUSE_S = 0.1
"""A client that sends nothing for so long waits for the response, or does not send the rest."""
_MOST_PAUSES = 100
_PROBES = ("/health", "/ready")
"""The ends of paths that are answered soon, even if no replica is available."""


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
            request = _Request(receive, call)
            body = await _short_body(scope, request)
            self._set_key(scope, body)
            if body is not None:
                scope = {**scope, BODY_KEY: body}
            response = _Response(scope["path"], send, call, request)
            await self._send_to_replicas(scope, request, response, call)
        finally:
            call.close()

    def _set_key(self, scope: Scope, body: bytes | None) -> None:
        """Set the routing key in the request's headers; its text may be the client's."""
        headers = MutableHeaders(scope=scope)
        text = headers.get(SESSION_HEADER) or (None if body is None else _key_of(body))
        if text:
            credential = headers.get("authorization") or headers.get("x-api-key")
            key = RoutingKey(text, self._owners.owner_of(credential))
            headers[SESSION_HEADER] = key.as_session_id()

    async def _send_to_replicas(
        self, scope: Scope, request: _Request, response: _Response, call: ProxiedCall
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


class _Request:
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


class _Response:
    """The response of one replica after another, as one response to the client."""

    def __init__(self, path: str, send: Send, call: ProxiedCall, request: _Request) -> None:
        self._path = path
        self._send = send
        self._call = call
        self._request = request
        self._kept: list[Message] = []
        """What is sent unless another replica serves the request."""
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
        """Whether something is missing from what the replicas have sent."""
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
            # Another replica can still take the place of one that dies before the body.
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


class _Prompt(msgspec.Struct):
    """What a request body says about its prompt."""

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


async def _short_body(scope: Scope, request: _Request) -> bytes | None:
    """Return the body of a POST request if it is short and complete."""
    length = Headers(scope=scope).get("content-length", "").lstrip("0")
    is_short = length.isdecimal() and len(length) < 10 and int(length) <= _MOST_READ_BYTES
    if scope["method"] != "POST" or not is_short:
        return None
    receive = request.receiver()
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            while not (request.is_whole or request.is_disconnected):
                message = await receive()
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > _MOST_READ_BYTES:
                    # Some servers ignore Content-Length if there is Transfer-Encoding.
                    return None
    except TimeoutError:
        # The replica limits how long the rest may take.
        return None
    return b"".join(parts) if request.is_whole else None


def _key_of(body: bytes) -> str | None:
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The replica rejects it with the same error as every frontend.
        return None
    return prompt.key()
