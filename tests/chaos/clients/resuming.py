"""Clients that resume their streams when the connection is cut."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from pagedray.v1 import pagedray_pb2_grpc
from tests.chaos.clients.frontends import (
    CHANNEL_OPTIONS,
    Frontend,
    abort,
    note_choice,
    note_sequences,
)

if TYPE_CHECKING:
    from tests.chaos.clients.call import Call
    from tests.chaos.clients.relay import Relay

__all__ = ["ResumingGrpcFrontend", "ResumingHttpFrontend"]

_TIMEOUT_S = 600.0
_RETRY_S = 0.2
_PATIENCE_S = 60.0
"""How long a client tries to resume a stream; a server keeps it for 30 s without a reader."""


class _Progress:
    """How far a client has read a stream."""

    def __init__(self) -> None:
        self.last: int | None = None
        """The number of the last message; None if the request must be sent, 0 if it has arrived."""
        self.is_aborted = False
        """Whether the client has sent an abort, of which it may not get the response."""
        self.num_generated: int | None = None
        """The number of generated tokens, once it was sent; the connection may be cut behind it."""
        self._failed_s: float | None = None

    def note_message(self, number: int) -> None:
        """Note a message."""
        self.last = number
        self._failed_s = None

    def may_retry(self) -> bool:
        """Note a failure; return whether to try again."""
        if self._failed_s is None:
            self._failed_s = time.monotonic()
        return time.monotonic() - self._failed_s < _PATIENCE_S


class ResumingGrpcFrontend(Frontend):
    """Generate and Chat through a relay."""

    name = "grpc resumed"

    def __init__(self, relay: Relay) -> None:
        self._channel = grpc.aio.insecure_channel(relay.address, CHANNEL_OPTIONS)
        # Any: the generated stub is not async to mypy.
        self._stub: Any = pagedray_pb2_grpc.GenerationServiceStub(self._channel)

    async def run(self, call: Call) -> None:
        progress = _Progress()
        while True:
            try:
                await self._read(call, progress)
            except grpc.aio.AioRpcError as error:
                if not _goes_on(error.code(), call, progress):
                    call.record.end(error.code().name + ": " + (error.details() or "")[:120])
                    return
                await asyncio.sleep(_RETRY_S)
            else:
                call.record.end("ok", progress.num_generated)
                return

    async def close(self) -> None:
        await self._channel.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default

    async def _read(self, call: Call, progress: _Progress) -> None:
        """Read from where the client is."""
        message, metadata = (
            call.spec.to_message(call.name),
            (("authorization", call.authorization),),
        )
        if progress.last is None:
            message.resumable = True
        else:
            message = type(message)(request_id=call.name, resume_from=progress.last)
        method = self._stub.Chat if call.spec.is_chat else self._stub.Generate
        record, is_aborted = call.record, False
        async for answer in method(message, metadata=metadata, timeout=_TIMEOUT_S):
            record.accept()
            progress.note_message(answer.number)
            note_sequences(answer, record)
            if answer.HasField("usage"):
                progress.num_generated = answer.usage.num_generated_tokens
            if call.is_to_end and not is_aborted:
                is_aborted = True
                # A resumable stream does not end with its connection.
                await abort(self._stub, call.name, metadata)


class ResumingHttpFrontend(Frontend):
    """Completions and chat completions through a relay."""

    name = "http resumed"

    def __init__(self, relay: Relay, model: str) -> None:
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=f"http://{relay.address}",
            timeout=httpx.Timeout(_TIMEOUT_S, connect=30.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=0.5),
        )

    async def run(self, call: Call) -> None:
        progress = _Progress()
        while True:
            try:
                if await self._read(call, progress):
                    return
            except httpx.HTTPError as error:
                if not progress.may_retry():
                    call.record.end(f"connection: {type(error).__name__}: {error}")
                    return
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def _read(self, call: Call, progress: _Progress) -> bool:
        """Read from where the client is; return whether the call has ended."""
        headers, record = {"authorization": call.authorization}, call.record
        if progress.last is None:
            body = call.spec.to_body(self._model)
            body["stream_options"] |= {"resumable": True}
            path = "/v1/chat/completions" if call.spec.is_chat else "/v1/completions"
            headers["x-request-id"] = call.name
            request = self._http.stream("POST", path, json=body, headers=headers)
        else:
            headers["last-event-id"] = str(progress.last)
            request = self._http.stream("GET", f"/v1/streams/{call.name}", headers=headers)
        async with request as answer:
            if answer.status_code == 409 and progress.last is None:
                progress.last = 0
                return False
            if answer.status_code == 404 and progress.last == 0:
                progress.last = None
                return False
            if answer.status_code == 404 and progress.is_aborted:
                record.end("cancelled")
                return True
            if answer.status_code != 200:
                text = (await answer.aread())[:120].decode(errors="replace")
                record.end(f"{answer.status_code}: {text}")
                return True
            record.accept()
            return await self._follow(answer, call, progress)

    async def _follow(self, answer: httpx.Response, call: Call, progress: _Progress) -> bool:
        record, number = call.record, 0
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line == "data: [DONE]":
                record.end("ok", progress.num_generated)
                return True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    record.end(f"error event: {event['error']['message']}")
                    return True
                progress.note_message(number)
                if event.get("usage") is not None:
                    progress.num_generated = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    note_choice(choice, record)
                if call.is_to_end:
                    progress.is_aborted = True
                    headers = {"authorization": call.authorization}
                    await self._http.delete(f"/v1/streams/{call.name}", headers=headers)
                    record.end("cancelled")
                    return True
        return False


def _goes_on(code: grpc.StatusCode, call: Call, progress: _Progress) -> bool:
    """Return whether a client calls again after an error."""
    if code is grpc.StatusCode.ALREADY_EXISTS and progress.last is None:
        progress.last = 0
        return True
    if code is grpc.StatusCode.NOT_FOUND and progress.last == 0:
        progress.last = None
        return True
    return code is grpc.StatusCode.UNAVAILABLE and call.record.is_accepted and progress.may_retry()
