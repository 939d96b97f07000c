"""Cancellation at random times over both frontends: `python -m tests.load.cancels`.

In each round some calls start and are cancelled after random times. Measured is how long the server
still reports them and their sequences, and how long until every block is free. There are more calls
than rows, so that some are cancelled while they wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["SERVER_ARGUMENTS", "CancelTimes", "Canceller"]

SERVER_ARGUMENTS = ("--max-num-seqs=6", "--num-blocks=512", "--log-level=warning")

_CALLS_A_ROUND = 8
_LATEST_CANCEL_S = 0.2
_MAX_TOKENS = 400
_POLL_S = 0.003
_PATIENCE_S = 60.0
_TARGET_S = 0.2


@dataclass(slots=True)
class CancelTimes:
    """How long the server still held cancelled calls, in seconds."""

    calls: list[float] = field(default_factory=list)
    """For each call, from its cancellation until neither it nor its sequences were reported."""
    blocks: list[float] = field(default_factory=list)
    """For each round, from its last cancellation until every block was free."""
    polls: list[float] = field(default_factory=list)
    """The duration of each poll, which limits the resolution of the other times."""
    states: Counter[str] = field(default_factory=Counter)
    """The states in which calls were cancelled."""

    def figures(self) -> dict[str, object]:
        """Return the figures of the report."""
        return {
            "calls": times_ms(self.calls),
            "blocks": times_ms(self.blocks),
            "polls": times_ms(self.polls),
            "cancelled_while": dict(self.states),
            "calls_over_200_ms": sum(seconds > _TARGET_S for seconds in self.calls),
            "rounds_over_200_ms": sum(seconds > _TARGET_S for seconds in self.blocks),
        }


class Canceller:
    """Starts and cancels calls, and times their removal."""

    def __init__(self, server: MeasuredServer, *, seed: int = 0) -> None:
        self._server = server
        self._generator = random.Random(seed)
        self._num_calls = 0

    async def over_grpc(self, number: int) -> CancelTimes:
        """Cancel calls of Generate."""
        return await self._rounds(number, self._run_grpc)

    async def over_http(self, number: int) -> CancelTimes:
        """Cancel streams of server-sent events by closing or resetting the connection."""
        return await self._rounds(number, self._run_http)

    async def _rounds(
        self, number: int, run: Callable[..., Coroutine[None, None, None]]
    ) -> CancelTimes:
        times = CancelTimes()
        async with grpc.aio.insecure_channel(self._server.grpc_target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            while number > 0:
                await self._round(stub, min(number, _CALLS_A_ROUND), run, times)
                number -= _CALLS_A_ROUND
        return times

    async def _round(
        self,
        stub: Any,  # Any: the generated stub is not async to mypy
        number: int,
        run: Callable[..., Coroutine[None, None, None]],
        times: CancelTimes,
    ) -> None:
        cancelled_s: dict[str, float] = {}
        tasks = []
        for _ in range(number):
            self._num_calls += 1
            name = f"cancelled-{self._num_calls}"
            after_s = self._generator.random() * _LATEST_CANCEL_S
            tasks.append(asyncio.create_task(run(stub, name, after_s, cancelled_s, times.states)))
        gone_s: dict[str, float] = {}
        given_up_s = time.perf_counter() + _PATIENCE_S
        while True:
            asked_s = time.perf_counter()
            # Only calls cancelled before the poll can be missing from its answer.
            asked_of = set(cancelled_s)
            loads = await stub.GetLoads(pb.GetLoadsRequest())
            now_s = time.perf_counter()
            times.polls.append(now_s - asked_s)
            listed = {call.request_id for call in loads.calls}
            num_sequences = loads.num_running + loads.num_waiting + loads.num_swapped
            # A call that was read late may appear after its cancellation.
            for name in listed & gone_s.keys():
                del gone_s[name]
            if num_sequences <= len(listed):
                for name in asked_of - listed:
                    gone_s.setdefault(name, now_s)
            is_free = num_sequences == 0 and loads.num_free_blocks == loads.num_blocks
            if len(gone_s) == number and is_free:
                break
            assert now_s < given_up_s, f"{number - len(gone_s)} calls are still there."
            await asyncio.sleep(_POLL_S)
        times.calls += [gone_s[name] - at_s for name, at_s in cancelled_s.items()]
        times.blocks.append(now_s - max(cancelled_s.values()))
        await asyncio.gather(*tasks)

    async def _run_grpc(
        self,
        stub: Any,  # Any: the generated stub is not async to mypy
        name: str,
        after_s: float,
        cancelled_s: dict[str, float],
        states: Counter[str],
    ) -> None:
        sampling = pb.SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
        call = stub.Generate(
            pb.GenerateRequest(request_id=name, text=self._prompt(), sampling=sampling)
        )
        num_messages = 0

        async def read() -> None:
            nonlocal num_messages
            async for _ in call:
                num_messages += 1

        reading = asyncio.create_task(read())
        await asyncio.sleep(after_s)
        states["streaming" if num_messages else "waiting"] += 1
        call.cancel()
        cancelled_s[name] = time.perf_counter()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    async def _run_http(
        self,
        stub: Any,  # Any: not needed here
        name: str,
        after_s: float,
        cancelled_s: dict[str, float],
        states: Counter[str],
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.http_port)
        body = json.dumps(
            {
                "model": "tiny-llama",
                "prompt": self._prompt(),
                "max_tokens": _MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"x-request-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        is_streaming = False

        async def read() -> None:
            nonlocal is_streaming
            while b"data: " not in await reader.readline():
                pass
            is_streaming = True
            while await reader.read(2**16):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(after_s)
        states["streaming" if is_streaming else "waiting"] += 1
        reading.cancel()
        if self._generator.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        cancelled_s[name] = time.perf_counter()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await reading

    def _prompt(self) -> str:
        """Return a prompt of 1 to about 500 tokens that is not cached."""
        num_words = int(250 ** self._generator.random())
        return " ".join(str(self._generator.randrange(100)) for _ in range(num_words))


def main() -> None:
    """Cancel calls over both frontends, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cancels", type=int, default=2000, help="on each frontend (%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.cancels")
    pin_load()
    with MeasuredServer(*SERVER_ARGUMENTS) as server:
        report.add("server", server.command)
        canceller = Canceller(server)
        asyncio.run(canceller.over_grpc(40))
        asyncio.run(canceller.over_http(40))
        rss_mib = [server.rss_mib()]
        report.add("grpc", asyncio.run(canceller.over_grpc(options.cancels)).figures())
        rss_mib.append(server.rss_mib())
        report.add("http", asyncio.run(canceller.over_http(options.cancels)).figures())
        rss_mib.append(server.rss_mib())
        places = ("after_40_of_each", "after_grpc", "after_http")
        report.add("rss_mib", dict(zip(places, map(round, rss_mib), strict=True)))
        report.add("answers_good_requests_afterwards", server.answers())
        report.add("errors_in_log", server.logged_errors())
    report.write(options.output)


if __name__ == "__main__":
    main()
