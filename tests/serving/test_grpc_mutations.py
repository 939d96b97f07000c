"""Mutated protobuf bodies: each is served or refused in good form, and the server goes on."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.grpc_front import status_of_call
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tests.serving.conftest import Server

NUM_BODIES = 40
SAMPLING = pb.SamplingParams(
    max_tokens=2, temperature=0.5, top_p=0.9, top_k=3, stop=["zz"], logit_bias={5: 1.0}, seed=7,
    n=2, logprobs=1, min_tokens=1, stop_token_ids=[9],
)  # fmt: skip
TURN = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="h\u00e9llo")
MESSAGES: dict[str, Message] = {
    "Generate": pb.GenerateRequest(
        request_id="a", text="h\u00e9llo", sampling=SAMPLING, priority=1, timeout={"seconds": 20}
    ),
    "Chat": pb.ChatRequest(messages=[TURN, TURN], sampling=SAMPLING, model="tiny"),
    "Embed": pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")], dimensions=3),
    "Tokenize": pb.TokenizeRequest(conversation=pb.Conversation(messages=[TURN])),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5, 6, 7], skip_special_tokens=True),
    "Abort": pb.AbortRequest(request_ids=["a", "b"]),
    "GetLoads": pb.GetLoadsRequest(),
}
# What a client may be told of a body: never that the server made a mistake.
CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def _mutated(body: bytes, chance: random.Random) -> bytes:
    """Return a body with some bytes changed, left out, doubled or put in."""
    content = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content) + 1)
        match chance.randrange(5):
            case 0 if place < len(content):
                content[place] ^= 1 << chance.randrange(8)
            case 1 if place < len(content):
                content[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del content[place : place + chance.randint(1, 4)]
            case 3:
                content[place:place] = content[place : place + chance.randint(1, 8)]
            case _:
                content[place:place] = chance.randbytes(chance.randint(1, 4))
    return bytes(content)


async def _answer(channel: grpc.aio.Channel, method: str, body: bytes) -> grpc.StatusCode:
    call = channel.unary_stream(f"/pagedray.v1.GenerationService/{method}")(body, timeout=30)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        _check(error)
        return error.code()
    return grpc.StatusCode.OK


def _check(error: grpc.aio.AioRpcError) -> None:
    status = status_of_call(error)
    assert status.message == error.details()
    assert len(status.message) < 500
    assert "Traceback" not in status.message
    assert len(status.details) >= 1


@pytest.mark.parametrize("method", MESSAGES)
async def test_mutated_bodies_are_served_or_refused(server: Server, method: str) -> None:
    chance = random.Random(f"pagedray {method}")
    server.engine.script = lambda request, index: [72, 1]
    body = MESSAGES[method].SerializeToString()
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: not async to mypy
        bodies = [_mutated(body, chance) for _ in range(NUM_BODIES)]
        codes = await asyncio.gather(*(_answer(channel, method, one) for one in bodies))
        assert set(codes) <= CODES
        good = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=2))
        messages = [message async for message in stub.Generate(good)]
    assert messages[-1].usage.num_generated_tokens == 2
    await wait_until(lambda: server.engine.num_sequences == 0)
