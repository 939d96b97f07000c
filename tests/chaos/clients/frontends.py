"""Clients of both frontends: each runs one call and writes down what arrives."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from tests.chaos.clients.call import Call
    from tests.chaos.clients.call_record import CallRecord
    from tests.chaos.targets.target import Target

__all__ = [
    "CHANNEL_OPTIONS",
    "Frontend",
    "GrpcFrontend",
    "HttpFrontend",
    "abort",
    "note_choice",
    "note_sequences",
]

CHANNEL_OPTIONS = (
    # A client that waits two minutes before it connects again would see nothing of the recovery.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # Also the time limit of an attempt.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_CALL_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 30.0
_REASONS = {"abort": "aborted"}


class Frontend(ABC):
    """How clients reach a server."""

    name: str

    @abstractmethod
    async def run(self, call: Call) -> None:
        """Run a call to its end."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class GrpcFrontend(Frontend):
    """Generate and Chat over a channel, which all calls share."""

    name = "grpc"

    def __init__(self, target: Target) -> None:
        self._channel = grpc.aio.insecure_channel(target.grpc_target, CHANNEL_OPTIONS)
        # Any: the generated stub is not async to mypy.
        self.stub: Any = pagedray_pb2_grpc.GenerationServiceStub(self._channel)

    async def run(self, call: Call) -> None:
        record = call.record
        method = self.stub.Chat if call.spec.is_chat else self.stub.Generate
        metadata = (("authorization", call.authorization),)
        message = call.spec.to_message(call.name)
        stream = method(message, metadata=metadata, timeout=_CALL_TIMEOUT_S)
        num_generated = None
        is_cancelled = is_aborted = False
        try:
            async for answer in stream:
                record.accept()
                note_sequences(answer, record)
                if answer.HasField("usage"):
                    num_generated = answer.usage.num_generated_tokens
                if call.is_to_end and call.cancels:
                    is_cancelled = stream.cancel()
                elif call.is_to_end and not is_aborted:
                    is_aborted = True
                    await abort(self.stub, call.name, metadata)
        except asyncio.CancelledError:
            if not is_cancelled:
                raise
            record.end("cancelled")
        except grpc.aio.AioRpcError as error:
            record.end(error.code().name + ": " + (error.details() or "")[:120])
        else:
            record.end("ok", num_generated)

    async def close(self) -> None:
        await self._channel.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default


class HttpFrontend(Frontend):
    """Streams of completions and chat completions, on connections of their own."""

    name = "http"

    def __init__(self, target: Target) -> None:
        self._url = f"{target.url}/v1"
        self._model = target.model
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(_CALL_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=0.5),
        )

    async def run(self, call: Call) -> None:
        record = call.record
        path = "/chat/completions" if call.spec.is_chat else "/completions"
        headers = {"authorization": call.authorization, "x-request-id": call.name}
        body = call.spec.to_body(self._model)
        try:
            async with self._http.stream(
                "POST", self._url + path, json=body, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread())[:120].decode(errors="replace")
                    record.end(f"{answer.status_code}: {text}")
                    return
                record.accept()
                await self._read(answer, call)
        except httpx.HTTPError as error:
            record.end(f"connection: {type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._http.aclose()

    async def _read(self, answer: httpx.Response, call: Call) -> None:
        record, num_generated = call.record, None
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                record.end("ok", num_generated)
                return
            event = json.loads(line[6:])
            if "error" in event:
                record.end(f"error event: {event['error']['message']}")
                return
            if event.get("usage") is not None:
                num_generated = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                note_choice(choice, record)
            if call.is_to_end:
                record.end("cancelled")
                return
        record.end("connection: the stream ended without [DONE]")


# Any: the generated stub is not async to mypy.
async def abort(stub: Any, call: str, metadata: tuple[tuple[str, str], ...]) -> None:
    """Abort a call; a server that ends does not answer."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.Abort(pb.AbortRequest(request_ids=[call]), metadata=metadata, timeout=30.0)


def note_sequences(answer: pb.GenerateResponse | pb.ChatResponse, record: CallRecord) -> None:
    """Write down what a gRPC message holds."""
    for one in answer.sequences:
        text = one.text if isinstance(one, pb.SequenceOutput) else one.content
        record.gain(one.index, tuple(one.token_ids), text)
        if one.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            name = pb.FinishReason.Name(one.finish_reason).removeprefix("FINISH_REASON_")
            record.end_sequence(one.index, name.lower())


def note_choice(choice: dict[str, Any], record: CallRecord) -> None:  # Any: JSON
    """Write down what a choice of a server-sent event holds."""
    text = choice["text"] if "text" in choice else choice["delta"].get("content")
    record.gain(choice["index"], (), text or "")
    if choice["finish_reason"] is not None:
        reason = choice["finish_reason"]
        record.end_sequence(choice["index"], _REASONS.get(reason, reason))
