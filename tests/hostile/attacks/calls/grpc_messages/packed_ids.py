"""gRPC messages with as many token ids as bytes."""

from __future__ import annotations

from pagedray.v1 import pagedray_pb2 as pb
from tests.hostile.floods.call_flood import CallFlood

__all__ = ["PackedIds"]

_NUM_IDS = 1_000_000


class PackedIds(CallFlood):
    """A byte for each token id."""

    name = "a million packed token ids"

    def body(self) -> bytes:
        """Return a Generate request."""
        ids = pb.TokenIds(ids=[1] * _NUM_IDS)
        return pb.GenerateRequest(token_ids=ids).SerializeToString()
