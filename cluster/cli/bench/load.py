"""Sends requests at a rate, and records how each of them went."""

from __future__ import annotations

import asyncio
import math
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from cluster.cli.bench.client import BenchError, BenchRequest, Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.cli.bench.client import BenchClient

__all__ = ["Load", "LoadResult", "send_load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The rate at which requests are sent, and how many may run at once."""

    request_rate: float = math.inf
    """Requests per second; infinity sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of intervals: 1 is a Poisson process, less is burstier."""
    max_concurrency: int | None = None
    """Most requests in flight; others wait, and their times begin when they are sent."""
    seed: int = 0

    def starts_s(self, number: int) -> list[float]:
        """Return when each request is due, in seconds after the first."""
        draws = random.Random(self.seed)
        starts = [0.0]
        for _ in range(number - 1):
            interval = 0.0
            if math.isfinite(self.request_rate):
                scale = 1.0 / (self.request_rate * self.burstiness)
                interval = draws.gammavariate(self.burstiness, scale)
            starts.append(starts[-1] + interval)
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The outcome of all requests."""

    timings: tuple[Timing, ...]
    """Timings of the requests that were answered."""
    requests: tuple[BenchRequest, ...]
    """The requests of `timings`, in the same order."""
    failures: tuple[str, ...]
    duration_s: float
    """Time from the first request to the end of the last answer."""
    peak_concurrency: int
    client_cpu_s: float
    """CPU time that this process took."""


class _Sender:
    def __init__(
        self, client: BenchClient, bar: tqdm[NoReturn], max_concurrency: int | None
    ) -> None:
        self._client = client
        self._bar = bar
        self._room = (
            nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._num_open = 0
        self.peak = 0
        self.answers: list[tuple[BenchRequest, Timing]] = []
        self.failures: list[str] = []

    async def send(self, request: BenchRequest, delay_s: float) -> None:
        if delay_s > 0.0:
            await asyncio.sleep(delay_s)
        async with self._room:
            self._num_open += 1
            self.peak = max(self.peak, self._num_open)
            try:
                self.answers.append((request, await self._client.stream(request)))
            except BenchError as error:
                self.failures.append(str(error))
                self._bar.set_postfix(failed=len(self.failures), refresh=False)
            finally:
                self._num_open -= 1
                self._bar.update()


async def send_load(
    client: BenchClient, requests: Sequence[BenchRequest], load: Load, *, has_bar: bool | None
) -> LoadResult:
    """Send requests and return when all have ended; a bar of None is shown on a terminal."""
    disabled = None if has_bar is None else not has_bar
    with tqdm(total=len(requests), unit="request", disable=disabled) as bar:
        sender = _Sender(client, bar, load.max_concurrency)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request, start_s in zip(requests, load.starts_s(len(requests)), strict=True):
                tasks.create_task(sender.send(request, began_s + start_s - time.perf_counter()))
        ended_s = time.perf_counter()
    return LoadResult(
        timings=tuple(timing for _, timing in sender.answers),
        requests=tuple(request for request, _ in sender.answers),
        failures=tuple(sender.failures),
        duration_s=ended_s - began_s,
        peak_concurrency=sender.peak,
        client_cpu_s=time.process_time() - cpu_s,
    )
