"""An honest tenant that streams one prompt again and again, and the times between its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    import asyncio

__all__ = ["NUM_TOKENS", "PROMPT", "HonestTenant", "Streamed"]

PROMPT = "def read(path):"
NUM_TOKENS = 48
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Streamed:
    """The results of the tenant in a period."""

    num_requests: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Times between messages of a stream."""
    first_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    lost: list[str] = field(default_factory=list)
    """Requests that ended with an error, or with other tokens than the first one."""


class HonestTenant:
    """Sends the same greedy request over gRPC, whose tokens must always be the same."""

    def __init__(self, target: str, key: str | None) -> None:
        self._target = target
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._expected: tuple[int, ...] | None = None

    async def stream_until(self, ended: asyncio.Event) -> Streamed:
        """Stream until the event is set, and at least once."""
        found = Streamed()
        async with grpc.aio.insecure_channel(self._target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            while not found.num_requests or not ended.is_set():
                await self._stream(stub, found)
        return found

    async def _stream(self, stub: Any, found: Streamed) -> None:  # Any: see `stream_until`
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        token_ids: list[int] = []
        last_s = time.perf_counter()
        found.num_requests += 1
        try:
            async for answer in stub.Generate(
                request, metadata=self._metadata, timeout=_TIMEOUT_S, wait_for_ready=True
            ):
                now_s = time.perf_counter()
                (found.gaps_s if token_ids else found.first_s).append(now_s - last_s)
                last_s = now_s
                for sequence in answer.sequences:
                    token_ids += sequence.token_ids
        except grpc.aio.AioRpcError as error:
            found.lost.append(f"{error.code().name}: {error.details()}")
            return
        if self._expected is None:
            self._expected = tuple(token_ids)
        if tuple(token_ids) != self._expected:
            found.lost.append(f"{len(token_ids)} tokens differ from those without the attack")
