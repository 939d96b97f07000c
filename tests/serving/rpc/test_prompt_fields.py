"""Fields that say which tokens a prompt has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from pagedray.v1 import pagedray_pb2_grpc
    from tests.serving.fake_engine import FakeEngine

    Stub = pagedray_pb2_grpc.GenerationServiceStub

LEFT, RIGHT = pb.TRUNCATION_SIDE_LEFT, pb.TRUNCATION_SIDE_RIGHT
ONE = pb.SamplingParams(max_tokens=2)


def prompt_of(
    engine: FakeEngine, stub: Stub, message: pb.GenerateRequest | pb.ChatRequest
) -> tuple[int, ...]:
    """Return the prompt that the engine gets."""
    engine.reset()
    list(stub.Chat(message) if isinstance(message, pb.ChatRequest) else stub.Generate(message))
    (request,) = engine.log.submitted
    return tuple(request.prompt_token_ids)


def test_special_tokens_may_be_left_out(stub: Stub, engine: FakeEngine) -> None:
    whole = prompt_of(engine, stub, pb.GenerateRequest(text="hello", sampling=ONE))
    given = pb.GenerateRequest(text="hello", sampling=ONE, add_special_tokens=False)
    assert prompt_of(engine, stub, given) == whole[1:]


@pytest.mark.parametrize(("num_kept", "length"), [(5, 5), (-1, 256 - 2)])
def test_prompts_are_truncated_at_either_side(
    stub: Stub, engine: FakeEngine, num_kept: int, length: int
) -> None:
    ids = pb.TokenIds(ids=range(290))
    given = pb.GenerateRequest(token_ids=ids, sampling=ONE, truncate_prompt_tokens=num_kept)
    assert prompt_of(engine, stub, given) == tuple(range(290 - length, 290))
    given.truncation_side = LEFT
    assert prompt_of(engine, stub, given) == tuple(range(290 - length, 290))
    given.truncation_side = RIGHT
    assert prompt_of(engine, stub, given) == tuple(range(length))


def test_conversations_are_truncated_at_either_side(stub: Stub, engine: FakeEngine) -> None:
    messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello")]
    given = pb.ChatRequest(messages=messages, sampling=ONE)
    whole = prompt_of(engine, stub, given)
    given.truncate_prompt_tokens = 3
    assert prompt_of(engine, stub, given) == whole[-3:]
    given.truncation_side = RIGHT
    assert prompt_of(engine, stub, given) == whole[:3]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens must be -1, or 1 or more, not 0.",
        ),
        ({"truncation_side": 3}, "truncation_side has unknown enum value 3."),
        (
            {"truncate_prompt_tokens": 5, "suffix": "x"},
            "suffix cannot be combined with truncate_prompt_tokens.",
        ),
    ],
)
def test_invalid_fields_are_rejected(
    stub: Stub,
    fields: dict[str, Any],  # Any: of all types
    text: str,
) -> None:
    with pytest.raises(grpc.RpcError) as rejected:
        list(stub.Generate(pb.GenerateRequest(text="hello", **fields)))
    assert (rejected.value.code(), rejected.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        text,
    )
