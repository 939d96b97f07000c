"""Messages that the gRPC server rejects: malformed, too large, or too costly to parse."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.conftest import CONTEXT

if TYPE_CHECKING:
    from tests.serving.conftest import Server


LIMIT = 2**20 + 8 * 128 * CONTEXT
"""Bytes of a message."""


def _raw_call(server: Server, method: str, body: bytes, **options: Any) -> grpc.RpcError:
    # Any: the options of a grpc call
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = channel.unary_stream(f"/pagedray.v1.GenerationService/{method}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(body, **options))
        return caught.value


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x12\x7fshort"])
def test_malformed_message_is_an_invalid_argument(server: Server, body: bytes) -> None:
    error = _raw_call(server, "Generate", body)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "The message is not a valid GenerateRequest."
    assert server.engine.log.submitted == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x12\x01x\xfa\x07\x01y", "GenerateRequest has no field with number 127."),
        (b"\x12\x01x\x22\x04\xfa\x07\x01y", "SamplingParams has no field with number 127."),
        (
            pb.GenerateRequest(
                text="x",
                sampling=pb.SamplingParams(
                    logit_bias={5: 1.0},
                    structure=pb.Structure.FromString(b"\xfa\x07\x01y"),
                ),
            ).SerializeToString(),
            "Structure has no field with number 127.",
        ),
        (b"x" * 20_000, "GenerateRequest has 20000 bytes of unknown fields."),
    ],
    ids=["message", "nested message", "after a map", "many"],
)
def test_unknown_field_is_rejected(server: Server, body: bytes, text: str) -> None:
    error = _raw_call(server, "Generate", body)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (LIMIT, "The message is not a valid TokenizeRequest."),
        (
            LIMIT + 1,
            f"Message of {LIMIT + 1} bytes is larger than the limit of {LIMIT} bytes "
            "(--max-request-kib).",
        ),
    ],
)
def test_too_large_message_is_rejected_before_it_is_parsed(
    server: Server, num_bytes: int, text: str
) -> None:
    # These bytes are not a message, so parsing them fails.
    error = _raw_call(server, "Tokenize", b"\xff" * num_bytes)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_message_far_too_large_is_rejected_by_its_length(server: Server) -> None:
    error = _raw_call(server, "Generate", b"\xff" * (2 * LIMIT))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"({2 * LIMIT} vs. {LIMIT + LIMIT // 2})" in str(error.details())
    assert server.engine.log.submitted == []


def test_too_much_metadata_is_rejected(server: Server) -> None:
    error = _raw_call(server, "Generate", b"", metadata=(("x-large", "x" * 20_000),))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_nested_messages_are_rejected_quickly(server: Server) -> None:
    started_s = time.process_time()
    # An empty turn has two bytes, and takes about a microsecond to parse.
    error = _raw_call(server, "Chat", b"\x12\x00" * 500_000)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "messages has too many entries: a message may have at most 24576 fields, those of nested "
        "messages included."
    )
    assert time.process_time() - started_s < 20


def test_compressed_message_is_rejected(server: Server) -> None:
    body = pb.GenerateRequest(text="x" * 100_000).SerializeToString()
    error = _raw_call(server, "Generate", body, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.engine.log.submitted == []


def test_unknown_method_is_unimplemented(server: Server) -> None:
    assert _raw_call(server, "Nothing", b"").code() is grpc.StatusCode.UNIMPLEMENTED
