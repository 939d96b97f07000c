"""Clients that resume, against a server whose connection ends behind the last message."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from tests.chaos.clients import (
    Call,
    CallRecord,
    Frontend,
    Relay,
    ResumingGrpcFrontend,
    ResumingHttpFrontend,
)
from tests.chaos.events import CallAccepted, CallEnded, CallSent, Event
from tests.chaos.requests import Spec

SPEC = Spec(name="a", prompt="x", max_tokens=1)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = b'id: 1\ndata: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'


class History:
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.was_accepted = asyncio.Event()
        self.num_arrivals = 0
        self.now_s = 0.0

    def add(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, CallAccepted):
            self.was_accepted.set()


async def ended(client: Frontend, history: History) -> Event:
    """Return the last event of one call."""
    sent = CallSent(at_s=0.0, call="c", spec="a", frontend=client.name, tenant="t")
    record = CallRecord(history, sent)  # type: ignore[arg-type]  # without a file
    await client.run(Call(name="c", spec=SPEC, record=record, key="k"))
    await client.close()
    return history.events[-1]


async def test_usage_behind_which_a_grpc_connection_is_cut_counts() -> None:
    history = History()

    async def generate(incoming: pb.GenerateRequest, context: object) -> AsyncIterator[object]:
        if not incoming.HasField("resume_from"):
            yield pb.GenerateResponse(number=1, usage=pb.Usage(num_generated_tokens=1))
            await history.was_accepted.wait()
            relay.cut()
            await asyncio.sleep(60)

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "pagedray.v1.GenerationService", {"Generate": handler}
            )
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Relay(port) as relay:
            event = await ended(ResumingGrpcFrontend(relay), history)
    finally:
        await server.stop(0)
    assert event == CallEnded(at_s=0.0, call="c", status="ok", num_generated=1)


async def test_usage_behind_which_an_http_connection_is_cut_counts() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(SSE + (b"data: [DONE]\n\n" if head.startswith(b"GET") else USAGE))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Relay(server.sockets[0].getsockname()[1]) as relay:
        event = await ended(ResumingHttpFrontend(relay, "m"), History())
    assert event == CallEnded(at_s=0.0, call="c", status="ok", num_generated=1)
