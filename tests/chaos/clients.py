"""Clients of both frontends: each runs calls and records the responses in the history."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import httpx

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.chaos.events import CallAccepted, CallEnded, CallSent, History, SequenceEnded, Tokens
from tests.chaos.requests import Spec
from tests.chaos.targets import Target

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
_GATHER_S = 0.25
_PART_BYTES = 2**16
_RETRY_S = 0.2
_PATIENCE_S = 60.0
"""How long a client tries to resume a stream; a server keeps it for 30 s without a reader."""

_REFUSED_RETRY_S = 0.5
_ABORTED = 0.1
"""The part of the calls that their client aborts."""
_LATEST_ABORT = 60


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one call sends, and the record of what it receives."""

    name: str
    """The request id."""
    spec: Spec
    record: CallRecord
    key: str
    """The API key."""
    aborts_after: int | None = None
    """Parts of the stream after which the client ends the call; None if it does not."""

    @property
    def authorization(self) -> str:
        """The value of the header, or of the metadata, that holds the key."""
        return f"Bearer {self.key}"

    @property
    def is_to_end(self) -> bool:
        """Whether so many parts have arrived that the client ends the call."""
        return self.aborts_after is not None and self.record.num_events >= self.aborts_after

    @property
    def cancels(self) -> bool:
        """Whether the client then cancels its stream, and does not ask the server to abort it."""
        return self.aborts_after is not None and self.aborts_after % 2 == 1


class _Gathered:
    """What a sequence gained and was not written down yet."""

    def __init__(self, at_s: float, begin: int) -> None:
        self.at_s = at_s
        self.begin = begin
        self.until_s = at_s
        self.token_ids: list[int] = []
        self.texts: list[str] = []


class CallRecord:
    """The events of one call."""

    def __init__(self, history: History, sent: CallSent) -> None:
        self._history = history
        self._call = sent.call
        self._has_tokens = sent.frontend.startswith("grpc")
        self._gathered: dict[int, _Gathered] = {}
        self._lengths: Counter[int] = Counter()
        self.is_accepted = False
        self.num_events = 0
        """Parts with tokens or text that have arrived."""
        history.add(sent)

    def accept(self) -> None:
        """Note that the server has begun to answer."""
        if not self.is_accepted:
            self.is_accepted = True
            self._history.add(CallAccepted(at_s=self._history.now_s, call=self._call))

    def gain(self, sequence: int, token_ids: tuple[int, ...], text: str) -> None:
        """Note new tokens or text of a sequence."""
        if not token_ids and not text:
            return
        self.num_events += 1
        self._history.num_arrivals += 1
        now_s = self._history.now_s
        gathered = self._gathered.get(sequence)
        if gathered is not None and now_s - gathered.at_s > _GATHER_S:
            self._write(sequence)
            gathered = None
        if gathered is None:
            gathered = self._gathered[sequence] = _Gathered(now_s, self._lengths[sequence])
        self._lengths[sequence] += len(token_ids) if self._has_tokens else len(text)
        gathered.until_s = now_s
        gathered.token_ids += token_ids
        gathered.texts.append(text)

    def end_sequence(self, sequence: int, reason: str) -> None:
        """Note a finish reason."""
        self._write(sequence)
        self._history.add(
            SequenceEnded(
                at_s=self._history.now_s, call=self._call, sequence=sequence, reason=reason
            )
        )

    def end(self, status: str, num_generated: int | None = None) -> None:
        """Note the end of the call."""
        for sequence in tuple(self._gathered):
            self._write(sequence)
        self._history.add(
            CallEnded(
                at_s=self._history.now_s,
                call=self._call,
                status=status,
                num_generated=num_generated,
            )
        )

    def _write(self, sequence: int) -> None:
        gathered = self._gathered.pop(sequence, None)
        if gathered is None:
            return
        self._history.add(
            Tokens(
                at_s=gathered.at_s,
                until_s=gathered.until_s,
                begin=gathered.begin,
                call=self._call,
                sequence=sequence,
                token_ids=tuple(gathered.token_ids),
                text="".join(gathered.texts),
            )
        )


class Relay:
    """Relays a loopback port, as an asynchronous context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        """Where clients connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Reset all connections, in both directions."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            # The server restarts.
            writer.close()
            self._writers.discard(writer)
            return
        self._writers.add(upstream[1])
        await asyncio.gather(self._copy(reader, upstream[1]), self._copy(upstream[0], writer))
        # Until both have ended, nothing else refers to what they read once a connection is lost.
        self._writers -= {writer, upstream[1]}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(_PART_BYTES):
                writer.write(part)
                await writer.drain()
        writer.close()


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
        async for answer in method(message, metadata=metadata, timeout=_CALL_TIMEOUT_S):
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
            timeout=httpx.Timeout(_CALL_TIMEOUT_S, connect=30.0),
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


class Clients:
    """A number of streams at once."""

    def __init__(
        self,
        specs: Sequence[Spec],
        frontends: Sequence[Frontend],
        history: History,
        *,
        keys: Mapping[str, str],
        seed: int,
    ) -> None:
        self._specs = specs
        self._frontends = frontends
        self._history = history
        self._keys = keys
        self._seed = seed
        self._is_stopping = False
        self.num_accepted = 0

    async def run(self, number: int) -> None:
        """Stream until `stop` is called and all calls have ended."""
        await asyncio.gather(*(self._client(index) for index in range(number)))

    def stop(self) -> None:
        """Let clients end after their present calls."""
        self._is_stopping = True

    async def _client(self, index: int) -> None:
        generator = random.Random(f"{self._seed} client {index}")
        frontend = self._frontends[index % len(self._frontends)]
        tenant = generator.choice(list(self._keys))
        number = 0
        while not self._is_stopping:
            spec = generator.choice(self._specs)
            aborts_after = None
            # What an aborted text holds back for a stop string is no part of the whole text.
            if generator.random() < _ABORTED and not spec.stop:
                aborts_after = generator.randint(1, _LATEST_ABORT)
            sent = CallSent(
                at_s=self._history.now_s,
                call=f"{index}-{number}",
                spec=spec.name,
                frontend=frontend.name,
                tenant=tenant,
                is_to_be_aborted=aborts_after is not None,
            )
            record = CallRecord(self._history, sent)
            call = Call(
                name=sent.call,
                spec=spec,
                record=record,
                key=self._keys[tenant],
                aborts_after=aborts_after,
            )
            await frontend.run(call)
            number += 1
            if record.is_accepted:
                self.num_accepted += 1
            else:
                await asyncio.sleep(_REFUSED_RETRY_S)
