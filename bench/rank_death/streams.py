"""Streams that clients read over gRPC, also while a rank is killed."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from bench.engine import MAX_TOKEN_ID
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc

if TYPE_CHECKING:
    from bench.rank_death.server import Server

__all__ = ["Stream", "read_streams"]

_NUM_PROMPT_TOKENS = 64
_NUM_TOKENS_BEFORE_KILL = 64
_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Stream:
    """The messages of one stream, with their times."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each message arrived."""
    is_complete: bool = False

    def pause_s(self, killed_s: float) -> float:
        """Return the time from the kill to the end of the gap that it caused."""
        ends = zip(self.times_s, self.times_s[1:], strict=False)
        gaps = [(end - begin, end) for begin, end in ends if end > killed_s]
        return max(gaps)[1] - killed_s if gaps else 0.0


async def read_streams(
    server: Server, number: int, num_tokens: int, kill_index: int | None
) -> tuple[list[Stream], float]:
    """Read streams to their ends; kill a rank once all of them have begun."""
    streams = [Stream() for _ in range(number)]
    chance = random.Random(0)
    prompts = [
        [chance.randrange(2, MAX_TOKEN_ID) for _ in range(_NUM_PROMPT_TOKENS)] for _ in streams
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        readers = [
            asyncio.create_task(_read(service, stream, prompt, num_tokens))
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        killed_s = 0.0
        if kill_index is not None:
            while min(len(stream.token_ids) for stream in streams) < _NUM_TOKENS_BEFORE_KILL:
                await asyncio.sleep(0.005)
            victim = server.processes(".serve_controller")[kill_index]
            killed_s = time.monotonic()
            victim.kill()
        await asyncio.gather(*readers)
    return streams, killed_s


async def _read(service: Any, stream: Stream, prompt: list[int], num_tokens: int) -> None:
    request = pagedray_pb2.GenerateRequest(
        token_ids=pagedray_pb2.TokenIds(ids=prompt),
        sampling=pagedray_pb2.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        ),
    )
    try:
        async for response in service.Generate(request, timeout=_TIMEOUT_S):
            for sequence in response.sequences:
                stream.token_ids += sequence.token_ids
            stream.times_s.append(time.monotonic())
    except grpc.aio.AioRpcError as error:
        print(f"A stream failed: {error.code().name}: {error.details()}", file=sys.stderr)
    stream.is_complete = len(stream.token_ids) == num_tokens
