"""Attacks that send one gRPC message again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import grpc

from tests.hostile.floods.request_flood import Answer, RequestFlood

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["CallFlood"]

_TIMEOUT_S = 30.0
# Otherwise channels share a connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class CallFlood(RequestFlood):
    """Calls of one method."""

    method: ClassVar[str] = "Generate"
    allowed = frozenset(("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"))

    def send_until(self, end_s: float, target: Target, body: bytes) -> list[Answer]:
        """Call on one channel, and return the codes."""
        answers: list[Answer] = []
        metadata = (("authorization", f"Bearer {target.key}"),)
        with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}", _OPTIONS) as channel:
            start = channel.unary_stream(
                f"/pagedray.v1.GenerationService/{self.method}",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            while time.monotonic() < end_s:
                started_s = time.monotonic()
                call = start(body, metadata=metadata, timeout=_TIMEOUT_S)
                code = call.code()
                answers.append((code.name, time.monotonic() - started_s))
        return answers
