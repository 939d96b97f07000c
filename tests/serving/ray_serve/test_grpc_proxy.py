"""The wrapper of Serve's gRPC handlers: however a call ends, the replica's part ends too.

The wrapped handler behaves like Serve's: it cancels the replica's part only if it is cancelled
while it waits for a message, and swallows all other exceptions.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from cluster.serving.ray_serve.grpc_proxy import add_services
from cluster.serving.ray_serve.placement import RoutingKey
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SERVICE = "/pagedray.v1.GenerationService"
BODY = pb.GenerateRequest(text="x").SerializeToString()
MESSAGE = pb.GenerateResponse(request_id="x").SerializeToString()
LAST = pb.GenerateResponse(usage=pb.Usage(num_generated_tokens=1)).SerializeToString()


class Serve:
    """A stand-in for Serve's proxy: its handler, and whether the replica's part was cancelled."""

    def __init__(self, num_messages: int) -> None:
        self._num_messages = num_messages
        self.metadata: dict[str, str] = {}
        """Of the last call, as the replica gets it."""
        self.is_cancelled = asyncio.Event()
        self._has_used_freed = False
        self._handlers: list[Any] = []  # Any: grpc's handlers
        add_services(object(), SimpleNamespace(add_generic_rpc_handlers=self._take))  # type: ignore[arg-type]  # a stand-in for a server

    def _take(self, handlers: tuple[Any, ...]) -> None:  # Any: see above
        for one in handlers:
            for name in one._method_handlers:
                one._method_handlers[name] = grpc.unary_stream_rpc_method_handler(self._answer)
            self._handlers.append(one)

    # Any: the context is a stand-in for grpc's.
    async def _answer(self, body: bytes, context: Any) -> AsyncGenerator[bytes]:
        self.metadata = dict(context.invocation_metadata())
        try:
            async for message in self._messages():
                yield message
        finally:
            self._has_used_freed |= context.is_freed

    async def _messages(self) -> AsyncGenerator[bytes]:
        try:
            for number in range(self._num_messages):
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    self.is_cancelled.set()
                    raise
                yield LAST if number == self._num_messages - 1 else MESSAGE
        except BaseException:
            yield b""

    async def check_cancelled(self, call: asyncio.Task[None]) -> None:
        """Wait for the end of a call and of the replica's part, and check their order."""
        await asyncio.wait_for(self.is_cancelled.wait(), 60.0)
        await asyncio.gather(call, return_exceptions=True)
        # grpc frees a call when its handler returns; using it afterwards crashes the process.
        for _ in range(10):
            await asyncio.sleep(0)
        assert not self._has_used_freed

    def call(
        self, context: Context, body: object = BODY, *, method: str = "Generate"
    ) -> asyncio.Task[None]:
        """Start a call."""
        context.body = body
        handler = self._handlers[0].service(SimpleNamespace(method=f"{SERVICE}/{method}"))

        async def run() -> None:
            try:
                await handler.stream_stream(None, context)
            finally:
                context.is_freed = True

        return asyncio.create_task(run())


class Context:
    """A call whose client reads some messages; the next write fails or blocks forever."""

    def __init__(
        self, num_taken: int, *, fails: bool = False, metadata: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._num_taken = num_taken
        self._metadata = metadata
        self._fails = fails
        self.body: object = BODY
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.is_stuck = asyncio.Event()
        self.written: list[bytes] = []
        self.is_freed = False

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def read(self) -> object:
        return self.body

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object) -> None:
        self.status = (code, details)
        raise grpc.aio.AbortError

    def time_remaining(self) -> None:
        return None

    def set_trailing_metadata(self, trailing: object) -> None:
        return None

    async def write(self, message: bytes) -> None:
        if len(self.written) == self._num_taken:
            self.is_stuck.set()
            if self._fails:
                raise RuntimeError("The batch failed.")
            await asyncio.sleep(3600.0)
        self.written.append(message)


async def test_a_complete_stream_is_passed_on_and_nothing_is_cancelled() -> None:
    serve, context = Serve(5), Context(5)
    await serve.call(context)
    assert context.written == [MESSAGE] * 4 + [LAST]
    assert not serve.is_cancelled.is_set()


@pytest.mark.parametrize(
    ("message", "method"),
    [
        (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "Chat"),
        (pb.GenerateRequest(text="x"), "Generate"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])), "Generate"),
    ],
    ids=["chat", "text", "ids"],
)
async def test_prompts_have_a_routing_key(
    message: pb.ChatRequest | pb.GenerateRequest, method: str
) -> None:
    serve = Serve(1)
    await serve.call(Context(1), message.SerializeToString(), method=method)
    assert serve.metadata["session_id"].startswith("prefix-")


async def test_a_key_has_the_owner_of_the_credential() -> None:
    serve, body = Serve(1), pb.GenerateRequest(text="x").SerializeToString()
    keys = []
    for metadata in (
        (("authorization", "Bearer a"),),
        (("session_id", "mine"), ("authorization", "Bearer a")),
        (("authorization", "Bearer b"),),
        (),
    ):
        await serve.call(Context(1, metadata=metadata), body, method="Generate")
        keys.append(RoutingKey.of_session_id(serve.metadata["session_id"]))
    first, session, *others = keys
    assert session == RoutingKey("mine", first.owner)
    assert {one.text for one in others} == {first.text}
    assert len({"", first.owner, *(one.owner for one in others)}) == 4


async def test_a_message_of_too_many_fields_is_left_to_the_replica() -> None:
    serve, context = Serve(1), Context(1)
    body = pb.ChatRequest(messages=[pb.ChatMessage(content="x")] * 100_000).SerializeToString()
    await serve.call(context, body, method="Chat")
    assert "session_id" not in serve.metadata
    assert context.written == [LAST]


async def test_a_call_without_a_message_is_rejected() -> None:
    serve, context = Serve(1), Context(1)
    with pytest.raises(grpc.aio.AbortError):
        await serve.call(context, None)
    assert context.status == (grpc.StatusCode.INVALID_ARGUMENT, "The call has no message.")


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.001, 0.0015, 0.01])
async def test_a_cancel_at_any_time_ends_the_replicas_part(delay_s: float) -> None:
    serve = Serve(1_000_000)
    call = serve.call(Context(1_000_000))
    await asyncio.sleep(delay_s + 0.001)
    call.cancel()
    await serve.check_cancelled(call)


async def test_a_cancel_during_a_write_ends_the_replicas_part() -> None:
    serve, context = Serve(10), Context(2)
    call = serve.call(context)
    await context.is_stuck.wait()
    call.cancel()
    await serve.check_cancelled(call)


async def test_a_message_that_cannot_be_written_ends_the_replicas_part() -> None:
    serve, context = Serve(10), Context(2, fails=True)
    call = serve.call(context)
    with pytest.raises(RuntimeError, match="The batch failed"):
        await call
    await serve.check_cancelled(call)


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_cancel_right_after_a_failed_write_ends_the_replicas_part(
    num_turns: int,
) -> None:
    serve, context = Serve(10), Context(2, fails=True)
    call = serve.call(context)
    await context.is_stuck.wait()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    call.cancel()
    await serve.check_cancelled(call)
