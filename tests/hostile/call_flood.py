"""Attacks that send one gRPC message again and again, each channel as soon as it is answered."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import grpc

from tests.hostile.attack import Attack, Findings
from tests.load.report import times_ms

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["CallFlood"]

_TIMEOUT_S = 30.0
# Otherwise channels share a connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_ALLOWED = frozenset((grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED))


class CallFlood(Attack):
    """Several channels with the attacker's key."""

    method: ClassVar[str] = "Generate"
    num_channels: ClassVar[int] = 8

    @abstractmethod
    def body(self) -> bytes:
        """Return the message of each call."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Call on all channels."""
        body = self.body()
        end_s = time.monotonic() + seconds
        with ThreadPoolExecutor(self.num_channels) as threads:
            runs = [
                threads.submit(self._call_until, end_s, target, body)
                for _ in range(self.num_channels)
            ]
            answers = [answer for one in runs for answer in one.result()]
        codes = Counter(code for code, _ in answers)
        return Findings(
            figures={
                "bytes": len(body),
                "answers": {code.name: number for code, number in codes.items()},
                **times_ms([seconds for _, seconds in answers]),
            },
            broken=tuple(f"The server answered {code.name}." for code in codes.keys() - _ALLOWED),
        )

    def _call_until(
        self, end_s: float, target: Target, body: bytes
    ) -> list[tuple[grpc.StatusCode, float]]:
        """Return the codes of calls and the seconds that each took."""
        answers: list[tuple[grpc.StatusCode, float]] = []
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
                answers.append((code, time.monotonic() - started_s))
        return answers
