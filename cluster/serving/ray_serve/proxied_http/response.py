"""The response to a request in Ray Serve's HTTP proxy, made of several replicas' responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from cluster.serving.continuation import PROGRESS_KEY, Progress
from cluster.serving.openai.response_choice import DONE_EVENT
from cluster.serving.ray_serve.proxied_http.errors import error_response, last_events
from cluster.serving.ray_serve.routing.errors import ReplicaDiedError
from pagedray.errors import DeadlineError

if TYPE_CHECKING:
    from starlette.types import Message, Send

    from cluster.serving.continuation import Cause
    from cluster.serving.ray_serve.proxied_http.request import ProxiedHttpRequest
    from cluster.serving.ray_serve.routing.proxied_call import ProxiedCall
    from pagedray.errors import PagedRayError

__all__ = ["ProxiedHttpResponse"]

_TIMEOUT = 408
"""The status of a replica that did not receive the whole body in time, and closes the connection.

A client that does not read gets the same status, but its connection stays open, and so does Serve
itself after its time limit.
"""


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
