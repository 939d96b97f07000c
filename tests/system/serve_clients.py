"""Clients of Ray Serve: streams to their end, and calls that are cancelled."""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import grpc
import httpx
import openai

from cluster.serving.server_info import ServerLoads
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


CancelFrontend = Literal["grpc", "http"]
_LONGEST_S = 0.3
"""The longest time after its start at which a call is cancelled."""
_POLL_S = 0.01
_GIVE_UP_S = 60.0
_LOST_AFTER_S = 1.0
"""A cancel is lost if the call is still reported this long after it."""
_MAX_TOKENS = 900
_NUM_SEQUENCES = 16
"""Of a call that should run for a long time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The fate of cancelled calls, in seconds since the cancel."""

    gone_s: list[float]
    """When no replica reported a call anymore; infinite if its cancel was lost."""
    free_s: list[float]
    """When all replicas were idle with all blocks free, after the last cancel of each round."""
    num_begun: int
    """Calls that received a message before their cancel."""
    look_s: list[float]
    """The duration of each poll of the replicas, which the times above include."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The fate of calls whose cancels Serve lost."""

    num_cancels: int
    gone_s: list[float]
    """When no replica reported a lost call anymore, in seconds since its cancel."""
    num_tokens: list[int]
    """The tokens that each lost call had when it was last seen."""
    most_tokens: int
    """The tokens of a call that runs to its end."""


class _Watch:
    """Polls the replicas and records which calls they report."""

    def __init__(self, cluster: ServeCluster) -> None:
        self._cluster = cluster
        self._cancelled_s: dict[str, float] = {}
        self._gone_s: dict[str, float] = {}
        self.look_s: list[float] = []
        self._idle_since_s = 0.0

    def note_cancel(self, name: str) -> None:
        """Record that a call is being cancelled."""
        self._cancelled_s[name] = time.monotonic()

    async def look(self) -> None:
        """Poll the replicas once."""
        asked_s = time.monotonic()
        loads = await self._cluster.loads()
        answered_s = time.monotonic()
        self.look_s.append(answered_s - asked_s)
        running = {call.id for one in loads for call in one.calls}
        for name, cancelled_s in self._cancelled_s.items():
            if name in running:
                # The call arrived late: it was absent from an earlier poll, not cancelled.
                self._gone_s.pop(name, None)
            elif name not in self._gone_s and asked_s >= cancelled_s:
                self._gone_s[name] = answered_s - cancelled_s
        is_idle = all(_is_idle(one) for one in loads)
        if not is_idle or not self._idle_since_s:
            self._idle_since_s = answered_s if is_idle else 0.0

    async def until_free(self) -> float:
        """Return how long after the last cancel all replicas were idle with all blocks free."""
        last_s = max(self._cancelled_s.values())
        self._idle_since_s = 0.0
        while not self._idle_since_s:
            if time.monotonic() - last_s > _GIVE_UP_S:
                return math.inf
            await self.look()
            await asyncio.sleep(_POLL_S)
        return self._idle_since_s - last_s

    def gone_s(self) -> list[float]:
        """Return how long each call was reported after its cancel."""
        return [self._gone_s.get(name, math.inf) for name in self._cancelled_s]


async def cancel_many(
    cluster: ServeCluster,
    *,
    frontend: CancelFrontend,
    number: int,
    num_sequences: int = 1,
    at_once: int = 8,
    seed: int = 0,
) -> Cancelled:
    """Cancel calls of a frontend at random times, several of them concurrently."""
    chance = random.Random(seed)
    watch = _Watch(cluster)
    free_s: list[float] = []
    num_begun = 0
    async with (
        grpc.aio.insecure_channel(cluster.grpc_target) as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=None) as client,
    ):
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)

        async def over_grpc(name: str, note_begin: Callable[[], None]) -> None:
            sampling = pb.SamplingParams(
                max_tokens=_MAX_TOKENS, ignore_eos=True, seed=1, n=num_sequences
            )
            request = pb.GenerateRequest(request_id=name, text=name, sampling=sampling)
            call = stub.Generate(request)
            try:
                async for _ in call:
                    note_begin()
            finally:
                # grpc does not cancel a call whose request is still being sent.
                call.cancel()

        async def over_http(name: str, note_begin: Callable[[], None]) -> None:
            body = {"prompt": name, "max_tokens": _MAX_TOKENS, "ignore_eos": True, "seed": 1}
            async with client.stream(
                "POST",
                "/v1/completions",
                json=body | {"model": "tiny-llama", "stream": True, "n": num_sequences},
                headers={"x-request-id": name},
            ) as answer:
                async for _ in answer.aiter_raw():
                    note_begin()

        run = over_grpc if frontend == "grpc" else over_http
        for begin in range(0, number, at_once):
            names = [f"{frontend}-{index}" for index in range(begin, min(begin + at_once, number))]
            calls = asyncio.gather(
                *(_cancel_one(watch, run, one, chance.random() * _LONGEST_S) for one in names)
            )
            while not calls.done():
                await watch.look()
                await asyncio.sleep(_POLL_S)
            num_begun += sum(await calls)
            free_s.append(await watch.until_free())
    return Cancelled(gone_s=watch.gone_s(), free_s=free_s, num_begun=num_begun, look_s=watch.look_s)


async def lose_some(cluster: ServeCluster, *, number: int, at_once: int = 8) -> Lost:
    """Cancel calls over gRPC on their first message, when Serve's own proxy loses some."""
    sampling = pb.SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, n=_NUM_SEQUENCES)
    lost = Lost(
        num_cancels=number, gone_s=[], num_tokens=[], most_tokens=_MAX_TOKENS * _NUM_SEQUENCES
    )
    async with grpc.aio.insecure_channel(cluster.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)

        async def cancel_at(name: str, num_messages: int) -> None:
            call = stub.Generate(pb.GenerateRequest(request_id=name, text=name, sampling=sampling))
            messages = aiter(call)
            for _ in range(num_messages):
                await anext(messages)
            call.cancel()

        for begin in range(0, number, at_once):
            names = [f"lost-{index}" for index in range(begin, min(begin + at_once, number))]
            await asyncio.gather(
                *(cancel_at(one, 1 + index % 4) for index, one in enumerate(names))
            )
            cancelled_s = time.monotonic()
            seen: dict[str, tuple[float, int]] = {}
            while time.monotonic() - cancelled_s < _GIVE_UP_S:
                found = {call.id: call for one in await cluster.loads() for call in one.calls}
                age_s = time.monotonic() - cancelled_s
                seen |= {name: (age_s, found[name].num_generated_tokens) for name in found}
                if not found:
                    break
                await asyncio.sleep(_POLL_S)
            for gone_s, num_tokens in seen.values():
                if gone_s >= _LOST_AFTER_S:
                    lost.gone_s.append(gone_s)
                    lost.num_tokens.append(num_tokens)
    return lost


async def _cancel_one(
    watch: _Watch,
    run: Callable[[str, Callable[[], None]], Awaitable[None]],
    name: str,
    after_s: float,
) -> bool:
    """Cancel one call; return whether it had received a message."""
    begun = asyncio.Event()
    call = asyncio.ensure_future(run(name, begun.set))
    await asyncio.sleep(after_s)
    watch.note_cancel(name)
    is_begun = begun.is_set()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    return is_begun


def _is_idle(loads: ServerLoads) -> bool:
    num_sequences = loads.num_running + loads.num_waiting + loads.num_swapped
    return (
        not loads.calls
        and num_sequences == 0
        and loads.num_queued_requests == 0
        and loads.num_free_blocks == loads.num_blocks
    )
