"""What a call holds is freed when it is rejected, not by a later garbage collection."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import grpc_frontend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer

NUM_CALLS = 20
NUM_BYTES = 300_000


@pytest.fixture
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("_without_collections")
@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * NUM_BYTES)),
        pb.GenerateRequest(text="x" * NUM_BYTES),
    ],
    ids=["rejected before it is parsed", "rejected after it is parsed"],
)
async def test_rejected_message_is_freed_at_once(
    tokenizer: Tokenizer, message: pb.GenerateRequest
) -> None:
    async with (
        grpc_frontend(tokenizer) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = server.stub(channel)
        held_before, _ = tracemalloc.get_traced_memory()
        for _ in range(NUM_CALLS):
            with pytest.raises(grpc.aio.AioRpcError) as rejected:
                await stub.Generate(message).read()
            assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        held, _ = tracemalloc.get_traced_memory()
    assert held - held_before < NUM_BYTES * NUM_CALLS / 4
