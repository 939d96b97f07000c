"""Clients that stream through Ray Serve, half of them over gRPC and half over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import openai

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.serve_cluster import ServeCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one stream ended."""

    id: str
    num_tokens: int
    error: str
    """The gRPC code or the HTTP error message; empty if the stream finished."""
    text: str = ""
    is_complete: bool = True
    """Whether the stream had a finish reason and the usage."""
    longest_pause_s: float = 0.0
    """The longest time between two messages."""
    ended_s: float = 0.0
    """When it ended, on the monotonic clock."""


class _Received:
    """What one stream has received."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.has_reason = False
        self.num_used: int | None = None
        self.longest_pause_s = 0.0
        self._read_s: float | None = None

    def note_message(self) -> None:
        """Record the time of a message."""
        now_s = time.monotonic()
        if self._read_s is not None:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self._read_s)
        self._read_s = now_s

    def ended(self, name: str, error: str) -> Ended:
        """Return how the stream ended."""
        self.note_message()
        return Ended(
            id=name,
            num_tokens=self.num_tokens,
            error=error,
            text=self.text,
            is_complete=self.has_reason and self.num_used == self.num_tokens,
            longest_pause_s=self.longest_pause_s,
            ended_s=time.monotonic(),
        )


class Streams:
    """Clients that each stream a number of tokens, every other one over HTTP."""

    def __init__(
        self,
        cluster: ServeCluster,
        *,
        num_tokens: int,
        name: str = "stream",
        temperature: float = 1.0,
    ) -> None:
        """The id of a stream is `name` and its number."""
        self._temperature = temperature
        self._name = name
        self._num_tokens = num_tokens
        self._channel = grpc.aio.insecure_channel(cluster.grpc_target)
        self._stub = pagedray_pb2_grpc.GenerationServiceStub(self._channel)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
        )
        self._tasks: list[asyncio.Task[Ended]] = []

    async def start(self, number: int) -> None:
        """Start streams and wait until each has received tokens."""
        flowing = []
        for index in range(len(self._tasks), len(self._tasks) + number):
            run = self._over_grpc if index % 2 else self._over_http
            flowing.append(asyncio.Event())
            self._tasks.append(asyncio.create_task(run(f"{self._name}-{index}", flowing[-1])))
        await asyncio.gather(*(event.wait() for event in flowing))

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def abort(self, names: Sequence[str]) -> None:
        """Abort streams."""
        await self._stub.Abort(pb.AbortRequest(request_ids=names))

    async def ended(self) -> list[Ended]:
        """Wait until all streams have ended."""
        return await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Close the connections."""
        await self._channel.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        await self._openai.close()

    async def _over_grpc(self, name: str, is_flowing: asyncio.Event) -> Ended:
        request = pb.GenerateRequest(
            request_id=name,
            text=f"{name}: def read(path):\n",
            sampling=pb.SamplingParams(
                max_tokens=self._num_tokens,
                ignore_eos=True,
                seed=1,
                temperature=self._temperature,
            ),
        )
        received, error = _Received(), ""
        try:
            async for response in self._stub.Generate(request):
                received.note_message()
                for one in response.sequences:
                    received.num_tokens += len(one.token_ids)
                    received.text += one.text
                    received.has_reason |= bool(one.finish_reason)
                if response.HasField("usage"):
                    received.num_used = response.usage.num_generated_tokens
                is_flowing.set()
        except grpc.aio.AioRpcError as rejection:
            error = rejection.code().name
        is_flowing.set()
        return received.ended(name, error)

    async def _over_http(self, name: str, is_flowing: asyncio.Event) -> Ended:
        received, error = _Received(), ""
        try:
            stream = await self._openai.completions.create(
                model="tiny-llama",
                prompt=f"{name}: def read(path):\n",
                max_tokens=self._num_tokens,
                seed=1,
                temperature=self._temperature,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-request-id": name},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                received.note_message()
                is_flowing.set()
                for choice in chunk.choices:
                    received.text += choice.text
                    received.has_reason |= bool(choice.finish_reason)
                if chunk.usage is not None:
                    received.num_tokens = received.num_used = chunk.usage.completion_tokens
        except openai.APIError as rejection:
            error = rejection.message
        is_flowing.set()
        return received.ended(name, error)


def summary(ended: Sequence[Ended], num_tokens: int) -> dict[str, object]:
    """Return the number of streams by how they ended."""
    whole = sum(one.num_tokens == num_tokens and one.is_complete for one in ended if not one.error)
    return {
        "streams": len(ended),
        "whole": whole,
        "truncated": sum(not one.error for one in ended) - whole,
        "errors": dict(Counter(one.error for one in ended if one.error)),
        "longest_pause_s": round(max((one.longest_pause_s for one in ended), default=0.0), 1),
    }
