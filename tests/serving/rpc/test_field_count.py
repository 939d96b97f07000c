"""The fields of a message are counted before it is parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.intake import RequestSize
from cluster.serving.rpc.requests import check_fields
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

SIZE = RequestSize(num_list_values=5000, context=5000)


def check(message: Message, size: RequestSize = SIZE) -> None:
    check_fields(type(message), message.SerializeToString(), size)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(text="x" * 1_000_000),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * 5000)),
        pb.GenerateRequest(
            text="x",
            sampling=pb.SamplingParams(
                max_tokens=5, temperature=0.5, seed=-1, stop=["a"], logit_bias={5: 1.0}
            ),
            timeout={"seconds": 5},
        ),
        pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")] * 4096),
        pb.EmbedRequest(prompts=[pb.EmbedPrompt(token_ids=pb.TokenIds(ids=[7] * 500))] * 2048),
    ],
    ids=["empty", "text", "ids", "sampling", "messages", "embeddings"],
)
def test_messages_within_the_limits_pass(message: Message) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatRequest(messages=[pb.ChatMessage()] * 100_000), "messages"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100_000)]),
            "messages",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100)] * 1000),
            "messages",
        ),
        (pb.AbortRequest(request_ids=[""] * 100_000), "request_ids"),
        (
            pb.GenerateRequest(
                sampling=pb.SamplingParams(
                    structure=pb.Structure(choices=pb.Choices(texts=[""] * 100_000))
                )
            ),
            "sampling",
        ),
    ],
    ids=["messages", "tool calls", "small messages", "strings", "choices"],
)
def test_too_many_fields_are_rejected(message: Message, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} has too many entries") as rejected:
        check(message)
    assert rejected.value.param == field


def test_unpacked_numbers_and_unknown_fields_count() -> None:
    for tag in (b"\x08", b"\xf8\x07"):
        with pytest.raises(InvalidRequestError, match="too many entries"):
            check_fields(pb.TokenIds, (tag + b"\x01") * 100_000, SIZE)


MANY = pb.ChatRequest(messages=[pb.ChatMessage()] * 100_000).SerializeToString()
LONG = pb.TokenizeRequest(text="x" * 5000).SerializeToString()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (pb.ChatRequest, b"\xa3\x06\xa4\x06" + MANY),
        (pb.ChatRequest, b"\xa3\x06" + MANY + b"\xa4\x06"),
        (pb.TokenizeRequest, LONG + b"\x1a\x04\xa3\x06\xa4\x06"),
    ],
    ids=["before", "around", "nested"],
)
def test_a_group_hides_no_fields(kind: type[Message], body: bytes) -> None:
    # Field 100 as a group, which the parser skips.
    kind.FromString(body)
    with pytest.raises(InvalidRequestError, match="has no field with number 100"):
        check_fields(kind, body, SIZE)


@pytest.mark.parametrize("token_id", [0, 300, 2**32 - 1])
def test_more_token_ids_than_a_context_are_rejected(token_id: int) -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token_id] * 5001))
    with pytest.raises(ContextLengthError, match=r"5001 entries.*--max-model-len") as rejected:
        check(message)
    assert rejected.value.param == "token_ids"


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_rejected(body: bytes) -> None:
    for kind in (pb.ChatRequest, pb.GenerateRequest):
        check_fields(kind, body, SIZE)
