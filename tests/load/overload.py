"""Ten times the load that a server can serve: `python -m tests.load.overload`.

A closed loop of clients measures the peak. Then requests of the same shape arrive at ten times that
rate in an open loop. Measured are the time to reject requests, the goodput, the growth of memory,
and the time until a request is served as before.

With `--executor local` the server has one core and this program the other: the model shares the
core and the GIL with the frontends, so that each rejection reduces the goodput. With
`--executor ray` the rank is a separate process, as in a cluster, and both may use both cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.load.keep_alive import KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SERVER_ARGUMENTS", "GrpcClient", "HttpClient", "overload"]

SERVER_ARGUMENTS = (
    *("--max-num-seqs=16", "--max-queued-requests=32", "--num-blocks=1024"),
    "--log-level=warning",
)
_CLOSED_LOOP_CLIENTS = 32
_FACTOR = 10.0
_PROBE_EVERY_S = 0.1
_NUM_CALM_PROBES = 5
_NUM_FIRST_PROBES = 10
_RECOVERY_PATIENCE_S = 120.0
_NUM_WORDS = 10


class Client(ABC):
    """Sends requests of one shape over one frontend."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._generator = random.Random(1)

    @abstractmethod
    async def ask(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` was served, not rejected."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    def length(self) -> int:
        """Return the number of tokens of the next request, 50 % to 150 % of the mean.

        Requests of equal length would end together, and the next ones start in the same step.
        """
        return self._generator.randint(self._num_tokens // 2, self._num_tokens * 3 // 2)

    def prompt(self) -> str:
        """Return a prompt that is not cached."""
        return " ".join(str(self._generator.randrange(1000)) for _ in range(_NUM_WORDS))


class HttpClient(Client):
    """Sends completions over HTTP, on one connection for each open request."""

    def __init__(self, server: MeasuredServer, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._port = server.http_port
        self._idle: list[KeepAlive] = []

    async def ask(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` was served, not rejected."""
        body = {
            "model": "tiny-llama",
            "prompt": self.prompt(),
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }
        connection = self._idle.pop() if self._idle else KeepAlive(self._port)
        try:
            answer = await connection.post("/v1/completions", json.dumps(body).encode())
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) > 0
            return False
        assert answer.status == 200, answer
        return True

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.close()


class GrpcClient(Client):
    """Calls Generate over one gRPC connection."""

    def __init__(self, server: MeasuredServer, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._channel = grpc.aio.insecure_channel(server.grpc_target)
        # Any: the generated stub is not async to mypy.
        self._stub: Any = pagedray_pb2_grpc.GenerationServiceStub(self._channel)

    async def ask(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` was served, not rejected."""
        sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        try:
            async for _ in self._stub.Generate(
                pb.GenerateRequest(text=self.prompt(), sampling=sampling)
            ):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return False
            raise
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default


@dataclass(slots=True)
class _Phase:
    """The results of the requests of one phase."""

    started_s: float = field(default_factory=time.perf_counter)
    served: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """How late this program sent each request, in seconds."""

    async def ask(self, client: Client) -> None:
        """Send one request and record its result."""
        sent_s = time.perf_counter()
        is_served = await client.ask(client.length())
        ended_s = time.perf_counter()
        (self.served if is_served else self.rejected).append(ended_s - sent_s)


async def overload(
    server: MeasuredServer,
    make_client: Callable[[MeasuredServer, int], Client],
    *,
    num_tokens: int,
    peak_s: float,
    overload_s: float,
    least_per_s: float = 0.0,
    max_open: float = math.inf,
    calm_ratio: float = 2.0,
) -> dict[str, object]:
    """Return the figures of the peak, of ten times the peak, and of the recovery.

    At least `least_per_s` requests arrive, even if the peak was measured on a busy machine, but
    none while `max_open` wait for a response. The server has recovered when requests take at most
    `calm_ratio` times as long as before.
    """
    client = make_client(server, num_tokens)
    calm_s = sorted([await _probe(client) for _ in range(_NUM_FIRST_PROBES)])
    peak_per_s = await _closed_loop(client, server, peak_s)
    await _until_idle(server)
    rss_mib = [server.rss_mib()]
    pace = asyncio.create_task(_tokens_per_s(server, overload_s * 0.1, overload_s * 0.9))
    rate_per_s = max(peak_per_s / num_tokens * _FACTOR, least_per_s)
    phase, cpu_s = await _open_loop(
        client, server, rss_mib, rate_per_s=rate_per_s, seconds=overload_s, max_open=max_open
    )
    goodput_per_s = await pace
    recovered_s = await _recovery(client, calm_ratio * calm_s[-1])
    # The peak is measured again, since the machine's speed varies.
    later_peak_per_s = await _closed_loop(client, server, peak_s)
    await _until_idle(server)
    await client.close()
    return {
        "prompt_words": _NUM_WORDS,
        "mean_tokens_a_request": num_tokens,
        "peak_tokens_per_s": round(peak_per_s),
        "peak_tokens_per_s_afterwards": round(later_peak_per_s),
        "arrivals_per_s": round(rate_per_s, 1),
        "overload_s": overload_s,
        "refusals": times_ms(phase.rejected),
        "served": times_ms(phase.served),
        "sent_late": times_ms(phase.late),
        "goodput_tokens_per_s": round(goodput_per_s),
        "goodput_of_mean_peak": round(2 * goodput_per_s / (peak_per_s + later_peak_per_s), 3),
        "server_cpu_s": round(cpu_s, 1),
        "rss_mib": {
            "before": round(rss_mib[0]),
            "largest": round(max(rss_mib)),
            "after": round(server.rss_mib()),
        },
        "calm_first_token_ms": {
            "p50": round(calm_s[len(calm_s) // 2] * 1e3, 1),
            "max": round(calm_s[-1] * 1e3, 1),
        },
        "recovered_after_s": round(recovered_s, 2),
    }


async def _probe(client: Client) -> float:
    """Return the time of a request of one token; infinity if it is rejected."""
    started_s = time.perf_counter()
    is_served = await client.ask(1)
    await asyncio.sleep(0.01)
    return time.perf_counter() - 0.01 - started_s if is_served else float("inf")


async def _tokens_per_s(server: MeasuredServer, wait_s: float, seconds: float) -> float:
    """Return the tokens per second that the server generates during `seconds` after `wait_s`.

    It takes longer if there is no token until then, as in a short run on a slow machine. Every
    accepted request is served completely, so each token is part of a response.
    """
    await asyncio.sleep(wait_s)
    began_s, num_before = time.perf_counter(), await asyncio.to_thread(server.num_generated_tokens)
    num_after = num_before
    while num_after == num_before:
        await asyncio.sleep(seconds)
        num_after = await asyncio.to_thread(server.num_generated_tokens)
    ended_s = time.perf_counter()
    return (num_after - num_before) / (ended_s - began_s)


async def _until_idle(server: MeasuredServer) -> None:
    """Wait for the end of the cancelled calls."""
    while not await asyncio.to_thread(server.is_idle):
        await asyncio.sleep(0.05)


async def _closed_loop(client: Client, server: MeasuredServer, seconds: float) -> float:
    """Keep the server busy for `seconds` and return the tokens per second that it generated."""
    # The queue fills at the start, which is not measured.
    pace = asyncio.create_task(_tokens_per_s(server, seconds * 0.2, seconds * 0.8))
    phase = _Phase()

    async def work() -> None:
        while True:
            await phase.ask(client)

    tasks = [asyncio.create_task(work()) for _ in range(_CLOSED_LOOP_CLIENTS)]
    peak_per_s = await pace
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return peak_per_s


async def _open_loop(
    client: Client,
    server: MeasuredServer,
    rss_mib: list[float],
    *,
    rate_per_s: float,
    seconds: float,
    max_open: float,
) -> tuple[_Phase, float]:
    """Return the phase and the CPU time of the server."""
    generator = random.Random(2)
    phase = _Phase()
    cpu_s = server.cpu_s()
    tasks: set[asyncio.Task[None]] = set()
    counts: Counter[str] = Counter()
    due_s = phase.started_s
    while due_s < phase.started_s + seconds:
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        while len(tasks) >= max_open:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        phase.late.append(time.perf_counter() - due_s)
        task = asyncio.create_task(phase.ask(client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due_s += generator.expovariate(rate_per_s)
        counts["sent"] += 1
        if counts["sent"] % int(rate_per_s + 1) == 0:
            rss_mib.append(server.rss_mib())
    used_s = server.cpu_s() - cpu_s
    # Requests that are still queued end during the probes.
    return phase, used_s


async def _recovery(client: Client, longest_s: float) -> float:
    """Return the time until probes are served steadily, each in at most `longest_s`."""
    over_s = time.perf_counter()
    calm_since_s: float | None = None
    num_calm = 0
    while num_calm < _NUM_CALM_PROBES:
        asked_s = time.perf_counter()
        assert asked_s - over_s < _RECOVERY_PATIENCE_S, "The server does not recover."
        if math.isfinite(probe_s := await _probe(client)) and probe_s <= longest_s:
            calm_since_s = asked_s if calm_since_s is None else calm_since_s
            num_calm += 1
        else:
            calm_since_s, num_calm = None, 0
        await asyncio.sleep(_PROBE_EVERY_S)
    assert calm_since_s is not None
    return calm_since_s - over_s


def main() -> None:
    """Overload a server over both frontends, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, action="append", help="of a request (256)")
    parser.add_argument("--frontend", choices=("http", "grpc"), action="append", help="(both)")
    parser.add_argument("--executor", choices=("local", "ray"), action="append", help="(both)")
    parser.add_argument("--peak-s", type=float, default=12.0, help="(%(default)s)")
    parser.add_argument("--overload-s", type=float, default=30.0, help="(%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.overload")
    pin_load()
    makers: dict[str, Callable[[MeasuredServer, int], Client]] = {
        "http": HttpClient,
        "grpc": GrpcClient,
    }
    runs = itertools.product(
        options.executor or ("local", "ray"), options.tokens or (256,), options.frontend or makers
    )
    for executor, num_tokens, frontend in runs:
        with MeasuredServer(*SERVER_ARGUMENTS, has_rank_processes=executor == "ray") as server:
            report.add("server", server.command)
            figures = asyncio.run(
                overload(
                    server,
                    makers[frontend],
                    num_tokens=num_tokens,
                    peak_s=options.peak_s,
                    overload_s=options.overload_s,
                )
            )
            figures["answers_good_requests_afterwards"] = server.answers()
            figures["errors_in_log"] = server.logged_errors()
            report.add(f"{frontend}, {num_tokens} tokens, executor {executor}", figures)
    report.write(options.output)


if __name__ == "__main__":
    main()
